"""The registry's tables as SQLAlchemy models; used by ``coordinator.registry`` alone.

Times are seconds since the epoch, UTC. Counters that may pass 2**31 are big integers; a 64-bit
unsigned identity is kept as text, for databases have no unsigned integer.
"""

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite counts rows up by itself only in a column of its own INTEGER type.
_RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Registry of every table below."""


class MemberRow(Base):
    """A member cluster, enrolled once and known by its certificate."""

    __tablename__ = "members"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    enrolled_at: Mapped[float] = mapped_column(Float)
    revoked: Mapped[bool] = mapped_column(Boolean, default=False)
    fingerprint: Mapped[str] = mapped_column(String(64))
    certificate_expires: Mapped[float] = mapped_column(Float)
    connected: Mapped[bool] = mapped_column(Boolean, default=False)
    last_seen: Mapped[float | None] = mapped_column(Float, default=None)
    features_version: Mapped[int | None] = mapped_column(Integer, default=None)
    architecture: Mapped[str | None] = mapped_column(String(64), default=None)
    software_version: Mapped[str | None] = mapped_column(String(64), default=None)
    bytes_in: Mapped[int] = mapped_column(BigInteger, default=0)
    bytes_out: Mapped[int] = mapped_column(BigInteger, default=0)
    counter: Mapped[str | None] = mapped_column(String(16), default=None)
    """Identity of the pod counter that ``accepted_pods`` refers to."""
    accepted_pods: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_table: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)
    """The newest accepted table, as a serialised ``PeerSpeeds`` message."""


class RoundRow(Base):
    """A federation round; ``finished`` is empty while it runs and after a crash in it."""

    __tablename__ = "rounds"

    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    started: Mapped[float] = mapped_column(Float)
    finished: Mapped[float | None] = mapped_column(Float, default=None)
    strategy: Mapped[str] = mapped_column(String(32))
    invited: Mapped[int] = mapped_column(Integer, default=0)
    accepted: Mapped[int] = mapped_column(Integer, default=0)
    rejected: Mapped[int] = mapped_column(Integer, default=0)
    version: Mapped[str | None] = mapped_column(String(64), default=None)
    """SHA-256 of the global policy after the round."""
    policy_file: Mapped[str | None] = mapped_column(String(255), default=None)
    global_norm: Mapped[float | None] = mapped_column(Float, default=None)
    bytes_in: Mapped[int] = mapped_column(BigInteger, default=0)
    bytes_out: Mapped[int] = mapped_column(BigInteger, default=0)


class UpdateRow(Base):
    """A member's answer in a round, accepted or set aside with the reason."""

    __tablename__ = "updates"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    round: Mapped[int] = mapped_column(ForeignKey("rounds.number"), index=True)
    member: Mapped[str] = mapped_column(String(63), index=True)
    received: Mapped[float] = mapped_column(Float)
    accepted: Mapped[bool] = mapped_column(Boolean)
    reason: Mapped[str] = mapped_column(String(500), default="")
    num_examples: Mapped[int] = mapped_column(BigInteger, default=0)
    learning_rounds: Mapped[int] = mapped_column(BigInteger, default=0)
    delta_norm: Mapped[float | None] = mapped_column(Float, default=None)
    size: Mapped[int] = mapped_column(BigInteger, default=0)


class MetricRow(Base):
    """One point of a member's learning curve."""

    __tablename__ = "member_metrics"
    __table_args__ = (Index("member_metrics_by_name", "member", "name", "id"),)

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    member: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(64))
    time: Mapped[float] = mapped_column(Float)
    value: Mapped[float] = mapped_column(Float)


class EventRow(Base):
    """Something an operator may want to know: a refusal, a rejected update, a restart."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    time: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(32))
    member: Mapped[str | None] = mapped_column(String(63), default=None)
    text: Mapped[str] = mapped_column(String(500))
