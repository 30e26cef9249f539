"""The experience database of one member: what ``agent learn`` keeps between two lines of code.

SQLite in WAL mode with one writer, the learner. Two transactions carry the guarantees: journal
records go in together with the position behind them, so each is taken exactly once; and decisions
are marked as consumed together with the learner's state that has learned from them, so ``kill -9``
at any line neither loses a decision nor learns from it twice.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from agent.cluster.outcomes import OUTCOMES
from agent.journal import Census, Decision, PodEvent, Progress, Record, pack, read, segments, unpack

log = logging.getLogger(__name__)

ENDED = tuple(OUTCOMES)
"""Kinds of pod events after which no more is heard of the pod."""
FATES = ("learned", "elsewhere", "superseded", "unplaced", "unfollowed", "invalid")
"""What became of a decision:

- ``learned``: went into a batch;
- ``elsewhere``: its pod landed where the behaviour policy's probability is not known;
- ``superseded``: the same pod was decided upon again before it was bound;
- ``unplaced``: its pod was never seen bound;
- ``unfollowed``: the last one of its session, so nothing tells what it led to;
- ``invalid``: its arrays are not those of this version.
"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL,
    time REAL NOT NULL, uid TEXT NOT NULL, fate TEXT, record BLOB);
CREATE INDEX IF NOT EXISTS decisions_open ON decisions (seq) WHERE fate IS NULL;
CREATE INDEX IF NOT EXISTS decisions_uid ON decisions (uid, seq);
CREATE TABLE IF NOT EXISTS pod_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL, kind TEXT NOT NULL,
    time REAL NOT NULL, record BLOB NOT NULL, job TEXT NOT NULL DEFAULT '', UNIQUE (uid, kind));
CREATE INDEX IF NOT EXISTS pod_events_kind ON pod_events (kind, seq);
CREATE TABLE IF NOT EXISTS speeds (
    key TEXT PRIMARY KEY, n REAL NOT NULL, sum_x REAL NOT NULL, sum_x2 REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, content BLOB NOT NULL);
"""
_JOB_INDEX = """
CREATE INDEX IF NOT EXISTS pod_events_job ON pod_events (job) WHERE kind = 'created';
"""
_TRANSACTION_RECORDS = 1000

_event_decoder = msgspec.msgpack.Decoder(PodEvent)
_encoder = msgspec.msgpack.Encoder()

SpeedSample = Callable[[Progress], "tuple[str, float] | None"]
"""From a reading to (key, log steps/s), or None where it teaches nothing."""


class OpenDecision(NamedTuple):
    """A decision that has no fate yet."""

    seq: int
    uid: str
    """The pod that the decision would place; empty where it chose to wait."""
    decision: Decision


class Store:
    """Open the database at ``path``, moving an unreadable one aside.

    Args:
        path: the database file; its folder is made where it is missing.
        now: wall clock, seconds since the epoch; names a file that is moved aside.
        keep_decisions: consumed decisions kept (without their arrays) for looking at.
        keep_events: pod events kept; a restarted ``agent serve`` reports a pod again, and only
            within this horizon that is recognised.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        keep_decisions: int = 20_000,
        keep_events: int = 200_000,
    ) -> None:
        self.path = path
        self.keep_decisions = keep_decisions
        self.keep_events = keep_events
        self.moved_aside: Path | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._open()
        except sqlite3.OperationalError:
            raise  # a full disk or missing rights say nothing against the database
        except sqlite3.DatabaseError as error:
            self.moved_aside = self._move_aside(int(now()))
            log.error(
                "the experience database %s is damaged (%s); it was moved to %s and learning "
                "starts anew from the policy that is live",
                path,
                error,
                self.moved_aside,
            )
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=30.0)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            db.executescript(_SCHEMA)
            if "job" not in {name for _, name, *_ in db.execute("PRAGMA table_info(pod_events)")}:
                # A database of an earlier release, in which every pod was a job of its own.
                db.execute("ALTER TABLE pod_events ADD COLUMN job TEXT NOT NULL DEFAULT ''")
                db.execute("UPDATE pod_events SET job = uid")
            db.executescript(_JOB_INDEX)
        except BaseException:
            db.close()
            raise
        return db

    def _move_aside(self, stamp: int) -> Path:
        target = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        number = 0
        while target.exists():
            number += 1
            target = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{number}")
        for suffix in ("-wal", "-shm"):
            side = self.path.with_name(self.path.name + suffix)
            if side.exists():
                side.rename(target.with_name(target.name + suffix))
        self.path.rename(target)
        return target

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- counters and blobs ----

    def counter(self, name: str) -> float:
        """A counter's value; 0 where it was never counted."""
        row = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return float(row[0]) if row else 0.0

    def _count(self, name: str, value: float = 1.0) -> None:
        self._db.execute(
            "INSERT INTO counters VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, value),
        )

    def _set(self, name: str, value: float) -> None:
        self._db.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, value))

    def blob(self, name: str) -> bytes | None:
        """What was saved last under this name."""
        row = self._db.execute("SELECT content FROM blobs WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row else None

    # ---- in: the journal ----

    @property
    def position(self) -> tuple[int, int]:
        """(segment, offset) behind the last record that is in the database."""
        return int(self.counter("journal_segment")), int(self.counter("journal_offset"))

    @property
    def now(self) -> float:
        """Time of the newest record, cluster seconds: the clock of delayed outcomes."""
        return self.counter("newest_time")

    def ingest(self, folder: Path, speed_sample: SpeedSample, *, limit: int | None = None) -> int:
        """Take what the journal in ``folder`` holds behind the stored position, at most ``limit``.

        Segments that were dropped before they could be read are counted as ``dropped_segments``.
        Returns the number of records taken.
        """
        taken = 0
        found = segments(folder)
        if found and found[-1][0] < self.position[0]:
            # Somebody removed the journal, and serving began to number anew. What was read before
            # is known by its id and is not taken twice.
            log.warning("the journal in %s was replaced; reading it from its beginning", folder)
            with self._transaction():
                self._set("journal_segment", 0)
                self._set("journal_offset", 0)
        records = islice(read(folder, self.position), limit)
        while chunk := list(islice(records, _TRANSACTION_RECORDS)):
            with self._transaction():
                reached = int(self.counter("journal_segment"))
                for record, segment, _ in chunk:
                    if segment > reached:
                        # Empty ones are of a process killed at its start; a first may be any.
                        passed = set(range(reached + 1, segment) if reached else ())
                        if missed := len(passed.difference(n for n, _ in segments(folder))):
                            log.warning("%d journal segments were dropped unread", missed)
                            self._count("dropped_segments", missed)
                        reached = segment
                    if record is None:
                        self._count("unreadable_records")
                    else:
                        self._ingest(record, speed_sample)
                _, segment, offset = chunk[-1]
                self._set("journal_segment", segment)
                self._set("journal_offset", offset)
                times = [record.time for record, _, _ in chunk if record is not None]
                self._set("newest_time", max([self.now, *times]))
            taken += len(chunk)
        return taken

    def _ingest(self, record: Record, speed_sample: SpeedSample) -> None:
        if isinstance(record, Decision):
            uid = record.pods[record.action] if 0 <= record.action < len(record.pods) else ""
            added = self._db.execute(
                "INSERT OR IGNORE INTO decisions (id, session, time, uid, record) "
                "VALUES (?, ?, ?, ?, ?)",
                (record.id, record.session, record.time, uid, pack(record)),
            ).rowcount
            self._count("decisions" if added else "repeated_decisions")
        elif isinstance(record, PodEvent):
            self._ingest_event(record)
        elif isinstance(record, Census):
            self._ingest_census(record)
        else:
            sample = speed_sample(record)
            if sample is not None:
                key, x = sample
                self._db.execute(
                    "INSERT INTO speeds VALUES (?, 1, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                    "n = n + 1, sum_x = sum_x + excluded.sum_x, sum_x2 = sum_x2 + excluded.sum_x2",
                    (key, x, x * x),
                )
                self._count("speed_observations")

    def _ingest_event(self, event: PodEvent) -> None:
        added = self._db.execute(
            "INSERT OR IGNORE INTO pod_events (uid, kind, time, record, job) "
            "VALUES (?, ?, ?, ?, ?)",
            (event.uid, event.kind, event.time, _encoder.encode(event), event.job or event.uid),
        ).rowcount
        if not added:
            self._count("repeated_events")
            return
        self._count(f"pods_{event.kind}")
        if event.kind == "finished" and event.run_seconds > 0.0:  # 0: its start was not seen
            self._count("runs")
            self._count("run_seconds", event.run_seconds)
        learned = "SELECT 1 FROM decisions WHERE uid = ? AND fate = 'learned'"
        if event.kind in ENDED and self._db.execute(learned, (event.uid,)).fetchone():
            self._count("late_outcomes")

    def _ingest_census(self, census: Census) -> None:
        """Pods that decisions wait for and that are there no more ended while nobody looked."""
        waited_for = {item.uid for item in self.open_decisions() if item.uid}
        for uid in sorted(waited_for.difference(census.uids)):
            events = self.events(uid)
            if not events.keys() & set(ENDED):
                known = events.get("bound", PodEvent(uid=uid, time=0.0, kind="created"))
                self._ingest_event(msgspec.structs.replace(known, kind="gone", time=census.time))

    def forget_segments(self, folder: Path, *, keep: int) -> int:
        """Delete journal segments that are wholly consumed, but for the last ``keep`` of them.

        Only the owner of the journal's state directory may call this. The newest segment always
        stays, so that segment numbers go on rising. Returns how many were deleted.
        """
        reached, _ = self.position
        consumed = [path for number, path in segments(folder)[:-1] if number < reached]
        old = consumed[: max(len(consumed) - keep, 0)]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    # ---- out: decisions ----

    def open_decisions(self) -> Iterator[OpenDecision]:
        """Decisions without a fate, oldest first. Do not write while iterating."""
        for seq, uid, record in self._db.execute(
            "SELECT seq, uid, record FROM decisions WHERE fate IS NULL ORDER BY seq"
        ):
            decision = unpack(record)
            assert isinstance(decision, Decision)
            yield OpenDecision(seq, uid, decision)

    def decided_again(self, uid: str, seq: int) -> bool:
        """Whether a later decision would place the same pod."""
        return bool(
            self._db.execute(
                "SELECT 1 FROM decisions WHERE uid = ? AND seq > ? LIMIT 1", (uid, seq)
            ).fetchone()
        )

    def events(self, uid: str) -> dict[str, PodEvent]:
        """What was seen of a pod, by kind."""
        rows = self._db.execute("SELECT kind, record FROM pod_events WHERE uid = ?", (uid,))
        return {kind: _event_decoder.decode(record) for kind, record in rows}

    def latest_events(self, kind: str, limit: int) -> list[PodEvent]:
        """The newest ``limit`` events of a kind, oldest first."""
        rows = self._db.execute(
            "SELECT record FROM pod_events WHERE kind = ? ORDER BY seq DESC LIMIT ?", (kind, limit)
        ).fetchall()
        return [_event_decoder.decode(record) for (record,) in reversed(rows)]

    def completion_seconds(self, limit: int = 2000) -> list[float]:
        """Creation to end of the newest finished jobs, cluster seconds, oldest first.

        A job begins with its first pod, however many replaced that.
        """
        rows = self._db.execute(
            "SELECT f.time - (SELECT MIN(c.time) FROM pod_events c "
            "WHERE c.kind = 'created' AND c.job = own.job) "
            "FROM pod_events f JOIN pod_events own ON own.uid = f.uid AND own.kind = 'created' "
            "WHERE f.kind = 'finished' ORDER BY f.seq DESC LIMIT ?",
            (limit,),
        ).fetchall()
        return [max(float(seconds), 0.0) for (seconds,) in reversed(rows)]

    def speed_sums(self) -> dict[str, tuple[float, float, float]]:
        """(n, Σx, Σx²) of the log steps/s seen so far, by key text."""
        rows = self._db.execute("SELECT key, n, sum_x, sum_x2 FROM speeds")
        return {key: (n, x, x2) for key, n, x, x2 in rows}

    def commit(
        self,
        fates: Sequence[tuple[int, str]] = (),
        blobs: Mapping[str, bytes] | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> None:
        """Give decisions their fate, save blobs and add to counters, all in one transaction.

        Args:
            fates: (seq, one of FATES) of decisions that have none.
            blobs: contents by name, such as the learner's state.
            counts: what to add, by counter name.

        Raises:
            RuntimeError: a decision already has its fate; nothing is changed.
        """
        with self._transaction():
            for seq, fate in fates:
                changed = self._db.execute(
                    "UPDATE decisions SET fate = ?, record = NULL WHERE seq = ? AND fate IS NULL",
                    (fate, seq),
                ).rowcount
                if changed != 1:
                    raise RuntimeError(
                        f"decision {seq} was consumed before; two learners on one state directory?"
                    )
                self._count(f"fate_{fate}")
            for name, content in (blobs or {}).items():
                self._db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", (name, content))
            for name, value in (counts or {}).items():
                self._count(name, value)
            if fates:
                self._prune()

    def _prune(self) -> None:
        # Only a run from the oldest row up goes: both conditions use the primary key.
        self._db.execute(
            "DELETE FROM decisions WHERE fate IS NOT NULL AND seq <= "
            "(SELECT COALESCE(MAX(seq), 0) FROM decisions) - ?",
            (self.keep_decisions,),
        )
        self._db.execute(
            "DELETE FROM pod_events WHERE seq <= "
            "(SELECT COALESCE(MAX(seq), 0) FROM pod_events) - ? "
            "AND uid NOT IN (SELECT uid FROM decisions WHERE fate IS NULL)",
            (self.keep_events,),
        )

    def fates(self) -> dict[str, int]:
        """How many decisions met which fate, pruned ones included."""
        return {fate: int(self.counter(f"fate_{fate}")) for fate in FATES}

    def open_count(self) -> int:
        """Decisions that have no fate yet."""
        (count,) = self._db.execute("SELECT COUNT(*) FROM decisions WHERE fate IS NULL").fetchone()
        return int(count)
