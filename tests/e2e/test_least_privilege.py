"""Every right that the chart grants is used by the processes, and nothing that they ask for is refused them.

``make test-cluster`` compares the same for the whole suite (``tests/audit``); here a node plugin and a controller do
all their kinds of work once, with tokens of their ServiceAccounts, on an API server that writes an audit log.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from driver.errors import ApiError
from driver.kube.client import KubeClient, load_configuration
from driver.kube.controller_heartbeat import HEARTBEAT
from driver.kube.lease import leases
from driver.kube.types import VOLCANO_GROUP_VERSION
from driver.model.plan import PATH
from tests.audit.grants import Grant, grants
from tests.audit.log import read
from tests.audit.report import Report, compare
from tests.bench.kubelet import Kubelet, allocated_claim
from tests.harness.audit import VARIABLE, audit_flags
from tests.harness.cluster import Cluster
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.chart import install, rendered
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.gangs import GANGS, SERVED
from tests.support.plugin import DRIVER, SLICES, TESSERA, PluginProcess, bare_node
from tests.support.workloads import CLAIMS, PODS, bound_pod, definition, is_gone, request

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = "node-a"
NAME = "tessera-node"
HOOK = "tessera-uninstall"
SOON_S = 60.0


@dataclass
class Watched:
    """A cluster whose API server writes down what the three ServiceAccounts ask for."""

    cluster: Cluster
    log: Path

    def report(self) -> Report:
        return compare(grants(rendered()), read([self.log]))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("audit")
    log = folder / "privileges.jsonl"
    flags = [*audit_flags(folder / "policy.json", log), *(GANGS["kube-apiserver"] if SERVED else [])]
    with control_plane("privileges", {"kube-apiserver": flags}) as cluster:
        install(cluster)
        cluster.apply([definition("PodGroup", VOLCANO_GROUP_VERSION)])
        yield Watched(cluster, log)


def waiting_pod(cluster: Cluster) -> None:
    """A pod with a claim that no card of the node can serve, and one whose template does not exist."""
    body = {"metadata": {"name": "waiting"}, "spec": {"devices": {"requests": [request("gpu-inference-1g-5gb")]}}}
    cluster.api.post(CLAIMS, body)
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimName": "waiting"}]
    spec = {"containers": [container], "resourceClaims": claims}
    cluster.api.post(PODS, {"metadata": {"name": "waiting"}, "spec": spec})
    without = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "none"}]}
    cluster.api.post(PODS, {"metadata": {"name": "lacking"}, "spec": without})


def told(cluster: Cluster, about: str) -> list[str]:
    """The reasons of the Events about a claim."""
    items = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [each["reason"] for each in items if each["involvedObject"].get("name") == about and "reason" in each]


def follows_a_plan(cluster: Cluster) -> bool:
    try:
        return bool(cluster.api.get(f"{PATH}/{NODE}").get("status", {}).get("mode") == "Planned")
    except ApiError:
        return False


def take_offers_back(cluster: Cluster, plugin: PluginProcess) -> None:
    """Partitions that are offered are not, once every GPU is for training: they are fenced first."""
    wait_for(lambda: any("-mig-" in name for name in plugin.devices()), SOON_S, "partitions are offered")
    labels = {f"gpu-{number}.gpu.tessera.dev/dedicated-to": "training" for number in range(8)}
    cluster.api.patch(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": labels}})
    wait_for(lambda: not any("-mig-" in name for name in plugin.devices()), SOON_S, "no partition is offered any more")


def stray_slice(cluster: Cluster) -> str:
    """A slice in the node's pool that its plugin did not write; it takes it away."""
    pool = {"name": f"{NODE}-{DRIVER}", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-99"}]}
    cluster.api.post(SLICES, {"metadata": {"name": "stray"}, "spec": spec})
    return f"{SLICES}/stray"


def a_claims_life(cluster: Cluster, plugin: PluginProcess) -> None:
    """Prepared, told about, its record spoilt and made anew after a restart, unprepared; beside one that must fail."""
    good = allocated_claim(cluster, "good", NODE, "gpu-0")
    bad = allocated_claim(cluster, "bad", NODE, "gpu-77")
    kubelet = Kubelet(plugin.socket).connect()
    kubelet.prepare(good)
    wait_for(lambda: cluster.api.get(f"{CLAIMS}/good")["status"].get("devices"), SOON_S, "the claim's status")
    with pytest.raises(RuntimeError, match="gpu-77"):
        kubelet.prepare(bad)
    wait_for(lambda: told(cluster, "bad"), SOON_S, "an Event about the failure")
    kubelet.close()

    plugin.kill()
    [record] = plugin.records()
    record.write_text("spoilt")
    stray = stray_slice(cluster)
    plugin.spawn()
    plugin.wait_published()
    wait_for(lambda: is_gone(cluster, stray), SOON_S, "the slice that nobody knows is gone")
    kubelet = Kubelet(plugin.socket).connect()
    with pytest.raises(RuntimeError, match="gpu-77"):
        kubelet.prepare(bad)
    wait_for(lambda: "CheckpointRecordRebuilt" in told(cluster, "good"), SOON_S, "the record is there again")
    kubelet.unprepare(good)
    kubelet.close()


def pod_without_its_gpu(cluster: Cluster) -> None:
    """A pod on the node whose claim was allocated the GPU that a prepared claim has: the controller evicts it."""
    allocated_claim(cluster, "late", NODE, "gpu-0")
    bound_pod(cluster, "late", NODE, "late", owned=True)


def uninstall(cluster: Cluster) -> None:
    """What helm runs before it deletes a release; its controller left no sign of life, and its node is down."""
    cluster.api.request("DELETE", f"{leases('tessera')}/{HEARTBEAT}")
    kubeconfig = cluster.service_account_kubeconfig("tessera", HOOK)
    for flags in (["--check"], ["--force", "--timeout", "1"]):
        command = [TESSERA, "uninstall", "--kubeconfig", str(kubeconfig), *flags]
        done = subprocess.run(command, capture_output=True, timeout=SOON_S, check=False)
    assert done.returncode == 0, done.stderr


def unused(report: Report) -> list[Grant]:
    """The rights that nothing used, but for those of ``test_evictions``, to see what protects a pod, and that of
    ``test_preempt``, to have a pod tried again."""
    rights = (grant for grant in report.unused if grant.group not in ("batch", "policy"))
    return [grant for grant in rights if grant.resource != "pods/status"]


@pytest.fixture(scope="module")
def work(watched: Watched) -> Report:
    """What the log says when both processes have done all their kinds of work."""
    cluster = watched.cluster
    first, second = (ControllerProcess(cluster, name) for name in ("first", "second"))
    plugin = PluginProcess(cluster, bare_node(cluster, NODE))
    try:
        plugin.spawn()
        plugin.wait_published()
        first.start()
        wait_for(lambda: follows_a_plan(cluster), SOON_S, "the node follows the plan that it has created")
        cluster.api.request("DELETE", f"{PATH}/{NODE}")
        wait_for(lambda: follows_a_plan(cluster), SOON_S, "the node follows the plan that the controller has created")
        take_offers_back(cluster, plugin)
        waiting_pod(cluster)
        for name in ("waiting", "lacking"):
            wait_for(partial(told, cluster, name), SOON_S, f"an Event about {name}")
        a_claims_life(cluster, plugin)
        pod_without_its_gpu(cluster)
        first.stop()
        second.start()
        # Whatever is amiss is told by the table below.
        with suppress(DeadlineError):
            wait_for(lambda: {each.who for each in unused(watched.report())} <= {HOOK}, SOON_S, "every right was used")
    finally:
        for process in (plugin, first, second):
            process.stop()
    uninstall(cluster)
    if folder := os.environ.get(VARIABLE):
        # Part of what the whole suite used; what is refused on purpose below isn't.
        shutil.copy(watched.log, folder)
    return watched.report()


def test_each_right_is_used_and_nothing_is_refused(work: Report) -> None:
    print(work)
    assert unused(work) == []
    assert work.refused == []


def test_a_right_that_nobody_uses_is_found(watched: Watched, work: Report) -> None:
    unused = Grant("tessera-node", "get", "", "secrets", "tessera")
    report = compare([*grants(rendered()), unused], read([watched.log]))
    assert unused in report.unused
    assert "tessera-node: get secrets in tessera" in str(report)
    assert not report.sound


def test_what_rbac_refuses_is_found(watched: Watched, work: Report) -> None:
    with pytest.raises(ApiError, match="forbidden"):
        as_the_plugin(watched.cluster, "node-b").get("/api/v1/namespaces/tessera/secrets")
    [found] = [each for each in watched.report().refused if "list secrets" in each]
    assert "tessera-node: list secrets tessera/ in cluster privileges, 1 times: " in found


def test_what_a_policy_refuses_is_found(watched: Watched, work: Report) -> None:
    stray = stray_slice(watched.cluster)
    with pytest.raises(ApiError, match="own-slices"):
        as_the_plugin(watched.cluster, "node-c").delete(stray)
    [found] = [each for each in watched.report().refused if "delete resourceslices" in each]
    assert "this token is of node node-c" in found


def as_the_plugin(cluster: Cluster, node: str) -> KubeClient:
    """With the token and the name of a node plugin on a new node."""
    cluster.add_node_object(node)
    return KubeClient(
        load_configuration(cluster.service_account_kubeconfig("tessera", "tessera-node", node=node)), NAME
    )


def test_what_a_test_asks_for_in_their_name_does_not_count(watched: Watched, work: Report) -> None:
    kubeconfig = watched.cluster.service_account_kubeconfig("tessera", "tessera-controller")
    with pytest.raises(ApiError):
        KubeClient(load_configuration(kubeconfig), "test").get("/api/v1/namespaces/default/secrets")
    assert not [each for each in watched.report().refused if "default/" in each]
