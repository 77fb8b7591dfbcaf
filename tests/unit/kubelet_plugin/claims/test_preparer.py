"""Preparing and unpreparing on a simulated DGX H100: what a pod gets, and what is left when it goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from driver.errors import ClaimError
from driver.model.gpu import Placement
from driver.step_observer import Moment
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.support.claims import result
from tests.support.node import NodeUnderTest, start_node

SMALL = "gpu-0-mig-1g10gb-6"
BIG = "gpu-0-mig-3g40gb-0"


def test_a_partition_is_cut_at_exactly_the_allocated_placement(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    [device] = node.preparer.prepare(claim)
    [partition] = node.partitions()
    assert partition.placement == Placement(6, 1)
    assert partition.complete
    assert device.device == SMALL
    assert device.requests == ("gpu",)
    assert device.cdi_device_ids == (f"gpu.tessera.dev/claim={claim.uid}-{SMALL}",)


def test_the_cdi_spec_gives_the_container_its_partition_and_nothing_else(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    [(name, spec)] = node.cdi_specs().items()
    [device] = spec["devices"]
    [partition] = node.partitions()
    paths = [entry["path"] for entry in device["containerEdits"]["deviceNodes"]]
    caps = [entry for entry in device["containerEdits"]["deviceNodes"] if "nvidia-caps" in entry["path"]]
    assert name == f"gpu.tessera.dev-claim_{claim.uid}.json"
    assert device["containerEdits"]["env"] == [f"TESSERA_DEVICE_GPU_0_MIG_1G10GB_6={partition.uuid}"]
    assert "/dev/nvidia0" in paths
    assert "/dev/nvidia1" not in paths
    assert len(caps) == 2
    assert all(entry["type"] == "c" and entry["major"] and "hostPath" not in entry for entry in caps)
    assert spec["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert any(mount["containerPath"].endswith("/libcuda.so.1") for mount in spec["containerEdits"]["mounts"])


def test_a_full_gpu_comes_without_mig_mode_and_without_capability_nodes(node: NodeUnderTest) -> None:
    small = node.api.allocate("small", SMALL)
    node.preparer.prepare(small)
    node.preparer.unprepare(small)
    assert node.host.mig_enabled(node.node.inventory.gpus[0])
    node.preparer.prepare(node.api.allocate("train", "gpu-0"))
    assert not node.host.mig_enabled(node.node.inventory.gpus[0])
    [spec] = node.cdi_specs().values()
    nodes = [entry["path"] for entry in spec["devices"][0]["containerEdits"]["deviceNodes"]]
    assert nodes[0] == "/dev/nvidia0"
    assert not [path for path in nodes if "caps" in path]


def test_mig_mode_stays_on_when_the_last_partition_goes(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.preparer.unprepare(claim)
    assert node.host.mig_enabled(node.node.inventory.gpus[0])


def test_unprepare_leaves_nothing(node: NodeUnderTest) -> None:
    claim = node.api.allocate("both", result(SMALL, "a"), result("gpu-1", "b"))
    node.preparer.prepare(claim)
    node.preparer.unprepare(claim)
    assert node.nothing_left()
    assert node.held() == set()


def test_unprepare_of_an_unknown_claim_is_done_already(node: NodeUnderTest) -> None:
    node.preparer.unprepare(ClaimReference("default", "never-seen", "0000"))
    assert node.nothing_left()


def test_a_repeated_prepare_gives_the_same_answer_and_cuts_nothing(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    first, before = node.preparer.prepare(claim), node.partitions()
    assert node.preparer.prepare(claim) == first
    assert node.partitions() == before


def test_a_repeated_prepare_that_finds_everything_in_order_is_no_news(node: NodeUnderTest) -> None:
    claim = node.api.allocate("c", "gpu-0-mig-3g40gb-4")
    node.preparer.prepare(claim)
    node.preparer.prepare(claim)
    assert node.changes == ["held"]


def test_only_what_is_let_go_is_to_be_told_at_once(node: NodeUnderTest) -> None:
    claim = node.api.allocate("c", "gpu-0-mig-3g40gb-4")
    node.preparer.prepare(claim)
    node.preparer.unprepare(claim)
    assert node.changes == ["held", "let go"]


def test_a_repeated_prepare_repairs_what_got_lost_meanwhile(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    first = node.preparer.prepare(claim)
    gpu, [partition] = node.node.inventory.gpus[0], node.partitions()
    node.host.destroy_compute_instance(gpu, partition)
    node.host.destroy_gpu_instance(gpu, partition)
    for spec in (node.root / "cdi").iterdir():
        spec.unlink()
    assert node.preparer.prepare(claim) == first
    [again] = node.partitions()
    [spec_again] = node.cdi_specs().values()
    assert again.uuid in spec_again["devices"][0]["containerEdits"]["env"][0]


def test_one_request_to_the_api_server_a_prepare(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    assert node.api.reads == 1


def test_two_requests_may_share_one_claim_and_both_are_named(node: NodeUnderTest) -> None:
    claim = node.api.allocate("two", result(SMALL, "small"), result(BIG, "big/first-choice"))
    devices = node.preparer.prepare(claim)
    assert {device.device: device.requests for device in devices} == {SMALL: ("small",), BIG: ("big",)}
    assert len(node.partitions()) == 2


def test_what_no_longer_fits_leaves_the_offers_and_what_is_held_stays(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("infer", BIG))
    offered = node.offered()
    assert node.held() == {BIG}
    assert "gpu-0" not in offered
    assert "gpu-0-mig-7g80gb-0" not in offered
    assert not [name for name in offered if name.startswith("gpu-0-mig-1g10gb-") and int(name[-1]) < 4]
    assert {"gpu-0-mig-3g40gb-4", "gpu-0-mig-1g10gb-6"} <= offered
    assert "gpu-1" in node.offered(gpu=1)


def test_only_one_partition_with_media_extensions_is_offered_a_gpu(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("media", "gpu-0-mig-1g10gbme-0"))
    assert not [name for name in node.offered() if "me-" in name]
    assert "gpu-0-mig-1g10gb-1" in node.offered()


@pytest.mark.parametrize(
    ("first", "second"), [("gpu-0", SMALL), (SMALL, "gpu-0"), (SMALL, SMALL), (BIG, "gpu-0-mig-1g10gb-3")]
)
def test_memory_is_never_given_out_twice(node: NodeUnderTest, first: str, second: str) -> None:
    holder = node.api.allocate("holder", first)
    node.preparer.prepare(holder)
    late = node.api.allocate("late", second)
    with pytest.raises(ClaimError, match=r"overlaps .* claim default/holder .* still holds") as refused:
        node.preparer.prepare(late)
    assert holder.uid in str(refused.value)
    node.preparer.unprepare(holder)
    assert node.preparer.prepare(late)


def test_a_claim_allocated_anew_gives_its_earlier_device_back(node: NodeUnderTest) -> None:
    claim = node.api.allocate("moved", SMALL)
    node.preparer.prepare(claim)
    node.api.allocate("moved", "gpu-3-mig-2g20gb-0", uid=claim.uid)
    [device] = node.preparer.prepare(claim)
    assert device.device == "gpu-3-mig-2g20gb-0"
    assert node.partitions(0) == []
    assert [p.placement for p in node.partitions(3)] == [Placement(0, 2)]


def test_eight_claims_on_eight_gpus_do_not_wait_for_each_other(tmp_path: Path) -> None:
    together = threading.Barrier(8, timeout=60)

    def meet(at: NodeStep, when: Moment) -> None:
        if at is NodeStep.CREATE_GPU_INSTANCE and when == "before":
            together.wait()  # breaks at the deadline unless all eight are cutting at once

    node = start_node(tmp_path, observer=meet)
    claims = [node.api.allocate(f"claim-{i}", f"gpu-{i}-mig-1g10gb-0") for i in range(8)]
    threads = [threading.Thread(target=node.preparer.prepare, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(node.partitions(i)) for i in range(8)] == [1] * 8
