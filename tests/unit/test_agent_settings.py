"""Settings of a member: what is wrong with one is said before anything starts."""

import re
from pathlib import Path
from typing import get_args

import pytest

from agent.scheduling.rules import RULES
from agent.settings import RuleName, SettingsError, load


def test_the_rules_that_a_setting_may_name_are_those_that_need_no_oracle() -> None:
    assert set(get_args(RuleName)) == {name for name, rule in RULES.items() if not rule.known}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("serve: {rule: fastets}", "serve.rule: Input should be 'least-allocated'"),
        ("serve: {rule: hrrn-eft-oracle}", "serve.rule"),
        ("serve: {prot: 1}", "serve.prot: no such setting; did you mean 'port'?"),
        ("sevre: {}", "sevre: no such setting; did you mean 'serve'?"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "north.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(why)) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("FEDSCHED_AGENT_SERVE__PROT", "1", "serve.prot: no such setting; did you mean 'port'?"),
        ("FEDSCHED_AGENT_SERVE__PORT", "many", "serve.port: Input should be a valid integer"),
        ("FEDSCHED_AGENT_SEVRE__PORT", "1", "FEDSCHED_AGENT_SEVRE__PORT: no such setting"),
        ("FEDSCHED_AGENT_LEARN__OPTIONS", "fast", "FEDSCHED_AGENT_…"),
    ],
)
def test_a_wrong_variable_is_a_plain_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=re.escape(why)):
        load()
