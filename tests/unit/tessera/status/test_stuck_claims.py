"""Output of ``tessera status``: of claims that wait, and of cordons."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from controller.cluster.fleet import Fleet
from controller.eviction.failed_starts import FailedStart
from controller.explain.events import UNREADABLE, InvolvedObject, WrittenEvent
from controller.explain.helpful_changes import HelpfulChange
from controller.report.claim_explainer import OTHER_DRIVERS, Explanation
from controller.report.slice_states import capacity_of
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import (
    DeviceTaintRule,
    DeviceTaintRuleSpec,
    DeviceTaintSelector,
    GpuNodePlan,
    Metadata,
    PlanMetadata,
    Pod,
    Taint,
)
from driver.model.offer import FULL
from driver.model.plan import FailedClaim, FailureCause, PlanMode, PlanSpec, PlanStatus
from driver.model.reported_gpus import OWNED_SUFFIX, FaultKind, GpuReport, encode_inventory
from tessera.commands.status import as_text
from tessera.status.snapshot import StatusSnapshot
from tessera.status.stuck_claims import ADVICE
from tests.support.gpus import H100, gpu_of
from tests.support.queues import fleet_gpu
from tests.unit.tessera.status.test_checks import (
    NODE,
    NOW,
    SOUND,
    claim,
    found,
    plan,
    result,
    slice_of,
    stamp,
)

GPU = gpu_of()
SOUNDNESS = Path(__file__).parents[4] / "docs" / "soundness.md"


def claim_pending(name: str, code: str, *helps: str, permanent: bool = False, message: str = "why") -> Explanation:
    changes = tuple(HelpfulChange("kind", text) for text in helps)
    return Explanation(f"team/{name}", (), code, message, permanent=permanent, changes=changes)


def waiting(*claims: Explanation) -> StatusSnapshot:
    return replace(SOUND, pending=claims)


def test_claims_that_wait_for_what_others_hold_are_counted_and_no_finding() -> None:
    snapshot = waiting(claim_pending("a", "AllHeld"), claim_pending("b", "Fragmented"), claim_pending("c", "AllHeld"))
    assert found(snapshot) == {}
    assert result(snapshot, "claims").summary == "3 claims pending: 3 wait (2 AllHeld, 1 Fragmented)"
    assert result(SOUND, "claims").summary == "no claim is pending"


def test_free_memory_that_is_of_no_use_is_counted_and_no_finding() -> None:
    gpus = [fleet_gpu("n", number, H100, "mig-1g10gb-0") for number in range(2)]
    snapshot = replace(SOUND, capacity=capacity_of(Fleet.of(gpus), (), {FULL}))
    assert found(snapshot) == {}
    assert result(snapshot, "room").summary == "14 memory slices stranded, 1 whole GPU lost to scatter"
    moved = [replace(claim_pending(name, "Fragmented"), moves=f"moving {name}") for name in ("a", "b", "c", "d")]
    named = ", ".join(f"for claim team/{name} moving {name}" for name in "abc")
    assert result(waiting(*moved), "room").summary.endswith(f"lost to scatter, {named}")
    assert result(SOUND, "room").summary == "0 memory slices stranded, 0 whole GPUs lost to scatter"


def test_claims_that_do_not_resolve_by_themselves_are_counted_apart_and_named_at_most_three() -> None:
    lasting = [claim_pending(f"c{n}", "NothingMatches", permanent=True, message="no GPU has it") for n in range(5)]
    snapshot = waiting(*lasting, claim_pending("d", "AllHeld"), claim_pending("nic", OTHER_DRIVERS))
    findings = result(snapshot, "claims").findings
    assert [each.about for each in findings] == ["claim team/c0", "claim team/c1", "claim team/c2", "2 more"]
    assert findings[0].message.endswith("NothingMatches: no GPU has it")
    counts = "6 claims pending: 1 wait (1 AllHeld), 5 do not resolve by themselves (5 NothingMatches)"
    assert result(snapshot, "claims").summary == counts


def test_more_claims_are_of_the_same_kind_only_if_they_are() -> None:
    claims = [claim_pending(f"c{n}", "NoSuchClass" if n < 4 else "TooMany", permanent=True) for n in range(6)]
    last = result(waiting(*claims), "claims").findings[-1]
    assert (last.about, last.message) == ("3 more", "of other kinds, too (1 NoSuchClass, 2 TooMany)")


def test_the_remedy_is_a_change_that_helps_if_there_is_one_and_the_command_that_explains_the_claim() -> None:
    [tried] = result(waiting(claim_pending("c", "TooMany", "it asked for 2", permanent=True)), "claims").findings
    assert tried.remedy == "it would fit if it asked for 2; details: tessera why claim/c -n team"
    [general] = result(waiting(claim_pending("c", "SelectorFails", permanent=True)), "claims").findings
    assert general.remedy == "correct its selector: tessera lint; details: tessera why claim/c -n team"
    pod = msgspec.convert({"metadata": {"name": "p", "namespace": "team"}, "spec": {}, "status": {}}, Pod)
    [of_pod] = result(waiting(Explanation("", (pod,), "NoSuchClaim", "x", permanent=True)), "claims").findings
    assert of_pod.about == "pod team/p"
    assert of_pod.remedy.endswith("tessera why pod/p -n team")


def test_the_documentation_names_the_reasons_that_can_be_findings() -> None:
    row = next(line for line in SOUNDNESS.read_text().splitlines() if line.startswith("| `claims` |"))
    assert set(re.findall(r"`([A-Z]\w+)`", row)) == {*ADVICE, UNREADABLE}


def failed(*nodes: str, cause: FailureCause = FailureCause.GPU) -> StatusSnapshot:
    """One claim that can not be prepared on each of ``nodes``; with ten nodes in all."""
    starts = [FailedStart(node, FailedClaim(f"team/{node}", node, "since", cause)) for node in nodes]
    plans = {f"n{number}": plan() for number in range(10)}
    for start in starts:
        status = PlanStatus(3, mode=PlanMode.PLANNED, unprepared=(start.unprepared,))
        plans[start.node] = GpuNodePlan(PlanMetadata(start.node, generation=3), PlanSpec(), status)
    unprepared = [Explanation(start.unprepared.claim, (), "NotPrepared", "why", start=start) for start in starts]
    return replace(SOUND, plans=plans, unprepared=unprepared)


def test_claims_that_can_not_be_prepared_are_findings_with_what_to_do() -> None:
    assert (result(SOUND, "starts").summary, result(SOUND, "starts").findings) == ("no failed preparation", ())
    shown = result(failed("n0", cause=FailureCause.NODE), "starts")
    assert shown.summary == "1 claim can't be prepared (cause: 1 Node)"
    [finding] = shown.findings
    assert (finding.about, finding.message) == ("claim team/n0", "why")
    advice = "mend what the message names on node n0; until then kubectl cordon n0"
    assert finding.remedy == f"{advice}; details: tessera why claim/n0 -n team"


def test_it_is_a_finding_of_its_own_if_so_many_nodes_fail_that_nobody_is_evicted() -> None:
    nodes = [f"n{number}" for number in range(5)]
    *_, more, stopped = result(failed(*nodes), "starts").findings
    assert (more.about, more.message) == ("2 more", "can't be prepared")
    assert stopped.about == "5 of 10 nodes"
    assert "the cause may be everywhere, and no pod is evicted for it" in stopped.message
    assert [finding.about for finding in result(failed("n0"), "starts").findings] == ["claim team/n0"]
    of_claims = result(failed(*nodes, cause=FailureCause.OTHER), "starts").findings
    assert "5 of 10 nodes" not in [finding.about for finding in of_claims]


def test_claims_that_can_not_be_released_are_findings() -> None:
    assert result(SOUND, "releases").summary == "no failed release"
    unreleased = [Explanation(f"team/c{number}", (), "NotReleased", "IN_USE") for number in range(5)]
    shown = result(replace(SOUND, unreleased=unreleased), "releases")
    assert shown.summary == "5 claims can't be released"
    assert [finding.about for finding in shown.findings] == [
        "claim team/c0",
        "claim team/c1",
        "claim team/c2",
        "2 more",
    ]
    assert shown.findings[0].remedy.endswith("details: tessera why claim/c0 -n team")


def test_an_object_that_the_controller_cannot_read_is_a_finding() -> None:
    about = InvolvedObject("ResourceClaim", "odd", "team", "u")
    event = WrittenEvent(about, UNREADABLE, "it can't be read: x", stamp(NOW))
    assert found(replace(SOUND, events=[event])) == {"claims": "ResourceClaim team/odd it can't be read: x"}


def cordoned(reason: str, *taints: str, offered: int = 0) -> StatusSnapshot:
    """A cordoned GPU, and as many others that are offered."""
    keys = [{"key": f"gpu.tessera.dev/{key}", "effect": "NoSchedule"} for key in taints]
    devices = [{"name": "gpu-0", "taints": keys, "attributes": {"uuid": {"string": "GPU-0"}}}]
    devices += [{"name": f"gpu-{n}", "attributes": {"uuid": {"string": f"GPU-{n}"}}} for n in range(1, offered + 1)]
    slices = [slice_of(devices)]
    plans = {NODE: plan(PlanMode.PLANNED, 3, 3, f"GPU-0 {reason}".rstrip())}
    return replace(SOUND, slices=slices, claims=[], plans=plans)


def test_a_cordon_is_shown_with_its_reason_and_is_no_finding() -> None:
    snapshot = cordoned("fan on Friday", "cordoned", offered=1)
    assert found(snapshot) == {}
    assert result(snapshot, "health").summary == "0 unhealthy, 1 cordoned: node-a/gpu-0 (fan on Friday)"


def test_a_reason_of_a_cordon_does_not_reach_the_terminal_as_commands() -> None:
    text = as_text([result(cordoned("fan\x1b[2J", "cordoned", offered=1), "health")])
    assert "node-a/gpu-0 (fan?[2J)" in text


def test_a_cordon_is_no_finding_while_others_have_the_other_gpus() -> None:
    """Nothing is offered, but not for the cordon."""
    assert "health" not in found(replace(cordoned("", "cordoned", offered=1), claims=[claim("gpu-1")]))


def test_a_cordon_that_its_node_does_not_follow_yet_is_no_finding() -> None:
    """Its devices are still offered."""
    assert found(cordoned("fan")) == {}


def test_it_is_a_finding_that_every_gpu_is_cordoned() -> None:
    assert found(cordoned("", "cordoned")) == {
        "health": "all GPUs are cordoned or unhealthy: nothing is offered to new pods"
    }


def test_a_gpu_that_is_unwell_and_in_no_slice_is_found_by_its_plan() -> None:
    """As soon as a controller has taken its offers back."""
    idle = replace(SOUND, slices=[nothing_published()], claims=[])
    faults = (f"{GPU.uuid} 2026-11-22T11:00:00Z xid-48: XID 48",)
    ill = told_by_plan(GpuReport(GPU, 3, fault="xid-48: XID 48"), *faults)
    assert found(replace(idle, plans=ill)) == {"health": "node-a/gpu-3 is unhealthy=xid-48: no new pods get it"}
    partly = told_by_plan(GpuReport(GPU, 3), f"{GPU.uuid} 2026-11-22T11:00:00Z xid-94: contained")
    assert found(replace(idle, plans=partly)) == {"health": "node-a/gpu-3 is unhealthy=xid-94: no new pods get it"}
    unnamed = told_by_plan(GpuReport(GPU, 3), f"{GPU.uuid} 2026-11-22T11:00:00Z")
    assert found(replace(idle, plans=unnamed)) == {"health": "node-a/gpu-3 is unhealthy=unknown: no new pods get it"}
    lost = told_by_plan(GpuReport(GPU, 3, fault="NVML says: GPU is lost"))
    assert "node-a/gpu-3 is unavailable: NVML says: GPU is lost" in found(replace(idle, plans=lost))["health"]
    assert found(replace(SOUND, slices=[], claims=[], plans=ill)).keys() == {"node plugins"}


def test_a_gpu_that_is_cordoned_or_a_neighbours_is_not_unwell() -> None:
    idle = replace(SOUND, slices=[nothing_published()], claims=[])
    for fault in ("cordoned: fan", f"a device plugin{OWNED_SUFFIX}"):
        assert result(replace(idle, plans=told_by_plan(GpuReport(GPU, 3, fault=fault))), "health").findings == ()


def test_partitions_that_tessera_did_not_create_are_a_finding_unless_they_are_offered() -> None:
    idle = replace(SOUND, slices=[nothing_published()], claims=[])
    cut = told_by_plan(GpuReport(GPU, 0, foreign=0b11110000))
    message = "has partitions that Tessera did not create on 1 of 1 GPU (gpu-0): what they occupy is not offered"
    assert found(replace(idle, plans=cut)) == {"health": f"{NODE} {message}"}
    offered = slice_of([{"name": "gpu-0-mig-3g40gb-4"}])
    assert found(replace(idle, plans=cut, slices=[offered])) == {}
    owned = told_by_plan(
        GpuReport(GPU, 0, foreign=1, fault=f"mig-manager{OWNED_SUFFIX}", fault_kind=FaultKind.RESERVED)
    )
    assert "health" not in found(replace(idle, plans=owned))


@pytest.mark.parametrize(
    ("effect", "device", "is_found"),
    [("NoSchedule", None, True), ("NoExecute", "gpu-0", True), ("None", None, False), ("NoSchedule", "gpu-7", False)],
)
def test_a_rule_that_taints_whatever_a_node_publishes_is_a_finding(
    effect: str, device: str | None, is_found: bool
) -> None:
    taint = Taint("maintenance", effect)
    rule = DeviceTaintRule(
        Metadata(name="night"), DeviceTaintRuleSpec(taint, DeviceTaintSelector("gpu.tessera.dev", None, device))
    )
    tainted = replace(SOUND, claims=[], taint_rules=[rule])
    message = f"DeviceTaintRule night taints all devices of {NODE}: only claims that tolerate it get one"
    assert found(tainted) == ({"health": message} if is_found else {})
    assert ("1 of them tainted" in result(tainted, "devices").summary) is is_found


@pytest.mark.parametrize(("total", "is_found"), [("1", True), ("9", False)])
def test_gpus_that_the_gpu_operators_device_plugin_offers_too_are_a_finding(total: str, is_found: bool) -> None:
    node = {"metadata": {"name": NODE, "labels": {"nvidia.com/gpu.count": total}}}
    plugged = {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    snapshot = replace(SOUND, nodes=[plugged], slices=[nothing_published()], claims=[])
    findings = result(replace(snapshot, plans=told_by_plan(GpuReport(GPU, 0))), "neighbours").findings
    assert [finding.message.endswith("1 GPU is offered twice") for finding in findings] == [True] * is_found


def nothing_published() -> ResourceSlice:
    return slice_of([])


def told_by_plan(state: GpuReport, *faults: str) -> dict[str, GpuNodePlan]:
    status = PlanStatus(3, mode=PlanMode.PLANNED, inventory=encode_inventory([state]), faults=faults)
    return {NODE: GpuNodePlan(PlanMetadata(NODE, generation=3), PlanSpec(), status)}
