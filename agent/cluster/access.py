"""From settings to a connection: where the API server is, and how the agent proves who it is.

Used by ``agent.scheduling.serve`` and ``agent.scheduling.lift_gates``. The official client reads
the configuration, authenticates and writes; list and watch go through an ``aiohttp`` session that
proves itself by the same credentials. Whatever rotates (tokens, certificates, the kubeconfig
itself) is taken up without a restart.
"""

import asyncio
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

import aiohttp
import msgspec
import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, kube_config
from kubernetes.config.incluster_config import InClusterConfigLoader
from urllib3.exceptions import HTTPError

from agent.cluster.kubernetes import ApiError
from agent.settings import KubernetesSettings

log = logging.getLogger(__name__)
THREADS = 20
"""Writes under way at one time; the queue takes sixteen of them at most (``queue.WRITES``)."""
LOOK_SECONDS = 10.0
"""Between two looks at the files that credentials come from."""
RENEW_SECONDS = 2.0
"""Credentials that were read this recently are not read again, whatever the server says."""
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 2.0
"""After this long without a request a connection is closed; the pages of a list come faster."""
_REFERRED = ("tokenFile", "client-certificate", "client-key", "certificate-authority")
Answer = TypeVar("Answer")


class AccessError(RuntimeError):
    """There is no way to an API server; the message names the cause and the cure."""


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


def explain(status: int, body: str, source: str) -> str:
    """What an API server's refusal means, and what cures it, for log and command line."""
    try:
        message = msgspec.json.decode(body, type=_Status).message or body
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body
    if status == HTTPStatus.UNAUTHORIZED:
        return (
            f"the credentials of {source} are not accepted ({message.strip()}): the token or "
            "certificate has expired, was revoked, or is another cluster's"
        )
    if status == HTTPStatus.FORBIDDEN:
        return f"{message.strip()}; let a Role or ClusterRole grant it (the chart's does)"
    return message


class Access:
    """The way to one API server, for as long as the process lives."""

    def __init__(
        self,
        settings: KubernetesSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Find the configuration and read it; nothing is asked of the server yet.

        Raises AccessError.
        """
        self._settings, self._environ, self._monotonic = settings, environ, monotonic
        self._lock = threading.Lock()
        self.timeout = settings.request_seconds
        """Longest time for one write, seconds."""
        self.source = ""
        """Where the credentials come from, in words."""
        self._kubeconfigs: list[Path] = []
        self.in_pod = False
        """Whether a pod's service account is used."""
        self._find()
        self._configuration = self._load()
        self.url: str = self._configuration.host
        self._ssl: ssl.SSLContext | None = None
        try:
            if self.url.startswith("https:"):
                self._ssl = ssl.create_default_context(cafile=self._configuration.ssl_ca_cert)
                if not self._configuration.verify_ssl:
                    log.warning("%s: the API server's certificate is not checked", self.source)
                    self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
            self._update_tls()
            self._client = ApiClient(self._configuration)
        except OSError as error:  # ssl.SSLError is one
            raise AccessError(
                f"{self.source}: its CA, client certificate or key cannot be read ({error})"
            ) from error
        self._tls_is_old = False
        self._seen = self._stamps()
        self._looked = self._renewed = monotonic()
        self.namespace: str = settings.namespace or self._own_namespace()
        """The agent's own namespace."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kubernetes")

    # ---- reading ----

    def session(self) -> aiohttp.ClientSession:
        """A session whose requests carry the credentials; close it when done.

        A refusal (401, 403) is raised as an ApiError that says what to do about it.
        """
        # A connection stays what its certificate made it, so idle ones do not live long.
        connector = aiohttp.TCPConnector(
            ssl=self._ssl if self._ssl is not None else True, keepalive_timeout=IDLE_SECONDS
        )
        # trust_env minds the environment's proxies, with their exceptions; a kubeconfig has others.
        proxy = self._configuration.proxy
        return aiohttp.ClientSession(
            connector=connector,
            middlewares=(self._prove,),
            trust_env=True,
            proxy=None if proxy in getproxies().values() else proxy,
        )

    async def _prove(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        for last in (False, True):
            bearer = await asyncio.to_thread(self._authorization)
            if self._tls_is_old:
                self._renew_tls()
            if self._configuration.tls_server_name:
                request.server_hostname = self._configuration.tls_server_name
            if bearer:
                request.headers["Authorization"] = bearer
            try:
                answer = await handler(request)
            except aiohttp.ClientConnectorCertificateError as error:
                await asyncio.to_thread(self.renew)  # the CA may be another by now
                raise aiohttp.ClientConnectionError(
                    f"the certificate of {self.url} is not one that {self.source} trusts ({error})"
                ) from error
            if answer.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                return answer
            text = await answer.text(errors="replace")
            if last or answer.status == HTTPStatus.FORBIDDEN:
                raise ApiError(answer.status, explain(answer.status, text, self.source))
            await asyncio.to_thread(self.renew)
        raise AssertionError("unreachable")

    def _authorization(self) -> str | None:
        self._look()
        with self._lock:  # the client's own hooks are not made for many threads
            token: str | None = self._configuration.get_api_key_with_prefix(
                "BearerToken", "authorization"
            )
        return token

    # ---- writing ----

    async def call(self, request: Callable[[ApiClient], Answer]) -> Answer:
        """Make a request with the official client, in a thread.

        Raises ApiError where the server refuses it, OSError where it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, request)

    def _call(self, request: Callable[[ApiClient], Answer]) -> Answer:
        for last in (False, True):
            self._authorization()  # renews what has expired, one thread at a time
            try:
                return request(self._client)
            except ApiException as error:
                status = int(error.status or 0)
                if status != HTTPStatus.UNAUTHORIZED or last:
                    body = error.body if isinstance(error.body, str) else str(error.reason)
                    raise ApiError(status, explain(status, body, self.source)) from error
                self.renew()
            except HTTPError as error:
                raise ConnectionError(f"{self.url} cannot be reached: {error}") from error
        raise AssertionError("unreachable")

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments that bound a call of the official client in time."""
        return {"_request_timeout": (min(CONNECT_SECONDS, self.timeout), self.timeout)}

    def close(self) -> None:
        """Give the threads up; writes that are under way end by their time limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- configuration ----

    def _find(self) -> None:
        """Decide where the configuration comes from. Raises AccessError."""
        settings = self._settings
        if settings.api_url:
            self.source = settings.api_url
            return
        account = settings.service_account
        here = "KUBERNETES_SERVICE_HOST" in self._environ and (account / "token").is_file()
        wanted = settings.in_cluster == "always" or (
            settings.in_cluster == "auto" and settings.kubeconfig is None and here
        )
        if wanted:
            self.in_pod, self.source = True, f"the service account in {account}"
            return
        if settings.kubeconfig is not None:
            paths = [settings.kubeconfig]
        elif named := self._environ.get("KUBECONFIG", ""):
            paths = [Path(part) for part in named.split(os.pathsep) if part]
        else:
            paths = [Path("~/.kube/config")]
        paths = [path.expanduser() for path in paths]
        self._kubeconfigs = [path for path in paths if path.is_file()]
        if not self._kubeconfigs:
            names = ", ".join(map(str, paths))
            raise AccessError(
                f"no way to an API server: this is no pod with a service account (in {account}), "
                f"and there is no kubeconfig ({names}); set kubernetes.kubeconfig, or "
                "kubernetes.api_url to what `kubectl proxy` prints"
            )
        self.source = f"kubeconfig {os.pathsep.join(map(str, self._kubeconfigs))}"
        if settings.context:
            self.source += f", context {settings.context}"

    def _load(self) -> Any:
        """Read the configuration anew. Raises AccessError."""
        settings = self._settings
        configuration = Configuration(retries=0, connection_pool_maxsize=THREADS)
        configuration.host = settings.api_url.rstrip("/")
        try:
            if self.in_pod:
                InClusterConfigLoader(
                    settings.service_account / "token",
                    settings.service_account / "ca.crt",
                    environ=self._environ,
                ).load_and_set(configuration)
            elif not settings.api_url:
                kube_config.load_kube_config(
                    os.pathsep.join(map(str, self._kubeconfigs)),
                    settings.context or None,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError) as error:
            raise AccessError(f"{self.source} cannot be used: {error}{self._contexts()}") from error
        proves = configuration.api_key or configuration.cert_file or configuration.username
        if configuration.host.startswith("https:") and not proves:
            raise AccessError(
                f"{self.source} gives no credentials: its user has neither token nor certificate, "
                "or its credential plugin failed (the log says how)"
            )
        return configuration

    def renew(self) -> None:
        """Read the credentials anew; those in use go on where that fails."""
        with self._lock:
            now = self._monotonic()
            if now - self._renewed < RENEW_SECONDS:
                return  # another thread has just done it
            self._renewed = self._looked = now
            self._seen = self._stamps()
            try:
                configuration = self._load()
                self._client = ApiClient(configuration)
            except (AccessError, OSError) as error:
                log.warning("%s; the credentials read before go on", error)
            else:
                self._configuration, self._tls_is_old = configuration, True

    def _renew_tls(self) -> None:
        """Only in the event loop: no handshake may begin while a context changes."""
        self._tls_is_old = False
        try:
            self._update_tls()
        except OSError as error:
            log.warning("%s: %s; the certificates read before go on", self.source, error)

    def _update_tls(self) -> None:
        """For connections from now on. Raises OSError."""
        configuration = self._configuration
        if self._ssl is not None:
            if configuration.ssl_ca_cert:
                self._ssl.load_verify_locations(configuration.ssl_ca_cert)
            if configuration.cert_file:
                self._ssl.load_cert_chain(configuration.cert_file, configuration.key_file)

    def _look(self) -> None:
        """Renew where a file behind the credentials has changed."""
        if self._monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._monotonic()
        if self._stamps() != self._seen:
            log.info("%s has changed; reading it anew", self.source)
            self.renew()

    def _stamps(self) -> tuple[tuple[int, int] | None, ...]:
        """What tells whether one of the files has changed."""
        found: list[tuple[int, int] | None] = []
        for path in self._files():
            try:
                about = path.stat()
                found.append((about.st_mtime_ns, about.st_size))
            except OSError:
                found.append(None)
        return tuple(found)

    def _files(self) -> list[Path]:
        if self.in_pod:
            return [self._settings.service_account / name for name in ("token", "ca.crt")]
        files = list(self._kubeconfigs)
        for path in self._kubeconfigs:
            for section in ("users", "clusters"):
                for entry in _yaml(path).get(section) or ():
                    about = entry.get(section[:-1]) or {}
                    files += [path.parent / about[key] for key in _REFERRED if key in about]
        return files

    def _contexts(self) -> str:
        names = [c.get("name", "") for p in self._kubeconfigs for c in _yaml(p).get("contexts", ())]
        return f"; its contexts are {', '.join(names)}" if names else ""

    def _own_namespace(self) -> str:
        if self.in_pod:
            try:
                return (self._settings.service_account / "namespace").read_text().strip()
            except OSError:
                return "default"
        for path in self._kubeconfigs:
            content = _yaml(path)
            wanted = self._settings.context or content.get("current-context")
            for entry in content.get("contexts") or ():
                if entry.get("name") == wanted:
                    return str((entry.get("context") or {}).get("namespace") or "default")
        return "default"


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
