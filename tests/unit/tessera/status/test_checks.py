"""Output of ``tessera status``: of an installation, as far as no real cluster is needed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import msgspec
import pytest
import yaml

from driver.kube.controller_heartbeat import LEAVING
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Claim, DeviceClass, GpuNodePlan, PlanMetadata
from driver.model.gpu_settings import SharedProfiles
from driver.model.plan import (
    COMPLETE,
    COUNTERS_FIELD,
    PUBLISH,
    NodeCondition,
    OfferMode,
    PlanMode,
    PlanSpec,
    PlanStatus,
    PublishHeld,
)
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import SHARING_FIELD, SharedMemory, SharingStrategy
from tessera.commands.status import CheckResult, as_text, run_checks
from tessera.status.snapshot import Listing, ReadFailure, StatusSnapshot
from tests.support.chart import manifests
from tests.support.gpus import gpu_of

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
NODE, POOL, DRIVER = "node-a", "node-a-gpu.tessera.dev", "gpu.tessera.dev"


def stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def lease(name: str, holder: str | None, ago_s: float = 0.0, ahead_s: float = 0.0) -> dict[str, Any]:
    at = NOW - timedelta(seconds=ago_s)
    fields = [{"manager": "x", "time": stamp(at), "fieldsV1": {"f:spec": {"f:renewTime": {}}}}]
    spec = {"holderIdentity": holder, "renewTime": stamp(at + timedelta(seconds=ahead_s))}
    return {"metadata": {"name": name, "managedFields": fields}, "spec": spec}


def item(count: int = 1, **device: Any) -> ResourceSlice:
    return slice_of([{"name": "gpu-0", **device}], count)


def slice_of(devices: list[dict[str, Any]], count: int = 1, node: str = NODE) -> ResourceSlice:
    pool = {"name": f"{node}-{DRIVER}", "generation": 1, "resourceSliceCount": count}
    metadata = {"name": f"00000-{pool['name']}", "resourceVersion": "1"}
    spec = {"nodeName": node, "driver": DRIVER, "pool": pool, "devices": devices}
    return msgspec.convert({"metadata": metadata, "spec": spec}, ResourceSlice)


def node_with(labels: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": NODE, "labels": labels}}


def plan(
    mode: PlanMode = PlanMode.PLANNED,
    generation: int = 3,
    observed: int = 3,
    *cordoned: str,
    dropped: tuple[str, ...] = (),
    gpus: Sequence[GpuReport] = (),
) -> GpuNodePlan:
    inventory = encode_inventory(gpus) if gpus else ""
    status = PlanStatus(observed_generation=observed, mode=mode, dropped=dropped, inventory=inventory)
    return GpuNodePlan(PlanMetadata(NODE, generation=generation), PlanSpec(cordoned=cordoned), status)


def pod(image: str, ready: str = "True", *containers: dict[str, Any]) -> dict[str, Any]:
    spec = {"serviceAccountName": "tessera-node", "nodeName": NODE, "containers": [{"image": image}]}
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": ready}],
        "containerStatuses": list(containers) or [{"state": {"running": {}}}],
    }
    return {"metadata": {"name": f"pod-{image}"}, "spec": spec, "status": status}


def claim(device: str) -> Claim:
    results = [{"driver": DRIVER, "pool": POOL, "device": device, "request": "r"}]
    requests = [{"name": "r", "exactly": {"deviceClassName": "gpu-training"}}]
    found = {
        "metadata": {"name": "train", "namespace": "team"},
        "spec": {"devices": {"requests": requests}},
        "status": {"allocation": {"devices": {"results": results}}},
    }
    return msgspec.convert(found, Claim)


def class_of(name: str, spec: dict[str, Any]) -> DeviceClass:
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, DeviceClass)


BOUNDARIES = [
    each["metadata"]["name"]
    for each in yaml.safe_load_all(manifests()["node-boundary.yaml"])
    if each["kind"] == "ValidatingAdmissionPolicy"
]
"""Policies that hold a node's token to its own node, by the chart."""

POLICIES = [*BOUNDARIES, "tessera-fence"]


def version_of(text: str) -> dict[str, str]:
    """The API server's ``/version``."""
    return {"gitVersion": text, "minor": text.split(".")[1] if "." in text else ""}


SHARED = GpuReport(gpu_of(), 0, shared=SharedMemory(SharingStrategy.TIME_SLICING, 79 << 30))
INSTANCES = GpuReport(SharedProfiles.parse("1c.3g.40gb").applied_to(gpu_of(), {}), 0)
SOUND = StatusSnapshot(
    DRIVER,
    "tessera",
    NOW,
    version=version_of("v1.37.1"),
    nodes=[{"metadata": {"name": NODE}}],
    slices=[item()],
    plans={NODE: plan()},
    claims=[claim("gpu-0")],
    classes=[class_of("gpu-training", {"selectors": [{"cel": {"expression": DRIVER}}]})],
    policies=[{"metadata": {"name": name}} for name in POLICIES],
    bindings=[{"spec": {"policyName": name, "validationActions": ["Deny"]}} for name in POLICIES],
    leases={
        name: lease(name, "controller-1", ago_s=3) for name in ("tessera-controller", "tessera-controller-heartbeat")
    },
    node_leases=[lease(NODE, NODE)],
)


def found(snapshot: StatusSnapshot) -> dict[str, str]:
    results = run_checks(snapshot)
    return {r.check: "; ".join(f"{f.about} {f.message}" for f in r.findings) for r in results if r.findings}


def result(snapshot: StatusSnapshot, check: str) -> CheckResult:
    return next(each for each in run_checks(snapshot) if each.check == check)


def test_nothing_is_wrong_with_a_sound_installation() -> None:
    assert found(SOUND) == {}
    text = as_text(run_checks(SOUND))
    assert "leader controller-1, heartbeat 3 s ago" in text
    assert "1 held, 0 offered" in text


@pytest.mark.parametrize("version", ["v1.34.4", "v1.35.4-gke.100", "v1.36.3", "v1.37.1", "v1.38.0"])
def test_no_version_from_1_34_on_is_a_problem(version: str) -> None:
    snapshot = replace(SOUND, version=version_of(version))
    assert found(snapshot) == {}
    assert ("never tested" in result(snapshot, "API server").summary) is (version == "v1.38.0")


BOTH = ("consumesCounters", "taints")
COUNTERS, DISJOINT = OfferMode
NOT_KEPT = "nodes report that the API server does not keep consumesCounters"
SLOW = "Kubernetes 1.36: its scheduler is slow with counters"


@pytest.mark.parametrize(
    ("version", "decided", "published", "dropped", "summary"),
    [
        ("v1.37.1", COUNTERS, COUNTERS, (), "mode Counters (the scheduler subtracts counters)"),
        (
            "v1.35.4",
            DISJOINT,
            DISJOINT,
            BOTH,
            f"mode Disjoint ({NOT_KEPT}), dropped device fields: consumesCounters, taints",
        ),
        (
            "v1.36.3",
            DISJOINT,
            COUNTERS,
            (),
            f"mode Disjoint ({SLOW}), 1 node not yet in the mode of the plan",
        ),
        ("v1.37.1", DISJOINT, DISJOINT, (), "mode Disjoint (controller.offerMode or --offer-mode)"),
    ],
    ids=["1.37", "1.35", "1.36, changing", "by setting"],
)
def test_the_offer_mode_has_its_reason_and_what_the_api_server_drops_is_named(
    version: str, decided: OfferMode, published: OfferMode, dropped: tuple[str, ...], summary: str
) -> None:
    status = PlanStatus(observed_generation=3, mode=PlanMode.PLANNED, offer_mode=published, dropped=dropped)
    changed = msgspec.structs.replace(plan(), spec=PlanSpec(offer_mode=decided), status=status)
    snapshot = replace(SOUND, version=version_of(version), plans={NODE: changed})
    assert result(snapshot, "offers").summary == summary
    assert found(snapshot) == {}


def test_a_shared_gpu_is_held_and_offered_until_its_node_closes_it() -> None:
    held = replace(SOUND, claims=[claim("gpu-0-shared")])
    assert (
        result(replace(held, slices=[slice_of([{"name": "gpu-0-shared"}])]), "devices").summary == "1 held, 1 offered"
    )
    closed = slice_of([{"name": "gpu-0-shared", "taints": [{"key": "gpu.tessera.dev/not-offered"}]}])
    assert result(replace(held, slices=[closed]), "devices").summary == "1 held, 0 offered"


def test_a_held_device_may_be_unpublished_only_while_nothing_of_its_gpu_is_offered() -> None:
    held = PlanSpec(held=("gpu-0-mig-1g10gb-6 team/train",), publish_held=PublishHeld.BESIDE_OFFERS)
    following = replace(SOUND, claims=[claim("gpu-0-mig-1g10gb-6")], slices=[slice_of([])])
    sound = replace(following, plans={NODE: msgspec.structs.replace(plan(), spec=held)})
    assert found(sound) == {}
    assert "1 held (1 not published: publishHeld auto), 0 offered" in as_text(run_checks(sound))
    offering = slice_of([{"name": "gpu-0-mig-1g10gb-0"}])
    for wrong in (
        replace(sound, slices=[offering]),
        replace(sound, plans={NODE: msgspec.structs.replace(plan(PlanMode.STANDALONE), spec=held)}),
        replace(sound, plans={NODE: msgspec.structs.replace(plan(), spec=msgspec.structs.replace(held, held=()))}),
        following,
    ):
        assert "gpu-0-mig-1g10gb-6 of pool node-a-gpu.tessera.dev is held by claim" in found(wrong)["devices"]


BEAT = "tessera-controller-heartbeat"


@pytest.mark.parametrize("gone", BOUNDARIES)
def test_each_policy_that_holds_a_nodes_token_to_its_node_is_missed(gone: str) -> None:
    assert found(replace(SOUND, policies=[each for each in SOUND.policies if each["metadata"]["name"] != gone])) == {
        "policies": f"{gone} this admission policy is missing: a node's token may write objects of other nodes"
    }


def test_a_policy_whose_binding_only_warns_refuses_nothing() -> None:
    warns, *others = SOUND.bindings
    told = found(
        replace(SOUND, bindings=[{"spec": {**warns["spec"], "validationActions": ["Warn", "Audit"]}}, *others])
    )
    assert told == {
        "policies": f"{BOUNDARIES[0]} this admission policy has no binding that denies, so it refuses nothing"
    }


def terms() -> list[dict[str, Any]]:
    """The labels that each make the chart's node plugin run on a node."""
    [daemon_set] = yaml.safe_load_all(manifests()["node-plugin.yaml"])
    affinity = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    selected = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [expression for term in selected for expression in term["matchExpressions"]]


@pytest.mark.parametrize("term", terms(), ids=lambda term: str(term["key"]))
def test_a_node_on_which_the_plugin_should_run_is_missed_where_it_publishes_nothing(term: dict[str, Any]) -> None:
    node = {"metadata": {"name": "idle", "labels": {term["key"]: term.get("values", ["nvidia-l4"])[0]}}}
    assert found(replace(SOUND, nodes=[*SOUND.nodes, node])) == {
        "node plugins": "idle publishes nothing: no pod of a node plugin runs there"
    }


def test_an_uninstalling_that_came_to_no_end_is_told_with_the_way_back() -> None:
    told = lease(BEAT, "controller-1", ago_s=3)
    told["metadata"]["annotations"] = {LEAVING: "true"}
    snapshot = replace(SOUND, leases={**SOUND.leases, BEAT: told})
    assert "an uninstallation has begun, and nodes offer nothing" in found(snapshot)["controller"]
    text = click.unstyle(as_text(run_checks(snapshot)))
    assert f"kubectl -n tessera annotate lease {BEAT} {LEAVING}-" in text


def test_a_claim_on_a_node_whose_name_begins_alike_hides_no_refusal() -> None:
    """A plugin that refuses beside a device plugin, on a node without a plan."""
    node = {"metadata": {"name": "node"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    taint = {"key": "gpu.tessera.dev/not-offered", "effect": "NoSchedule"}
    closed = slice_of([{"name": "gpu-0", "taints": [taint]}], node="node")
    snapshot = replace(SOUND, nodes=[*SOUND.nodes, node], slices=[*SOUND.slices, closed])
    assert "1 GPU is not offered" in found(snapshot)["neighbours"]


@pytest.mark.parametrize(
    ("snapshot", "check", "message"),
    [
        (replace(SOUND, version=version_of("v1.33.2")), "API server", "is v1.33.2"),
        (replace(SOUND, plans=None), "definition", "the CustomResourceDefinition is not installed"),
        (replace(SOUND, classes=[]), "classes", "DeviceClass gpu-training does not exist, but claims name it"),
        (replace(SOUND, leases={**SOUND.leases, BEAT: lease(BEAT, "c", ago_s=95)}), "controller", "95 s ago"),
        (replace(SOUND, pods=[pod("tessera:1"), pod("tessera:2")]), "versions", "2 versions run at once"),
        (replace(SOUND, pods=[pod("tessera:1", ready="False")]), "node plugins", "is not ready on node-a"),
        (replace(SOUND, nodes=[{"metadata": {"name": "other"}}]), "node plugins", "no Node of this name exists"),
        (replace(SOUND, slices=[item(count=2)]), "slices", "incomplete: 1 of 2 slices"),
        (
            replace(SOUND, claims=[claim("gpu-7")]),
            "devices",
            "gpu-7 of pool node-a-gpu.tessera.dev is held by claim team",
        ),
        (
            replace(SOUND, plans={NODE: plan(PlanMode.STANDALONE)}),
            "mode",
            "is standalone although a controller is running",
        ),
        (replace(SOUND, plans={NODE: plan(observed=1)}), "mode", "is 2 versions of its plan behind"),
        (replace(SOUND, autoscaler={}), "mode", "cluster-autoscaler takes the devices that a node publishes for all"),
        (replace(SOUND, nodes=[node_with({"karpenter.sh/nodepool": "a100"})]), "mode", "is managed by Karpenter"),
        (
            replace(SOUND, nodes=[node_with({PUBLISH: COMPLETE})], plans={NODE: plan(dropped=(COUNTERS_FIELD,))}),
            "mode",
            "without effect: the API server does not keep consumesCounters",
        ),
        (
            replace(SOUND, plans={NODE: plan(dropped=(SHARING_FIELD,), gpus=[SHARED])}),
            "offers",
            "node-a can't share gpu-0 by memory: the API server does not keep allowMultipleAllocations",
        ),
        (
            replace(SOUND, plans={NODE: plan(dropped=(SHARING_FIELD,), gpus=[INSTANCES])}),
            "offers",
            "node-a can't share 1c.3g.40gb: the API server does not keep allowMultipleAllocations",
        ),
        (replace(SOUND, node_leases=[lease(NODE, NODE, ahead_s=-30)]), "clocks", "30 s behind the API server's"),
        (
            replace(SOUND, unreadable={Listing.PODS: ReadFailure("500: why")}),
            "API server",
            "pods can't be read: 500: why",
        ),
    ],
)
def test_trouble_is_found_by_its_check_and_nothing_else_is(snapshot: StatusSnapshot, check: str, message: str) -> None:
    told = found(snapshot)
    assert message in told.pop(check)
    assert told.keys() <= {"node plugins"}


def test_a_lease_that_somebody_annotates_was_not_renewed_and_says_nothing_about_its_holders_clock() -> None:
    """As `tessera uninstall` and the command that cancels it do, where the controller is gone."""
    old = lease(BEAT, "controller-1", ago_s=600)
    now = {"manager": "kubectl-annotate", "time": stamp(NOW), "fieldsV1": {"f:metadata": {"f:annotations": {}}}}
    old["metadata"]["managedFields"].append(now)
    snapshot = replace(SOUND, leases={**SOUND.leases, BEAT: old})
    assert "sent its last heartbeat 600 s ago" in found(snapshot)["controller"]
    assert "clocks" not in found(snapshot)


def test_a_class_of_another_driver_is_not_one_of_ours_by_the_api_group_of_its_parameters() -> None:
    parameters = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"}
    spec = {
        "selectors": [{"cel": {"expression": 'device.driver == "gpu.example.com"'}}],
        "config": [{"opaque": {"driver": "gpu.example.com", "parameters": parameters}}],
    }
    other = class_of("gpu-training", spec)
    assert found(replace(SOUND, classes=[other])) == {"classes": f"DeviceClasses none selects devices of {DRIVER}"}


def test_a_cluster_without_a_controller_is_sound_where_nobody_installed_one() -> None:
    alone = replace(SOUND, leases={}, plans={})
    assert found(alone) == {}
    assert "every node offers whatever fits" in as_text(run_checks(alone))


def test_a_gpu_that_is_unwell_is_named_as_the_command_that_brings_it_back_takes_it() -> None:
    taint = {"key": "gpu.tessera.dev/unhealthy", "value": "xid-48", "effect": "NoSchedule"}
    text = click.unstyle(as_text(run_checks(replace(SOUND, slices=[item(taints=[taint])]))))
    assert "node-a/gpu-0 is unhealthy=xid-48" in text
    assert "tessera uncordon node-a/gpu-0" in text


def test_a_node_whose_plugin_no_kubelet_registers_is_found_though_it_publishes_nothing() -> None:
    condition = NodeCondition("Unregistered", stamp(NOW), "the kubelet has not registered this plugin")
    status = msgspec.structs.replace(plan().status, conditions=(condition,))
    text = click.unstyle(
        as_text(run_checks(replace(SOUND, slices=[], plans={NODE: GpuNodePlan(PlanMetadata(NODE), status=status)})))
    )
    assert "node-a the kubelet has not registered this plugin (since 2026-11-22T12:00:00Z)" in text
    assert "--kubelet-dir is the kubelet's --root-dir" in text


def test_a_pod_that_ends_again_and_again_is_looked_for_in_its_log() -> None:
    crashing = {"restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    [finding] = result(replace(SOUND, pods=[pod("x", "False", crashing)]), "node plugins").findings
    assert finding.message == "is not ready on node-a: CrashLoopBackOff, restarted 4 times"
    assert finding.remedy == "read its last log: kubectl -n tessera logs pod-x --previous"
    pulling = {"restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    [finding] = result(replace(SOUND, pods=[pod("x", "False", pulling)]), "node plugins").findings
    assert finding.remedy == "kubectl -n tessera describe pod pod-x"


def test_the_controllers_log_is_looked_for_in_its_namespace() -> None:
    nobody = replace(SOUND, leases={"tessera-controller": lease("tessera-controller", None)})
    [finding] = result(nobody, "controller").findings
    assert "kubectl -n tessera logs deploy/tessera-controller" in finding.remedy


def test_numbers_agree_with_their_nouns() -> None:
    assert result(SOUND, "mode").summary == "1 node follows the controller, 0 standalone"
    alone = replace(SOUND, plans={}, leases={})
    assert result(alone, "mode").summary == "0 nodes follow the controller, 1 standalone"
    assert result(SOUND, "classes").summary == "1 DeviceClass"


def test_a_node_that_publishes_every_device_is_right_for_an_autoscaler() -> None:
    complete = replace(SOUND, autoscaler={}, plans={NODE: plan(PlanMode.COMPLETE)})
    [mode] = [result for result in run_checks(complete) if result.check == "mode"]
    assert mode.summary.endswith("1 node publishes every device")
    assert not mode.findings
