"""The reading half of the registry: what dashboard and commands may ask, and change nothing by."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from coordinator.tables import EventRow, MemberRow, MetricRow, RoundRow, UpdateRow
from coordinator.views import Checkpoint, Event, Member, Overview, Point, Round, Update


class Reader:
    """Read-only queries; each is one transaction and may be called from any thread."""

    def __init__(self, session: sessionmaker[Session]) -> None:
        self._session = session

    def checkpoint(self) -> Checkpoint | None:
        """The last finished round, or None before the first."""
        with self._session() as session:
            row = session.scalar(
                select(RoundRow)
                .where(RoundRow.finished.is_not(None))
                .order_by(RoundRow.number.desc())
                .limit(1)
            )
            if row is None or row.version is None or row.policy_file is None:
                return None
            return Checkpoint(row.number, row.version, row.policy_file)

    def overview(self) -> Overview:
        """The federation at a glance."""
        with self._session() as session:
            member = session.execute(
                select(
                    func.count().filter(MemberRow.revoked.is_(False)),
                    func.count().filter(MemberRow.connected.is_(True)),
                    func.coalesce(func.sum(MemberRow.bytes_in), 0),
                    func.coalesce(func.sum(MemberRow.bytes_out), 0),
                )
            ).one()
            finished = session.scalar(select(func.count(RoundRow.finished))) or 0
            answers = session.execute(
                select(
                    func.count().filter(UpdateRow.accepted.is_(True)),
                    func.count().filter(UpdateRow.accepted.is_(False)),
                    func.coalesce(
                        func.sum(UpdateRow.num_examples).filter(UpdateRow.accepted.is_(True)), 0
                    ),
                )
            ).one()
            last = session.scalar(select(RoundRow).order_by(RoundRow.number.desc()).limit(1))
            done = self.checkpoint()
            return Overview(
                members=member[0],
                connected=member[1],
                rounds=finished,
                current_round=last.number if last and last.finished is None else None,
                strategy=last.strategy if last else None,
                version=done.version if done else None,
                accepted_updates=answers[0],
                rejected_updates=answers[1],
                scheduled_pods=int(answers[2]),
                bytes_in=int(member[2]),
                bytes_out=int(member[3]),
            )

    def members(self) -> list[Member]:
        """All members, by name."""
        with self._session() as session:
            counts: dict[tuple[str, bool], int] = {}
            grouped = select(UpdateRow.member, UpdateRow.accepted, func.count()).group_by(
                UpdateRow.member, UpdateRow.accepted
            )
            for name, accepted, count in session.execute(grouped):
                counts[name, accepted] = count
            rows = session.scalars(select(MemberRow).order_by(MemberRow.name))
            return [
                Member(
                    name=row.name,
                    enrolled_at=row.enrolled_at,
                    revoked=row.revoked,
                    fingerprint=row.fingerprint,
                    certificate_expires=row.certificate_expires,
                    state=_state(row),
                    last_seen=row.last_seen,
                    features_version=row.features_version,
                    architecture=row.architecture,
                    software_version=row.software_version,
                    bytes_in=row.bytes_in,
                    bytes_out=row.bytes_out,
                    scheduled_pods=row.accepted_pods,
                    accepted_updates=counts.get((row.name, True), 0),
                    rejected_updates=counts.get((row.name, False), 0),
                )
                for row in rows
            ]

    def rounds(self, limit: int = 100) -> list[Round]:
        """The latest rounds, newest first."""
        with self._session() as session:
            rows = list(
                session.scalars(select(RoundRow).order_by(RoundRow.number.desc()).limit(limit))
            )
            newest = session.scalar(select(func.max(RoundRow.number)))
            return [
                Round(
                    number=row.number,
                    started=row.started,
                    finished=row.finished,
                    state="finished"
                    if row.finished is not None
                    else ("open" if row.number == newest else "interrupted"),
                    strategy=row.strategy,
                    invited=row.invited,
                    accepted=row.accepted,
                    rejected=row.rejected,
                    version=row.version,
                    global_norm=row.global_norm,
                    bytes_in=row.bytes_in,
                    bytes_out=row.bytes_out,
                )
                for row in rows
            ]

    def updates(self, limit: int = 100, member: str | None = None) -> list[Update]:
        """The latest updates, of one member or of all, newest first."""
        query = select(UpdateRow).order_by(UpdateRow.id.desc()).limit(limit)
        if member is not None:
            query = query.where(UpdateRow.member == member)
        with self._session() as session:
            return [
                Update(
                    round=row.round,
                    member=row.member,
                    received=row.received,
                    accepted=row.accepted,
                    reason=row.reason,
                    num_examples=row.num_examples,
                    learning_rounds=row.learning_rounds,
                    delta_norm=row.delta_norm,
                    size=row.size,
                )
                for row in session.scalars(query)
            ]

    def metric_names(self, member: str) -> list[str]:
        """Names of a member's curves, sorted."""
        query = select(MetricRow.name).where(MetricRow.member == member).distinct()
        with self._session() as session:
            return sorted(session.scalars(query))

    def metrics(self, member: str, name: str, since: float = 0.0) -> list[Point]:
        """A member's curve after the time ``since``, oldest point first."""
        query = (
            select(MetricRow.time, MetricRow.value)
            .where(MetricRow.member == member, MetricRow.name == name, MetricRow.time > since)
            .order_by(MetricRow.id)
        )
        with self._session() as session:
            return [Point(moment, value) for moment, value in session.execute(query)]

    def latest_metrics(self) -> dict[str, dict[str, float]]:
        """The newest value of every curve, by member and name."""
        newest = select(func.max(MetricRow.id)).group_by(MetricRow.member, MetricRow.name)
        query = select(MetricRow.member, MetricRow.name, MetricRow.value).where(
            MetricRow.id.in_(newest)
        )
        values: dict[str, dict[str, float]] = {}
        with self._session() as session:
            for member, name, value in session.execute(query):
                values.setdefault(member, {})[name] = value
        return values

    def rejections(self) -> dict[str, int]:
        """How many updates were set aside, by reason."""
        query = (
            select(UpdateRow.reason, func.count())
            .where(UpdateRow.accepted.is_(False))
            .group_by(UpdateRow.reason)
        )
        with self._session() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def events(self, limit: int = 100) -> list[Event]:
        """The latest events, newest first."""
        query = select(EventRow).order_by(EventRow.id.desc()).limit(limit)
        with self._session() as session:
            return [Event(r.time, r.kind, r.member, r.text) for r in session.scalars(query)]


def _state(row: MemberRow) -> str:
    if row.revoked:
        return "revoked"
    if row.connected:
        return "connected"
    return "never seen" if row.last_seen is None else "disconnected"
