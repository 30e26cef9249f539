"""The commands that measure speed measure what they say, on a cluster of a size for tests."""

import pytest

from agent.benchmark.latency import measure as latency
from examples.lab.latency import extender
from examples.lab.throughput import AGENT, ALONE, GO, measure


def test_latency_is_measured_against_a_go_extender_that_understands_the_request() -> None:
    with extender() as url:
        found = latency(requests=10, candidates=20, training=False, rounds=2, against=url)
    for percent in ("p50", "p99"):
        assert found[f"at_once_{percent}_ms"] > 0.0
        assert found[f"extender_{percent}_ms"] > 0.0
    assert found["rounds"] == 2


@pytest.mark.timeout(600)
def test_bursts_are_scheduled_by_each_arm_and_the_agent_has_an_opinion_on_every_pod() -> None:
    pods, said = 120, list[str]()
    found = measure(60, pods, 2, learn=False, go=True, timeout=30.0, percentage=50, say=said.append)
    assert [[burst.arm for burst in bursts] for bursts in found] == [[ALONE, AGENT, GO]] * 2
    for bursts in found:
        for burst in bursts:
            assert burst.pods_per_second > 0.0
            assert burst.opinions == (pods if burst.arm == AGENT else 0)
    order = [line.split("] ")[1].rpartition(":")[0] for line in said if line.startswith("[")]
    assert order == [ALONE, AGENT, GO, GO, AGENT, ALONE]
