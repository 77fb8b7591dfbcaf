"""Labels of Nodes on a real API server: two GB200 racks, each one NVLink domain."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from controller.decision.hardware_labels import NVIDIA, OWN
from driver.errors import FORBIDDEN, INVALID, ApiError
from driver.kube.client import KubeClient, load_configuration
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import TESSERA, PluginFlags
from tests.support.rights import may

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODES = "/api/v1/nodes"
SOON_S = 60.0

TRAY = Path(__file__).parents[2] / "driver" / "simulator" / "data" / "nodes" / "gb200-nvl72-tray.yaml"
FIRST, SECOND = "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c", "0b7e1c55-3f0d-4a57-8a53-6c1f6f1f0a02"
RACKS = {"rack-a-1": FIRST, "rack-a-2": FIRST, "rack-b-1": SECOND, "rack-b-2": SECOND}
GFD = "nvidia.com/gpu.product"


@contextmanager
def cluster_of(name: str) -> Iterator[Cluster]:
    with control_plane(name) as running:
        install(running, {"controller": {"nodeLabels": "all"}})
        yield running


@contextmanager
def led(cluster: Cluster, nodes: Mapping[str, str], folder: Path) -> Iterator[ControllerProcess]:
    """A controller, and trays of these racks; rack-a-1 has a label of NVIDIA's feature discovery already."""
    with ExitStack() as stack:
        for rack in set(nodes.values()):
            description = folder / f"{rack}.yaml"
            description.write_text(TRAY.read_text().replace(FIRST, rack))
            names = [node for node, its in nodes.items() if its == rack]
            stack.enter_context(plugins(cluster, names, PluginFlags(gpus=f"sim:{description}")))
        label(cluster, "rack-a-1", {GFD: "NVIDIA-GB200-SHARED"})
        found = ControllerProcess(cluster, flags=("--node-labels", "all"))
        found.start()
        for node in nodes:
            wait_right(cluster, node)
        yield found
        found.stop()
        assert found.refused() == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of("node-labels") as running:
        yield running


@pytest.fixture(scope="module")
def controller(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with led(cluster, RACKS, tmp_path_factory.mktemp("racks")) as found:
        yield found


def labels(cluster: Cluster, node: str) -> dict[str, str]:
    """Those that Tessera may write."""
    found: dict[str, str] = cluster.api.get(f"{NODES}/{node}")["metadata"]["labels"]
    return {name: value for name, value in found.items() if name in {*OWN.names, *NVIDIA.names}}


def label(cluster: Cluster, node: str, changes: dict[str, Any]) -> None:
    cluster.api.patch(f"{NODES}/{node}", {"metadata": {"labels": changes}})


def expected(node: str) -> dict[str, str]:
    clique = f"{RACKS[node]}.2"
    own = {
        "gpu.tessera.dev/product": "NVIDIA-GB200",
        "gpu.tessera.dev/count": "4",
        "gpu.tessera.dev/driver-version": "580.95.5",
        "gpu.tessera.dev/nvlink-generation": "5",
        "gpu.tessera.dev/fabric-clique": clique,
    }
    nvidia = {GFD: "NVIDIA-GB200", "nvidia.com/gpu.clique": clique}
    return own | (nvidia if node != "rack-a-1" else {GFD: "NVIDIA-GB200-SHARED"})


def wait_right(cluster: Cluster, node: str) -> None:
    wait_for(lambda: labels(cluster, node) == expected(node), SOON_S, f"the labels of {node}")


def test_the_nodes_of_a_rack_have_its_clique_and_no_other(cluster: Cluster, controller: ControllerProcess) -> None:
    cliques = {node: labels(cluster, node)["gpu.tessera.dev/fabric-clique"] for node in RACKS}
    assert cliques["rack-a-1"] == cliques["rack-a-2"] != cliques["rack-b-1"] == cliques["rack-b-2"]


def test_labels_that_somebody_changes_or_removes_come_back(cluster: Cluster, controller: ControllerProcess) -> None:
    for _ in range(2):
        label(cluster, "rack-b-1", {"gpu.tessera.dev/fabric-clique": "another", "gpu.tessera.dev/count": None})
        wait_right(cluster, "rack-b-1")


def test_labels_of_others_stay_as_they_are(cluster: Cluster, controller: ControllerProcess) -> None:
    label(cluster, "rack-b-2", {"gpu.tessera.dev/dedicated-to": "training", "example.com/rack": "b"})
    label(cluster, "rack-b-2", {"gpu.tessera.dev/product": None})
    wait_right(cluster, "rack-b-2")
    found = cluster.api.get(f"{NODES}/rack-b-2")["metadata"]["labels"]
    assert found["gpu.tessera.dev/dedicated-to"] == "training"
    assert found["example.com/rack"] == "b"


def test_the_policy_is_sound_by_the_word_of_the_api_server(cluster: Cluster) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/node-labels.gpu.tessera.dev"

    def checked() -> dict[str, Any]:
        status = cluster.api.get(path).get("status", {})
        return {"found": status["typeChecking"]} if "typeChecking" in status else {}

    assert wait_for(checked, SOON_S, "the API server has checked it") == {"found": {}}


@pytest.mark.parametrize("account", ["tessera-controller", "tessera-uninstall"])
@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
        {"metadata": {"labels": {"gpu.tessera.dev/dedicated-to": "dev"}}},
        {"metadata": {"labels": {"kubernetes.io/hostname": None}}},
        {"metadata": {"annotations": {"x": "y"}}},
        {"metadata": {"finalizers": ["example.com/stay"]}},
        {"spec": {"unschedulable": True}},
        {"spec": {"taints": [{"key": "x", "effect": "NoExecute"}]}},
    ],
    ids=str,
)
def test_the_right_to_patch_nodes_is_good_for_these_labels_only(
    cluster: Cluster, controller: ControllerProcess, account: str, change: dict[str, Any]
) -> None:
    client = KubeClient(load_configuration(cluster.service_account_kubeconfig("tessera", account)), "test")
    with pytest.raises(ApiError, match="Tessera may change only") as refused:
        client.patch(f"{NODES}/rack-a-2", change)
    assert refused.value.status in (FORBIDDEN, INVALID)


def uninstall(cluster: Cluster) -> str:
    """What the hook of the chart prints, with the rights that it has."""
    kubeconfig = cluster.service_account_kubeconfig("tessera", "tessera-uninstall")
    command = [TESSERA, "uninstall", "--kubeconfig", str(kubeconfig), "--timeout", "1"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def may_label(cluster: Cluster) -> bool:
    return may(cluster, "tessera:tessera-uninstall", "patch", "nodes")


def test_uninstalling_removes_what_tessera_wrote_and_nothing_else(tmp_path: Path) -> None:
    nodes = {"rack-a-1": FIRST, "rack-a-2": FIRST}
    with cluster_of("labels-gone") as cluster:
        with led(cluster, nodes, tmp_path):
            pass
        install(cluster, {"controller": {"nodeLabels": "none"}})
        wait_for(lambda: not may_label(cluster), SOON_S, "the API server knows that the right is gone")
        before = {node: labels(cluster, node) for node in nodes}
        assert "not allowed to remove labels of Nodes" in uninstall(cluster)
        assert {node: labels(cluster, node) for node in nodes} == before
        install(cluster, {"controller": {"nodeLabels": "all"}})
        wait_for(lambda: may_label(cluster), SOON_S, "the API server knows that the right is back")
        assert "not allowed" not in uninstall(cluster)
        assert {node: labels(cluster, node) for node in nodes} == {
            "rack-a-1": {GFD: "NVIDIA-GB200-SHARED"},
            "rack-a-2": {},
        }
        assert "kubernetes.io/hostname" in cluster.api.get(f"{NODES}/rack-a-2")["metadata"]["labels"]
