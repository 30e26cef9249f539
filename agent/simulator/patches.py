"""JSON Patch (RFC 6902) and JSON Merge Patch (RFC 7386) on pods, with what Kubernetes allows.

api.py calls :func:`patch_pod` for ``PATCH`` requests to the embedded cluster.
"""

import copy
from typing import Any

import msgspec

from agent.simulator.store import ApiError, Json

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"


def patch_pod(pod: Json, content_type: str, body: bytes) -> Json:
    """The pod after the patch; the given one is left as it is.

    Labels and annotations may change freely, scheduling gates may only be removed, as Kubernetes
    has it; ``metadata.uid`` and ``metadata.resourceVersion`` in a merge patch are preconditions.
    Errors: ApiError 400 (not a patch), 409 (a precondition fails), 415 (another kind of patch),
    422 (it does not apply, or it changes what may not be changed).
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (JSON_PATCH, MERGE_PATCH):
        raise ApiError(
            415,
            "UnsupportedMediaType",
            f"the body of the request was in an unknown format ({kind or 'no content type'}): "
            f"accepted media types are {JSON_PATCH} and {MERGE_PATCH}",
        )
    try:
        patch = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, "BadRequest", f"the patch is not JSON: {error}") from error
    if kind == JSON_PATCH:
        changed = _json_patch(pod, patch)
    elif isinstance(patch, dict):
        changed = _merge(pod, patch)
    else:
        raise ApiError(400, "BadRequest", "a merge patch is a JSON object")
    _check_update(pod, changed)
    for field in ("uid", "resourceVersion"):
        changed["metadata"][field] = pod["metadata"][field]
    return changed


def _merge(target: Any, patch: Any) -> Any:
    """RFC 7386: objects merge, null removes, all else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result


def _invalid(message: str) -> ApiError:
    return ApiError(422, "Invalid", message)


def _json_patch(document: Json, operations: Any) -> Json:
    if not isinstance(operations, list):
        raise ApiError(400, "BadRequest", "a JSON patch is a list of operations")
    root: dict[str, Any] = {"": copy.deepcopy(document)}
    for number, operation in enumerate(operations):
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise ApiError(
                400, "BadRequest", f"operation {number} is not an object with a path: {operation}"
            )
        _apply(root, operation)
    if not isinstance(root[""], dict):
        raise _invalid("the patch replaces the pod by something that is no object")
    return root[""]


def _apply(root: dict[str, Any], operation: Json) -> None:
    name, path = operation.get("op"), operation["path"]
    if name in ("add", "replace", "test") and "value" not in operation:
        raise ApiError(400, "BadRequest", f"operation {name} at {path!r} has no value")
    if name == "test":
        found = _get(root, path)
        if found != operation["value"]:
            raise _invalid(f"test failed at {path}: found {found!r}")
    elif name == "add":
        _set(root, path, copy.deepcopy(operation["value"]), insert=True)
    elif name == "replace":
        _get(root, path)
        _set(root, path, copy.deepcopy(operation["value"]), insert=False)
    elif name == "remove":
        _remove(root, path)
    elif name in ("move", "copy") and isinstance(operation.get("from"), str):
        value = copy.deepcopy(_get(root, operation["from"]))
        if name == "move":
            _remove(root, operation["from"])
        _set(root, path, value, insert=True)
    else:
        raise ApiError(400, "BadRequest", f"unknown or incomplete JSON patch operation {name!r}")


def _parent(root: Any, path: str) -> tuple[Any, str]:
    """The container that the last part of the path is in; the document itself is root's ``""``."""
    if path and not path.startswith("/"):
        raise ApiError(400, "BadRequest", f"a JSON pointer starts with a slash: {path!r}")
    parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
    here = root
    for part in parts[:-1]:
        here = _child(here, part, path)
    return here, parts[-1]


def _index(items: list[Any], part: str, path: str, end: int) -> int:
    if not part.isdecimal() or int(part) >= end:
        raise _invalid(f"nothing at {path}: the list has {len(items)} entries")
    return int(part)


def _child(here: Any, part: str, path: str) -> Any:
    if isinstance(here, dict) and part in here:
        return here[part]
    if isinstance(here, list):
        return here[_index(here, part, path, len(here))]
    raise _invalid(f"nothing at {path}: no {part!r} on the way")


def _get(root: Any, path: str) -> Any:
    return _child(*_parent(root, path), path)


def _set(root: Any, path: str, value: Any, *, insert: bool) -> None:
    here, part = _parent(root, path)
    if isinstance(here, dict):
        here[part] = value
    elif not isinstance(here, list):
        raise _invalid(f"nothing at {path}: its parent is no object and no list")
    elif not insert:
        here[_index(here, part, path, len(here))] = value
    else:
        here.insert(len(here) if part == "-" else _index(here, part, path, len(here) + 1), value)


def _remove(root: Any, path: str) -> None:
    _get(root, path)
    here, part = _parent(root, path)
    del here[int(part) if isinstance(here, list) else part]


def _check_update(old: Json, new: Json) -> None:
    """Refuse what an API server refuses of an update of a pod (labels and annotations are free)."""
    name = old["metadata"]["name"]
    metadata = new.get("metadata")
    if not isinstance(metadata, dict):
        raise _invalid(f'Pod "{name}" is invalid: metadata: Required value')
    for field in ("uid", "resourceVersion"):
        if metadata.get(field, old["metadata"][field]) != old["metadata"][field]:
            raise ApiError(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on pods "{name}": {field} is '
                f"{old['metadata'][field]}, the request expects {metadata[field]}",
            )
    for field in ("labels", "annotations"):
        values = metadata.get(field) or {}
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            raise _invalid(f'Pod "{name}" is invalid: metadata.{field}: values must be strings')
    before, after = _rest(old), _rest(new)
    if before != after:
        fields = sorted(
            f"{part}.{key}"
            for part in ("metadata", "spec", "status")
            for key in {*_part(before, part), *_part(after, part)}
            if _part(before, part).get(key) != _part(after, part).get(key)
        )
        raise _invalid(
            f'Pod "{name}" is invalid: {", ".join(fields) or "object"}: Forbidden: pod updates may '
            "change only labels, annotations and, by removing them, spec.schedulingGates"
        )
    gates = new["spec"].get("schedulingGates") or []
    held = old["spec"].get("schedulingGates", [])
    if not isinstance(gates, list) or any(gate not in held for gate in gates):
        raise _invalid(
            f'Pod "{name}" is invalid: spec.schedulingGates: Forbidden: only deletion is allowed'
        )
    if not gates:
        new["spec"].pop("schedulingGates", None)


def _part(item: Json, name: str) -> Json:
    part = item.get(name)
    return part if isinstance(part, dict) else {}


def _rest(pod: Json) -> Json:
    """What may not change, as one comparable object."""
    return {
        **pod,
        "metadata": {
            key: value
            for key, value in pod["metadata"].items()
            if key not in ("labels", "annotations", "uid", "resourceVersion")
        },
        "spec": {k: v for k, v in _part(pod, "spec").items() if k != "schedulingGates"},
    }
