"""What a node plugin's token may not do although RBAC lets it: touch what is another node's.

The plugin has more rights than the chart gives it: those that the API server's own check of who may write the status of
a claim asks for, which from 1.36 on comes before the policies (``test_claim_status.py``). What the policies refuse here
they refuse on every version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest

from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.model.plan import API_VERSION, FENCE, KIND, PATH
from driver.slices.slice_names import Pool, shortened
from tests.bench.kubelet import allocated_claim
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER, SLICES
from tests.support.workloads import CLAIMS, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"
EVENTS = "/api/v1/namespaces/default/events"
POOL_A, POOL_B = f"node-a-{DRIVER}", f"node-b-{DRIVER}"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BOUNDARIES = [f"own-{what}.{DRIVER}" for what in ("slices", "claims", "plan", "fence", "events")]
PAST_THE_OWN_CHECK = [
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/driver"], "verbs": ["arbitrary-node:patch"]},
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims/binding"], "verbs": ["patch"]},
]
REFUSED = 422

Object = dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("boundary") as running:
        install(running)
        let_past_the_own_check(running)
        for name in ("node-a", "node-b"):
            running.add_node_object(name)
            running.api.post(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}})
        yield running


def let_past_the_own_check(cluster: Cluster) -> None:
    group, name = "rbac.authorization.k8s.io", "past-the-own-check"
    header = {"apiVersion": f"{group}/v1", "metadata": {"name": name}}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": name}
    plugin = {"kind": "ServiceAccount", "namespace": "tessera", "name": "tessera-node"}
    binding = {**header, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [plugin]}
    cluster.apply([{**header, "kind": "ClusterRole", "rules": PAST_THE_OWN_CHECK}, binding])


@pytest.fixture(scope="module")
def node_a(cluster: Cluster) -> KubeClient:
    """With the token of node-a's plugin; returned when each policy is in force, which none says of another."""
    found = client(cluster, "tessera-node", "node-a")
    cluster.api.post(CONFIG_MAPS, {"metadata": {"name": FENCE, "namespace": "tessera"}})
    allocated_claim(cluster, "tried", "node-b", "gpu-0")
    device = {"driver": DRIVER, "pool": POOL_B, "device": "gpu-0"}

    def by_a_policy(call: Callable[..., object], path: str, body: Object) -> bool:
        return "ValidatingAdmissionPolicy 'own-" in refused(call, path, body, {"dryRun": "All"})

    for call, path, body in (
        (found.patch, status_of("node-b"), {"status": {"epoch": "x"}}),
        (found.patch, f"{CLAIMS}/tried/status", {"status": {"devices": [device]}}),
        (found.patch, f"{CONFIG_MAPS}/{FENCE}", {"data": {"junk": "x"}}),
        (found.create, EVENTS, event_from("node-b", "tried")),
        (found.create, SLICES, slice_of("node-b")),
    ):
        wait_for(partial(by_a_policy, call, path, body), 60, f"a policy for {path} in force")
    for path in (f"{CLAIMS}/tried", f"{CONFIG_MAPS}/{FENCE}"):
        cluster.api.request("DELETE", path)
    return found


@pytest.fixture(scope="module")
def unbound(cluster: Cluster, node_a: KubeClient) -> KubeClient:
    """With a token of the same ServiceAccount that names no node."""
    return client(cluster, "tessera-node")


@pytest.fixture
def fence(cluster: Cluster) -> Iterator[str]:
    """The path of the fence, around devices of both nodes."""
    metadata = {"name": FENCE, "namespace": "tessera"}
    cluster.api.post(CONFIG_MAPS, {"metadata": metadata, "data": {POOL_A: "gpu-0 gpu-1", POOL_B: "gpu-0"}})
    yield f"{CONFIG_MAPS}/{FENCE}"
    cluster.api.request("DELETE", f"{CONFIG_MAPS}/{FENCE}")


@pytest.fixture
def others_slice(cluster: Cluster) -> Iterator[Object]:
    """A slice of node-b, as it is stored."""
    yield cluster.api.post(SLICES, slice_of("node-b"))
    cluster.api.request("DELETE", f"{SLICES}/slice-node-b")


def client(cluster: Cluster, account: str, node: str | None = None) -> KubeClient:
    return KubeClient(load_configuration(cluster.service_account_kubeconfig("tessera", account, node=node)), "test")


def status_of(node: str) -> str:
    return f"{PATH}/{node}/status"


def slice_of(node: str, **spec: Any) -> Object:
    """A slice as the node's plugin writes it, but for ``spec``; None leaves a field out."""
    pool = {"name": f"{node}-{DRIVER}", "generation": 1, "resourceSliceCount": 1}
    whole = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}], **spec}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"slice-{node}"},
        "spec": {name: each for name, each in whole.items() if each is not None},
    }


SOURCE = {"component": "tessera-node"}
"""What `kubectl get events -o wide` shows, with a host where one is given."""


def event_from(node: str, name: str, component: str = "tessera-node") -> Object:
    """An Event about some pod."""
    return {
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "somebody"},
        "reason": "GpuLost",
        "message": "delete me",
        "source": {"component": component},
        "reportingComponent": component,
        "reportingInstance": node,
    }


def refused(call: Callable[..., object], *arguments: object) -> str:
    """What the API server says against it; empty: it was done."""
    try:
        call(*arguments)
    except ApiError as error:
        assert error.status == REFUSED, error  # noqa: PT017 - nothing else may refuse it
        return str(error)
    return ""


def refusal(who: KubeClient, path: str, change: Object) -> str:
    """The same for a merge patch."""
    return refused(who.patch, path, change)


class TestSlices:
    @pytest.mark.smoke
    def test_a_node_creates_changes_and_deletes_its_own(self, cluster: Cluster, node_a: KubeClient) -> None:
        stored = node_a.create(SLICES, slice_of("node-a"))
        stored["spec"]["devices"] = [{"name": "gpu-7"}]
        node_a.replace(f"{SLICES}/slice-node-a", stored)
        [device] = cluster.api.get(f"{SLICES}/slice-node-a")["spec"]["devices"]
        assert device["name"] == "gpu-7"
        node_a.delete(f"{SLICES}/slice-node-a")

    def test_a_node_creates_and_deletes_that_of_its_monitor_devices(self, node_a: KubeClient) -> None:
        pool = {"name": f"{POOL_A}-monitor", "generation": 1, "resourceSliceCount": 1}
        node_a.create(SLICES, slice_of("node-a", pool=pool))
        node_a.delete(f"{SLICES}/slice-node-a")

    @pytest.mark.parametrize("rest", [40, 58], ids=["of the monitor devices", "of both pools"])
    def test_a_node_with_a_long_name_creates_those_whose_pool_has_a_name_that_ends_in_a_hash(
        self, cluster: Cluster, node_a: KubeClient, rest: int
    ) -> None:
        node = f"{'n' * 63}.{'n' * 63}.{'n' * 63}.{'n' * rest}"
        cluster.api.post("/api/v1/nodes", {"metadata": {"name": node}})  # no label can have such a value
        plugin, pool = client(cluster, "tessera-node", node), Pool(node, DRIVER)
        for name in (pool.name, shortened(f"{node}-{DRIVER}-monitor")):
            body = slice_of(node, pool={"name": name, "generation": 1, "resourceSliceCount": 1})
            body["metadata"]["name"] = "of-a-long-name"
            assert plugin.create(SLICES, body)["spec"]["pool"]["name"] == name
            plugin.delete(f"{SLICES}/of-a-long-name")

    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param({"nodeName": "node-b"}, id="of another node"),
            pytest.param({"nodeName": None, "allNodes": True}, id="of all nodes"),
            pytest.param(
                {"nodeName": None, "perDeviceNodeSelection": True},
                id="of nodes that each device names",
                marks=pytest.mark.needs("nodes by device"),
            ),
            pytest.param(
                {
                    "nodeName": None,
                    "nodeSelector": {
                        "nodeSelectorTerms": [
                            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]}
                        ]
                    },
                },
                id="of nodes by a selector, even where it selects its own",
            ),
            pytest.param({"driver": "gpu.nvidia.com"}, id="of another driver"),
            pytest.param({"pool": {"name": POOL_B, "generation": 9, "resourceSliceCount": 1}}, id="of another pool"),
            pytest.param(
                {"pool": {"name": f"{POOL_B}-monitor", "generation": 1, "resourceSliceCount": 1}},
                id="of another node's monitor devices",
            ),
            pytest.param(
                {"pool": {"name": f"{POOL_A}-monitors", "generation": 1, "resourceSliceCount": 1}},
                id="of a pool with almost its name",
            ),
        ],
    )
    def test_a_node_can_not_create_one(self, node_a: KubeClient, spec: Object) -> None:
        body = slice_of("node-a", **spec)
        if spec.get("perDeviceNodeSelection"):
            body["spec"]["devices"] = [{"name": "gpu-0", "nodeName": "node-a"}]
        assert "a node plugin may write only slices" in refused(node_a.create, SLICES, body)

    def test_a_node_can_not_change_another_nodes(
        self, cluster: Cluster, node_a: KubeClient, others_slice: Object
    ) -> None:
        changed = others_slice | {"spec": {**others_slice["spec"], "devices": []}}
        told = refused(node_a.replace, f"{SLICES}/slice-node-b", changed)
        assert "only slices with nodeName of its own node; this token is of node node-a" in told
        assert cluster.api.get(f"{SLICES}/slice-node-b") == others_slice

    def test_a_node_can_not_delete_another_nodes(
        self, cluster: Cluster, node_a: KubeClient, others_slice: Object
    ) -> None:
        told = refused(node_a.delete, f"{SLICES}/slice-node-b")
        assert "only slices with nodeName of its own node; this token is of node node-a" in told
        assert cluster.api.get(f"{SLICES}/slice-node-b") == others_slice

    def test_a_token_that_is_bound_to_no_node_writes_none(self, unbound: KubeClient, others_slice: Object) -> None:
        assert "bound to no node" in refused(unbound.create, SLICES, slice_of("node-a"))
        assert "bound to no node" in refused(unbound.delete, f"{SLICES}/slice-node-b")

    def test_admins_are_not_meant(self, cluster: Cluster, node_a: KubeClient) -> None:
        cluster.api.post(SLICES, slice_of("node-a", nodeName=None, allNodes=True))
        cluster.api.request("DELETE", f"{SLICES}/slice-node-a")


class TestClaimStatus:
    ENTRY: ClassVar = {"driver": DRIVER, "pool": POOL_A, "device": "gpu-0", "data": {"uuid": "GPU-0"}}
    RESERVED: ClassVar = [{"resource": "pods", "name": "mine", "uid": "1"}]

    @pytest.fixture
    def claims(self, cluster: Cluster) -> Iterator[None]:
        """ "mine" on node-a, "theirs" on node-b, "nobodys" not allocated."""
        for name, node in (("mine", "node-a"), ("theirs", "node-b")):
            allocated_claim(cluster, name, node, "gpu-0")
        spec = {"devices": {"requests": [request("gpu-training")]}}
        cluster.api.post(CLAIMS, {"metadata": {"name": "nobodys"}, "spec": spec})
        yield
        for name in ("mine", "theirs", "nobodys"):
            cluster.api.request("DELETE", f"{CLAIMS}/{name}")

    @pytest.mark.smoke
    def test_a_node_writes_about_its_devices_of_a_claim_on_it(
        self, cluster: Cluster, node_a: KubeClient, claims: None
    ) -> None:
        assert not refusal(node_a, f"{CLAIMS}/mine/status", {"status": {"devices": [self.ENTRY]}})
        [entry] = cluster.api.get(f"{CLAIMS}/mine")["status"]["devices"]
        assert entry["data"] == self.ENTRY["data"]
        assert not refusal(node_a, f"{CLAIMS}/mine/status", {"status": {"devices": None}})

    def test_a_node_writes_about_its_monitor_devices(self, cluster: Cluster, node_a: KubeClient) -> None:
        pool, device = f"{POOL_A}-monitor", "gpu-0-monitor"
        allocated_claim(cluster, "watch", "node-a", "gpu-0", of_others=[(DRIVER, pool, device)])
        entry = self.ENTRY | {"pool": pool, "device": device}
        assert not refusal(node_a, f"{CLAIMS}/watch/status", {"status": {"devices": [entry]}})
        cluster.api.request("DELETE", f"{CLAIMS}/watch")

    def test_a_node_writes_nothing_about_a_claim_on_another(
        self, cluster: Cluster, node_a: KubeClient, claims: None
    ) -> None:
        before = cluster.api.get(f"{CLAIMS}/theirs")
        entry = self.ENTRY | {"pool": POOL_B}
        told = refusal(node_a, f"{CLAIMS}/theirs/status", {"status": {"devices": [entry]}})
        assert "theirs is not allocated there; this token is of node node-a" in told
        assert cluster.api.get(f"{CLAIMS}/theirs") == before

    def test_a_node_allocates_nothing_to_itself(self, cluster: Cluster, node_a: KubeClient, claims: None) -> None:
        allocation = cluster.api.get(f"{CLAIMS}/mine")["status"]["allocation"]
        told = refusal(node_a, f"{CLAIMS}/nobodys/status", {"status": {"allocation": allocation}})
        assert "nobodys is not allocated to a node" in told

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"allocation": None, "devices": None}, id="give the devices of a running pod away"),
            pytest.param({"reservedFor": RESERVED}, id="let another pod in"),
        ],
    )
    def test_of_a_claim_on_it_a_node_can_not(
        self, cluster: Cluster, node_a: KubeClient, claims: None, change: Object
    ) -> None:
        before = cluster.api.get(f"{CLAIMS}/mine")
        assert "may change only status.devices in the status of a claim" in refusal(
            node_a, f"{CLAIMS}/mine/status", {"status": change}
        )
        assert cluster.api.get(f"{CLAIMS}/mine") == before

    def test_a_node_writes_nothing_in_another_drivers_name(self, cluster: Cluster, node_a: KubeClient) -> None:
        allocated_claim(cluster, "with-nic", "node-a", "gpu-0", of_others=[("nic.example.com", "nics", "nic-0")])
        nic = {"driver": "nic.example.com", "pool": "nics", "device": "nic-0", "data": {"ip": "10.0.0.1"}}
        path = f"{CLAIMS}/with-nic/status"
        told = refusal(node_a, path, {"status": {"devices": [nic]}})
        assert f"only those entries of status.devices with driver {DRIVER} and pool {POOL_A}" in told
        cluster.api.patch(path, {"status": {"devices": [nic]}})
        assert "only those entries" in refusal(node_a, path, {"status": {"devices": [self.ENTRY]}})
        assert not refusal(node_a, path, {"status": {"devices": [nic, self.ENTRY]}})
        cluster.api.request("DELETE", f"{CLAIMS}/with-nic")

    def test_a_token_that_is_bound_to_no_node_writes_none(self, unbound: KubeClient, claims: None) -> None:
        told = refusal(unbound, f"{CLAIMS}/mine/status", {"status": {"devices": [self.ENTRY]}})
        assert "this token is bound to no node" in told


class TestThePlan:
    @pytest.mark.smoke
    def test_a_node_writes_the_status_of_its_own_and_of_no_other(self, cluster: Cluster, node_a: KubeClient) -> None:
        assert not refusal(node_a, status_of("node-a"), {"status": {"epoch": "e1"}})
        told = refusal(node_a, status_of("node-b"), {"status": {"epoch": "e1"}})
        assert "only the node plugin of node node-b may write the status of its plan; this token is of node" in told
        assert cluster.api.get(f"{PATH}/node-b").get("status", {}) == {}

    def test_a_node_creates_its_own_without_a_spec_and_no_other(self, cluster: Cluster, node_a: KubeClient) -> None:
        def plan(node: str, **spec: Any) -> Object:
            return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": node}, **spec}

        cluster.api.request("DELETE", f"{PATH}/node-a")
        assert "only the node plugin of node node-c" in refused(node_a.create, PATH, plan("node-c"))
        assert "only without a spec" in refused(node_a.create, PATH, plan("node-a", spec={"epoch": "e1"}))
        assert node_a.create(PATH, plan("node-a"))["metadata"]["name"] == "node-a"

    def test_a_token_that_is_bound_to_no_node_writes_no_status(self, unbound: KubeClient) -> None:
        told = refusal(unbound, status_of("node-a"), {"status": {"epoch": "e2"}})
        assert "this token is bound to no node" in told


class TestTheFence:
    def test_a_node_lets_go_of_its_own_devices(self, cluster: Cluster, node_a: KubeClient, fence: str) -> None:
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
    def test_a_node_can_not(self, cluster: Cluster, node_a: KubeClient, fence: str, change: Object) -> None:
        before = cluster.api.get(fence)
        assert "a node plugin may" in refusal(node_a, fence, change)
        assert cluster.api.get(fence) == before

    def test_a_token_that_is_bound_to_no_node_lets_go_of_nothing(self, unbound: KubeClient, fence: str) -> None:
        for pool in (POOL_A, POOL_B):
            assert "may remove only the fence entry of its own pool" in refusal(unbound, fence, {"data": {pool: None}})

    def test_the_controller_is_not_meant(self, cluster: Cluster, node_a: KubeClient, fence: str) -> None:
        controller = client(cluster, "tessera-controller")
        assert not refusal(controller, fence, {"data": {POOL_B: None, POOL_A: "gpu-3"}})


class TestEvents:
    def test_a_node_tells_its_own_and_none_in_the_name_of_others(self, node_a: KubeClient) -> None:
        assert not refused(node_a.create, EVENTS, event_from("node-a", "mine"))
        assert not refusal(node_a, f"{EVENTS}/mine", {"count": 2})
        for name, body in {
            "of-node-b": event_from("node-b", "of-node-b"),
            "of-the-kubelet": event_from("node-a", "of-the-kubelet", "kubelet"),
            "from-node-b": {**event_from("node-a", "from-node-b"), "source": {**SOURCE, "host": "node-b"}},
        }.items():
            assert "only Events of its own" in refused(node_a.create, EVENTS, body), name
        assert "only Events of its own" in refusal(node_a, f"{EVENTS}/mine", {"reportingInstance": "node-b"})

    def test_a_node_can_not_change_what_others_told(self, cluster: Cluster, node_a: KubeClient) -> None:
        cluster.api.post(EVENTS, event_from("node-a", "of-the-scheduler", "default-scheduler"))
        told = refusal(node_a, f"{EVENTS}/of-the-scheduler", event_from("node-a", "of-the-scheduler"))
        assert "only Events of its own" in told

    def test_a_token_that_is_bound_to_no_node_tells_none(self, unbound: KubeClient) -> None:
        assert "bound to no node" in refused(unbound.create, EVENTS, event_from("", "from-nowhere"))


def test_the_policies_have_no_fault_that_the_api_server_could_find(cluster: Cluster, node_a: KubeClient) -> None:
    for name in BOUNDARIES:

        def checked(name: str = name) -> Object:
            status = cluster.api.get(f"{POLICIES}/{name}").get("status", {})
            return {"found": status["typeChecking"]} if "typeChecking" in status else {}

        assert wait_for(checked, 60, "the expressions were checked") == {"found": {}}, name
