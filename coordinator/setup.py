"""Creates a hub's state: directory, CA, certificate and registry; used by commands and server."""

import datetime as dt

from common.identity import (
    IdentityError,
    KeyPair,
    covers,
    create_ca,
    expires,
    issue_server,
    read_key_pair,
    write_key_pair,
)
from coordinator.registry import Registry
from coordinator.settings import CoordinatorSettings

RENEW_BEFORE = dt.timedelta(days=30)
"""The hub's own certificate is renewed at a start this long before it expires."""


def utc_now() -> dt.datetime:
    """Now, aware, UTC."""
    return dt.datetime.now(dt.UTC)


def initialise(settings: CoordinatorSettings, now: dt.datetime) -> KeyPair:
    """Create what is missing of CA and server certificate; return the CA.

    An existing CA is kept, for every member trusts it. The server certificate is issued anew when
    it expires soon or does not cover ``server_names``.
    """
    directory = settings.ca_dir
    if not (directory / "ca.crt").exists():
        write_key_pair(create_ca(now), directory, "ca")
    ca = read_key_pair(directory, "ca")
    try:
        old = read_key_pair(directory, "server").certificate
        fresh = covers(old, settings.server_names) and expires(old) > now + RENEW_BEFORE
    except IdentityError:
        fresh = False
    if not fresh:
        write_key_pair(issue_server(ca, settings.server_names, now), directory, "server")
    return ca


def open_registry(settings: CoordinatorSettings) -> Registry:
    """The registry of the settings; the state directory is made if it is not there."""
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Registry(
        settings.database,
        metric_points=settings.metric_points,
        event_limit=settings.event_limit,
    )
