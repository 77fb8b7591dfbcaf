"""What ``tessera status`` says of claims that wait, and of cordons."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from driver.kube.plans import GpuNodePlan, PlanMetadata
from driver.model.plan import PlanMode, PlanSpec, PlanStatus
from driver.model.plan_gpus import GpuState, described
from kubelet_plugin.neighbours import OWNED
from tessera.status_claims import LASTING
from tessera.status_picture import Picture
from tests.support.gpus import gpu_of
from tests.unit.test_status import NODE, NOW, SOUND, claim, found, item, plan, result, stamp

GPU = gpu_of()
SOUNDNESS = Path(__file__).parents[2] / "docs" / "soundness.md"


def wish(name: str, code: str, ago_s: float = 20.0, message: str = "why") -> tuple[dict[str, Any], dict[str, Any]]:
    """A claim that waits, and what the controller said of it."""
    pending = {"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}}
    at = stamp(NOW - timedelta(seconds=ago_s))
    event = {"involvedObject": {"uid": f"uid-{name}"}, "reason": code, "message": message, "lastTimestamp": at}
    return pending, event


def waiting(*wishes: tuple[dict[str, Any], dict[str, Any]]) -> Picture:
    return replace(SOUND, pending=[each for each, _ in wishes], events=[each for _, each in wishes])


def test_claims_that_wait_for_what_others_hold_are_no_finding() -> None:
    picture = waiting(wish("a", "AllHeld"), wish("b", "Fragmented"), wish("c", "AllHeld"))
    assert found(picture) == {}
    told = "3 wait: 2 AllHeld, 1 Fragmented (kubectl describe resourceclaim -n team)"
    assert result(picture, "claims").summary == told


def test_without_a_controller_nobody_says_that_no_claim_waits() -> None:
    assert result(SOUND, "claims").summary == "the controller tells of none that waits"
    assert result(replace(SOUND, leases={}), "claims").summary == "nobody tells why any waits"


def test_claims_that_wait_for_what_never_comes_are_named_at_most_three() -> None:
    picture = waiting(
        *(wish(f"c{n}", "NothingMatches", message="no GPU has it") for n in range(5)), wish("d", "AllHeld")
    )
    findings = result(picture, "claims").findings
    assert [each.about for each in findings] == ["claim team/c0", "claim team/c1", "claim team/c2", "2 more"]
    assert findings[0].message.endswith("NothingMatches: no GPU has it")
    assert result(waiting(wish("c", "SelectorFails")), "claims").findings[0].remedy.endswith("tessera lint")


def test_the_documentation_names_the_reasons_that_are_findings() -> None:
    row = next(line for line in SOUNDNESS.read_text().splitlines() if line.startswith("| `claims` |"))
    assert set(re.findall(r"`([A-Z]\w+)`", row)) == set(LASTING)


def test_only_the_last_word_on_a_claim_counts_and_none_on_one_that_no_longer_waits() -> None:
    claim, old = wish("a", "NothingMatches", ago_s=120)
    _, new = wish("a", "AllHeld", ago_s=10)
    assert found(replace(SOUND, pending=[claim], events=[new, old])) == {}
    assert found(replace(SOUND, pending=[], events=[old])) == {}
    assert result(waiting(wish("a", "NothingMatches", ago_s=1200)), "claims").findings == ()


def cordoned(reason: str, *taints: str, offered: int = 0) -> Picture:
    """A cordoned GPU, and as many others that are offered."""
    keys = [{"key": f"gpu.tessera.dev/{key}", "effect": "NoSchedule"} for key in taints]
    devices = [{"name": "gpu-0", "taints": keys, "attributes": {"uuid": {"string": "GPU-0"}}}]
    devices += [{"name": f"gpu-{n}", "attributes": {"uuid": {"string": f"GPU-{n}"}}} for n in range(1, offered + 1)]
    slices = [{"spec": {**item()["spec"], "devices": devices}}]
    plans = {NODE: plan(PlanMode.PLANNED, 3, 3, f"GPU-0 {reason}".rstrip())}
    return replace(SOUND, slices=slices, claims=[], plans=plans)


def test_a_cordon_is_shown_with_its_reason_and_is_no_finding() -> None:
    picture = cordoned("fan on Friday", "cordoned", offered=1)
    assert found(picture) == {}
    assert result(picture, "health").summary == "0 unwell, 1 cordoned: node-a/gpu-0 (fan on Friday)"


def test_a_cordon_is_no_finding_while_others_have_the_other_gpus() -> None:
    """Nothing is offered, but not for the cordon."""
    assert "health" not in found(replace(cordoned("", "cordoned", offered=1), claims=[claim("gpu-1")]))


def test_a_cordon_that_its_node_does_not_follow_yet_is_no_finding() -> None:
    """Its devices are still offered."""
    assert found(cordoned("fan")) == {}


def test_it_is_a_finding_that_every_gpu_is_cordoned() -> None:
    assert found(cordoned("", "cordoned")) == {
        "health": "all GPUs are cordoned or unwell: nothing is offered to new pods"
    }


def test_a_gpu_that_is_unwell_and_in_no_slice_is_found_by_its_plan() -> None:
    """As soon as a controller has taken its offers back."""
    idle = replace(SOUND, slices=[nothing_published()], claims=[])
    faults = (f"{GPU.uuid} 2026-11-22T11:00:00Z xid-48: XID 48",)
    ill = told_by_plan(GpuState(GPU, 3, fault="xid-48: XID 48"), *faults)
    assert found(replace(idle, plans=ill)) == {"health": "node-a/gpu-3 is unhealthy=xid-48: no new pods get it"}
    partly = told_by_plan(GpuState(GPU, 3), f"{GPU.uuid} 2026-11-22T11:00:00Z xid-94: contained")
    assert found(replace(idle, plans=partly)) == {"health": "node-a/gpu-3 is unhealthy=xid-94: no new pods get it"}
    lost = told_by_plan(GpuState(GPU, 3, fault="NVML says: GPU is lost"))
    assert "node-a/gpu-3 is unavailable: NVML says: GPU is lost" in found(replace(idle, plans=lost))["health"]
    assert found(replace(SOUND, slices=[], claims=[], plans=ill)).keys() == {"node plugins"}


def test_a_gpu_that_is_cordoned_or_a_neighbours_is_not_unwell() -> None:
    idle = replace(SOUND, slices=[nothing_published()], claims=[])
    for fault in ("cordoned: fan", f"a device plugin{OWNED}"):
        assert result(replace(idle, plans=told_by_plan(GpuState(GPU, 3, fault=fault))), "health").findings == ()


def nothing_published() -> dict[str, Any]:
    return {"spec": {**item()["spec"], "devices": []}}


def told_by_plan(state: GpuState, *faults: str) -> dict[str, GpuNodePlan]:
    status = PlanStatus(3, mode=PlanMode.PLANNED, inventory=described([state]), faults=faults)
    return {NODE: GpuNodePlan(PlanMetadata(NODE, generation=3), PlanSpec(), status)}
