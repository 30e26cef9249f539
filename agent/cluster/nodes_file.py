"""The file in which the decision path tells the learner what nodes there are.

Written by ``agent serve`` whenever the set of nodes changed, read by ``agent.learning.learner`` for
the cluster's own simulator. It is JSON, replaced atomically, and stays within the member.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from agent.cluster.records import Node
from common.weights import write_atomic

_decoder = msgspec.json.Decoder(list[Node])


class NodesFileError(ValueError):
    """A nodes file is missing or torn; the message says which."""


def write(path: Path, nodes: Iterable[Node]) -> None:
    """Write ``nodes``, sorted by name, replacing ``path`` atomically. Raises OSError.

    What only scheduling asks about (labels, taints, addresses) is left out.
    """
    slim = (msgspec.structs.replace(node, labels={}, taints=(), addresses=()) for node in nodes)
    ordered = sorted(slim, key=lambda node: node.name)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(ordered), indent=1))


def read(path: Path) -> list[Node]:
    """Read what :func:`write` wrote. Raises NodesFileError where it is not there or not sound."""
    try:
        return _decoder.decode(path.read_bytes())
    except OSError as error:
        raise NodesFileError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NodesFileError(
            f"{path} is not a nodes file: {error}; delete it and agent serve writes it anew"
        ) from error
