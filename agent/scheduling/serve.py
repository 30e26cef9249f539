"""``agent serve``: one process that watches a cluster, answers kube-scheduler and lifts gates.

Called by ``agent.cli``. It trains nothing and imports no torch; what the learner finds out comes
through files in the state directory, which are looked at once a second.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
from pathlib import Path

import numpy as np

from agent.cluster.access import Access
from agent.cluster.gpus import sheet
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.journal import Journal
from agent.lock import sole
from agent.scheduling.decision import (
    decide_node,
    decide_queue,
    extender_scores,
    make_policy,
    seed_kernels,
)
from agent.scheduling.http_server import listening
from agent.scheduling.member import Member
from agent.settings import Settings
from common.policy import initial_arrays
from common.weights import write_atomic

log = logging.getLogger(__name__)


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
        choice = decide_node(state.view, policy, state.slots["u2"], np.array([0, 1], np.int64))
        extender_scores(choice)
    gc.collect()
    gc.freeze()  # what is loaded stays, and need not be gone over again while a pod waits


async def serve(settings: Settings, ready_file: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. ``ready_file`` gets pid and port once the port answers.

    Raises LockedError where the state directory is in use, AccessError where there is no way to an
    API server, and OSError where the port or the directory cannot be had.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    warm_up(settings.serve.rule)
    seed_kernels(settings.serve.seed)
    access = Access(settings.kubernetes)
    log.info("API server at %s, by %s", access.url, access.source)
    with sole(settings.state, "serve"):
        journal = Journal(settings.journal_dir)
        try:
            async with access.session() as session:
                member = Member(settings, access, session, journal)
                member.read_files()
                async with contextlib.AsyncExitStack() as stack:
                    ready = {"pid": os.getpid()}
                    at, routes = settings.serve, member.extender.routes()
                    ready["port"] = await stack.enter_async_context(
                        listening(routes, at.host, at.port)
                    )
                    if at.health_host:
                        routes = member.extender.health_routes()
                        ready["health_port"] = await stack.enter_async_context(
                            listening(routes, at.health_host, at.health_port)
                        )
                    log.info("extender at http://%s:%d", at.host, ready["port"])
                    if ready_file is not None:
                        write_atomic(ready_file, json.dumps(ready).encode())
                    await member.run(stop)
        finally:
            access.close()
            journal.close()
