"""The hub's memory of members, rounds and events; written by link and rounds, read by all.

SQLite in WAL mode by default, any SQLAlchemy URL by choice. Every public method is one transaction
and may be called from any thread. A round's outcome, the pods that it counted and the speed tables
that it accepted are committed together, so that a crash never leaves one without the other.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import create_engine, delete, event, func, select, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from common.identity import check_member_name
from coordinator.reader import Reader
from coordinator.tables import Base, EventRow, MemberRow, MetricRow, RoundRow, UpdateRow
from coordinator.views import NewUpdate


class RegistryError(RuntimeError):
    """The registry cannot be opened, or was asked for something that it does not hold."""


def told(error: SQLAlchemyError) -> str:
    """One line for a registry that failed at work, with what to do."""
    return (
        f"the registry failed at work ({str(error).splitlines()[0]}); what was committed is kept: "
        "free some disk or reach its database again, and start anew"
    )


def _tune_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _check_sqlite(engine: Engine) -> None:
    """Refuse a damaged file, and never begin a new one by oneself: it holds who is shut out."""
    try:
        with engine.connect() as connection:
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    except OperationalError:
        raise  # missing, locked or on a full disk: that says nothing against the file
    except DatabaseError as error:
        verdict = error.orig
    if verdict != "ok":
        why = " ".join(str(verdict).split())
        raise RegistryError(
            f"the registry {engine.url.database} is damaged ({why}); restore it from a copy, or "
            "move it away, start anew and enroll every member again"
        )


def _open(url: str) -> Engine:
    try:
        engine = create_engine(url)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _tune_sqlite)
            _check_sqlite(engine)
        Base.metadata.create_all(engine)
    except (SQLAlchemyError, ImportError) as error:
        raise RegistryError(
            f"cannot open the registry ({error}); check registry_url and that its directory exists"
        ) from error
    return engine


class Registry(Reader):
    """Members, rounds, updates, learning curves and events."""

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], float] = time.time,
        metric_points: int = 2000,
        event_limit: int = 10_000,
    ) -> None:
        """Open the registry, creating its tables if there are none.

        Args:
            url: SQLAlchemy URL, such as ``sqlite:////var/lib/fedsched/registry.db``.
            clock: seconds since the epoch.
            metric_points: points kept per member and metric.
            event_limit: events kept.
        """
        self._engine = _open(url)
        super().__init__(sessionmaker(self._engine, expire_on_commit=False))
        self._clock = clock
        self._metric_points = metric_points
        self._event_limit = event_limit

    def close(self) -> None:
        """Give all database connections back."""
        self._engine.dispose()

    # ---- members ----

    def enroll(self, name: str, fingerprint: str, certificate_expires: float) -> None:
        """Add a member, or give a known one a new certificate; either may connect from now on."""
        check_member_name(name)
        with self._session.begin() as session:
            row = session.get(MemberRow, name)
            if row is None:
                row = MemberRow(name=name, enrolled_at=self._clock())
                session.add(row)
            row.fingerprint = fingerprint
            row.certificate_expires = certificate_expires
            row.revoked = False

    def revoke(self, name: str) -> None:
        """Shut a member out; raise RegistryError when there is none of that name."""
        with self._session.begin() as session:
            row = session.get(MemberRow, name)
            if row is None:
                raise RegistryError(f"no member is called {name}; `coordinator members` lists them")
            row.revoked = True
            row.connected = False

    def refusal(self, name: str, fingerprint: str) -> str | None:
        """Why a certificate may not connect as ``name``, or None if it may."""
        with self._session() as session:
            row = session.get(MemberRow, name)
            if row is None:
                return "not enrolled"
            if row.revoked:
                return "revoked"
            if row.fingerprint != fingerprint:
                return "certificate was replaced by a newer one"
            return None

    def admitted(self) -> dict[str, str]:
        """Fingerprint of the valid certificate of every member that may connect."""
        with self._session() as session:
            rows = session.scalars(select(MemberRow).where(MemberRow.revoked.is_(False)))
            return {row.name: row.fingerprint for row in rows}

    def connected(
        self, name: str, features_version: int, architecture: str, software_version: str
    ) -> None:
        """Note that a member opened a session."""
        self._change(
            name,
            connected=True,
            last_seen=self._clock(),
            features_version=features_version,
            architecture=architecture[:64],
            software_version=software_version[:64],
        )

    def disconnected(self, name: str) -> None:
        """Note that a member's session ended."""
        self._change(name, connected=False, last_seen=self._clock())

    def all_disconnected(self) -> None:
        """Forget sessions of an earlier process; called once when the hub starts."""
        with self._session.begin() as session:
            session.execute(update(MemberRow).values(connected=False))

    def traffic(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Add bytes (received, sent) to the members' counts; they were seen now."""
        now = self._clock()
        with self._session.begin() as session:
            for name, (received, sent) in sorted(counts.items()):
                session.execute(
                    update(MemberRow)
                    .where(MemberRow.name == name)
                    .values(
                        last_seen=now,
                        bytes_in=MemberRow.bytes_in + received,
                        bytes_out=MemberRow.bytes_out + sent,
                    )
                )

    def _change(self, name: str, **values: Any) -> None:
        with self._session.begin() as session:
            session.execute(update(MemberRow).where(MemberRow.name == name).values(**values))

    def pod_counter(self, name: str) -> tuple[int | None, int]:
        """A member's counter and how many of its pods were accepted; (None, 0) at first."""
        with self._session() as session:
            row = session.get(MemberRow, name)
            if row is None or row.counter is None:
                return None, 0
            return int(row.counter, 16), row.accepted_pods

    def speed_tables(self) -> dict[str, bytes]:
        """The newest accepted speed table of every member that is not revoked, serialised."""
        with self._session() as session:
            rows = session.scalars(select(MemberRow).where(MemberRow.revoked.is_(False)))
            return {row.name: row.speed_table for row in rows if row.speed_table is not None}

    # ---- rounds ----

    def begin_round(self, strategy: str) -> int:
        """Open the next round and return its number; numbers never repeat, even after a crash."""
        with self._session.begin() as session:
            number = (session.scalar(select(func.max(RoundRow.number))) or 0) + 1
            session.add(RoundRow(number=number, started=self._clock(), strategy=strategy))
            return number

    def finish_round(
        self,
        number: int,
        *,
        invited: int,
        updates: Iterable[NewUpdate],
        version: str,
        policy_file: str,
        global_norm: float,
        bytes_in: int,
        bytes_out: int,
    ) -> None:
        """Close a round: its outcome, its updates and what they change of their members."""
        now = self._clock()
        with self._session.begin() as session:
            row = session.get_one(RoundRow, number)
            row.finished, row.invited = now, invited
            row.version, row.policy_file, row.global_norm = version, policy_file, global_norm
            row.bytes_in, row.bytes_out = bytes_in, bytes_out
            for new in updates:
                row.accepted += new.accepted
                row.rejected += not new.accepted
                session.add(
                    UpdateRow(
                        round=number,
                        member=new.member,
                        received=now,
                        accepted=new.accepted,
                        reason=new.reason[:500],
                        num_examples=new.num_examples,
                        learning_rounds=new.learning_rounds,
                        delta_norm=_finite(new.delta_norm),
                        size=new.size,
                    )
                )
                member = session.get(MemberRow, new.member)
                if new.accepted and member is not None and new.counter is not None:
                    member.counter = f"{new.counter:016x}"
                    member.accepted_pods = new.scheduled_pods
                    member.speed_table = new.speed_table

    def accepted_norms(self, limit: int = 100) -> list[float]:
        """Norms of the latest accepted deltas, newest first."""
        with self._session() as session:
            norms = session.scalars(
                select(UpdateRow.delta_norm)
                .where(UpdateRow.accepted.is_(True), UpdateRow.delta_norm.is_not(None))
                .order_by(UpdateRow.id.desc())
                .limit(limit)
            )
            return [norm for norm in norms if norm is not None]

    # ---- curves and events ----

    def record_metrics(self, member: str, values: Mapping[str, float]) -> None:
        """Add a point to each named curve; what is not finite is never stored."""
        now = self._clock()
        with self._session.begin() as session:
            for name, value in values.items():
                if not math.isfinite(value):
                    continue
                session.add(MetricRow(member=member, name=name, time=now, value=float(value)))
                session.flush()
                mine = (MetricRow.member == member, MetricRow.name == name)
                _keep_newest(session, MetricRow, mine, self._metric_points)

    def record_event(self, kind: str, text: str, member: str | None = None) -> None:
        """Add an event; the oldest beyond the limit are dropped."""
        with self._session.begin() as session:
            name = None if member is None else member[:63]
            session.add(EventRow(time=self._clock(), kind=kind, member=name, text=text[:500]))
            session.flush()
            _keep_newest(session, EventRow, (), self._event_limit)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _keep_newest(
    session: Session, table: type[MetricRow] | type[EventRow], where: tuple[Any, ...], limit: int
) -> None:
    oldest = session.scalar(
        select(table.id).where(*where).order_by(table.id.desc()).offset(limit).limit(1)
    )
    if oldest is not None:
        session.execute(delete(table).where(*where, table.id <= oldest))
