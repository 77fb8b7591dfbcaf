"""Why a claim gets no memory of a shared GPU, and what would help."""

from __future__ import annotations

from typing import Any

import pytest

from controller.explain.helpful_changes import changes_that_help
from controller.explain.reason import ReasonCode
from controller.explain.sources.no_free_device import Reasoning
from tests.support.queues import Situation, fleet_gpu, request
from tests.support.reasons import reasons_of
from tests.support.shared_gpus import BY_MPS, SHARED, memory, shared_gpu, shared_result


def reason(gpus: list[Any], *requests: dict[str, Any]) -> tuple[ReasonCode, str]:
    [found] = reasons_of(Situation(gpus).wants(*requests).queue)
    return found.code, found.sentence


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        pytest.param(memory("6Gi"), ["memory 6Gi of a shared GPU", "the claim asks 6"], id="one"),
        pytest.param(memory("5500Mi"), ["the claim asks 6 (5500Mi, rounded up to whole GiB)"], id="rounded up"),
        pytest.param(memory("6144Mi"), ["the claim asks 6"], id="another unit"),
        pytest.param(memory("6Gi", count=2), ["the claim asks 2 times 6"], id="several"),
        pytest.param(memory(), ["all memory of a shared GPU", "the claim asks 80"], id="no amount"),
    ],
)
def test_where_too_little_is_left_the_fullest_gpu_that_has_most_is_named(
    asked: dict[str, Any], parts: list[str]
) -> None:
    code, sentence = reason([shared_gpu("a", 0, 78), shared_gpu("a", 1, 70, 6)], asked)
    assert code is ReasonCode.HELD
    for part in ["gpu-1 of a has 4 GiB left of 80, the most of 2 shared GPUs", *parts]:
        assert part in sentence
    assert ("rounded up" in sentence) == ("5500Mi" in sentence)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        pytest.param(
            [shared_gpu("a", 0, 6)],
            memory("100Gi"),
            "memory 100Gi (rounded up to whole GiB): no shared GPU has so much; the largest has 80 GiB for claims",
            id="more than the largest",
        ),
        pytest.param(
            [shared_gpu("a", 0)],
            memory(f"{80 * 1024 + 1}Mi"),
            "memory 81921Mi (rounded up to whole GiB): no shared GPU has so much; the largest has 80 GiB for claims",
            id="more than the largest once it is rounded up",
        ),
        pytest.param(
            [fleet_gpu("a", 0)], memory("6Gi"), "no GPU is shared by memory (node plugin: --shared", id="none"
        ),
        pytest.param(
            [shared_gpu("a", 0)],
            request(selector=SHARED, capacity={"requests": {"gpu.tessera.dev/memory": "6Gi"}}),
            "write the name of the capacity as the slice has it, without a domain: memory",
            id="a name with a domain",
        ),
    ],
)
def test_what_no_shared_gpu_has_is_said_once_and_for_all(gpus: list[Any], asked: dict[str, Any], expected: str) -> None:
    code, sentence = reason(gpus, asked)
    assert code is ReasonCode.NOTHING_MATCHES
    assert expected in sentence


def test_where_mps_serves_no_more_claims_that_is_said_and_not_how_much_memory_is_left() -> None:
    full = shared_gpu("a", 1, *[1] * 48, strategy=BY_MPS)
    code, sentence = reason([full], memory("1Gi"))
    assert code is ReasonCode.HELD
    assert "gpu-1 of a has room for 48 claims by MPS, all of them taken" in sentence
    assert "GiB left" not in sentence
    assert not reasons_of(Situation([shared_gpu("a", 1, *[1] * 47, strategy=BY_MPS)]).wants(memory("1Gi")).queue)


def waiting(asked: str, **parts: str) -> Situation:
    """A GPU whose claims have ``parts``, and a claim that waits."""
    there = Situation([shared_gpu("a", 0, *(int(part.removesuffix("Gi")) for part in parts.values()))])
    for name, part in parts.items():
        status = {"allocation": {"devices": {"results": [shared_result("a", 0, part)]}}}
        there.claim(name, memory(part), status=status)
    return there.wants(memory(asked))


def test_the_fewest_claims_whose_end_helps_are_named_and_what_the_claim_could_have() -> None:
    queue = waiting("20Gi", small="6Gi", large="50Gi", third="20Gi").queue
    [found] = reasons_of(queue)
    assert "held by 3 claims: default/large, default/small, default/third" in found.sentence
    [pending] = queue.pending
    changes = {change.kind: change for change in changes_that_help(Reasoning(queue), pending)}
    assert changes["release"].claims in {("default/large",), ("default/third",)}
    assert changes["memory"].text == "request gpu asked for memory 4Gi instead of 20Gi"
    assert not reasons_of(waiting("4Gi", small="6Gi", large="50Gi", third="20Gi").queue)
