"""What ``tessera status`` says of claims that wait, and of cordons."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from driver.model.plan import PlanMode
from tessera.status_picture import Picture
from tests.unit.test_status import NODE, NOW, SOUND, claim, found, item, plan, result, stamp


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


def test_claims_that_wait_for_what_never_comes_are_named_at_most_three() -> None:
    picture = waiting(
        *(wish(f"c{n}", "NothingMatches", message="no GPU has it") for n in range(5)), wish("d", "AllHeld")
    )
    findings = result(picture, "claims").findings
    assert [each.about for each in findings] == ["claim team/c0", "claim team/c1", "claim team/c2", "2 more"]
    assert findings[0].message.endswith("NothingMatches: no GPU has it")
    assert result(waiting(wish("c", "SelectorFails")), "claims").findings[0].remedy.endswith("tessera lint")


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
