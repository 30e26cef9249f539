from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberMessage(_message.Message):
    __slots__ = ("hello", "update", "status", "failure", "adopted")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    update: Update
    status: Status
    failure: Failure
    adopted: Adopted
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("member", "features_version", "architecture", "software_version")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    FEATURES_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    member: str
    features_version: int
    architecture: str
    software_version: str
    def __init__(self, member: _Optional[str] = ..., features_version: _Optional[int] = ..., architecture: _Optional[str] = ..., software_version: _Optional[str] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("reply_to", "base_round", "base_version", "tensors", "scheduled_pods", "counter", "learning_rounds", "speeds", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    BASE_ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_PODS_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    reply_to: int
    base_round: int
    base_version: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    scheduled_pods: int
    counter: int
    learning_rounds: int
    speeds: _containers.RepeatedCompositeFieldContainer[SpeedRow]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, reply_to: _Optional[int] = ..., base_round: _Optional[int] = ..., base_version: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., scheduled_pods: _Optional[int] = ..., counter: _Optional[int] = ..., learning_rounds: _Optional[int] = ..., speeds: _Optional[_Iterable[_Union[SpeedRow, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "scale", "values", "gaps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    scale: float
    values: bytes
    gaps: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., scale: _Optional[float] = ..., values: _Optional[bytes] = ..., gaps: _Optional[bytes] = ...) -> None: ...

class SpeedRow(_message.Message):
    __slots__ = ("key", "n", "sum_x", "sum_x2")
    KEY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SUM_X_FIELD_NUMBER: _ClassVar[int]
    SUM_X2_FIELD_NUMBER: _ClassVar[int]
    key: int
    n: float
    sum_x: float
    sum_x2: float
    def __init__(self, key: _Optional[int] = ..., n: _Optional[float] = ..., sum_x: _Optional[float] = ..., sum_x2: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reply_to", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Failure.Reason]
        NOTHING_NEW: _ClassVar[Failure.Reason]
        INCOMPATIBLE: _ClassVar[Failure.Reason]
        NOT_FINITE: _ClassVar[Failure.Reason]
        INTERNAL: _ClassVar[Failure.Reason]
    UNSPECIFIED: Failure.Reason
    NOTHING_NEW: Failure.Reason
    INCOMPATIBLE: Failure.Reason
    NOT_FINITE: Failure.Reason
    INTERNAL: Failure.Reason
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reply_to: int
    reason: Failure.Reason
    def __init__(self, reply_to: _Optional[int] = ..., reason: _Optional[_Union[Failure.Reason, str]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("reply_to", "adopted")
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    reply_to: int
    adopted: bool
    def __init__(self, reply_to: _Optional[int] = ..., adopted: _Optional[bool] = ...) -> None: ...

class HubMessage(_message.Message):
    __slots__ = ("train", "personalize")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    PERSONALIZE_FIELD_NUMBER: _ClassVar[int]
    train: Train
    personalize: Personalize
    def __init__(self, train: _Optional[_Union[Train, _Mapping]] = ..., personalize: _Optional[_Union[Personalize, _Mapping]] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ("id", "round", "version", "arrays", "proximal_mu", "speeds")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_MU_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    round: int
    version: str
    arrays: _containers.RepeatedCompositeFieldContainer[FullTensor]
    proximal_mu: float
    speeds: PeerSpeeds
    def __init__(self, id: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[FullTensor, _Mapping]]] = ..., proximal_mu: _Optional[float] = ..., speeds: _Optional[_Union[PeerSpeeds, _Mapping]] = ...) -> None: ...

class Personalize(_message.Message):
    __slots__ = ("id", "round", "version", "arrays", "eta", "proximal_mu", "accepted_pods", "speeds")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    PROXIMAL_MU_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PODS_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    round: int
    version: str
    arrays: _containers.RepeatedCompositeFieldContainer[FullTensor]
    eta: float
    proximal_mu: float
    accepted_pods: int
    speeds: PeerSpeeds
    def __init__(self, id: _Optional[int] = ..., round: _Optional[int] = ..., version: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[FullTensor, _Mapping]]] = ..., eta: _Optional[float] = ..., proximal_mu: _Optional[float] = ..., accepted_pods: _Optional[int] = ..., speeds: _Optional[_Union[PeerSpeeds, _Mapping]] = ...) -> None: ...

class FullTensor(_message.Message):
    __slots__ = ("name", "shape", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class PeerSpeeds(_message.Message):
    __slots__ = ("members", "rows", "unconfirmed")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    members: int
    rows: _containers.RepeatedCompositeFieldContainer[SpeedRow]
    unconfirmed: _containers.RepeatedCompositeFieldContainer[SpeedRow]
    def __init__(self, members: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[SpeedRow, _Mapping]]] = ..., unconfirmed: _Optional[_Iterable[_Union[SpeedRow, _Mapping]]] = ...) -> None: ...
