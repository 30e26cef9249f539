"""The commands ``fedsched coordinator …``: set up, enroll and revoke members, serve the hub."""

import datetime as dt
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from common.documented import documented_yaml
from common.identity import (
    CERTIFICATE_DAYS,
    Bundle,
    IdentityError,
    check_member_name,
    expires,
    fingerprint,
    issue_member,
    write_bundle,
)
from coordinator.registry import RegistryError, told
from coordinator.settings import PREFIX, CoordinatorSettings, SettingsError, load_settings
from coordinator.setup import initialise, open_registry, utc_now

app = typer.Typer(
    no_args_is_help=True,
    help="The hub: blends what the member clusters learned. Begin with `init`, `enroll` each "
    "member, then `serve`.",
)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file of settings; the environment wins over it."),
]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Directory of CA, registry and policies.")
]


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn the errors that a user can cure into one line and exit status 1."""
    try:
        yield
    except (IdentityError, RegistryError, SettingsError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(1) from error
    except SQLAlchemyError as error:
        Console(stderr=True).print(f"[red]error:[/red] {told(error)}", highlight=False)
        raise typer.Exit(1) from error


def _settings(config: Path | None, state_dir: Path | None) -> CoordinatorSettings:
    overrides = {} if state_dir is None else {"state_dir": state_dir}
    return load_settings(config, **overrides)


@app.command()
def init(config: Config = None, state_dir: StateDir = None) -> None:
    """Create the CA, the hub's certificate and the registry; what exists is kept."""
    with _told_plainly():
        settings = _settings(config, state_dir)
        open_registry(settings).close()
        initialise(settings, utc_now())
        typer.echo(f"the hub's state is in {settings.state_dir}; next: fedsched coordinator enroll")


@app.command()
def enroll(
    name: Annotated[str, typer.Argument(help="The member's name: a-z, 0-9 and hyphens.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Bundle to write: a directory, or one file if it ends in .tar."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Validity of the certificate.")] = (
        CERTIFICATE_DAYS
    ),
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Enroll a member and write its bundle; again for the same name: renew, the old one ends."""
    with _told_plainly():
        check_member_name(name)
        settings = _settings(config, state_dir)
        registry = open_registry(settings)
        now = utc_now()
        ca = initialise(settings, now)
        pair = issue_member(ca, name, now, days)
        bundle = Bundle(
            member=name,
            hub=settings.dialled,
            server_name=settings.server_names[0],
            ca=ca.certificate,
            certificate=pair.certificate,
            key=pair.key,
        )
        path = out or Path(f"{name}.tar")
        # First the bundle: a member that was admitted but has no bundle could not be helped.
        write_bundle(bundle, path)
        end = expires(pair.certificate)
        registry.enroll(name, fingerprint(pair.certificate), end.timestamp())
        registry.close()
        typer.echo(f"{name} is enrolled until {end:%Y-%m-%d}; hand it {path} and keep it secret")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The member to shut out.")],
    config: Config = None,
    state_dir: StateDir = None,
) -> None:
    """Shut a member out; an open session ends within seconds."""
    with _told_plainly():
        registry = open_registry(_settings(config, state_dir))
        registry.revoke(name)
        registry.record_event("revoked", f"{name} was revoked", name)
        registry.close()
        typer.echo(f"{name} is revoked")


@app.command()
def members(config: Config = None, state_dir: StateDir = None) -> None:
    """List the members."""
    with _told_plainly():
        registry = open_registry(_settings(config, state_dir))
        table = Table("member", "state", "pods", "accepted", "set aside", "certificate until")
        for member in registry.members():
            end = dt.datetime.fromtimestamp(member.certificate_expires, dt.UTC)
            table.add_row(
                member.name,
                member.state,
                str(member.scheduled_pods),
                str(member.accepted_updates),
                str(member.rejected_updates),
                f"{end:%Y-%m-%d}",
            )
        registry.close()
        Console().print(table)


@app.command("settings")
def print_settings() -> None:
    """Print every setting with its default and its meaning, as a file for --config."""
    typer.echo(documented_yaml(CoordinatorSettings, PREFIX), nl=False)


@app.command()
def serve(
    config: Config = None,
    state_dir: StateDir = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="File that receives pid and bound ports as JSON once the hub listens."),
    ] = None,
) -> None:
    """Run the hub: link, rounds and dashboard, until SIGTERM or Ctrl-C."""
    # Here, so that the other commands do without Flower, the web server and the kernels.
    from common.features import FEATURES_VERSION
    from common.policy import ARCHITECTURE, initial_arrays
    from coordinator.dashboard import create_app
    from coordinator.rounds import CheckpointError
    from coordinator.server import serve as run
    from coordinator.sessions import Terms

    with _told_plainly():
        settings = _settings(config, state_dir)
        logging.basicConfig(
            level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        terms = Terms(FEATURES_VERSION, ARCHITECTURE)
        try:
            status = run(settings, terms, initial_arrays(), create_app, ready_file)
        except CheckpointError as error:
            raise RegistryError(str(error)) from error
    raise typer.Exit(status)
