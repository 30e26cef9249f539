"""Counters and quantiles read from expositions are those that were counted and observed."""

import socket

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from examples.lab.federation import extender_figures
from examples.lab.figures import Figures
from examples.processes import PORTS, free_ports


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def read(registry: CollectorRegistry) -> Figures:
    return Figures(generate_latest(registry).decode())


def test_totals_are_over_all_series_with_the_labels(registry: CollectorRegistry) -> None:
    attempts = Counter("attempts", "by result", ["result", "profile"], registry=registry)
    attempts.labels("scheduled", "a").inc(3)
    attempts.labels("scheduled", "b").inc(4)
    attempts.labels("error", "a").inc(5)
    found = read(registry)
    assert found.total("attempts_total", result="scheduled") == 7
    assert found.total("attempts_total", result="scheduled", profile="b") == 4
    assert found.total("attempts_total") == 12
    assert found.total("nothing_total") == 0
    assert found.by("attempts_total", "profile") == {"a": 8, "b": 4}


def test_quantiles_are_interpolated_within_their_bucket(registry: CollectorRegistry) -> None:
    seconds = Histogram("seconds", "", ["verb"], buckets=(1.0, 2.0, 4.0), registry=registry)
    for value in [0.5] * 2 + [1.5] * 6 + [3.0] * 2:
        seconds.labels("prioritize").observe(value)
    seconds.labels("filter").observe(100.0)
    found = read(registry)
    # Ranks 5 and 9 of ten: the third of six between 1 and 2, the first of two between 2 and 4.
    assert found.quantile("seconds", 0.5, verb="prioritize") == pytest.approx(1.5)
    assert found.quantile("seconds", 0.9, verb="prioritize") == pytest.approx(3.0)
    assert found.quantile("seconds", 0.5, verb="filter") == 4.0  # beyond the last bound
    assert found.quantile("seconds", 0.5, verb="bind") is None


def test_answers_of_an_agent_are_told_as_an_embedded_cluster_tells_them() -> None:
    text = """# TYPE fedsched_extender_answers counter
fedsched_extender_answers_total{verb="filter"} 3.0
fedsched_extender_answers_total{verb="prioritize"} 2.0
# TYPE fedsched_extender_no_opinion counter
fedsched_extender_no_opinion_total{reason="stale_state"} 1.0
# TYPE fedsched_extender_seconds histogram
fedsched_extender_seconds_bucket{le="0.002",verb="prioritize"} 2.0
fedsched_extender_seconds_bucket{le="+Inf",verb="prioritize"} 2.0
"""
    assert extender_figures(Figures(text)) == {
        "calls": {"filter": 3, "prioritize": 2},
        "failures": {"stale_state": 1},
        "prioritize_p50_ms": pytest.approx(1.0),
        "prioritize_p99_ms": pytest.approx(1.98),
    }


def test_ports_are_unlike_free_and_never_those_of_outgoing_connections() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert set(ports) <= set(PORTS)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in free_ports(500)


def test_a_port_that_somebody_got_and_has_not_bound_yet_is_nobody_elses() -> None:
    assert not set(free_ports(500)) & set(free_ports(500))
