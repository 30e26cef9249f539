"""``agent serve``: one process that watches a cluster, answers kube-scheduler and lifts gates.

Called by ``agent.cli``. It trains nothing and imports no torch; what the learner finds out comes
through files in the state directory, which are looked at once a second.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

from agent.cluster.gpus import sheet
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.journal import Journal
from agent.scheduling.decision import decide_node, decide_queue, make_policy, seed_kernels
from agent.scheduling.extender import KEEP_ALIVE_SECONDS
from agent.scheduling.member import Member
from agent.settings import Settings
from common.policy import initial_arrays
from common.weights import write_atomic

log = logging.getLogger(__name__)


class StateLockedError(RuntimeError):
    """Another ``agent serve`` uses the state directory."""


def warm_up(rule: str) -> None:
    """Compile or load the kernels on a small cluster, so that no pod waits for it."""
    state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=sheet)
    state.replace_nodes(
        Node(name=model, cpu=8.0, memory=32.0, gpus=2, gpu_model=model, gpu_memory=16.0)
        for model in ("v100", "k80")
    )
    for number in range(3):
        pod = Pod(uid=f"u{number}", name=f"p{number}", cpu=1.0, memory=1.0, gpus=1, job_type="a")
        state.apply_pod(pod)
    state.assume("u0", "v100")
    state.apply_pod(Pod(uid="u1", name="p1", cpu=1.0, memory=1.0, gpus=1, node="k80"))
    state.apply_pod(state.pods["u1"], deleted=True)
    eligible = np.ones(len(state.view.kind), np.bool_)
    for policy in (make_policy(rule), make_policy(rule, initial_arrays())):
        decide_queue(state.view, policy, eligible)
        decide_node(state.view, policy, state.slots["u2"], np.array([0, 1], np.int64))


@contextlib.contextmanager
def state_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold the state directory for one process of a kind. Raises StateLockedError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateLockedError(
                f"another 'agent {name}' uses {folder}; stop it, or give this one a state "
                "directory of its own (setting 'state')"
            ) from None
        yield


async def serve(settings: Settings, ready_file: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. ``ready_file`` gets pid and port once the port answers.

    Raises StateLockedError, and OSError where the port or the directory cannot be had.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    warm_up(settings.serve.rule)
    seed_kernels(settings.serve.seed)
    with state_lock(settings.state, "serve"):
        journal = Journal(settings.journal_dir)
        try:
            async with aiohttp.ClientSession() as session:
                member = Member(settings, session, journal)
                member.read_files()
                runner = web.AppRunner(
                    member.extender.app(),
                    access_log=None,
                    keepalive_timeout=KEEP_ALIVE_SECONDS,
                    shutdown_timeout=1.0,
                )
                await runner.setup()
                try:
                    site = web.TCPSite(runner, settings.serve.host, settings.serve.port)
                    await site.start()
                    port = int(runner.addresses[0][1])
                    log.info("extender at http://%s:%d", settings.serve.host, port)
                    if ready_file is not None:
                        ready = {"pid": os.getpid(), "port": port}
                        write_atomic(ready_file, json.dumps(ready).encode())
                    await member.run(stop)
                finally:
                    await runner.cleanup()
        finally:
            journal.close()
