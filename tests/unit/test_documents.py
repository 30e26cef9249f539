"""The documents keep in step with the code: commands, settings, modules, links that they name."""

import ast
import importlib.util
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
import typer
import yaml

from agent.settings import Settings, load
from agent.simulator.cluster_settings import load_settings as load_cluster
from common.cli import GROUP
from coordinator.settings import CoordinatorSettings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PACKAGES = ("agent", "common", "coordinator", "examples")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "_pb2" not in path.name and path.name != "__init__.py"
)
TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py") if p.name != "__init__.py")
LONGEST = 400

named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """What a document tells its reader to run, as words: lines of sh blocks and inline code."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    found = []
    for line in lines:
        if re.match(r"(\w+=\S+ )*(fedsched|make|python)\b", line) and "…" not in line:
            words = shlex.split(line.partition(" &")[0], comments=True)
            while "=" in words[0]:
                words = words[1:]
            found.append(words)
    return found


def check_options(command: click.Command, words: list[str], line: str) -> None:
    known = {name for option in command.params for name in option.opts + option.secondary_opts}
    known.add("--help")
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{line!r}: there is no option {word}"


def check_fedsched(words: list[str]) -> None:
    line = shlex.join(words)
    sides = {point.name: point for point in entry_points(group=GROUP)}
    if len(words) == 1 or words[1] == "--help":
        return
    assert words[1] in sides, f"{line!r}: fedsched has no {words[1]!r}"
    command = typer.main.get_command(sides[words[1]].load())
    rest = words[2:]
    assert isinstance(command, click.Group)
    if rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{line!r}: there is no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    check_options(command, rest, line)


def check_make(words: list[str]) -> None:
    from examples.lab.__main__ import app as lab
    from examples.laptop.__main__ import app as laptop

    made = typer.main.get_command(lab)
    assert isinstance(made, click.Group)
    takes_arguments = {
        "demo": typer.main.get_command(laptop),
        "demo-kubernetes": made.commands["demo"],
        "lab": made.commands["up"],
    }
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words[1:]:
        if word.startswith("ARGS=") and words[1] in takes_arguments:
            arguments = shlex.split(word.removeprefix("ARGS="))
            check_options(takes_arguments[words[1]], arguments, shlex.join(words))
        elif "=" not in word:
            assert word in targets, f"the Makefile has no target {word!r}"


@named
def test_every_command_that_a_document_gives_exists_with_its_options(document: Path) -> None:
    for words in commands(document.read_text()):
        if words[0] == "fedsched":
            check_fedsched(words)
        elif words[0] == "make":
            check_make(words)
        elif words[0] == "python" and "-m" in words:
            module = words[words.index("-m") + 1]
            assert importlib.util.find_spec(module), f"{shlex.join(words)}: no module {module}"


def test_commands_are_found_in_blocks_and_in_code_spans_and_checked() -> None:
    text = "Run `make demo`.\n\n```sh\nA=1 fedsched agent serve --config a &  # so\n```\n"
    assert commands(text) == [["fedsched", "agent", "serve", "--config", "a"], ["make", "demo"]]
    with pytest.raises(AssertionError, match="no option --nope"):
        check_fedsched(["fedsched", "agent", "serve", "--nope"])
    with pytest.raises(AssertionError, match="no command 'dance'"):
        check_fedsched(["fedsched", "coordinator", "dance"])
    with pytest.raises(AssertionError, match="no target 'dance'"):
        check_make(["make", "dance"])
    with pytest.raises(AssertionError, match="no option --nope"):
        check_make(["make", "demo", "ARGS=--nope 1"])
    with pytest.raises(AssertionError, match="no option --nope"):
        check_make(["make", "demo-kubernetes", "ARGS=--nope 1"])


def test_the_readme_gives_the_two_commands() -> None:
    given = commands((ROOT / "README.md").read_text())
    assert ["make", "demo"] in given
    assert ["make", "test"] in given


def test_the_settings_files_in_the_readme_are_valid(tmp_path: Path) -> None:
    readers = {
        "hub.yaml": load_settings,
        "north.yaml": load,
        "embedded.yaml": load,
        "cluster.yaml": load_cluster,
    }
    seen = set()
    for block in blocks((ROOT / "README.md").read_text(), "yaml"):
        name = block.splitlines()[0].removeprefix("# ")
        if name in readers:
            path = tmp_path / name
            path.write_text(block)
            readers[name](path)
            seen.add(name)
    assert seen == set(readers)


def test_the_extender_snippet_fits_what_the_agent_answers() -> None:
    found = [
        content
        for block in blocks((ROOT / "README.md").read_text(), "yaml")
        if (content := yaml.safe_load(block)).get("kind") == "KubeSchedulerConfiguration"
    ]
    (extender,) = found[0]["extenders"]
    assert extender["urlPrefix"] == f"http://127.0.0.1:{Settings().serve.port}"
    assert (extender["filterVerb"], extender["prioritizeVerb"]) == ("filter", "prioritize")
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is True


@named
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@named
def test_documents_name_no_folder_of_one_machine(document: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", document.read_text())


def test_the_architecture_names_every_module_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == sorted({name for name, _ in rows}, key=_place)
    assert {name for name, _ in rows} == {str(path.relative_to(ROOT)) for path in MODULES}
    assert all(purpose for _, purpose in rows)


def _place(name: str) -> tuple[int, int, str]:
    """Packages in the order of the document, a package's own modules before its rooms."""
    top = next(i for i, package in enumerate(PACKAGES) if name.startswith(f"{package}/"))
    rooms = (
        "cluster",
        "scheduling",
        "learning",
        "simulator",
        "benchmark",
        "dashboard",
        "lab",
        "laptop",
    )
    parts = name.split("/")
    return top, 1 + rooms.index(parts[1]) if parts[1] in rooms else 0, name


def test_modules_that_the_documents_name_in_passing_exist() -> None:
    known = {str(path.relative_to(ROOT)) for path in (*MODULES, *ROOT.glob("tests/**/*.py"))}
    for document in DOCUMENTS:
        for name in re.findall(
            r"`((?:agent|common|coordinator|examples|tests)/[\w/]+\.py)`", document.read_text()
        ):
            assert name in known, f"{document.name} names {name}"


@pytest.mark.parametrize("module", [*MODULES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_can_be_held_in_the_head(module: Path) -> None:
    text = module.read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    assert first.endswith("."), f"the docstring's first paragraph is no sentence: {first!r}"
    assert text.count("\n") <= LONGEST


def test_the_package_docstrings_are_sentences() -> None:
    for package in ("agent", "common", "coordinator"):
        for path in (ROOT / package).rglob("__init__.py"):
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
            assert first.endswith("."), path


def test_every_decision_is_listed_and_has_its_three_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("0*.md"))
    listed = re.findall(r"^- \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name in listed] == [page.name for page in pages]
    for (title, _), page in zip(listed, pages, strict=True):
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        assert headings == [title, "Context", "Decision", "Consequences"]


def test_the_defaults_that_the_documents_state_are_those_of_the_settings() -> None:
    assert Settings().serve.margin == 0.3  # decision 0002
    assert Settings().serve.cpu_limit == 0.9  # architecture: above 90 %
    assert Settings().learn.gate_tolerance == 0.0  # decision 0007: nothing
    assert CoordinatorSettings.model_fields["strategy"].default == "fedmedian"  # decision 0012
