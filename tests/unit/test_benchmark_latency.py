"""The latency benchmark measures real answers of real processes and leaves none behind."""

import multiprocessing

import pytest

from agent.benchmark.latency import measure


def test_ratios_are_those_of_the_two_servers_that_were_asked_in_turn() -> None:
    found = measure(requests=10, candidates=20, training=False)
    for percent in ("p50", "p99"):
        ratio = found[f"extender_{percent}_ms"] / found[f"at_once_{percent}_ms"]
        assert found[f"{percent}_ratio"] == pytest.approx(ratio)
    assert found["candidates"] == 20
    assert not multiprocessing.active_children()
