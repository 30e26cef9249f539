"""The agent's picture of a real cluster while its API server is killed and forgets."""

import asyncio
from typing import Any

import kubernetes

from agent.cluster.access import Access
from agent.settings import KubernetesSettings
from examples.lab.control_plane import ControlPlane, node_manifest, pod_manifest
from tests.kubernetes.conftest import OwnLab
from tests.unit.api_server import until
from tests.unit.replay import Picture


class Cluster:
    """What the API server itself says, and changes to it; it may be away in between."""

    def __init__(self, lab: ControlPlane) -> None:
        self._lab = lab
        self._core: Any = kubernetes.client.CoreV1Api(lab.api())  # its types know no plain objects

    def add_pods(self, names: list[str], node: str) -> None:
        for name in names:
            pod = pod_manifest(name)
            pod["spec"]["nodeName"] = node
            self._core.create_namespaced_pod("default", pod)

    def delete_pods(self, names: list[str]) -> None:
        for name in names:
            self._core.delete_namespaced_pod(name, "default", grace_period_seconds=0)

    def finish(self, name: str) -> None:
        self._core.patch_namespaced_pod_status(name, "default", {"status": {"phase": "Succeeded"}})

    def go_on(self, number: int) -> None:
        """Move the server's version without any node or pod."""
        data = {"metadata": {"name": f"unrelated-{number}"}}
        self._core.create_namespaced_config_map("default", data)

    def places(self) -> dict[str, str | None]:
        """Node by pod UID of all that are not done."""
        pods = self._core.list_pod_for_all_namespaces().items
        return {p.metadata.uid: p.spec.node_name for p in pods if p.status.phase != "Succeeded"}

    def restart(self) -> None:
        self._lab.kill("kube-apiserver")
        self._lab.start("kube-apiserver")


async def test_a_killed_api_server_costs_the_picture_nothing(own_lab: OwnLab) -> None:
    lab = await asyncio.to_thread(own_lab, controllers=False, kwok=False)
    await asyncio.to_thread(lab.create_nodes, [node_manifest(f"n{i}", cpu=64) for i in range(3)])
    cluster = Cluster(lab)
    names = [f"p{i}" for i in range(40)]
    await asyncio.to_thread(cluster.add_pods, names, "n0")
    access = Access(KubernetesSettings(kubeconfig=lab.kubeconfig, in_cluster="never"))
    async with access.session() as session:
        picture = Picture(session, access.url)

        async def agree() -> None:
            wanted = await asyncio.to_thread(cluster.places)
            await until(lambda: _places(picture) == wanted)
            picture.check()

        async with picture.following():
            await agree()
            await until(lambda: picture.pods.counts["watches"] > 0)
            for turn, kept in enumerate((30, 20, 10)):
                # A server that comes back begins its cache at its newest version, so a watch of
                # an older one is answered by 410.
                await asyncio.to_thread(cluster.go_on, turn)
                await asyncio.to_thread(cluster.restart)
                await asyncio.to_thread(cluster.delete_pods, names[kept:])
                await asyncio.to_thread(cluster.finish, names[turn])
                await asyncio.to_thread(cluster.add_pods, [f"late{turn}"], f"n{turn}")
                names = names[:kept]
                await agree()
            assert picture.pods.counts["failures"] > 0
            assert picture.pods.counts["gone"] > 0
            assert picture.pods.counts["lists"] > 1
    ends = [kind for _, kind in picture.told if kind in ("deleted", "finished")]
    assert (ends.count("deleted"), ends.count("finished")) == (30, 3)
    access.close()


def _places(picture: Picture) -> dict[str, str]:
    return {uid: pod.node for uid, pod in picture.state.pods.items()}
