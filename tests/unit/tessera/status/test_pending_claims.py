"""Output of ``tessera status``: of claims that wait, and of cordons."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.explain.events import UNREADABLE
from driver.kube.types import Claim, GpuNodePlan, PlanMetadata, ResourceSlice
from driver.model.plan import GpuReport, PlanMode, PlanSpec, PlanStatus, described
from kubelet_plugin.coexistence.other_drivers import OWNED
from tessera.commands.status import as_text
from tessera.status.pending_claims import PERMANENT, PERMANENT_IF_FREE, READ_EVENTS
from tessera.status.snapshot import StatusSnapshot
from tests.support.gpus import gpu_of
from tests.unit.tessera.status.test_checks import (
    NODE,
    NOW,
    SOUND,
    claim,
    class_of,
    found,
    plan,
    result,
    slice_of,
    stamp,
)

GPU = gpu_of()
SOUNDNESS = Path(__file__).parents[4] / "docs" / "soundness.md"


def wish(
    name: str, code: str, ago_s: float = 20.0, message: str = "why", device_class: str = ""
) -> tuple[Claim, dict[str, Any]]:
    """A claim that waits, and what the controller said of it."""
    requests = [{"name": "r", "exactly": {"deviceClassName": device_class}}] if device_class else []
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
    pending = msgspec.convert({"metadata": metadata, "spec": {"devices": {"requests": requests}}}, Claim)
    at = stamp(NOW - timedelta(seconds=ago_s))
    event = {"involvedObject": {"uid": f"uid-{name}"}, "reason": code, "message": message, "lastTimestamp": at}
    return pending, event


def waiting(*wishes: tuple[Claim, dict[str, Any]]) -> StatusSnapshot:
    return replace(SOUND, pending=[each for each, _ in wishes], events=[each for _, each in wishes])


def test_claims_that_wait_for_what_others_hold_are_no_finding() -> None:
    snapshot = waiting(wish("a", "AllHeld"), wish("b", "Fragmented"), wish("c", "AllHeld"))
    assert found(snapshot) == {}
    told = f"3 pending: 2 AllHeld, 1 Fragmented ({READ_EVENTS})"
    assert result(snapshot, "claims").summary == told


def test_without_a_controller_nobody_says_that_no_claim_waits() -> None:
    assert result(SOUND, "claims").summary == "the controller reports no pending claim"
    assert result(replace(SOUND, leases={}), "claims").summary == "no controller reports why claims are pending"


def test_claims_that_wait_for_what_never_comes_are_named_at_most_three() -> None:
    snapshot = waiting(
        *(wish(f"c{n}", "NothingMatches", message="no GPU has it") for n in range(5)), wish("d", "AllHeld")
    )
    findings = result(snapshot, "claims").findings
    assert [each.about for each in findings] == ["claim team/c0", "claim team/c1", "claim team/c2", "2 more"]
    assert findings[0].message.endswith("NothingMatches: no GPU has it")
    assert result(waiting(wish("c", "SelectorFails")), "claims").findings[0].remedy.endswith("tessera lint")


def test_the_documentation_names_the_reasons_that_are_findings() -> None:
    row = next(line for line in SOUNDNESS.read_text().splitlines() if line.startswith("| `claims` |"))
    assert set(re.findall(r"`([A-Z]\w+)`", row)) == {*PERMANENT, *PERMANENT_IF_FREE, UNREADABLE}


def test_only_the_last_word_on_a_claim_counts_and_none_on_one_that_no_longer_waits() -> None:
    claim, old = wish("a", "NothingMatches", ago_s=120)
    _, new = wish("a", "AllHeld", ago_s=10)
    assert found(replace(SOUND, pending=[claim], events=[new, old])) == {}
    assert found(replace(SOUND, pending=[], events=[old])) == {}
    assert result(waiting(wish("a", "NothingMatches", ago_s=1200)), "claims").findings == ()


def test_a_reason_that_holds_even_if_nothing_were_held_is_a_finding_and_one_of_the_moment_is_none() -> None:
    for code, remedy in PERMANENT_IF_FREE.items():
        lasting = waiting(wish("c", code, message="even if nothing were held no node has devices for it"))
        assert [each.remedy for each in result(lasting, "claims").findings] == [remedy]
        assert found(waiting(wish("c", code, message="at present no node has devices for it"))) == {}


def refused(claim: str, ago_s: float) -> dict[str, Any]:
    """A pod that the scheduler has refused for that long."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "lastTransitionTime": stamp(NOW - timedelta(seconds=ago_s)),
    }
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}
    return {"metadata": {"name": "pod", "namespace": "team"}, "spec": spec, "status": {"conditions": [condition]}}


@pytest.mark.parametrize("device_class", ["gpu-training", "any-nic"])
@pytest.mark.parametrize("ago_s", [30, 90])
@pytest.mark.parametrize("led", [True, False])
def test_a_claim_of_ours_that_waits_for_a_minute_without_a_reason_is_a_finding(
    device_class: str, ago_s: float, led: bool
) -> None:
    pending, _ = wish("a", "AllHeld", device_class=device_class)
    nic = class_of("any-nic", {"selectors": [{"cel": {"expression": "nic.example.com"}}]})
    snapshot = replace(
        SOUND,
        classes=[*SOUND.classes, nic],
        pending=[pending],
        pending_pods=[refused("a", ago_s)],
        leases=SOUND.leases if led else {},
    )
    findings = result(snapshot, "claims").findings
    if device_class == "any-nic" or ago_s < 60:
        assert findings == ()
    else:
        (finding,) = findings
        assert (finding.about, finding.message) == ("claim team/a", "is pending, and no controller reports why")
        assert ("start a controller" in finding.remedy) is not led


def test_an_object_that_the_controller_cannot_read_is_a_finding() -> None:
    about = {"kind": "ResourceClaim", "namespace": "team", "name": "odd", "uid": "u"}
    event = {
        "involvedObject": about,
        "reason": UNREADABLE,
        "message": "it can't be read: x",
        "lastTimestamp": stamp(NOW),
    }
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
    for fault in ("cordoned: fan", f"a device plugin{OWNED}"):
        assert result(replace(idle, plans=told_by_plan(GpuReport(GPU, 3, fault=fault))), "health").findings == ()


def nothing_published() -> ResourceSlice:
    return slice_of([])


def told_by_plan(state: GpuReport, *faults: str) -> dict[str, GpuNodePlan]:
    status = PlanStatus(3, mode=PlanMode.PLANNED, inventory=described([state]), faults=faults)
    return {NODE: GpuNodePlan(PlanMetadata(NODE, generation=3), PlanSpec(), status)}
