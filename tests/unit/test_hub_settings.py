"""Settings of the hub, its commands and the contract's generated files."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common import stubs
from common.identity import read_bundle
from common.metrics import DECLARED, allowed, undeclared
from coordinator.cli import app
from coordinator.registry import Registry
from coordinator.settings import CoordinatorSettings, SettingsError, load_settings
from coordinator.validation import Limits, norm_bound

ROOT = Path(__file__).resolve().parents[2]


def test_environment_wins_over_the_file_and_arguments_over_both(tmp_path, monkeypatch):
    path = tmp_path / "hub.yaml"
    path.write_text("eta: 0.5\nmin_members: 3\nlisten: 10.0.0.1:9000\n")
    monkeypatch.setenv("FEDSCHED_COORDINATOR_ETA", "0.75")
    monkeypatch.setenv("FEDSCHED_COORDINATOR_LISTEN", "10.0.0.2:9000")
    settings = load_settings(path, listen="10.0.0.3:9000")
    assert (settings.eta, settings.min_members, settings.listen) == (0.75, 3, "10.0.0.3:9000")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("eta: 2", "eta: Input should be less than or equal to 1"),
        ("etta: 1", "etta: Extra inputs are not permitted"),
        ("listen: nowhere", "listen: Value error, must be host:port"),
        ("strategy: fedbest", "strategy: Input should be"),
        ("- a", "must hold names and values"),
        ("1: 2", "must hold names and values"),
        ("a: [", "cannot read the settings file"),
    ],
)
def test_wrong_settings_are_named_with_their_file(tmp_path, text, why):
    path = tmp_path / "hub.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(why)) as error:
        load_settings(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ETAA", "0.5", "FEDSCHED_COORDINATOR_ETAA: no such setting; did you mean 'eta'?"),
        ("SERVER_NAMES", "a,b", "a list is written there as JSON"),
    ],
)
def test_wrong_variable_is_a_plain_error(monkeypatch, name, value, why):
    monkeypatch.setenv(f"FEDSCHED_COORDINATOR_{name}", value)
    with pytest.raises(SettingsError, match=re.escape(why)):
        load_settings()


def test_every_setting_is_documented():
    undocumented = [n for n, f in CoordinatorSettings.model_fields.items() if not f.description]
    assert undocumented == []


def test_generated_stubs_are_those_of_the_contract(tmp_path):
    stubs.generate(tmp_path)
    for name in stubs.STUBS:
        fresh = (tmp_path / "common" / name).read_text()
        assert fresh == (ROOT / "common" / name).read_text(), "run: python -m common.stubs"


def test_metric_names_follow_the_pattern_and_others_are_held_back():
    assert all(re.fullmatch("[a-z][a-z0-9_]{0,63}", name) for name in DECLARED)
    mixed = {"reward": 1, "loss": float("inf"), "pod-x": 2.0}
    assert allowed(mixed) == {"reward": 1.0}
    assert undeclared(mixed) == ["pod-x"]


def test_largest_norm_follows_the_median_between_two_bounds():
    limits = Limits(free_delta_norm=5.0, norm_factor=10.0, max_delta_norm=100.0, max_examples=1)
    assert norm_bound([1.0, 2.0, 3000.0], [], limits) == 20.0
    assert norm_bound([3000.0], [1.0] * 5, limits) == 10.0
    assert norm_bound([0.001], [0.001], limits) == 5.0
    assert norm_bound([50.0, 60.0], [], limits) == 100.0


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(app, [*arguments, "--state-dir", str(tmp_path / "hub")])

    return call


def test_enroll_writes_a_bundle_and_a_registry_row(run, tmp_path):
    assert run("init").exit_code == 0
    done = run("enroll", "alpha", "--out", str(tmp_path / "alpha"))
    assert done.exit_code == 0, done.output
    bundle = read_bundle(tmp_path / "alpha")
    assert (bundle.member, bundle.hub, bundle.server_name) == (
        "alpha",
        "localhost:8443",
        "localhost",
    )
    registry = Registry(f"sqlite:///{tmp_path / 'hub' / 'registry.db'}")
    (row,) = registry.members()
    registry.close()
    assert (row.name, row.revoked) == ("alpha", False)
    assert "alpha" in run("members").output


def test_commands_fail_with_one_plain_line(run):
    wrong = run("enroll", "No_Name")
    assert wrong.exit_code == 1
    assert "no member name" in wrong.output
    assert "Traceback" not in wrong.output
    missing = run("revoke", "ghost")
    assert missing.exit_code == 1
    assert "no member is called ghost" in missing.output


def test_revoked_member_is_listed_as_such(run):
    run("enroll", "alpha")
    assert run("revoke", "alpha").exit_code == 0
    assert "revoked" in run("members").output


def test_init_keeps_the_ca_that_members_trust(run, tmp_path):
    run("init")
    before = (tmp_path / "hub" / "identity" / "ca.crt").read_bytes()
    run("init")
    assert (tmp_path / "hub" / "identity" / "ca.crt").read_bytes() == before
