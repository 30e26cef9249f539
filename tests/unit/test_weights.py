"""Arithmetic of named arrays, INT8 deltas with error feedback, and files."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.codec import MalformedError, decode_delta, decode_gaps, encode_delta, encode_gaps
from common.weights import (
    WeightsFileError,
    apply,
    carry_progress,
    check_same_form,
    delta,
    dequantise,
    flatten,
    interpolate,
    load,
    norm,
    quantise,
    save,
    version_id,
)


def array(*values):
    return np.array(values, np.float32)


def test_delta_and_apply_undo_each_other():
    base = {"a": array(1.0, 2.0), "b": array(3.0)}
    now = {"a": array(1.5, 1.0), "b": array(-3.0)}
    change = delta(now, base)
    np.testing.assert_array_equal(change["a"], [0.5, -1.0])
    np.testing.assert_array_equal(apply(base, change)["b"], [-3.0])


def test_norm_and_flatten_go_over_all_tensors_by_name():
    arrays = {"b": array(4.0), "a": array([3.0], [0.0])}
    assert norm(arrays) == 5.0
    np.testing.assert_array_equal(flatten(arrays), [3.0, 0.0, 4.0])


def test_forms_that_differ_are_named():
    with pytest.raises(ValueError, match="array b"):
        check_same_form({"a": array(1.0)}, {"a": array(1.0), "b": array(1.0)})
    with pytest.raises(ValueError, match=r"a has shape \(1,\) here and \(2,\) there"):
        check_same_form({"a": array(1.0)}, {"a": array(1.0, 2.0)})


def test_personal_policy_mixes_local_and_shared():
    mixed = interpolate({"a": array(4.0)}, {"a": array(8.0)}, 0.25)
    np.testing.assert_array_equal(mixed["a"], [7.0])
    assert mixed["a"].dtype == np.float32
    with pytest.raises(ValueError, match="eta"):
        interpolate({"a": array(4.0)}, {"a": array(8.0)}, 1.5)


def test_progress_since_the_upload_is_carried_over():
    new = carry_progress({"a": array(10.0)}, {"a": array(3.5)}, {"a": array(3.0)})
    np.testing.assert_array_equal(new["a"], [10.5])


def test_version_depends_on_names_shapes_and_values():
    ids = {
        version_id({"a": array(1.0, 2.0)}),
        version_id({"b": array(1.0, 2.0)}),
        version_id({"a": array([1.0], [2.0])}),
        version_id({"a": array(1.0, 3.0)}),
    }
    assert len(ids) == 4
    assert version_id({"a": array(1.0), "b": array(2.0)}) == version_id(
        {"b": array(2.0), "a": array(1.0)}
    )


def test_quantised_levels_worked_by_hand():
    code, residual = quantise({"a": array(127.0, -63.4, 0.6, 0.0)})
    assert code["a"].scale == 1.0
    assert code["a"].values.tolist() == [127, -63, 1, 0]
    assert code["a"].positions is None
    np.testing.assert_allclose(residual["a"], [0.0, -0.4, -0.4, 0.0], atol=1e-5)


def test_zero_change_has_scale_zero():
    code, residual = quantise({"a": array(0.0, 0.0)})
    assert code["a"].scale == 0.0
    np.testing.assert_array_equal(dequantise(code)["a"], [0.0, 0.0])
    np.testing.assert_array_equal(residual["a"], [0.0, 0.0])


def test_sparse_code_keeps_the_largest_entries_and_the_rest_as_residual():
    change = {"a": array([0.1, -5.0], [2.0, 0.2])}
    code, residual = quantise(change, keep=0.5)
    assert code["a"].positions.tolist() == [1, 2]
    sent = dequantise(code)["a"]
    np.testing.assert_allclose(sent, [[0.0, -5.0], [2.0, 0.0]], atol=5 / 254)
    np.testing.assert_allclose(sent + residual["a"], change["a"], atol=1e-6)


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(max_dims=2, max_side=20),
        elements=st.floats(-1e3, 1e3, width=32),
    )
)
@settings(max_examples=60, deadline=None)
def test_quantisation_errs_by_at_most_half_a_level(values):
    code, residual = quantise({"a": values})
    decoded = decode_delta(encode_delta(code), {"a": values.shape})
    error = np.abs(dequantise(decoded)["a"].astype(np.float64) - values)
    peak = float(np.abs(values).max())
    assert error.max() <= code["a"].scale / 2 * (1 + 1e-6) + 1e-6 * peak
    np.testing.assert_allclose(dequantise(code)["a"] + residual["a"], values, atol=1e-6 * peak)


@pytest.mark.parametrize("keep", [1.0, 0.1])
def test_error_feedback_keeps_the_sum_of_many_uploads(keep):
    rng = np.random.default_rng(1)
    total = np.zeros(500)
    sent = np.zeros(500)
    blind = np.zeros(500)
    residual = None
    for _ in range(200):
        change = {"a": (0.01 * rng.standard_normal(500) + 0.002).astype(np.float32)}
        total += change["a"]
        code, residual = quantise(change, residual, keep)
        sent += dequantise(code)["a"]
        blind += dequantise(quantise(change, None, keep)[0])["a"]
    # What is missing is exactly the last residual; without feedback the errors add up.
    np.testing.assert_allclose(sent + residual["a"], total, atol=1e-4)
    assert np.linalg.norm(sent - total) < 0.5 * np.linalg.norm(blind - total)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_cannot_be_quantised(bad):
    with pytest.raises(ValueError, match="a holds NaN or infinite"):
        quantise({"a": array(1.0, bad)})
    with pytest.raises(ValueError, match="keep is 0"):
        quantise({"a": array(1.0)}, keep=0.0)


def test_gap_code_worked_by_hand():
    # Gaps 1, 127, 128 and 20000: 128 = 0x80 0x01, 20000 = 0xa0 0x9c 0x01.
    index = np.array([0, 127, 255, 20255])
    assert encode_gaps(index) == bytes([1, 127, 0x80, 1, 0xA0, 0x9C, 1])


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_positions_survive_the_gap_code(positions):
    index = np.array(sorted(positions))
    np.testing.assert_array_equal(decode_gaps(encode_gaps(index), 10**6 + 1), index)


@given(st.binary(min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_any_gap_code_is_either_in_range_or_malformed(code):
    try:
        index = decode_gaps(code, 50)
    except MalformedError:
        return
    assert 0 <= index.min() <= index.max() < 50
    assert (np.diff(index) > 0).all()


def test_file_returns_arrays_and_metadata(tmp_path):
    path = tmp_path / "deep" / "policy.safetensors"
    save(path, {"a": array([1.0, 2.0])}, {"round": "3"})
    arrays, metadata = load(path)
    np.testing.assert_array_equal(arrays["a"], [[1.0, 2.0]])
    assert metadata == {"round": "3"}
    assert os.listdir(path.parent) == ["policy.safetensors"]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "policy.safetensors"
    save(path, {"a": array(1.0)})

    def fail(_descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("common.weights.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, {"a": array(2.0)})
    np.testing.assert_array_equal(load(path)[0]["a"], [1.0])
    assert os.listdir(tmp_path) == ["policy.safetensors"]


def test_truncated_foreign_and_missing_files_are_told_apart(tmp_path):
    path = tmp_path / "policy.safetensors"
    save(path, {"a": array(1.0, 2.0)})
    whole = path.read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsFileError, match="truncated or no safetensors file"):
            load(path)
    with pytest.raises(WeightsFileError, match="cannot read"):
        load(tmp_path / "none.safetensors")
