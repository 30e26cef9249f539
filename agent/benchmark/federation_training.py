"""All that the suite ``federation`` has to learn before its cells, task by task, into files.

Called by ``agent.benchmark.federation``. Each task's last file is written atomically, so that a run
that was broken off goes on with the task that it was at.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from agent.benchmark.federation_data import Cluster, Data, Liar
from agent.benchmark.federation_policies import Learner, LyingLearner, federate, teach
from agent.benchmark.federation_speeds import exchange, experience, lie, table
from agent.benchmark.knowledge import Knowledge
from agent.benchmark.suite import Say, Size
from agent.simulator import splits
from agent.simulator.labels import Labels
from common.speeds import Peers
from common.weights import Arrays, load, save, write_atomic

NOBODY = "nobody lies"
HALVES = ("first half", "second half")
PROCESSES = 2


class Federated(msgspec.Struct, frozen=True):
    """Members that learn policies together."""

    setting: str
    arm: str
    members: tuple[str, ...]
    settings: dict[str, Any]
    """Of the hub."""
    liar: Liar | None = None
    """What the last member does; None: it is honest."""


class Told(msgspec.Struct, frozen=True):
    """Members that tell each other their speeds."""

    arm: str
    newcomer: str
    """Who has nothing to tell; empty: nobody."""
    members: tuple[str, ...]
    """Who tells."""
    liar: str = ""


def together(count: int) -> str:
    """The setting of a federation of ``count`` members."""
    return f"policies, {count} member{'s' if count > 1 else ''}"


def lied(count: int, strategy: str) -> str:
    """The setting of a federation in which one of ``count`` members lies."""
    return f"one liar of {count}, {strategy}"


UNSEEN = "policies, unseen clusters"


def federations(data: Data, names: tuple[str, ...]) -> Iterator[Federated]:
    """All federations that learn policies, of the members that are there."""
    for count in [n for n in data.sizes if 1 < n <= len(names)]:
        for arm, settings in data.arms.items():
            yield Federated(together(count), arm, names[:count], settings)
    middle = len(names) // 2
    if middle > 1:
        for half, members in zip(HALVES, (names[:middle], names[middle:]), strict=True):
            yield Federated(UNSEEN, half, members, data.arms["fedavg"])
    if len(names) >= data.liar_members:
        members = names[: data.liar_members]
        for strategy, settings in data.robust.items():
            setting = lied(data.liar_members, strategy)
            yield Federated(setting, NOBODY, members, settings)
            for arm, liar in data.liars.items():
                yield Federated(setting, arm, members, settings, liar)


def peers_arm(count: int, liar: bool = False) -> str:
    """The name of a newcomer's arm."""
    return f"{count} peer{'' if count == 1 else 's'}{', one lies' if liar else ''}"


OWN_AND_PEERS, OWN_AND_LIAR = "own jobs and all peers", "own jobs and all peers, one lies"


def tellings(data: Data, names: tuple[str, ...]) -> Iterator[Told]:
    """All exchanges of speed tables."""
    counts = sorted({n for n in data.speeds.peers if 0 < n < len(names)})
    for place, newcomer in enumerate(names):
        others = names[place + 1 :] + names[:place]
        for count in counts:
            yield Told(peers_arm(count), newcomer, others[:count])
        if counts:
            most = others[: counts[-1]]
            yield Told(peers_arm(counts[-1], liar=True), newcomer, most, most[0])
        yield Told(OWN_AND_LIAR, "", (newcomer, *others), others[0])
    yield Told(OWN_AND_PEERS, "", names)


# ---- where everything lies ----


def knowledge_file(folder: Path, member: str) -> Path:
    """What a member has lived through."""
    return folder / "knowledge" / f"{member}.json"


def labels_file(folder: Path, member: str, seed: int) -> Path:
    """What its candidates led to."""
    return folder / "labels" / f"{member} {seed}.npz"


def policy_file(folder: Path, setting: str, arm: str, seed: int, member: str) -> Path:
    """A member's policy in the end; ``shared`` for the hub's."""
    return folder / "policies" / quote(setting) / quote(arm) / str(seed) / f"{member}.safetensors"


def course_file(folder: Path, federated: Federated, seed: int) -> Path:
    """In how many rounds the hub set each member aside; the last of a federation's files."""
    return policy_file(folder, federated.setting, federated.arm, seed, "x").with_name("course.json")


def peers_file(folder: Path, arm: str, member: str) -> Path:
    """What a member hears of the others' speeds."""
    return folder / "peers" / f"{quote(arm)} {member}.json"


def read_policy(path: Path) -> Arrays:
    """A policy that was written here."""
    return load(path)[0]


def read_knowledge(folder: Path, member: str) -> Knowledge:
    """What a member knows."""
    return msgspec.json.decode(knowledge_file(folder, member).read_bytes(), type=Knowledge)


def read_peers(folder: Path, arm: str, member: str) -> Peers:
    """What a member heard."""
    return msgspec.json.decode(peers_file(folder, arm, member).read_bytes(), type=Peers)


# ---- the tasks; each in a process of its own ----


def live(data: Data, folder: Path, cluster: Cluster) -> None:
    """A member lives through jobs of its own."""
    path = knowledge_file(folder, cluster.name)
    if not path.exists():
        write_atomic(path, msgspec.json.encode(experience(cluster, data.speeds, data.rule)))


def learn_alone(data: Data, folder: Path, size: Size, cluster: Cluster, seed: int) -> None:
    """A member tries candidates, and learns from them by itself."""
    path = labels_file(folder, cluster.name, seed)
    if not path.exists():
        history = read_knowledge(folder, cluster.name).history
        labels, jobs = teach(
            cluster, data.training, history, load=data.load, rule=data.rule,
            labels=data.training.labels.of(size), seed=seed,
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(f".{os.getpid()}.part")
        with partly.open("wb") as file:
            np.savez(file, jobs=jobs, **vars(labels))
        partly.replace(path)
    target = policy_file(folder, "alone", "alone", seed, cluster.name)
    if not target.exists():
        learner = _learner(data, folder, cluster.name, seed, None)
        for _ in range(data.training.rounds):
            learner.learn()
        save(target, learner.policy)


def _learner(data: Data, folder: Path, member: str, seed: int, liar: Liar | None) -> Learner:
    with np.load(labels_file(folder, member, seed)) as file:
        jobs = int(file["jobs"])
        labels = Labels(**{name: file[name] for name in Labels.__dataclass_fields__})
    # By its place among all members, so that its minibatches are the same in every federation.
    draw = 1000 * seed + list(data.members).index(member)
    if liar is None:
        return Learner(labels, data.training, jobs=jobs, seed=draw)
    return LyingLearner(labels, data.training, jobs=jobs, seed=draw, kind=liar)


def learn_together(data: Data, folder: Path, federated: Federated, seed: int) -> None:
    """A federation takes its course."""
    last = course_file(folder, federated, seed)
    if last.exists():
        return
    liars = {federated.members[-1]: federated.liar}
    learners = {
        name: _learner(data, folder, name, seed, liars.get(name)) for name in federated.members
    }
    course = federate(learners, federated.settings, data.training.rounds)
    for name, policy in {**course.policies, "shared": course.shared}.items():
        save(policy_file(folder, federated.setting, federated.arm, seed, name), policy)
    write_atomic(last, msgspec.json.encode(course.refused))


def tell(data: Data, folder: Path, all_clusters: Mapping[str, Cluster], told: Told) -> None:
    """Members tell each other their speeds."""
    hearers = [told.newcomer] if told.newcomer else list(told.members)
    if told.liar and not told.newcomer:
        hearers = [told.members[0]]
    if all(peers_file(folder, told.arm, name).exists() for name in hearers):
        return
    tables = {name: table(read_knowledge(folder, name)) for name in told.members}
    if told.liar:
        speeds = all_clusters[told.liar].site_speeds(data.speeds.spread)
        known = read_knowledge(folder, told.liar)
        tables[told.liar] = lie(known, speeds, data.speeds.liar_factor)
    if told.newcomer:
        tables[told.newcomer] = {}
    heard = exchange(tables)
    for name in hearers:
        write_atomic(peers_file(folder, told.arm, name), msgspec.json.encode(heard[name]))


def _blind(task: Callable[[], None]) -> None:
    """Do a task with the sealed jobs out of reach; this process may be a new one."""
    with splits.training():
        task()


def learn_all(data: Data, found: list[Cluster], size: Size, folder: Path, say: Say) -> None:
    """Everything, in two processes."""
    names = tuple(cluster.name for cluster in found)
    seeds = range(data.training.seeds.of(size))
    by_name = {cluster.name: cluster for cluster in found}
    stages = {
        "members live through jobs of their own": [
            partial(live, data, folder, cluster) for cluster in found
        ],
        "members try candidates and learn alone": [
            partial(learn_alone, data, folder, size, cluster, seed)
            for seed in seeds
            for cluster in found
        ],
        "members learn policies together": [
            partial(learn_together, data, folder, federated, seed)
            for seed in seeds
            for federated in federations(data, names)
        ],
        "members tell each other their speeds": [
            partial(tell, data, folder, by_name, told) for told in tellings(data, names)
        ],
    }
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for text, tasks in stages.items():
            say(f"{text}: {len(tasks)} tasks")
            for done in [pool.submit(_blind, task) for task in tasks]:
                done.result()
