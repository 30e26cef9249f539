"""The hub's figures in Prometheus' text format; served by ``dashboard.app`` at ``/metrics``.

Everything is read from the registry at the time of the scrape, so that counters go on where they
were after a restart. Labels are member names (enrolled by an operator) and classes of reasons.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.dashboard.reports import rejections_by_class
from coordinator.reader import Reader


class FederationCollector(Collector):
    """Reads the registry at every scrape."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known without a first query to the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Members, rounds, updates and bytes as they are in the registry now."""
        seen = self._reader.overview()
        last = next((r for r in self._reader.rounds(50) if r.finished is not None), None)
        yield _gauge("members_enrolled", "Members enrolled and not revoked", seen.members)
        yield _gauge("members_connected", "Members with an open session", seen.connected)
        yield _gauge("round", "Number of the last finished round", last.number if last else 0)
        yield _counter("rounds", "Finished rounds", seen.rounds)
        if last is not None and last.finished is not None:
            took = last.finished - last.started
            yield _gauge("round_duration_seconds", "Duration of the last finished round", took)
            yield _gauge(
                "round_finished_timestamp_seconds", "When the last round finished", last.finished
            )
        yield _counter("updates_accepted", "Updates that were blended", seen.accepted_updates)
        rejected = CounterMetricFamily(
            "fedsched_updates_rejected", "Updates set aside, by class of reason", labels=["reason"]
        )
        for reason, count in rejections_by_class(self._reader).items():
            rejected.add_metric([reason], count)
        yield rejected
        yield _counter("scheduled_pods", "Pods in accepted updates", seen.scheduled_pods)
        yield _counter("received_bytes", "Bytes received from members", seen.bytes_in)
        yield _counter("sent_bytes", "Bytes sent to members", seen.bytes_out)
        connected = GaugeMetricFamily(
            "fedsched_member_connected", "1 while the member has a session", labels=["member"]
        )
        seen_at = GaugeMetricFamily(
            "fedsched_member_last_seen_timestamp_seconds", "Last sign of life", labels=["member"]
        )
        for member in self._reader.members():
            connected.add_metric([member.name], float(member.state == "connected"))
            if member.last_seen is not None:
                seen_at.add_metric([member.name], member.last_seen)
        yield connected
        yield seen_at


def exposition(reader: Reader) -> bytes:
    """All figures in the text format."""
    registry = CollectorRegistry()
    registry.register(FederationCollector(reader))
    return generate_latest(registry)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fedsched_{name}", documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"fedsched_{name}", documentation, value=value)
