"""``agent learn``: the learner's process, alone or with its end of the federation link.

Called by ``agent.cli``. It may be killed at any line and started again; a second one on the same
state directory is refused.
"""

import json
import logging
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from agent.cluster import leader_file
from agent.federation import Member
from agent.learning.learner import OnlineLearner
from agent.learning.store import Store
from agent.lock import sole
from agent.settings import Settings
from agent.uploads import UploadPolicy
from common.features import FEATURES_VERSION
from common.identity import read_bundle
from common.policy import ARCHITECTURE
from common.weights import write_atomic

log = logging.getLogger(__name__)


class StoreError(RuntimeError):
    """The experience database failed at work."""


def software_version() -> str:
    """The installed distribution's version; ``0`` in a bare checkout."""
    try:
        return version("fedsched")
    except PackageNotFoundError:
        return "0"


def run(
    settings: Settings,
    *,
    journal: Path | None = None,
    ready_file: Path | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Learn until SIGTERM, SIGINT or ``stop``; the round that is under way is finished.

    Args:
        settings: the member's settings.
        journal: read this journal in place of the state directory's own, deleting nothing of it.
        ready_file: written (pid as JSON) once the learner is at work.
        stop: ends the loop; handlers for signals are installed only where it is not given.

    Raises:
        LockedError: another learner works on the state directory.
        ValueError: a setting, the bundle or an option is wrong; the message says which.
        StoreError: the database failed while open, for want of disk or damaged.
    """
    stop = stop or _stop_on_signals()
    with sole(settings.state, "learn"):
        store = Store(settings.state / "experience.sqlite")
        try:
            _work(settings, store, journal, ready_file, stop)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"the experience in {store.path} failed ({error}); nothing that was committed is "
                "lost: free some disk and start again, a damaged file is then moved aside"
            ) from error
        finally:
            store.close()


def _work(
    settings: Settings,
    store: Store,
    journal: Path | None,
    ready_file: Path | None,
    stop: threading.Event,
) -> None:
    learner = OnlineLearner(
        settings, store, journal=journal or settings.journal_dir, owns_journal=journal is None
    )
    leads = leadership(settings)
    member = _member(settings, learner, leads)
    learner.write_status()
    if ready_file is not None:
        write_atomic(ready_file, json.dumps({"pid": os.getpid()}).encode())
    log.info(
        "learning with %s from round %d, %s",
        settings.learn.algorithm,
        learner.learning_rounds,
        f"as member {member[1]}" if member else "alone",
    )
    if member:
        member[0].start()
    try:
        led = True
        while not stop.is_set():
            leading = leads()
            if leading != led:
                log.info("learning goes on" if leading else "another replica leads; waiting")
                led = leading
            if not leading:
                stop.wait(settings.learn.poll_seconds)
            elif not learner.round():
                # What the hub lays down need not wait for the next look at the journal.
                _wait(stop, learner.handover.offered, settings.learn.poll_seconds)
    finally:
        learner.handover.close()
        if member:
            member[0].stop()
        learner.write_status()
    log.info("stopped after round %d", learner.learning_rounds)


def _wait(stop: threading.Event, offered: threading.Event, seconds: float) -> None:
    """Wait until ``seconds`` are over or either event is set."""
    step = min(seconds, 0.1)
    left = seconds
    while left > 0.0 and not offered.is_set() and not stop.wait(min(step, left)):
        left -= step


def leadership(settings: Settings, clock: Callable[[], float] = time.time) -> Callable[[], bool]:
    """Says whether this replica may learn now: it leads, or there is no election."""
    if settings.election.mode == "none":
        return lambda: True
    return lambda: leader_file.read(settings.leader_file).holds(clock())


def _member(
    settings: Settings, learner: OnlineLearner, leads: Callable[[], bool]
) -> tuple[Member, str] | None:
    """The federation link and the member's name; None without a bundle."""
    learn = settings.learn
    if learn.bundle is None:
        return None
    bundle = read_bundle(learn.bundle)
    member = Member(
        bundle,
        learner.handover,
        settings.state,
        features_version=FEATURES_VERSION,
        architecture=ARCHITECTURE,
        software_version=software_version(),
        policy=UploadPolicy(learn.upload_rounds, learn.upload_seconds, learn.upload_drift),
        keep=learn.upload_keep,
        status_seconds=learn.status_seconds,
        active=leads,
    )
    return member, bundle.member


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        log.info("%s: stopping after this round", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop
