"""Pods that wait for a device of another driver, such as a NIC, although a GPU is offered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.explain.reason import ReasonCode
from controller.explain.sources.pending_despite_offers import GATES
from driver.kube.slice_types import DetailedSlice
from tests.support.queues import Situation, node_of, profile, request
from tests.support.watched_offers import SAYS_NO, SECOND, Watched, refused

SMALL = profile("1g.10gb")
NIC = "nic.example.com"
ROOT = "resource.kubernetes.io/pcieRoot"
FAST = 'device.attributes["nic.example.com"].speed >= 200'
REPAIR = {"key": "repair", "value": "fan", "effect": "NoSchedule"}


def nic(name: str, speed: int = 400, root: str = "pci0000:07", **more: Any) -> dict[str, Any]:
    return {"name": name, "attributes": {"speed": {"int": speed}, ROOT: {"string": root}}, **more}


def nic_slice(*devices: dict[str, Any], node: str | None = "a", **pool: Any) -> DetailedSlice:
    of_pool = {"name": f"{node}-nics", "generation": 1, "resourceSliceCount": 1, **pool}
    spec = {"driver": NIC, "pool": of_pool, "devices": devices, **({"nodeName": node} if node else {"allNodes": True})}
    return msgspec.convert({"metadata": {"name": f"{node}-1", "resourceVersion": "1"}, "spec": spec}, DetailedSlice)


def waiting_for(count: int = 1, **more: Any) -> Situation:
    """A claim for a partition and for fast NICs on the same PCIe root, on a node that offers the partition."""
    there = Situation(node_of("a"))
    there.device_class("rdma", f'device.driver == "{NIC}"')
    nics = request("rdma", name="nic", selector=FAST, count=count, **more)
    return there.wants(request(selector=SMALL), nics, status=refused(SAYS_NO), constraints=[{"matchAttribute": ROOT}])


def reason_of(there: Situation, slices: list[DetailedSlice] | None) -> str:
    watched = Watched(there, "a/gpu-0-mig-1g10gb-6")
    watched.answers.slices = slices
    [reason] = watched.after(SECOND)
    assert reason.code is ReasonCode.UNUSED
    assert GATES not in reason.sentence
    return reason.sentence


@pytest.mark.parametrize(
    ("slices", "has"),
    [
        pytest.param(None, f"none that it selects and the same {ROOT} as the GPU is free on node a", id="unknown"),
        pytest.param(
            [nic_slice(nic("nic-0"), node=None)],
            f"none that it selects and the same {ROOT} as the GPU is free on node a",
            id="of no single node",
        ),
        pytest.param([], f"node a has no device of {NIC}, nor has any other", id="nowhere"),
        pytest.param(
            [nic_slice(nic("nic-0"), node="b")], f"node a has no device of {NIC}, only b has one", id="elsewhere"
        ),
        pytest.param(
            [nic_slice(nic("nic-0"), resourceSliceCount=2)],
            f"the scheduler takes none of {NIC} from node a, whose pool a-nics is incomplete (1 of 2 ResourceSlices)",
            id="incomplete pool",
        ),
        pytest.param(
            [nic_slice(nic("nic-9")), nic_slice(nic("held"), generation=2)],
            f"the only device of {NIC} on node a is held by claim default/other",
            id="held, in the newest generation",
        ),
        pytest.param(
            [nic_slice(nic("nic-0", speed=100))],
            f"the only device of {NIC} on node a is not selected by speed >= 200",
            id="too slow",
        ),
        pytest.param(
            [nic_slice(nic("held"), nic("nic-1", speed=100), nic("nic-2", speed=50))],
            f"of the 3 devices of {NIC} on node a, 1 is held by claim default/other, "
            "2 are not selected by speed >= 200",
            id="one is held, two are too slow",
        ),
        pytest.param(
            [nic_slice(nic("held", speed=100))],
            f"the only device of {NIC} on node a is not selected by speed >= 200",
            id="held, and too slow",
        ),
        pytest.param(
            [nic_slice(nic("nic-0", taints=[REPAIR]))],
            f"the only device of {NIC} on node a is tainted (taint repair=fan:NoSchedule)",
            id="tainted in its slice",
        ),
        pytest.param(
            [nic_slice(nic("by-rule"))],
            f"the only device of {NIC} on node a is tainted (DeviceTaintRule broken with cable=loose:NoExecute)",
            id="tainted by a rule",
        ),
        pytest.param(
            [nic_slice(nic("nic-0", root="pci0000:ff"))],
            f"the only device of {NIC} on node a is free, but has not the same {ROOT} as the GPU",
            id="elsewhere in the node",
        ),
    ],
)
def test_a_request_for_another_driver_is_named_with_what_the_node_has_for_it(
    slices: list[DetailedSlice] | None, has: str
) -> None:
    there = waiting_for()
    results = [{"request": "nic", "driver": NIC, "pool": "a-nics", "device": "held"}]
    there.claim("other", status={"allocation": {"devices": {"results": results}}})
    rule = {"driver": NIC, "device": "by-rule"}
    there.taint_rule("broken", rule, key="cable", value="loose", effect="NoExecute")
    cause = f"devices of another driver are missing: request nic (class rdma): {has}"
    offered = "gpu-0-mig-1g10gb-6 of node a would do and has been offered since 2026-11-21T00:16:40Z"
    assert reason_of(there, slices) == f"{cause}; {offered}"


def test_a_toleration_of_the_request_counts() -> None:
    tolerant = waiting_for(count=2, tolerations=[{"key": "repair", "operator": "Exists"}])
    sentence = reason_of(tolerant, [nic_slice(nic("nic-0", taints=[REPAIR]))])
    assert f"the only device of {NIC} on node a is free, the request asks for 2" in sentence


def test_enough_nics_on_different_pcie_roots_are_not_enough() -> None:
    nics = nic("nic-0", root="pci0000:00"), nic("nic-1", root="pci0000:ff")
    sentence = reason_of(waiting_for(count=2), [nic_slice(*nics)])
    assert f"of the 2 devices of {NIC} on node a, 2 are free, but only 1 has the same {ROOT} as the GPU" in sentence


def test_an_attribute_of_a_kind_that_is_not_known_is_no_cause() -> None:
    strange = nic("nic-0") | {"attributes": {"speed": {"decimal": "4.5"}}}
    assert "is not selected" not in reason_of(waiting_for(), [nic_slice(strange)])


def test_a_claim_of_the_pod_for_another_driver_is_named_too() -> None:
    there = Situation(node_of("a"))
    there.device_class("rdma", f'device.driver == "{NIC}"')
    claims = there.claim("claim", request(selector=SMALL)), there.claim("fast", request("rdma", name="nic"))
    there.pod("pod", *claims, status=refused(SAYS_NO))
    sentence = reason_of(there, None)
    assert "request nic of claim fast (class rdma): none that it selects is free on node a" in sentence


@pytest.mark.parametrize(
    ("nics", "count", "permanent"),
    [
        pytest.param([nic("held")], 1, False, id="held"),
        pytest.param([nic("held"), nic("nic-1", speed=100)], 1, False, id="one is held, one too slow"),
        pytest.param([nic("held"), nic("nic-1", speed=100)], 2, True, id="too few even after its release"),
        pytest.param([nic("nic-0", speed=100)], 1, True, id="too slow"),
    ],
)
def test_a_pod_waits_for_the_end_of_claims_only_if_that_gives_it_enough_nics(
    nics: list[dict[str, Any]], count: int, permanent: bool
) -> None:
    there = waiting_for(count)
    results = [{"request": "nic", "driver": NIC, "pool": "a-nics", "device": "held"}]
    there.claim("other", status={"allocation": {"devices": {"results": results}}})
    watched = Watched(there, "a/gpu-0-mig-1g10gb-6")
    watched.answers.slices = [nic_slice(*nics)]
    [reason] = watched.after(SECOND)
    assert reason.permanent is permanent


def test_a_request_that_the_node_can_meet_is_not_named_where_another_is_in_the_way() -> None:
    there = Situation(node_of("a"))
    there.device_class("rdma", f'device.driver == "{NIC}"')
    slow, fast = request("rdma", name="slow"), request("rdma", name="fast", selector=FAST)
    there.wants(request(selector=SMALL), slow, fast, status=refused(SAYS_NO))
    sentence = reason_of(there, [nic_slice(nic("nic-0", speed=100))])
    assert "missing: request fast (class rdma): the only device" in sentence
