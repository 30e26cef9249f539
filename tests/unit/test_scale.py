"""``agent serve`` beside a large cluster: ``python -m examples.lab scale`` in its reduced form."""

import json

from typer.testing import CliRunner

from examples.lab.__main__ import app

MIB = 1 << 20
BYTES_PER_POD = 16 << 10
"""Twelve times what a pod costs at 100,000; typed models would take four times this."""


def test_a_process_follows_a_cluster_through_events_a_new_list_and_its_end() -> None:
    arguments = "scale --nodes 500 --pods 5000 --events 2000 --rate 200 --seconds 1 --json"
    done = CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["wrong_pods"] == 0.0
    assert found["left_pods"] == 0.0
    for part in ("synced_mib", "after_events_mib", "after_relist_mib", "emptied_mib"):
        assert (found[part] - found["start_mib"]) * MIB < 5000 * BYTES_PER_POD, part
    for part in ("quiet", "busy", "relist", "empty"):
        assert found[f"{part}_answers"] > 0.0
        assert 0.0 < found[f"{part}_p50_ms"] <= found[f"{part}_p99_ms"]
    assert found["sync_seconds"] > 0.0
    assert found["cpu_us_per_event"] > 0.0
