"""Speed tables: their bounds, and the sum over the others that withstands a liar."""

import math

import numpy as np
import pytest

from common.speeds import MAX_COUNT, NOBODY, Peers, SpeedRow, SpeedRowError, add, check, speed_key
from coordinator import speeds
from coordinator.speeds import peer_speeds


def row(n, mean, variance=0.25):
    return SpeedRow(n, n * mean, n * (variance + mean**2))


def test_key_is_a_stable_eight_byte_hash():
    # BLAKE2b-64 of the empty text, as `b2sum -l 64` prints it.
    assert speed_key("") == 0xE4A6A0577479B2B4
    assert speed_key("resnet|2|v100") != speed_key("resnet|4|v100")


def test_tables_add_row_by_row():
    total = add({1: SpeedRow(1, 2, 4)}, {1: SpeedRow(2, 3, 5), 2: SpeedRow(1, 1, 1)})
    assert total == {1: SpeedRow(3, 5, 9), 2: SpeedRow(1, 1, 1)}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (SpeedRow(math.nan, 0, 0), "not finite"),
        (SpeedRow(1, math.inf, 0), "not finite"),
        (SpeedRow(-1, 0, 0), "count of -1"),
        (SpeedRow(2 * MAX_COUNT, 0, 0), "count of"),
        (SpeedRow(0, 1, 0), "no observations"),
        (SpeedRow(1, 51, 51.0**2), "mean beyond"),
        (SpeedRow(2, 4, 7.9), "sum of squares below"),
        (SpeedRow(1, 0, 1e9), "mean square beyond"),
    ],
)
def test_rows_that_no_observation_gives_are_refused(bad, why):
    check({1: row(3, -2.0)})
    with pytest.raises(SpeedRowError, match=why):
        check({1: bad})


def test_table_with_too_many_rows_is_refused():
    with pytest.raises(SpeedRowError, match="10001 rows"):
        check({key: SpeedRow(0, 0, 0) for key in range(10_001)})


def test_sum_leaves_the_member_itself_out():
    tables = {"a": {1: row(2, 1.0)}, "b": {1: row(4, 2.0), 2: row(1, 0.0)}, "c": {}}
    assert peer_speeds(tables, "b", 1.0) == Peers(1, {1: row(2, 1.0)}, {})
    members, table, _ = peer_speeds(tables, "c", 1.0)
    assert members == 2
    assert table[1] == add({1: row(2, 1.0)}, {1: row(4, 2.0)})[1]
    assert peer_speeds({"a": {1: row(2, 1.0)}}, "a", 1.0) == NOBODY


def test_liar_among_three_peers_is_moved_to_the_others():
    tables = {
        "a": {1: row(10, 1.0)},
        "b": {1: row(10, 1.2)},
        "liar": {1: row(1e8, 40.0, variance=900.0)},
        "me": {},
    }
    _, table, _ = peer_speeds(tables, "me", 0.5)
    # Median of the means 1.2, so the liar's becomes 1.7; its count at most twice the median count
    # of 10; its variance at most 10 * 0.25 + 0.5**2.
    expected = (10 * 1.0 + 10 * 1.2 + 20 * 1.7) / 40
    got = table[1]
    assert got.n == pytest.approx(40)
    assert got.sum_x / got.n == pytest.approx(expected)
    squares = 10 * (0.25 + 1) + 10 * (0.25 + 1.44) + 20 * (2.75 + 2.89)
    assert got.sum_x2 == pytest.approx(squares)
    check(table)


def test_what_one_of_three_peers_alone_tells_is_told_apart():
    tables = {"a": {1: row(5, 1.0)}, "b": {1: row(5, 1.1)}, "liar": {2: row(1e6, 9.0)}, "me": {}}
    members, table, unconfirmed = peer_speeds(tables, "me", 0.5)
    assert members == 3
    assert table.keys() == {1}
    assert table[1] == add(tables["a"], tables["b"])[1]
    assert unconfirmed == tables["liar"]


def test_of_two_of_three_peers_that_contradict_each_other_the_slower_is_told_apart():
    tables = {"a": {1: row(5, 1.0)}, "liar": {1: row(5, 3.3)}, "c": {2: row(5, 0.0)}, "me": {}}
    assert peer_speeds(tables, "me", 0.5) == Peers(3, {}, {1: row(5, 1.0), 2: row(5, 0.0)})


def test_of_what_peers_tell_alone_no_more_is_passed_on_than_one_may_send(monkeypatch):
    monkeypatch.setattr(speeds, "MAX_ROWS", 6)
    tables = {
        "a": {1: row(5, 1.0), 2: row(6, 1.0), 3: row(7, 1.0)},
        "b": {4: row(5, 1.0)},
        "liar": {key: row(1e6, 0.0) for key in range(10, 90)},
        "me": {},
    }
    assert peer_speeds(tables, "me", 0.5).unconfirmed.keys() == {2, 3, 4, 10, 11}


def test_of_two_peers_that_agree_neither_counts_for_more_than_twice_the_other():
    tables = {"a": {1: row(5, 1.0)}, "b": {1: row(1e6, 1.4)}, "c": {2: row(5, 0.0)}, "me": {}}
    _, table, _ = peer_speeds(tables, "me", 0.5)
    assert table[1].n == pytest.approx(15)
    assert table[1].sum_x / table[1].n == pytest.approx((5 * 1.0 + 10 * 1.4) / 15)


def test_honest_peers_are_summed_unchanged():
    rng = np.random.default_rng(0)
    tables = {name: {k: row(5.0, rng.normal(0, 0.1)) for k in range(4)} for name in "abcd"}
    _, table, _ = peer_speeds(tables, "d", 1.0)
    plain = add(add(tables["a"], tables["b"]), tables["c"])
    for key, got in table.items():
        np.testing.assert_allclose(got, plain[key])
