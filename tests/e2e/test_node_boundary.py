"""What a node plugin's token may not do although RBAC lets it: touch what is another node's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from driver.errors import ApiError
from driver.kube.transport import KubeClient, load_configuration
from driver.model.plan import API_VERSION, FENCE, KIND, PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"
POOL_A, POOL_B = "node-a-gpu.tessera.dev", "node-b-gpu.tessera.dev"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
REFUSED = 422


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("boundary") as running:
        install(running)
        for name in ("node-a", "node-b"):
            running.add_node_object(name)
            running.api.post(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}})
        yield running


@pytest.fixture(scope="module")
def node_a(cluster: Cluster) -> KubeClient:
    """With the token of node-a's plugin; returned when the policies are in force."""
    found = client(cluster, "tessera-node", "node-a")
    wait_for(lambda: refusal(found, status_of("node-b"), {"status": {"epoch": "x"}}), 20, "the policy is in force")
    return found


@pytest.fixture
def fence(cluster: Cluster) -> Iterator[str]:
    """The path of the fence, around devices of both nodes."""
    metadata = {"name": FENCE, "namespace": "tessera"}
    cluster.api.post(CONFIG_MAPS, {"metadata": metadata, "data": {POOL_A: "gpu-0 gpu-1", POOL_B: "gpu-0"}})
    yield f"{CONFIG_MAPS}/{FENCE}"
    cluster.api.request("DELETE", f"{CONFIG_MAPS}/{FENCE}")


def client(cluster: Cluster, account: str, node: str | None = None) -> KubeClient:
    return KubeClient(load_configuration(cluster.service_account_kubeconfig("tessera", account, node=node)), "test")


def status_of(node: str) -> str:
    return f"{PATH}/{node}/status"


def refusal(who: KubeClient, path: str, change: dict[str, Any]) -> str:
    """What the API server says against it; empty: it was done."""
    try:
        who.patch(path, change)
    except ApiError as error:
        assert error.status == REFUSED, error  # noqa: PT017 - nothing else may refuse it
        return str(error)
    return ""


def test_a_node_writes_the_status_of_its_own_plan_and_of_no_other(cluster: Cluster, node_a: KubeClient) -> None:
    assert not refusal(node_a, status_of("node-a"), {"status": {"epoch": "e1"}})
    told = refusal(node_a, status_of("node-b"), {"status": {"epoch": "e1"}})
    assert "only the node plugin of node node-b may write the status of its plan; this token is of node node-a" in told
    assert cluster.api.get(f"{PATH}/node-b").get("status", {}) == {}


def test_a_token_that_is_bound_to_no_node_writes_no_status(cluster: Cluster, node_a: KubeClient) -> None:
    told = refusal(client(cluster, "tessera-node"), status_of("node-a"), {"status": {"epoch": "e2"}})
    assert "this token is bound to no node" in told


def test_a_node_lets_go_of_its_own_devices(cluster: Cluster, node_a: KubeClient, fence: str) -> None:
    assert not refusal(node_a, fence, {"data": {POOL_A: None}})
    assert cluster.api.get(fence)["data"] == {POOL_B: "gpu-0"}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"data": {POOL_B: None}}, id="let go of another node's"),
        pytest.param({"data": {POOL_B: "gpu-0 gpu-1"}}, id="fence another node's"),
        pytest.param({"data": {POOL_A: "gpu-7"}}, id="fence its own"),
        pytest.param({"data": {"junk": "x" * 1000}}, id="fill it"),
        pytest.param({"binaryData": {"junk": "eHh4"}}, id="fill it with bytes"),
        pytest.param({"immutable": True}, id="freeze it"),
        pytest.param({"metadata": {"finalizers": ["example.com/never"]}}, id="keep it for ever"),
        pytest.param({"metadata": {"annotations": {"a": "b"}}}, id="annotate it"),
    ],
)
def test_a_node_can_not(cluster: Cluster, node_a: KubeClient, fence: str, change: dict[str, Any]) -> None:
    before = cluster.api.get(fence)
    assert "a node may" in refusal(node_a, fence, change)
    assert cluster.api.get(fence) == before


def test_the_controller_is_not_meant(cluster: Cluster, node_a: KubeClient, fence: str) -> None:
    controller = client(cluster, "tessera-controller")
    assert not refusal(controller, fence, {"data": {POOL_B: None, POOL_A: "gpu-3"}})


def test_the_policies_have_no_fault_that_the_api_server_could_find(cluster: Cluster, node_a: KubeClient) -> None:
    for name in ("own-plan.gpu.tessera.dev", "own-fence.gpu.tessera.dev"):

        def checked(name: str = name) -> dict[str, Any]:
            status = cluster.api.get(f"{POLICIES}/{name}").get("status", {})
            return {"found": status["typeChecking"]} if "typeChecking" in status else {}

        assert wait_for(checked, 20, "the expressions were checked") == {"found": {}}
