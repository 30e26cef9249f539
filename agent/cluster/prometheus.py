"""Asks Prometheus, by its HTTP API; ``agent.cluster.telemetry`` does so in a thread.

prometheus-api-client sends the queries. What goes wrong has one of a few names, so that it can be
counted, and a message that says what to do about it.
"""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import requests
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect
from urllib3.util.retry import Retry

from agent.telemetry_settings import TelemetrySettings

_STATUS = re.compile(r"HTTP Status Code (\d+) \((.*)\)", re.DOTALL)
TEXT = 300
"""Characters of a server's words that are passed on."""


class PrometheusError(Exception):
    """A query gave nothing; ``state`` is one of ``agent.cluster.telemetry.STATES``."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class Sample(NamedTuple):
    """One element of an instant vector."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """One server; for one thread at a time."""

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        session = requests.Session()
        session.verify = str(settings.ca_file) if settings.ca_file else True
        connect: Any = PrometheusConnect  # its time-out may be a fraction, whatever its types say
        self._connection: Any = connect(
            settings.prometheus_url.rstrip("/"),
            session=session,
            retry=Retry(total=0),  # the next reading comes soon enough
            timeout=settings.timeout_seconds,
        )

    def sign_in(self) -> None:
        """Read token and password anew: they rotate. Raises PrometheusError."""
        settings = self._settings
        self._connection.headers = dict(settings.headers)
        if settings.token_file is not None:
            token = _secret(settings.token_file, "telemetry.token_file")
            self._connection.headers["Authorization"] = f"Bearer {token}"
        if settings.username:
            password = ""
            if settings.password_file is not None:
                password = _secret(settings.password_file, "telemetry.password_file")
            self._connection.auth = settings.username, password

    def query(self, text: str) -> list[Sample]:
        """The instant vector of a query, without elements that are no numbers.

        Values older than ``stale_seconds`` are left out by the server. Raises PrometheusError.
        """
        settings = self._settings
        where = f"Prometheus at {settings.prometheus_url}"
        oldest = f"{round(1000 * settings.stale_seconds)}ms"
        try:
            found = self._connection.custom_query(text, params={"lookback_delta": oldest})
            samples = [_sample(one) for one in found]
        except requests.exceptions.JSONDecodeError as error:
            raise PrometheusError(
                "not_prometheus",
                f"{where} answers, but not with JSON; is telemetry.prometheus_url the API's root?",
            ) from error
        except requests.exceptions.SSLError as error:
            raise PrometheusError(
                "prometheus_unreachable",
                f"{where}: its certificate is not trusted; set telemetry.ca_file ({error})",
            ) from error
        except (requests.exceptions.RequestException, OSError) as error:
            raise PrometheusError(
                "prometheus_unreachable", f"{where} does not answer: {str(error)[:TEXT]}"
            ) from error
        except PrometheusApiClientException as error:
            raise _refusal(str(error), where, text) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PrometheusError(
                "query_failed", f"{where} gave no instant vector for {text!r}: {error!r}"
            ) from error
        return [sample for sample in samples if math.isfinite(sample.value)]

    def close(self) -> None:
        """Close its connections."""
        self._connection.close()


def _sample(one: Any) -> Sample:
    labels = {str(name): str(value) for name, value in dict(one["metric"]).items()}
    return Sample(labels, float(one["value"][1]))


def _secret(path: Path, setting: str) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PrometheusError(
            "prometheus_refused", f"{setting} {path} cannot be read: {error}"
        ) from error


def _refusal(message: str, where: str, text: str) -> PrometheusError:
    match = _STATUS.search(message)
    status, words = (int(match[1]), match[2][:TEXT]) if match else (0, message[:TEXT])
    if status in (401, 403):
        return PrometheusError(
            "prometheus_refused",
            f"{where} refuses (HTTP {status}); set telemetry.token_file, or username and "
            "password_file",
        )
    if status in (400, 422):
        return PrometheusError("query_failed", f"{where} cannot evaluate {text!r}: {words}")
    return PrometheusError("prometheus_unreachable", f"{where}: HTTP {status} {words}")
