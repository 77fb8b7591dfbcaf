"""The rules by which the kill matrix judges a node can each be broken, and a node that is well breaks none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from driver.model.gpu_settings import GpuSharing, TimeSlice
from kubelet_plugin.checkpoint.records import ClaimRecord
from tests.support.invariants import Facts, leftovers, read_facts, violations
from tests.support.node import start_node

SMALL, BIG = "gpu-0-mig-1g10gb-6", "gpu-0-mig-3g40gb-0"


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    """One GPU with two prepared claims."""
    node = start_node(tmp_path, gpus="h100-1", sharing=GpuSharing(lambda _: 2))
    devices = {}
    for name, device in (("small", SMALL), ("big", BIG)):
        claim = node.api.allocate(name, device)
        node.preparer.prepare(claim)
        devices[claim.uid] = frozenset({device})
    names = frozenset({SMALL, BIG})
    return look(tmp_path, allocations=devices, answered=frozenset(devices), published=names)


def look(root: Path, **more: Any) -> Facts:
    return read_facts(root / "host", root / "state", root / "cdi", **more)


def without_partition(facts: Facts) -> Facts:
    [gpu] = copy.deepcopy(list(facts.gpus))
    del gpu["migDevices"][0]
    return replace(facts, gpus=[gpu])


def with_gpu(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, gpus=[{**facts.gpus[0], **changes}])


def with_record(facts: Facts, **changes: Any) -> Facts:
    first, *others = facts.records
    return replace(facts, records=[msgspec.structs.replace(first, **changes), *others])


def with_device(facts: Facts, **changes: Any) -> Facts:
    return with_record(facts, devices=(msgspec.structs.replace(facts.records[0].devices[0], **changes),))


def with_two_holders(facts: Facts) -> Facts:
    other: ClaimRecord = msgspec.structs.replace(facts.records[0], uid="another", name="another")
    return replace(facts, records=[*facts.records, other])


def with_edits(facts: Facts, **edits: Any) -> Facts:
    specs = copy.deepcopy(dict(facts.specs))
    next(iter(specs.values()))["devices"][0]["containerEdits"] |= edits
    return replace(facts, specs=specs)


BROKEN: dict[str, tuple[Callable[[Facts], Facts], str]] = {
    "a partition without a claim": (lambda f: replace(f, records=f.records[1:]), "belongs to 0 claims"),
    "a partition of two claims": (with_two_holders, "belongs to 2 claims"),
    "a spec without a claim": (lambda f: replace(f, records=f.records[1:]), "belongs to no recorded claim"),
    "memory given out twice": (with_two_holders, "overlap"),
    "a partition is gone": (without_partition, "there is no partition"),
    "a GPU is gone": (lambda f: replace(f, gpus=[]), "is gone"),
    "another partition": (lambda f: with_device(f, uuid="MIG-other"), "the hardware"),
    "another allocation": (lambda f: replace(f, allocations={}), "allocated is None"),
    "a spec is gone": (lambda f: replace(f, specs={}), "has no CDI spec"),
    "a spec with another UUID": (lambda f: with_edits(f, env=["TESSERA_DEVICE_X=MIG-other"]), "says"),
    "a spec with a node that is not there": (lambda f: with_edits(f, deviceNodes=[{"hostPath": "/no"}]), "no node /no"),
    "a held device is not published": (lambda f: replace(f, published=frozenset({SMALL})), "not in the node's slices"),
    "a claim is half prepared": (lambda f: with_record(f, phase="preparing"), "half prepared"),
    "a claim is half unprepared": (lambda f: with_record(f, releasing=True), "half prepared or unprepared"),
    "an answered claim is lost": (lambda f: replace(f, answered=frozenset({"lost"})), "answered and is not prepared"),
    "a file is half written": (lambda f: replace(f, temporary=[".x.tmp"]), "left .x.tmp"),
    "an interval nobody asks for": (lambda f: with_gpu(f, timeSlice="Short"), "ask for Default"),
    "a limit of a pod without a claim": (lambda f: replace(f, limits={("GPU-0", "a"): 1}), "limited to 1 bytes"),
    "a compute mode nobody needs": (lambda f: with_gpu(f, computeMode="EXCLUSIVE_PROCESS"), "not DEFAULT"),
    "a daemon nobody needs": (lambda f: replace(f, daemons=frozenset({"GPU-0"})), "MPS daemons serve ['GPU-0']"),
    "an interval is lost": (lambda f: with_device(f, time_slice=TimeSlice.LONG), "ask for Long"),
}


def test_a_node_that_is_well_breaks_no_rule(facts: Facts) -> None:
    assert violations(facts) == []


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule_can_be_broken(facts: Facts, what: str) -> None:
    damage, sentence = BROKEN[what]
    assert any(sentence in found for found in violations(damage(facts)))


def test_shares_of_one_gpu_may_overlap_but_one_share_is_given_once(tmp_path: Path) -> None:
    node = start_node(tmp_path, gpus="h100-1", sharing=GpuSharing(lambda _: 2))
    for number in (0, 1):
        node.preparer.prepare(node.api.allocate(f"share-{number}", f"gpu-0-share-{number}"))
    facts = look(tmp_path)
    assert violations(facts) == []
    assert any(
        "overlap" in found for found in violations(with_device(facts, device=facts.records[1].devices[0].device))
    )
    assert any("more than the GPU" in found for found in violations(with_device(facts, shares=1)))


def test_a_partition_that_somebody_else_made_needs_no_claim_and_may_stay(facts: Facts) -> None:
    foreign = frozenset(place for place, _ in facts.partitions())
    assert violations(replace(facts, records=[], specs={}, answered=frozenset(), foreign=foreign)) == []
    assert leftovers(replace(facts, records=[], specs={}, foreign=foreign)) == []


def test_everything_of_a_claim_counts_as_left_over(facts: Facts) -> None:
    assert len(leftovers(facts)) == 6
