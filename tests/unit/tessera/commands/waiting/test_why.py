"""``tessera why`` as a command against an API server: without rights, without a controller, and with odd Events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from controller.report.claim_explainer import Explanation
from driver.clock import Clock
from driver.kube.lease import leases
from tessera.cli import main
from tessera.commands.waiting.why import _as_text
from tests.support.api_server import Exchange, ObjectApi
from tests.support.queues import request
from tests.unit.tessera.commands.test_map import add_node, hold
from tests.unit.tessera.test_cli import KUBECONFIG

CLASS = "/apis/resource.k8s.io/v1/deviceclasses/gpu-training"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims"
PODS, EVENTS = "/api/v1/namespaces/team-a/pods", "/api/v1/namespaces/team-a/events"
SELECTOR = 'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"].type == "gpu"'


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    """Of a cluster with one node of two free GPUs, neither of which is offered as a whole."""
    with ObjectApi() as server:
        add_node(server, "n1", "gpu-0-mig-1g10gb-6")
        server.store(CLASS, spec={"selectors": [{"cel": {"expression": SELECTOR}}]})
        yield server


def ask(api: ObjectApi, name: str, **spec: Any) -> None:
    """A claim for one GPU and its pod, of the same name."""
    api.store(f"{CLAIMS}/{name}", spec={"devices": {"requests": [request("gpu-training")]}})
    claims = [{"name": "gpu", "resourceClaimName": name}]
    api.store(f"{PODS}/{name}", spec={"resourceClaims": claims, **spec}, status={"phase": "Pending"})


def run(api: ObjectApi, folder: Path, *flags: str) -> Result:
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}))
    return CliRunner().invoke(main, ["why", "--kubeconfig", str(file), "-n", "team-a", *flags])


def report(api: ObjectApi, name: str, at: str, reason: str, **fields: Any) -> None:
    """An Event of the controller on the pod ``wanted``."""
    about = {"kind": "Pod", "name": "wanted", "namespace": "team-a"}
    event = {"involvedObject": about, "reason": reason, "lastTimestamp": at, "reportingComponent": "tessera-controller"}
    api.store(f"{EVENTS}/{name}", **{**event, **fields})


def forbid_the_cluster(api: ObjectApi) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.refuse(403, "this account may not list nodes")

    api.once("list", refuse)


def test_a_namespace_account_sees_what_the_controller_reported_last(api: ObjectApi, tmp_path: Path) -> None:
    report(api, "first", "2026-11-25T10:00:00Z", "AllHeld", message="none is free")
    report(api, "last", "2026-11-25T10:05:00Z", "NodeClosed", message="n1 is cordoned")
    report(api, "of-nothing", "2026-11-25T10:05:00Z", "AllHeld", involvedObject={"namespace": "team-a"})
    api.store(f"{PODS}/wanted", spec={})
    forbid_the_cluster(api)
    answer = run(api, tmp_path, "pod/wanted")
    assert answer.exit_code == 1
    assert answer.stderr.startswith(
        "this is what the objects and Events of the namespace say: this account may not read"
    )
    assert "this account may not list nodes" in answer.stderr
    assert "NodeClosed" in answer.stdout
    assert "n1 is cordoned (reported 2026-11-25T10:05:00Z)" in answer.stdout
    forbid_the_cluster(api)
    [found] = json.loads(run(api, tmp_path, "wanted", "-o", "json").stdout)
    assert (found["reason"], found["pods"]) == ("NodeClosed", ["team-a/wanted"])


def test_a_namespace_account_is_told_nothing_of_pods_that_are_gone(api: ObjectApi, tmp_path: Path) -> None:
    for name in ("there", "gone", "anew"):
        about = {"kind": "Pod", "name": name, "namespace": "team-a", "uid": "first"}
        report(api, name, "2026-11-25T10:00:00Z", "AllHeld", message="none is free", involvedObject=about)
    for name, uid in (("there", "first"), ("anew", "second")):
        api.store(f"{PODS}/{name}", spec={})
        api.folder(PODS)[name]["metadata"]["uid"] = uid
    forbid_the_cluster(api)
    explained = json.loads(run(api, tmp_path, "-o", "json").stdout)
    assert [found["pods"] for found in explained] == [["team-a/there"]]


def test_without_a_flag_the_namespace_is_that_of_the_context(api: ObjectApi, tmp_path: Path) -> None:
    ask(api, "wanted")
    file, cluster = tmp_path / "kubeconfig", {"name": "c", "cluster": {"server": api.server.url}}
    of_team = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}}
    file.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [cluster], "contexts": [of_team]}))
    answer = CliRunner().invoke(main, ["why", "--kubeconfig", str(file)])
    assert "claim team-a/wanted of pod team-a/wanted" in answer.stdout


def hold_all(api: ObjectApi, metadata: dict[str, Any], **pod: Any) -> None:
    """Both GPUs are held by claims of pods ``old-0`` and ``old-1``."""
    for number in range(2):
        name = f"old-{number}"
        hold(api, f"team-a/{name}", "n1", f"gpu-{number}")
        api.folder(CLAIMS)[name]["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": name}]
        api.store(f"{PODS}/{name}", **pod)
        api.folder(PODS)[name]["metadata"] |= metadata


def of_deployment(revision: str) -> dict[str, Any]:
    owner = {
        "kind": "ReplicaSet",
        "name": f"llm-{revision}",
        "uid": revision,
        "controller": True,
        "apiVersion": "apps/v1",
    }
    return {"labels": {"pod-template-hash": revision}, "ownerReferences": [owner]}


def test_a_rolling_update_that_waits_for_its_own_old_pods_is_told_the_way_out(api: ObjectApi, tmp_path: Path) -> None:
    hold_all(api, of_deployment("aaaa"), spec={})
    ask(api, "wanted")
    api.folder(PODS)["wanted"]["metadata"] |= of_deployment("bbbb")
    answer = run(api, tmp_path, "pod/wanted").stdout
    assert "older pods of its own Deployment are among the holders" in answer
    assert "set its strategy to maxSurge 0 and maxUnavailable 1" in answer
    hold_all(api, {"labels": {}, "ownerReferences": []}, spec={})
    assert "Deployment" not in run(api, tmp_path, "pod/wanted").stdout


@pytest.mark.parametrize(("held_by", "said"), [(10, "pod team-a/old-0 has one and a lower priority"), (100_000, "")])
def test_holders_of_lower_priority_are_named_with_what_kubernetes_does_not_do(
    api: ObjectApi, tmp_path: Path, held_by: int, said: str
) -> None:
    hold_all(api, {}, spec={"priority": held_by})
    ask(api, "wanted", priority=100_000)
    answer = run(api, tmp_path, "pod/wanted").stdout
    assert ("does not preempt pods for devices" in answer) == bool(said)
    assert said in answer


def test_a_namespace_account_without_reports_is_told_what_it_may_not_read(api: ObjectApi, tmp_path: Path) -> None:
    forbid_the_cluster(api)
    answer = run(api, tmp_path)
    assert answer.exit_code == 1
    assert "this account may not list nodes" in answer.output


def test_without_reports_a_namespace_account_sees_what_pod_and_claim_say(api: ObjectApi, tmp_path: Path) -> None:
    message = "0/1 nodes are available: 1 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ask(api, "wanted")
    api.folder(PODS)["wanted"]["status"]["conditions"] = [condition]
    ask(api, "starting", nodeName="n1")
    hold(api, "team-a/starting", "n1", "gpu-0-shared")
    [allocated] = api.folder(CLAIMS)["starting"]["status"]["allocation"]["devices"]["results"]
    allocated |= {"shareID": "1f0c3c1e", "consumedCapacity": {"memory": "6Gi"}}
    uid = api.folder(PODS)["starting"]["metadata"]["uid"]
    about = {"involvedObject": {"uid": uid}, "type": "Warning", "message": "no CDI"}
    api.store(f"{EVENTS}/failed", **about, reason="FailedPrepareDynamicResources")
    said = {
        "pod/wanted": "NotReported: no Event of the controller says why it is pending",
        "claim/wanted": "NotReported: no Event of the controller",
        "pod/starting": "n1 has not prepared it: FailedPrepareDynamicResources: no CDI",
        "claim/starting": "Allocated: it is allocated: memory 6Gi of gpu-0-shared of pool n1",
        "pod/gone": "namespace team-a has no pod named gone",
    }
    # What the controller reported before the pod had its node.
    report(
        api, "before", "2026-11-25T10:00:00Z", "AllHeld", message="none is free", involvedObject={"name": "starting"}
    )
    for name, part in said.items():
        forbid_the_cluster(api)
        answer = run(api, tmp_path, name)
        assert part in (answer.output or str(answer.exception))
        assert answer.exit_code == (0 if "Allocated" in part else 1)
        assert (message in answer.output) is (name == "pod/wanted")
        assert ("this account may not list nodes" in answer.stderr) is (name != "pod/gone")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(5, "enough is free now"), (402, "has sent no heartbeat for 40"), (None, "enough is free now")],
)
def test_a_silent_controller_is_named_where_enough_is_free(
    api: ObjectApi, tmp_path: Path, seconds: int | None, said: str
) -> None:
    ask(api, "first")
    ask(api, "second")
    if seconds is not None:
        at = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
        writer = {"time": at, "fieldsV1": {"f:spec": {"f:renewTime": {}}}}
        path = f"{leases('tessera')}/tessera-controller-heartbeat"
        api.store(path, spec={}, metadata={"name": "tessera-controller-heartbeat", "managedFields": [writer]})
    lines = run(api, tmp_path).stdout.splitlines()
    assert len([line for line in lines if said in line]) == 2, lines
    assert api.count("list", "/leases") == 1


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_ages_are_those_by_the_api_servers_clock(api: ObjectApi, tmp_path: Path, ahead: float) -> None:
    api.server.ahead_seconds = ahead
    now = datetime.now(UTC) + timedelta(seconds=ahead)
    ask(api, "wanted")
    api.folder(PODS)["wanted"]["metadata"]["creationTimestamp"] = (now - timedelta(seconds=330)).isoformat()
    writer = {"time": (now - timedelta(seconds=5)).isoformat(), "fieldsV1": {"f:spec": {"f:renewTime": {}}}}
    path = f"{leases('tessera')}/tessera-controller-heartbeat"
    api.store(path, spec={}, metadata={"name": "tessera-controller-heartbeat", "managedFields": [writer]})
    answer = run(api, tmp_path, "pod/wanted").stdout
    assert "pending for 5 minutes" in answer
    assert "enough is free now" in answer


def test_a_pod_that_does_not_start_has_the_last_warning_of_its_node(api: ObjectApi, tmp_path: Path) -> None:
    ask(api, "wanted", nodeName="n1")
    hold(api, "team-a/wanted", "n1", "gpu-0")
    event = {"involvedObject": {"uid": api.folder(f"{PODS}/wanted")["wanted"]["metadata"]["uid"]}, "type": "Warning"}
    api.store(f"{EVENTS}/silent", **event, reason="FailedPrepareDynamicResources")
    answer = run(api, tmp_path, "pod/wanted")
    assert answer.exit_code == 1
    assert "n1 has not prepared it: FailedPrepareDynamicResources" in answer.stdout


def test_a_claim_that_its_node_can_not_prepare_is_explained_with_what_the_controller_did(
    api: ObjectApi, tmp_path: Path
) -> None:
    ask(api, "wanted", nodeName="n1")
    hold(api, "team-a/wanted", "n1", "gpu-0")
    uid = api.folder(CLAIMS)["wanted"]["metadata"]["uid"]
    failed = {
        "claim": "team-a/wanted",
        "uid": uid,
        "since": "2026-11-25T10:00:00Z",
        "cause": "GPU",
        "message": "999",
    }
    api.folder("/apis/gpu.tessera.dev/v1alpha1/gpunodeplans")["n1"]["status"]["unprepared"] = [failed]
    for flags in (["pod/wanted"], ["claim/wanted"], []):
        answer = run(api, tmp_path, *flags)
        assert answer.exit_code == 1
        assert "NotPrepared: it is allocated: gpu-0" in answer.stdout
        assert "n1 can't prepare it since 2026-11-25T10:00:00Z, because of its GPU: 999" in answer.stdout
    event = {"involvedObject": {"kind": "ResourceClaim", "name": "wanted", "namespace": "team-a", "uid": uid}}
    outcome = "it can't be prepared; its pod is not evicted: PodDisruptionBudget web forbids it"
    report(api, "done", "2026-11-25T10:02:00Z", "FailedStart", message=outcome, **event)
    assert f"since 2026-11-25T10:00:00Z: {outcome}" in run(api, tmp_path, "pod/wanted").stdout


def test_a_running_pod_on_a_gpu_that_failed_is_told_so(api: ObjectApi, tmp_path: Path) -> None:
    ask(api, "runs", nodeName="n1")
    hold(api, "team-a/runs", "n1", "gpu-0")
    condition = {"type": "Ready", "status": "False", "message": "xid-79: XID 79", "lastTransitionTime": "T"}
    device = {"driver": "gpu.tessera.dev", "pool": "n1-gpu.tessera.dev", "device": "gpu-0", "conditions": [condition]}
    api.folder(CLAIMS)["runs"]["status"]["devices"] = [device]
    api.folder(PODS)["runs"]["status"]["phase"] = "Running"
    for name in ("pod/runs", "claim/runs"):
        answer = run(api, tmp_path, name)
        assert answer.exit_code == 1
        assert "DeviceUnhealthy: it is allocated: gpu-0" in answer.stdout
        assert "gpu-0 is unhealthy since T: xid-79: XID 79; its programs may fail" in answer.stdout


def test_a_holder_that_is_being_deleted_is_marked(api: ObjectApi, tmp_path: Path) -> None:
    ask(api, "wanted")
    for name, device, deleted in (("leaves", "gpu-0", "2026-11-25T10:00:00Z"), ("stays", "gpu-1", None)):
        hold(api, f"team-a/{name}", "n1", device)
        api.folder(CLAIMS)[name]["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": name}]
        api.store(f"{PODS}/{name}", spec={"nodeName": "n1"}, metadata={"name": name, "deletionTimestamp": deleted})
    rows = [line for line in run(api, tmp_path, "pod/wanted").stdout.splitlines() if "n1/gpu-" in line]
    assert [("leaves (being deleted)" in row, "being deleted" in row) for row in rows] == [(True, True), (False, False)]


def test_a_resource_that_no_class_provides_is_named(api: ObjectApi, tmp_path: Path) -> None:
    limits = {"limits": {"nvidia.com/gpu": "1", "cpu": "2"}}
    api.store(f"{PODS}/plugged", spec={"containers": [{"name": "c", "resources": limits}]}, status={"phase": "Pending"})
    answer = run(api, tmp_path, "pod/plugged")
    assert answer.exit_code == 1
    assert "ResourceNotMapped: it requests nvidia.com/gpu, which no node has" in answer.stdout
    assert "--set 'extendedResourceNames={gpu-training}'" in answer.stdout


def test_a_resource_of_a_device_plugin_is_not_tesseras(api: ObjectApi, tmp_path: Path) -> None:
    api.store("/api/v1/nodes/n9", status={"allocatable": {"nvidia.com/gpu": "8"}})
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    api.store(f"{PODS}/plugged", spec={"containers": [{"name": "c", "resources": limits}]}, status={"phase": "Pending"})
    answer = run(api, tmp_path, "pod/plugged")
    assert answer.exit_code == 0
    assert "only a device plugin can provide it" in answer.stdout


def test_what_the_scheduler_reports_on_many_pods_of_a_claim_is_shown_once() -> None:
    reports = tuple((f"job-{number}", "0/1 nodes are available") for number in range(256))
    text = _as_text(Explanation("default/shared", (), "AllHeld", "none is free", reports=reports), (), Clock())
    said = "the scheduler reports on pods job-0, job-1, job-2 and 253 more: 0/1 nodes are available"
    assert text.splitlines()[-1] == said
