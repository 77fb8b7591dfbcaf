"""Why nothing could satisfy a claim: what its owner reads, and which of the many reasons it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controller.cluster.node_dedication import UseLabel
from controller.explain.pipeline import NOT_EXAMINED, ReasonFinder
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Situation as Now
from driver.kube.events import shortened
from driver.model.gpu import MigMode
from driver.model.offer import DeviceKind
from driver.model.reported_gpus import FaultKind
from tests.support.clock import FakeClock
from tests.support.gpus import H100
from tests.support.queues import (
    DRIVER,
    FULL,
    SHARE,
    Situation,
    first_available,
    fleet_gpu,
    node_of,
    profile,
    request,
    selected_by,
)
from tests.support.reasons import reasons_of

A100 = "NVIDIA A100-SXM4-80GB"
L4 = "NVIDIA L4"
CLIQUE = "gpu.tessera.dev/nvlinkClique"


def reason(there: Situation) -> ClaimReason:
    [found] = reasons_of(there.queue)
    return found


def told(there: Situation, code: ReasonCode, *parts: str) -> str:
    """The reason's sentence, which has these parts."""
    found = reason(there)
    assert found.code is code, found.sentence
    for part in parts:
        assert part in found.sentence
    return found.sentence


def test_a_claim_that_could_be_met_has_no_reason() -> None:
    assert reasons_of(Situation(node_of("a")).wants(request(selector=FULL)).queue) == []


def test_no_such_class_names_the_nearest() -> None:
    there = Situation(node_of("a"))
    there.device_class("gpu-training", FULL)
    told(there.wants(request("gpu-trainin")), ReasonCode.NO_SUCH_CLASS, "'gpu-trainin'", "did you mean gpu-training?")


def test_a_selector_that_does_not_compile_is_shown_with_the_place() -> None:
    there = Situation(node_of("a")).wants(request(selector=f"{FULL} && devise.driver"))
    told(there, ReasonCode.SELECTOR_REFUSED, "devise", "at character")


def test_a_selector_that_calls_a_function_tessera_does_not_evaluate_names_the_function_and_holds_up_no_other() -> None:
    there = Situation(node_of("a")).wants(request(selector=f'{FULL} && duration("1h") == duration("60m")'))
    told(there, ReasonCode.SELECTOR_REFUSED, "duration() is not evaluated by Tessera", "at character")
    there.wants(request(selector=FULL), name="second")
    assert [each.code for each in reasons_of(there.queue)] == [ReasonCode.SELECTOR_REFUSED]


def test_a_selector_that_fails_names_expression_device_and_error() -> None:
    selector = 'device.attributes["gpu.tessera.dev"].nvlinkClique == "x"'
    there = Situation(node_of("a")).wants(request(selector=selector))
    told(there, ReasonCode.SELECTOR_FAILS, selector, "gpu-0", "no such key")


def test_a_profile_that_no_gpu_has_is_answered_with_those_there_are() -> None:
    there = Situation(node_of("a")).wants(request(selector=profile("1g.99gb")))
    told(there, ReasonCode.NOTHING_MATCHES, "profile 1g.99gb: no GPU has it", "there are 1g.10gb, 1g.10gb+me, 1g.20gb")


def test_a_selector_that_matches_nothing_is_shown_as_it_is() -> None:
    told(
        Situation(node_of("a")).wants(request(selector=f"{FULL} && 1 > 2")),
        ReasonCode.NOTHING_MATCHES,
        "1 > 2",
        "2 GPUs",
    )


def test_where_no_gpu_is_divided_who_wants_a_share_is_told_how_to_divide_them() -> None:
    there = Situation(node_of("a"))
    there.device_class("gpu-dev", SHARE)
    told(
        there.wants(request("gpu-dev")),
        ReasonCode.NOTHING_MATCHES,
        "request gpu: no GPU is divided into shares (",
        "nodePlugin.extraArgs={--shares=all=10}",
    )
    assert "device." not in reason(there).sentence


@pytest.mark.parametrize("selector", [selected_by('type == "mig"'), profile("1g.10gb")])
def test_where_no_gpu_can_be_cut_who_wants_a_partition_is_told_which_gpus_there_are(selector: str) -> None:
    there = Situation(node_of("a", product=L4)).wants(request(selector=selector))
    told(there, ReasonCode.NOTHING_MATCHES, "no GPU can be cut into MIG partitions", "NVIDIA L4")
    assert "device." not in reason(there).sentence


def test_a_type_that_no_device_can_have_is_answered_with_those_there_are() -> None:
    there = Situation(node_of("a")).wants(request(selector=selected_by('type == "shares"')))
    told(there, ReasonCode.NOTHING_MATCHES, "type shares: no GPU has it; there are gpu, mig")


def test_devices_on_other_nodes_only_are_named_by_their_nodes() -> None:
    there = Situation([*node_of("a"), *node_of("b", product=A100)])
    there.node("b", {"pool": "b"})
    there.wants(request(selector=selected_by(f'productName == "{H100}"')), nodeSelector={"pool": "b"})
    assert told(there, ReasonCode.OTHER_NODES).endswith("a lacks the label pool=b of the pod's nodeSelector")


def test_several_nodes_that_are_excluded_alike_are_named_together() -> None:
    there = Situation([*node_of("a"), *node_of("b"), *node_of("c")]).wants(
        request(selector=FULL), nodeSelector={"pool": "x"}
    )
    for name in "abc":
        there.node(name)
    told(there, ReasonCode.NO_NODE, ": each of a, b, c lacks the label pool=x of the pod's nodeSelector")


def test_a_pod_without_any_node_is_told_so() -> None:
    there = Situation(node_of("a")).wants(request(selector=FULL), nodeSelector={"no": "where"})
    told(there, ReasonCode.NO_NODE, "a lacks the label no=where")


def test_more_devices_than_any_node_has() -> None:
    there = Situation([*node_of("a"), *node_of("b", gpus=3)]).wants(request(selector=FULL, count=4))
    told(there, ReasonCode.TOO_MANY, "asks for 4", "no node has more than 3")


def test_more_devices_than_a_claim_can_have() -> None:
    there = Situation(node_of("a", gpus=8)).wants(request(selector=profile("1g.10gb"), count=40))
    told(there, ReasonCode.TOO_MANY, "asks for 40 devices")


def test_held_says_how_many_and_by_which_claims() -> None:
    there = Situation(node_of("a", "full"))
    there.holding("one", "a", "gpu-0").holding("two", "a", "gpu-1").wants(request(selector=FULL))
    told(
        there, ReasonCode.HELD, "needs a full GPU: none is free, of 2 NVIDIA H100", "2 claims: default/one, default/two"
    )


def test_two_gpus_where_one_is_free_says_that_one_is_free() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "full"), fleet_gpu("a", 1)]).holding("one", "a", "gpu-0")
    there.wants(request(selector=FULL, count=2))
    told(there, ReasonCode.HELD, "needs 2 full GPUs of one node: at most 1 is free on one node (a)", "default/one")


def test_too_little_that_is_free_is_not_called_fragmentation() -> None:
    there = Situation(node_of("a", "mig-1g10gb-0", gpus=1)).holding("one", "a", "gpu-0-mig-1g10gb-0")
    told(there.wants(request(selector=FULL)), ReasonCode.HELD, "held by 1 claim: default/one")
    assert [entry.state.free for entry in there.gpus] == [7]


def test_of_a_mixed_fleet_every_product_is_counted_by_its_own_slices() -> None:
    """A GPU without MIG has one slice: that 7 slices are free elsewhere is no fragmentation of it."""
    there = Situation([fleet_gpu("a", 0, H100, "mig-1g10gb-0"), *node_of("b", "full", product=L4)])
    there.holding("one", "a", "gpu-0-mig-1g10gb-0").holding("two", "b", "gpu-0", "gpu-1")
    there.wants(request(selector=FULL))
    told(there, ReasonCode.HELD, "none is free, of 1 NVIDIA H100 80GB HBM3, 2 NVIDIA L4 that have it", "2 claims")


def test_the_eighth_small_partition_meets_the_limit_of_the_gpu() -> None:
    there = Situation([fleet_gpu("a", 0, H100, *(f"mig-1g10gb-{n}" for n in range(7)))])
    there.wants(request(selector=profile("1g.10gb")))
    told(there, ReasonCode.LIMIT, "a GPU can have at most 7 of 1g.10gb", "gpu-0 of a has as many")


CUT = ("mig-1g10gb-0", "mig-1g10gb-2", "mig-1g10gb-4", "mig-1g10gb-6")


def test_fragmentation_says_how_much_is_free_and_where() -> None:
    there = Situation([*node_of("a", *CUT), fleet_gpu("b", 0, H100, "mig-7g80gb-0")])
    told(
        there.wants(request(selector=profile("3g.40gb"))),
        ReasonCode.FRAGMENTED,
        "8 memory slices are free on node a, at most 4 on one GPU (gpu-0)",
        "no moves of claims within a node were found that would help",
    )


def test_fragmentation_names_the_claim_whose_move_makes_room() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "mig-1g10gb-1"), fleet_gpu("a", 1, H100, "mig-4g40gb-0")])
    there.holding("small", "a", "gpu-0-mig-1g10gb-1").holding("large", "a", "gpu-1-mig-4g40gb-0")
    there.wants(request(selector=FULL))
    told(there, ReasonCode.FRAGMENTED, "on node a moving default/small (1g.10gb) from gpu-0 to gpu-1 would make room")


def test_fragmentation_names_the_claim_whose_move_within_its_gpu_makes_room() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "mig-1g10gb-0", "mig-1g10gb-4")])
    there.holding("first", "a", "gpu-0-mig-1g10gb-0").holding("second", "a", "gpu-0-mig-1g10gb-4")
    there.wants(request(selector=profile("3g.40gb")))
    told(there, ReasonCode.FRAGMENTED, "(1g.10gb) to another place of gpu-0 would make room")


@pytest.mark.parametrize(
    ("node", "code", "text"),
    [
        pytest.param(
            {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]},
            ReasonCode.NOT_READY,
            "b is not ready",
            id="not ready",
        ),
        pytest.param({"unschedulable": True}, ReasonCode.CLOSED, "b is cordoned", id="cordoned"),
        pytest.param(
            {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]},
            ReasonCode.OTHER_NODES,
            "b has the taint dedicated=ml:NoSchedule",
            id="taint",
        ),
    ],
)
def test_a_node_that_would_do_is_named_with_what_excludes_it(node: dict[str, Any], code: ReasonCode, text: str) -> None:
    there = Situation([*node_of("a", gpus=1), *node_of("b", gpus=4)])
    there.node("b", **node)
    told(there.wants(request(selector=FULL, count=3)), code, "no node where its pod can run has more than 1", text)


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (
            'memory.compareTo(quantity("100Gi")) >= 0',
            "of at least 100Gi: no device has it; the largest is 81559Mi",
        ),
        ('memory.compareTo(quantity("81559Mi")) > 0', "memory of more than 81559Mi: no device has it"),
        ('multiprocessors.compareTo(quantity("1k")) >= 0', "the largest is 132 (NVIDIA H100 80GB HBM3)"),
        ('memory.compareTo(quantity("1Ki")) <= 0', "no device of the cluster's 2 GPUs is selected by"),
    ],
)
def test_the_largest_capacity_is_named_where_more_is_asked_for(condition: str, text: str) -> None:
    there = Situation(node_of("a"))
    told(there.wants(request(selector=f'device.capacity["{DRIVER}"].{condition}')), ReasonCode.NOTHING_MATCHES, text)


def test_the_largest_partition_counts_where_partitions_are_asked_for() -> None:
    there = Situation(node_of("a"))
    larger = f'device.capacity["{DRIVER}"].memory.compareTo(quantity("81500Mi")) >= 0'
    partition = selected_by('type == "mig"')
    there.wants(request(selector=f"{partition} && {larger}"))
    told(there, ReasonCode.NOTHING_MATCHES, "memory of at least 81500Mi: no device has it")


def test_a_product_is_suggested_by_its_beginning() -> None:
    there = Situation([*node_of("a"), *node_of("b", product=L4)])
    there.wants(request(selector=selected_by('productName == "NVIDIA H100"')))
    told(there, ReasonCode.NOTHING_MATCHES, "did you mean NVIDIA H100 80GB HBM3?")


def test_the_largest_clique_is_named() -> None:
    gpus = [fleet_gpu("a", n, facts={"nvlink_clique": f"clique-{n // 2}"}) for n in range(4)]
    there = Situation(gpus).wants(request(selector=FULL, count=3), constraints=[{"matchAttribute": CLIQUE}])
    told(there, ReasonCode.CONSTRAINT, f"it asks for 3, and at most 2 share a value of {CLIQUE}")


def test_a_selector_that_fails_on_some_gpus_says_so_while_the_others_are_held() -> None:
    linked = fleet_gpu("a", 0, H100, "full", facts={"nvlink_clique": "clique-0"})
    there = Situation([linked, *node_of("b", product=L4)]).holding("one", "a", "gpu-0")
    there.wants(request(selector=selected_by('type == "gpu"', 'nvlinkClique == "clique-0"')))
    told(there, ReasonCode.HELD, "its selector fails on devices like gpu-0 of NVIDIA L4 (no such key: nvlinkClique)")


def test_shares_are_held_while_partitions_cut_the_gpu() -> None:
    there = Situation(node_of("a", "mig-7g80gb-0", shares=4)).wants(request(selector=SHARE))
    told(there, ReasonCode.HELD)


ASKED = "start its node plugin with --mig-gpus=a/0 (nodePlugin.extraArgs={--mig-gpus=a/0})"
RESET = "nvidia-smi --gpu-reset -i a/0"
UNASKED = "name it no more in its node plugin's --mig-gpus, then nvidia-smi -i a/0 -mig 0"


@pytest.mark.parametrize(
    ("mode", "selector", "steps", "others"),
    [
        pytest.param(MigMode.DISABLED, profile("1g.10gb"), (ASKED, RESET), ("-mig 0",), id="MIG was never asked for"),
        pytest.param(
            MigMode.RESET_TO_ENABLE, profile("1g.10gb"), ("set already", RESET), ("--mig-gpus",), id="MIG is pending"
        ),
        pytest.param(MigMode.ENABLED, FULL, (UNASKED, RESET), ("start its",), id="MIG is on"),
        pytest.param(
            MigMode.RESET_TO_DISABLE, FULL, ("set already", RESET), ("--mig-gpus", "-mig 0"), id="MIG ends by a reset"
        ),
    ],
)
def test_a_gpu_that_needs_a_reset_says_so_and_which_steps_are_left(
    mode: MigMode, selector: str, steps: tuple[str, ...], others: tuple[str, ...]
) -> None:
    there = Situation(node_of("a", product=A100, facts={"mig_mode": mode})).wants(request(selector=selector))
    named = "gpu-0, gpu-1 of a"
    told(there, ReasonCode.RESET, "2 GPUs have it, but a reset must first give them another MIG mode", named, *steps)
    assert not [each for each in others if each in reason(there).sentence]


def test_of_gpus_that_need_a_reset_those_with_the_least_left_to_do_are_named() -> None:
    pending = fleet_gpu("a", 3, A100, facts={"mig_mode": MigMode.RESET_TO_ENABLE})
    there = Situation([*node_of("a", product=A100), pending]).wants(request(selector=profile("1g.10gb")))
    told(there, ReasonCode.RESET, "3 GPUs have it", "MIG mode: gpu-3 of a;", "nvidia-smi --gpu-reset -i a/3")
    assert "--mig-gpus" not in reason(there).sentence


def test_the_steps_to_a_reset_are_told_in_full_where_names_are_long() -> None:
    nodes = [f"{letter * 50}.gpu.example" for letter in "abc"]
    uuid = "GPU-" + "0" * 36
    gpus = [entry for node in nodes for entry in node_of(node, product=A100)]
    gpus[0] = replace(gpus[0], gpu=replace(gpus[0].gpu, uuid=uuid))
    found = reason(Situation(gpus).wants(request(name="r" * 63, selector=profile("1g.10gb"))))
    assert shortened(found.sentence) == found.sentence
    assert found.sentence.endswith(f"nvidia-smi --gpu-reset -i {uuid}")


def test_gpus_with_faults_are_named() -> None:
    there = Situation(node_of("a", fault="cordoned: fan on Friday", fault_kind=FaultKind.CORDONED)).wants(
        request(selector=FULL)
    )
    told(there, ReasonCode.CORDONED, "2 GPUs have it", "gpu-0, gpu-1 of a (cordoned: fan on Friday)")


def test_gpus_kept_for_other_uses_are_named() -> None:
    label = UseLabel("gpu.tessera.dev/dedicated-to", "inference")
    uses = frozenset({DeviceKind.PARTITION})
    there = Situation(node_of("a", uses=uses, dedicated_by=label)).wants(request(selector=FULL))
    remedy = "kubectl label node a gpu.tessera.dev/dedicated-to-"
    told(
        there,
        ReasonCode.DEDICATED,
        "other uses",
        f"gpu-0, gpu-1 of a (label gpu.tessera.dev/dedicated-to=inference); {remedy}",
    )


def test_gpus_that_settings_keep_for_other_uses_are_told_from_those_with_a_label() -> None:
    there = Situation(node_of("a", shares=2, shares_only=True)).wants(request(selector=FULL))
    told(there, ReasonCode.DEDICATED, "gpu-0, gpu-1 of a (--shares or --mig-gpus of its node plugin)")


def test_cordoned_and_faulty_gpus_are_named_apart_and_counted_once() -> None:
    gpus = [
        fleet_gpu("a", 0, H100, "full"),
        fleet_gpu("a", 1, fault="cordoned: fan", fault_kind=FaultKind.CORDONED),
        fleet_gpu("a", 2, fault="Xid 79"),
    ]
    there = Situation(gpus).holding("one", "a", "gpu-0").wants(request(selector=FULL))
    unusable = "2 more can't be used (gpu-1 of a: cordoned: fan; gpu-2 of a: Xid 79)"
    told(there, ReasonCode.HELD, "none is free, of 1 NVIDIA H100 80GB HBM3 that have it", unusable)


def test_every_taint_that_a_pod_does_not_tolerate_is_named() -> None:
    there = Situation(node_of("a"))
    there.node("a", taints=[{"key": key, "value": "x", "effect": "NoSchedule"} for key in ("first", "second")])
    there.wants(request(selector=FULL))
    told(there, ReasonCode.NO_NODE, "has the taints first=x:NoSchedule, second=x:NoSchedule, which the pod does not")


def test_every_rule_that_taints_a_gpu_is_named() -> None:
    there = Situation([fleet_gpu("a", 0)])
    for name in ("fan", "power"):
        there.taint_rule(name, GPU_0, key=name, effect="NoSchedule")
    there.wants(request(selector=FULL))
    told(there, ReasonCode.TAINTED, "DeviceTaintRule fan with fan:NoSchedule and DeviceTaintRule power with")


def test_of_several_obstacles_the_one_with_the_most_gpus_is_named_with_them() -> None:
    gpus = [
        *node_of("a", fault="Xid 79"),
        *node_of("b", gpus=1, why_no_offers="is cordoned"),
        *node_of("c", gpus=1, foreign=1),
    ]
    there = Situation(gpus).wants(request(selector=FULL))
    told(there, ReasonCode.FAULT, "4 GPUs have it", "gpu-0, gpu-1 of a (Xid 79); 1 more: node closed")


def test_held_mentions_those_that_cannot_be_used_anyway() -> None:
    gpus = [fleet_gpu("a", 0, H100, "full"), fleet_gpu("a", 1, fault="Xid 79")]
    told(Situation(gpus).wants(request(selector=FULL)), ReasonCode.HELD, "1 more can't be used (gpu-1 of a: Xid 79)")


@pytest.mark.parametrize(
    ("held", "when"),
    [
        pytest.param((), "even if nothing were held", id="cliques are too small"),
        pytest.param(("mig-1g10gb-0",), "at present", id="cliques are in use"),
    ],
)
def test_a_constraint_that_cannot_be_met_is_named(held: tuple[str, ...], when: str) -> None:
    """Four GPUs in pairs: three of one clique never; two of one not while one of each pair is cut."""
    gpus = [
        fleet_gpu("a", n, H100, *(held if n % 2 else ()), facts={"nvlink_clique": f"clique-{n // 2}"}) for n in range(4)
    ]
    there = Situation(gpus).wants(
        request(selector=FULL, count=2 if held else 3), constraints=[{"matchAttribute": CLIQUE}]
    )
    told(there, ReasonCode.CONSTRAINT, when, CLIQUE)


def test_requests_that_no_node_can_meet_together() -> None:
    there = Situation([*node_of("a", "full"), *node_of("b", gpus=1)])
    there.wants(request(name="big", selector=FULL), request(name="small", selector=profile("1g.10gb")))
    told(
        there,
        ReasonCode.NOT_TOGETHER,
        "the requests big, small could be met",
        "big needs a full GPU (on a, b); small needs a partition 1g.10gb (on a, b)",
    )


def test_claims_of_one_pod_that_no_node_can_meet_together() -> None:
    there = Situation([*node_of("a", gpus=1), *node_of("b", gpus=1)])
    there.pod("pod", *[there.claim(f"claim-{n}", request(selector=FULL)) for n in range(2)])
    found = reasons_of(there.queue)
    assert [each.code for each in found] == [ReasonCode.NOT_TOGETHER] * 2
    assert found[0].sentence == (
        "it could be met (on a, b), but even if nothing were held, no single node could also provide what else its pod "
        "requests: claim claim-1 (on a, b)"
    )


def test_an_extended_resource_that_no_node_can_provide_beside_a_claim_of_the_pod_is_named() -> None:
    there = Situation([*node_of("a", gpus=1), *node_of("b", gpus=1)])
    there.device_class("gpu-training", FULL, extendedResourceName="nvidia.com/gpu")
    containers = [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]
    there.pod("pod", there.claim("claim", request(selector=FULL)), containers=containers)
    of_claim, of_resource = reasons_of(there.queue)
    assert of_claim.sentence.endswith("what else its pod requests: extended resource nvidia.com/gpu (on a, b)")
    assert of_resource.sentence.endswith("what else its pod requests: claim claim (on a, b)")


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("1g.99gb", "1g.10gb", ReasonCode.NOTHING_MATCHES), ("7g.80gb", "1g.10gb", ReasonCode.FRAGMENTED)],
    ids=["never", "at present"],
)
def test_a_claim_that_keeps_its_pod_waiting_is_the_reason_of_the_pods_other_claims(
    first: str, second: str, code: ReasonCode
) -> None:
    there = Situation([fleet_gpu("a", n, H100, "mig-3g40gb-4") for n in range(2)])
    there.holding("one", "a", "gpu-0-mig-3g40gb-4", "gpu-1-mig-3g40gb-4")
    there.pod("pod", *[there.claim(f"of-{each}", request(selector=profile(each))) for each in (first, second)])
    [own, other] = reasons_of(there.queue)
    assert (own.code, other.code) == (code, code)
    assert other.sentence == f"its pod also has the claim of-{first}: {own.sentence}"


def test_an_alternative_is_named_as_the_scheduler_names_it() -> None:
    alternatives = first_available(("dream", profile("1g.99gb")), ("whole", FULL))
    told(Situation(node_of("a", "full")).wants(alternatives), ReasonCode.HELD, "request gpu/whole needs a full GPU")


def test_equal_requests_of_two_claims_keep_their_names() -> None:
    there = Situation(node_of("a", "full")).wants(request(name="first", selector=FULL), name="one")
    there.wants(request(name="second", selector=FULL), name="two")
    assert [each.sentence.split(" needs ")[0] for each in reasons_of(there.queue)] == [
        "request first",
        "request second",
    ]


@pytest.mark.parametrize(
    ("of_class", "selector", "said"),
    [
        (f'{FULL} && device.driver == "gpu.tesera.dev"', None, "this condition is part of DeviceClass mine"),
        (selected_by('tipe == "gpu"'), None, " of DeviceClass mine fails on "),
    ],
    ids=["matches nothing", "fails"],
)
def test_a_mistake_in_a_class_is_looked_for_there(of_class: str, selector: str | None, said: str) -> None:
    there = Situation(node_of("a"))
    there.device_class("mine", of_class)
    assert said in reason(there.wants(request("mine", selector=selector))).sentence


def test_of_several_alternatives_the_only_one_that_can_become_free_is_reported() -> None:
    alternatives = first_available(("dream", profile("1g.99gb")), ("whole", FULL))
    told(
        Situation(node_of("a", "full")).wants(alternatives),
        ReasonCode.HELD,
        "(the only one that can become free of the alternatives gpu/dream, gpu/whole; gpu/dream: profile 1g.99gb: ",
    )


def test_none_of_several_alternatives_that_can_become_free_is_said_to_be_nearer() -> None:
    alternatives = first_available(("small", profile("1g.10gb")), ("whole", FULL))
    told(
        Situation(node_of("a", "full")).wants(alternatives),
        ReasonCode.HELD,
        "(one of the alternatives gpu/small, gpu/whole; gpu/whole: likewise)",
    )


def test_a_pod_without_a_claim_yet_gets_the_reason_itself() -> None:
    there = Situation(node_of("a", "full"))
    there.device_class("gpu-training", FULL, extendedResourceName="nvidia.com/gpu")
    there.pod("old", containers=[{"resources": {"requests": {"nvidia.com/gpu": "1"}}}])
    assert (reason(there).pending.key, reason(there).pending.not_created) == ("Pod/default/old", True)


def test_all_of_devices_of_which_some_are_in_use_waits_for_them() -> None:
    there = Situation([*node_of("a", "full"), fleet_gpu("a", 2)])
    there.holding("one", "a", "gpu-0").holding("two", "a", "gpu-1")
    there.wants(request(selector=FULL, allocationMode="All"))
    told(there, ReasonCode.HELD, "on every node that has them some are in use", "by 2 claims")


def test_all_of_the_devices_of_a_node_are_those_without_a_fault() -> None:
    """Nothing is published of a GPU with a fault, unless a claim holds something of it."""
    there = Situation([fleet_gpu("a", 0), fleet_gpu("a", 1, fault="Xid 79")])
    assert reasons_of(there.wants(request(selector=FULL, allocationMode="All")).queue) == []


OF_A, GPU_0 = {"pool": f"a-{DRIVER}"}, {"pool": f"a-{DRIVER}", "device": "gpu-0"}
TAINT = "DeviceTaintRule repair with broken=fan:NoSchedule"


@pytest.mark.parametrize(
    ("rule", "wanted", "part"),
    [
        pytest.param(OF_A, request(selector=FULL), f"2 GPUs have it, but a {TAINT[:15]} taints them", id="all"),
        pytest.param({"pool": "b"}, request(selector=FULL), "", id="of another node"),
        pytest.param(GPU_0, request(selector=FULL, count=2), f"gpu-0 of a ({TAINT})", id="one of two"),
        pytest.param(GPU_0, request(selector=FULL, allocationMode="All"), "taints 1 of the 2 GPUs", id="one of all"),
        pytest.param(GPU_0, request(selector=profile("7g.80gb"), count=2), "", id="the full GPU, not its partitions"),
        pytest.param(
            GPU_0, request(selector=FULL, count=2, tolerations=[{"operator": "Exists"}]), "", id="what is tolerated"
        ),
    ],
)
def test_gpus_with_a_taint_by_a_rule_are_not_free(rule: dict[str, str], wanted: dict[str, Any], part: str) -> None:
    there = Situation(node_of("a")).wants(wanted)
    there.taint_rule("repair", rule, key="broken", value="fan", effect="NoSchedule")
    if part:
        told(there, ReasonCode.TAINTED, part, "which no request of the claim tolerates")
    else:
        assert reasons_of(there.queue) == []


def test_a_tainted_device_that_a_held_partition_keeps_from_being_published_does_not_matter_to_who_wants_all() -> None:
    held, free = fleet_gpu("a", 0, H100, "mig-1g10gb-0"), fleet_gpu("a", 1)
    there = Situation([held, free]).holding("one", "a", held.held[0].name)
    there.taint_rule("repair", GPU_0, key="broken", effect="NoSchedule")
    there.wants(request(selector=FULL, allocationMode="All"))
    assert reasons_of(there.queue) == []


def test_gpus_with_a_taint_are_named_beside_those_that_are_held() -> None:
    there = Situation([fleet_gpu("a", 0), fleet_gpu("a", 1, H100, "full")]).holding("one", "a", "gpu-1")
    there.taint_rule("repair", GPU_0, key="broken", value="fan", effect="NoExecute")
    there.wants(request(selector=FULL))
    told(
        there,
        ReasonCode.HELD,
        "none is free",
        "default/one",
        "1 more can't be used (gpu-0 of a: DeviceTaintRule repair",
    )


def test_a_claim_that_becomes_possible_loses_its_reason() -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    assert reason(there).code is ReasonCode.HELD
    there.gpus = [replace(entry, held=()) for entry in there.gpus]
    assert reasons_of(there.queue) == []


def test_another_drivers_claim_gets_no_reason() -> None:
    there = Situation(node_of("a"))
    there.device_class("nic", 'device.driver == "nic.example.com" && device.attributes["nic.example.com"].speed > 1')
    assert reasons_of(there.wants(request("nic")).queue) == []


@pytest.mark.parametrize(
    ("condition", "parts"),
    [
        (
            'productName.startsWith("H100")',
            ("productName is NVIDIA H100 80GB HBM3, NVIDIA L4", "did you mean NVIDIA H100"),
        ),
        ('productName == "H100" || ATTRIBUTES.productName == "A100"', ('"H100" || productName == "A100"',)),
        ("pcieWidth >= 32", ("pcieWidth is 16 (NVIDIA H100 80GB HBM3), 8 (NVIDIA L4)",)),
        ('cudaComputeCapability.isGreaterThan(semver("10.0.0"))', ("cudaComputeCapability is 9.0.0",)),
        ('profile == "1g.10gb"', ('none of the devices with type == "gpu" is selected by profile == "1g.10gb"',)),
        ('profile == "1g.5gb"', ("profile 1g.5gb: no GPU has it",)),
        ('?memoryTyp.orValue("") == "HBM3"', ("none of these devices has memoryTyp", "did you mean memoryType?")),
    ],
)
def test_the_condition_that_excludes_all_devices_is_named_with_the_values_that_there_are(
    condition: str, parts: tuple[str, ...]
) -> None:
    gpus = [*node_of("a", facts={"pcie_width": 16}), *node_of("b", product=L4, facts={"pcie_width": 8})]
    condition = condition.replace("ATTRIBUTES", f'device.attributes["{DRIVER}"]')
    there = Situation(gpus).wants(request(selector=f'{FULL} && device.attributes["{DRIVER}"].{condition}'))
    sentence = told(there, ReasonCode.NOTHING_MATCHES, *parts)
    assert "did you mean 1g.20gb" not in sentence
    assert "device.attributes" not in sentence


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        (f'device.attributes["{DRIVER}"].memory >= 80', f'a capacity: device.capacity["{DRIVER}"].memory'),
        (f'device.attributes["{DRIVER}"].productname == "x"', "did you mean productName?"),
        (f'device.attributes["{DRIVER}"].cudaComputeCapability == "9.0"', 'is a version: .compareTo(semver("9.0.0"))'),
        ('device.attributes["gpu.nvidia.com"].productName == "x"', f"have productName in the domain {DRIVER}"),
        (f'device.attributes["{DRIVER}"].nvlinkLinks >= 8', ".?nvlinkLinks.orValue(0) does not fail"),
        (
            f'device.attributes["{DRIVER}"].computeSlices >= 8',
            'only devices with type == "mig" || type == "mig-shared" have computeSlices',
        ),
    ],
)
def test_a_selector_that_fails_is_answered_with_what_lint_knows_of_it(selector: str, hint: str) -> None:
    there = Situation(node_of("a"))
    there.device_class("gpu-training", FULL)
    told(there.wants(request("gpu-training", selector=selector)), ReasonCode.SELECTOR_FAILS, hint)


@pytest.mark.parametrize(
    ("attribute", "hint"),
    [
        ("gpu.tessera.dev/nvlinkclique", "did you mean nvlinkClique?"),
        ("gpu.tessera.dev/numaNode", "is in Kubernetes' domain: resource.kubernetes.io/numaNode"),
        ("gpu.nvidia.com/productName", "Tessera's devices have gpu.tessera.dev/productName instead"),
        (
            "gpu.tessera.dev/parentUUID",
            'only devices with type == "mig" || type == "share" || type == "shared" || type == "mig-shared" have',
        ),
    ],
)
def test_a_constraint_on_an_attribute_that_no_device_has_says_why(attribute: str, hint: str) -> None:
    there = Situation(node_of("a")).wants(request(selector=FULL, count=2), constraints=[{"matchAttribute": attribute}])
    told(there, ReasonCode.CONSTRAINT, f"none of these devices has a value of {attribute}", hint)


def test_the_most_devices_with_different_values_are_named() -> None:
    distinct = [{"distinctAttribute": "gpu.tessera.dev/parentUUID"}]
    there = Situation(node_of("a")).wants(request(selector=profile("1g.10gb"), count=3), constraints=distinct)
    told(there, ReasonCode.CONSTRAINT, "it asks for 3, and at most 2 have different values")


def test_what_is_in_the_way_of_the_other_alternatives_is_said_too() -> None:
    there = Situation(node_of("a", "full")).wants(first_available(("dream", profile("1g.99gb")), ("whole", FULL)))
    told(there, ReasonCode.HELD, "gpu/dream: profile 1g.99gb: no GPU has it")


def test_where_no_class_has_a_similar_name_some_are_listed() -> None:
    there = Situation(node_of("a"))
    there.device_class("gpu-training", FULL)
    told(there.wants(request("nvidia")), ReasonCode.NO_SUCH_CLASS, "there are any, gpu-training")


def test_where_compute_slices_limit_what_is_free_nothing_is_called_fragmented() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "full"), *(fleet_gpu("a", number, H100) for number in (1, 2, 3))])
    told(
        there.wants(request(selector=profile("1g.10gb"), count=24)),
        ReasonCode.HELD,
        "at most 21 are free on one node (a)",
    )
    there = Situation([fleet_gpu("a", 0, H100, "mig-4g40gb-0", "mig-2g20gb-4")])
    told(there.wants(request(selector=profile("2g.20gb"))), ReasonCode.HELD, "none is free")


class Ticking(FakeClock):
    """A second passes whenever somebody looks at it."""

    def monotonic(self) -> float:
        self.advance(1)
        return super().monotonic()


def counted(finder: ReasonFinder, gpus: int, claims: int, each: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Of how many GPUs each claim is told, while that many are full; ``each`` is called after each claim.

    "-": it is told that it is new.
    """
    there = Situation(node_of("a", *["full"] * gpus, gpus=gpus))
    for number in range(claims):
        there.wants(request(selector=FULL), name=str(number))
    found: dict[str, str] = {}
    for reason in finder.find(Now(there.queue)):
        is_new = reason.sentence == NOT_EXAMINED and not reason.is_examined
        found[reason.pending.claim.metadata.name] = "-" if is_new else reason.sentence.split(" of ")[-1][0]
        each()
    return found


def test_where_time_is_short_claims_keep_their_last_reason_until_they_have_their_turn() -> None:
    clock = Ticking()
    finder = ReasonFinder(60, clock, limit_seconds=1.5)  # time for one claim

    def counted_later(gpus: int, claims: int) -> dict[str, str]:
        clock.advance(100)
        return counted(finder, gpus, claims)

    assert counted_later(2, 2) == {"0": "2", "1": "-"}
    assert counted_later(2, 2) == {"0": "2", "1": "2"}
    assert counted_later(3, 2) == {"0": "3", "1": "2"}
    assert counted_later(4, 4) == {"0": "3", "1": "2", "2": "4", "3": "-"}
    assert counted_later(5, 4) == {"0": "3", "1": "2", "2": "4", "3": "5"}
    assert counted_later(6, 4) == {"0": "6", "1": "2", "2": "4", "3": "5"}
    assert finder.postponed == "default/1"


def test_after_a_long_search_claims_keep_their_reasons_for_a_while_and_new_ones_are_examined_later() -> None:
    clock = FakeClock()
    finder = ReasonFinder(60, clock)
    assert counted(finder, 2, 2, lambda: clock.advance(0.01)) == {"0": "2", "1": "2"}
    assert counted(finder, 3, 3) == {"0": "2", "1": "2", "2": "-"}
    assert finder.next_s == pytest.approx(0.4)
    clock.advance(0.5)
    assert counted(finder, 3, 3) == {"0": "3", "1": "3", "2": "3"}
    assert not finder.postponed


def test_a_pod_with_a_shared_claim_is_told_of_its_other_claims_only() -> None:
    there = Situation([fleet_gpu("a", 0, H100, "full"), fleet_gpu("b", 0)])
    there.claim("shared", request(selector=FULL))
    there.claim("other", request(selector=FULL))
    there.pod("first", "shared", nodeSelector={"kubernetes.io/hostname": "a"})
    there.pod("second", "shared", "other", nodeSelector={"kubernetes.io/hostname": "b"})
    for node in "ab":
        there.node(node, {"kubernetes.io/hostname": node})
    [of_shared] = [reason for reason in reasons_of(there.queue) if reason.pending.key == "default/shared"]
    [(_, of_second)] = of_shared.of_pods
    assert of_second.code is ReasonCode.NOT_TOGETHER
    assert "no single node could also provide what else its pod requests: claim other (on b);" in of_second.sentence


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        (FaultKind.RESERVED, ReasonCode.DEDICATED, "another driver of the node manages it"),
        (FaultKind.ADOPTED, ReasonCode.HELD, "claims that NVIDIA's DRA driver prepared hold it"),
    ],
)
def test_a_gpu_of_another_driver_has_no_fault(kind: FaultKind, code: ReasonCode, text: str) -> None:
    fault = "the device plugin of NVIDIA allocates it"
    gpu = fleet_gpu("a", 0, fault=fault, fault_kind=kind)
    there = Situation([gpu]).wants(request(selector=FULL))
    told(there, code, f"{text}: gpu-0 of a ({fault})")
