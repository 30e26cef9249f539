"""Lifts every gate of fedsched's, by what the API server itself says there is.

``agent.scheduling.member`` calls it on the way out, when the watches are closed already, and
``fedsched agent lift-gates`` calls it where the agent is gone or about to be uninstalled.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from kubernetes.client import ApiClient, CoreV1Api

from agent.cluster import objects
from agent.cluster.access import THREADS, Access
from agent.cluster.kubernetes import FAILURES, PAGE, ApiError, Page
from agent.cluster.records import Pod
from agent.cluster.writes import lift_gate
from agent.settings import Settings

log = logging.getLogger(__name__)
PAUSE_SECONDS = 0.5
"""Before gates that stayed are looked at anew."""


async def gated(access: Access, schedulers: Iterable[str] = ()) -> list[Pod]:
    """The pods behind our gate as they are now, oldest first.

    ``schedulers`` are the scheduler names to keep to; none: all. Raises one of
    ``kubernetes.FAILURES``.
    """
    found: list[Pod] = []
    names, token = tuple(schedulers), ""
    while True:
        page = msgspec.json.decode(await access.call(partial(_page, access, token)), type=Page)
        for item in page.items or ():
            try:
                pod = objects.pod(item)
            except objects.ObjectError as error:
                log.warning("passed over %s", error)
                continue
            if pod.gated and (not names or pod.scheduler in names):
                found.append(pod)
        token = page.metadata.continue_ or ""
        if not token:
            return sorted(found, key=lambda pod: (pod.created, pod.namespace, pod.name))


def _page(access: Access, token: str, client: ApiClient) -> bytes:
    # A gated pod has no node; the many that run are not sent at all.
    more: dict[str, Any] = {"_continue": token} if token else {}
    answer: Any = CoreV1Api(client).list_pod_for_all_namespaces(
        field_selector="spec.nodeName=",
        limit=PAGE,
        _preload_content=False,
        **more,
        **access.limits,
    )
    return bytes(answer.data)


async def lift_all(
    access: Access,
    schedulers: Iterable[str] = (),
    *,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    insist: bool = True,
) -> int:
    """Lift all gates that there are, until none is left; how many were lifted.

    Tries for ever at what is only away or has moved: bound it by ``asyncio.timeout``. Without
    ``insist``, an API server that is away when it is first asked is an error. ``progress`` gets how
    many are lifted, and of how many. Raises ApiError where the server refuses for good.
    """
    lifted = 0
    while True:
        try:
            pods = await gated(access, schedulers)
        except FAILURES as error:
            _give_up_on(error)
            if not insist:
                raise
            log.warning("the gated pods cannot be listed: %s; trying again", error)
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if not pods:
            return lifted
        insist = True
        stayed, total, room = 0, lifted + len(pods), asyncio.Semaphore(THREADS)

        async def lift(pod: Pod, of: int = total, room: asyncio.Semaphore = room) -> None:
            nonlocal lifted, stayed
            async with room:
                try:
                    await lift_gate(access, pod)
                except FAILURES as error:
                    _give_up_on(error)
                    log.info("gate of pod %s/%s: %s", pod.namespace, pod.name, error)
                    stayed += 1
                else:
                    lifted += 1
                    progress(lifted, of)

        await asyncio.gather(*map(lift, pods))
        if stayed:
            await asyncio.sleep(PAUSE_SECONDS)


def _give_up_on(error: BaseException) -> None:
    """Raise again what no further try can change: rights and credentials."""
    if isinstance(error, ApiError) and error.status in (401, 403):
        raise error


async def run(settings: Settings, seconds: float, say: Callable[[str], None] = print) -> int:
    """The command: lift all gates within ``seconds``; how many were lifted.

    Raises AccessError, ApiError, and TimeoutError where gates were left.
    """
    access = Access(settings.kubernetes)
    told = 0

    def progress(done: int, of: int) -> None:
        nonlocal told
        if done == of or done >= told + 100:
            told = done
            say(f"{done} of {of} gates lifted")

    try:
        async with asyncio.timeout(seconds):
            return await lift_all(access, settings.serve.scheduler_names, progress=progress)
    finally:
        access.close()
