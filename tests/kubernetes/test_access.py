"""How the agent proves itself to a real API server, and what it says when it cannot."""

import asyncio
import base64
import json
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from agent.cluster import access as module
from agent.cluster.access import Access, AccessError
from agent.cluster.kubernetes import NODES, ApiError, Client
from agent.cluster.rights import Right, missing, needed
from agent.settings import ElectionSettings, KubernetesSettings, Settings
from common.identity import create_ca
from examples.lab.control_plane import ControlPlane
from tests.kubernetes.agents import grant, reaching

READ = {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}


async def names(access: Access) -> set[str]:
    """What of the nodes a session sees."""
    async with access.session() as session:
        client = Client(session, access.url)
        pages = [page async for page in client.pages(NODES)]
    return {
        json.loads(bytes(item))["metadata"]["name"] for page in pages for item in page.items or ()
    }


@pytest.fixture(scope="module")
def account(lab: ControlPlane) -> dict[str, Any]:
    """A service account that may read, with what a pod of it finds in its file system."""
    lab.kubectl("create", "serviceaccount", "reader", "--namespace=default")
    grant(lab, "default:reader", READ)
    content: dict[str, Any] = yaml.safe_load(lab.token_kubeconfig("default", "reader").read_text())
    return content


def mounted(folder: Path, account: dict[str, Any]) -> Path:
    """The service account's files as they are mounted into a pod."""
    folder.mkdir()
    cluster = account["clusters"][0]["cluster"]
    (folder / "ca.crt").write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    (folder / "token").write_text(account["users"][0]["user"]["token"])
    (folder / "namespace").write_text("somewhere")
    return folder


async def test_a_pod_uses_its_service_account(
    lab: ControlPlane, account: dict[str, Any], tmp_path: Path
) -> None:
    host, _, port = lab.url.removeprefix("https://").partition(":")
    access = Access(
        KubernetesSettings(service_account=mounted(tmp_path / "account", account)),
        environ={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
    )
    try:
        assert (access.url, access.namespace, access.in_pod) == (lab.url, "somewhere", True)
        assert "gpu-0" in await names(access)
    finally:
        access.close()


async def test_a_token_that_rotates_is_read_anew(
    account: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mounted(tmp_path / "account", account)
    good = (folder / "token").read_text()
    (folder / "token").write_text("not.a.token")
    content = account | {"users": [{"name": "lab", "user": {"tokenFile": "account/token"}}]}
    content["contexts"][0]["context"]["user"] = "lab"
    config = tmp_path / "config"
    config.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.0)
    with reaching(config) as access:
        with pytest.raises(ApiError, match=r"401.*has expired"):
            await names(access)
        (folder / "token").write_text(good)
        assert "gpu-0" in await names(access)  # the refusal was reason enough to look
        assert await missing(access, [Right("list", "", "pods")]) == []
        (folder / "token").write_text("not.a.token.either")
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
        with pytest.raises(ApiError, match="401"):
            await missing(access, [Right("list", "", "pods")])


async def test_a_client_certificate_that_is_replaced_is_used_for_new_connections(
    lab: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    config = tmp_path / "config"
    shutil.copy(lab.user_kubeconfig("nobody-in-particular"), config)
    with reaching(config) as access:
        async with access.session() as session:
            client = Client(session, access.url)
            with pytest.raises(ApiError, match=r"403.*nobody-in-particular.*cannot list.*grant"):
                [page async for page in client.pages(NODES)]
            shutil.copy(lab.kubeconfig, config)
            await asyncio.sleep(module.IDLE_SECONDS)
            assert [page async for page in client.pages(NODES)]
        assert await missing(access, [Right("patch", "", "pods")]) == []


async def test_a_credential_plugin_gives_the_token(account: dict[str, Any], tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    token = account["users"][0]["user"]["token"]
    said = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": token},
    }
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    run = {"apiVersion": said["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    content = account | {"users": [{"name": "lab", "user": {"exec": run}}]}
    content["contexts"][0]["context"]["user"] = "lab"
    config = tmp_path / "config"
    config.write_text(yaml.safe_dump(content))
    with reaching(config) as access:
        assert "gpu-0" in await names(access)
    plugin.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(AccessError, match="credential plugin failed"):
        Access(KubernetesSettings(kubeconfig=config))


async def test_the_rights_that_are_missing_are_named(lab: ControlPlane) -> None:
    grant(lab, "half", READ)
    settings = Settings(
        election=ElectionSettings(mode="lease"), kubernetes=KubernetesSettings(pod="agent-0")
    )
    with reaching(lab.user_kubeconfig("half")) as access:
        lacking = await missing(access, needed(settings, access))
    assert [str(right) for right in lacking] == [
        "patch pods",
        "get leases.coordination.k8s.io fedsched-agent in namespace default",
        "create leases.coordination.k8s.io in namespace default",
        "update leases.coordination.k8s.io fedsched-agent in namespace default",
        "create events.events.k8s.io in namespace default",
    ]


async def test_a_server_with_another_certificate_authority_is_not_trusted(
    lab: ControlPlane, tmp_path: Path
) -> None:
    content = yaml.safe_load(lab.kubeconfig.read_text())
    other = create_ca(datetime.now(UTC), 1, name="other").certificate
    content["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(
        other
    ).decode()
    config = tmp_path / "config"
    config.write_text(yaml.safe_dump(content))
    with reaching(config) as access:
        with pytest.raises(
            aiohttp.ClientConnectionError, match=r"is not one that kubeconfig .* trusts"
        ):
            await names(access)
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await missing(access, [Right("list", "", "pods")])
