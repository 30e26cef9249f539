"""The ``fedsched`` command: mounts the commands of the installed sides, each only when called.

``main`` is the console script. A side announces its Typer application in the entry-point group
``fedsched.commands``; what it needs may not be installed, and then only that command is missing.
"""

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

GROUP = "fedsched.commands"
EXTRAS = {"agent": "learn", "benchmark": "learn", "coordinator": "coordinator"}
"""The extra that brings all that a command needs."""
SUMMARIES = {
    "agent": "One member cluster: answer kube-scheduler, learn, simulate.",
    "benchmark": "Measure policies and the decision path.",
    "coordinator": "The hub: members, rounds, policies and the dashboard.",
}
DESCRIPTION = (
    "Federated multi-cluster learning for Kubernetes scheduling: agents learn in each cluster "
    "which pod goes next and where, a hub blends what they learned."
)


def load(point: EntryPoint) -> typer.Typer:
    """A side's commands; where a package is missing, commands that say how to install it."""
    try:
        app = point.load()
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in (
            "agent",
            "common",
            "coordinator",
        ):
            raise  # a fault of ours and not of the installation
        return _absent(point.name, error.name or "a package")
    if not isinstance(app, typer.Typer):
        raise TypeError(f"entry point {point.value} is no Typer application")
    return app


def _absent(name: str, package: str) -> typer.Typer:
    app = typer.Typer(help=f"{SUMMARIES.get(name, '')} (not installed)", add_completion=False)
    extra = EXTRAS.get(name, "demo")

    @app.callback(
        invoke_without_command=True,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def explain(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        del arguments
        typer.echo(
            f"error: 'fedsched {name}' needs {package!r}, which is not installed: "
            f"pip install 'fedsched[{extra}]'",
            err=True,
        )
        raise typer.Exit(1)

    return app


def _named(name: str) -> typer.Typer:
    """A stand-in for the overview, which must not load every side."""
    app = typer.Typer(help=SUMMARIES.get(name, ""), add_completion=False)
    app.callback()(lambda: None)
    return app


def build(arguments: list[str], points: list[EntryPoint] | None = None) -> typer.Typer:
    """The root application for these arguments: the side that they name is loaded, no other."""
    root = typer.Typer(
        help=DESCRIPTION,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    found = list(entry_points(group=GROUP)) if points is None else points
    for point in sorted(found, key=lambda point: point.name):
        app = load(point) if point.name == wanted else _named(point.name)
        root.add_typer(app, name=point.name, help=SUMMARIES.get(point.name))
    root.callback()(lambda: None)
    return root


def main() -> None:
    """Run the command line."""
    build(sys.argv[1:])()


if __name__ == "__main__":
    main()
