"""The command line: sides are found, loaded only when called, and named when not installed."""

from importlib.metadata import EntryPoint

from typer.testing import CliRunner

from common.cli import GROUP, build


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=GROUP)


POINTS = [point("agent", "agent.cli:app"), point("coordinator", "no_such_package.cli:app")]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(list(arguments), POINTS), list(arguments))
    return result.exit_code, result.output


def test_the_overview_names_every_side_without_loading_it() -> None:
    code, text = run("--help")
    assert code == 0
    assert "agent" in text
    assert "coordinator" in text


def test_a_side_that_is_not_installed_says_how_to_install_it() -> None:
    for arguments in (("coordinator",), ("coordinator", "serve", "--port", "1")):
        code, text = run(*arguments)
        assert code == 1
        assert "pip install 'fedsched[coordinator]'" in text


def test_a_command_of_an_installed_side_is_there() -> None:
    code, text = run("agent", "serve", "--help")
    assert code == 0
    assert "--ready-file" in text


def test_a_missing_settings_file_is_named_with_its_cure() -> None:
    code, text = run("agent", "serve", "--config", "no-such.yaml")
    assert code == 2
    assert "no-such.yaml: no such settings file; check --config" in text
