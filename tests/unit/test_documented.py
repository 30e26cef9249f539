"""Printed settings are complete, explained, and a settings file that holds the defaults."""

from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from agent.cli import app as agent_app
from agent.settings import LearnSettings, ServeSettings, Settings, load
from agent.simulator.cluster_settings import ClusterSettings
from agent.simulator.cluster_settings import load_settings as load_cluster
from common.documented import documented_yaml
from coordinator.cli import app as hub_app
from coordinator.settings import CoordinatorSettings, load_settings


class Inner(BaseModel):
    """A section."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    pace: float = Field(default=2.0, gt=0.0, le=3.0)
    """How fast."""


class Outer(BaseModel):
    """All of it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    folder: Path = Path("here")
    """Where ``it`` lies."""
    names: list[str] = ["a: b"]
    """Who."""
    inner: Inner = Inner()


def test_a_setting_is_printed_with_its_meaning_its_range_and_its_default() -> None:
    assert documented_yaml(Outer, "X_") == (
        "# All of it.\n"
        "# X_FOLDER in the environment wins over 'folder' here.\n"
        "# '__' joins a section and its setting there.\n"
        "\n"
        "# Where it lies.\n"
        "folder: here\n"
        "\n"
        "# Who.\n"
        "names: ['a: b']\n"
        "\n"
        "# A section.\n"
        "inner:\n"
        "\n"
        "  # How fast. Above 0, at most 3.\n"
        "  pace: 2.0\n"
    )


def printed(tmp_path: Path, app: typer.Typer, *arguments: str) -> Path:
    result = CliRunner().invoke(app, ["settings", *arguments])
    assert result.exit_code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(result.output)
    return path


def test_what_the_agent_prints_holds_the_defaults(tmp_path: Path) -> None:
    path = printed(tmp_path, agent_app)
    assert load(path) == Settings()
    content = yaml.safe_load(path.read_text())
    assert content.keys() == Settings.model_fields.keys()
    assert content["serve"].keys() == ServeSettings.model_fields.keys()
    assert content["learn"].keys() == LearnSettings.model_fields.keys()


def test_what_the_hub_prints_holds_the_defaults(tmp_path: Path) -> None:
    path = printed(tmp_path, hub_app)
    assert load_settings(path) == CoordinatorSettings()
    assert yaml.safe_load(path.read_text()).keys() == CoordinatorSettings.model_fields.keys()


def test_what_is_printed_for_the_embedded_cluster_holds_the_defaults(tmp_path: Path) -> None:
    path = printed(tmp_path, agent_app, "--simulate-cluster")
    assert load_cluster(path) == ClusterSettings()


@pytest.mark.parametrize("model", [Settings, CoordinatorSettings, ClusterSettings])
def test_every_setting_has_a_meaning(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            test_every_setting_has_a_meaning(type(default))
        else:
            assert field.description, f"{model.__name__}.{name}"
