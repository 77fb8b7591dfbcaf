"""Preparing with bad input and on a node in trouble: one clear error, and nothing half made."""

from __future__ import annotations

import pytest

from driver.errors import ApiError, ClaimError, HardwareError, StateError
from driver.model.gpu import Placement
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.claims import opaque, result
from tests.support.node import NodeUnderTest
from tests.support.nvml_client import process_on

SMALL = "gpu-0-mig-1g10gb-6"
BIG = "gpu-0-mig-3g40gb-0"


class TestBadInput:
    """Each is refused by name, and leaves nothing behind."""

    def test_unknown_claim(self, node: NodeUnderTest) -> None:
        with pytest.raises(ApiError, match="not found"):
            node.preparer.prepare(ClaimReference("default", "ghost", "1234"))

    def test_wrong_uid(self, node: NodeUnderTest) -> None:
        node.api.allocate("infer", SMALL, uid="new")
        with pytest.raises(ClaimError, match="uid new, the kubelet asked for old"):
            node.preparer.prepare(ClaimReference("default", "infer", "old"))

    def test_not_allocated(self, node: NodeUnderTest) -> None:
        claim = node.api.put("waiting", "u1", {})
        with pytest.raises(ClaimError, match=r"default/waiting is not allocated: status\.allocation is empty"):
            node.preparer.prepare(claim)

    def test_another_driver(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("nic", result("eth1", driver="dra.net"))
        with pytest.raises(ClaimError, match=r"no device of driver gpu\.tessera\.dev: it is allocated from dra\.net"):
            node.preparer.prepare(claim)

    def test_another_nodes_pool(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("far", result("gpu-0", pool="node-b-gpu.tessera.dev"))
        with pytest.raises(
            ClaimError, match=r"pool node-b-gpu\.tessera\.dev, this node's pool is node-a-gpu\.tessera\.dev"
        ):
            node.preparer.prepare(claim)

    def test_unknown_device(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("odd", "gpu-9")
        with pytest.raises(ClaimError, match="device gpu-9 is unknown on this node, which has GPUs gpu-0, gpu-1"):
            node.preparer.prepare(claim)

    @pytest.mark.parametrize(
        ("parameters", "named"),
        [
            ({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfg"}, "GpuConfg"),
            ({"apiVersion": "gpu.tessera.dev/v2", "kind": "GpuConfig"}, "gpu.tessera.dev/v2"),
            ({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "sharng": 1, "mode": 2}, "sharng.*mode"),
            ({}, "kind"),
        ],
    )
    def test_parameters_that_do_not_parse(self, node: NodeUnderTest, parameters: dict[str, object], named: str) -> None:
        claim = node.api.allocate("odd", "gpu-0", config=[opaque(parameters)])
        with pytest.raises(ClaimError, match=rf"(?s)claim default/odd, request gpu, FromClaim: .*{named}"):
            node.preparer.prepare(claim)

    def test_parameters_for_the_other_kind_of_device(self, node: NodeUnderTest) -> None:
        wrong = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "MigDeviceConfig"}
        claim = node.api.allocate("odd", "gpu-0", config=[opaque(wrong, requests=("gpu",))])
        with pytest.raises(ClaimError, match="MigDeviceConfig is for devices of type mig, gpu-0 has type gpu"):
            node.preparer.prepare(claim)

    def test_api_server_away(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.api.away = True
        with pytest.raises(ApiError, match="no answer"):
            node.preparer.prepare(claim)
        node.api.away = False
        assert node.preparer.prepare(claim)

    @pytest.fixture(autouse=True)
    def nothing_half_made_is_left(self, node: NodeUnderTest) -> object:
        yield
        for reference in list(node.api.claims.values()):
            node.preparer.unprepare(ClaimReference("default", reference.metadata.name, reference.metadata.uid))
        assert node.nothing_left()


def test_a_placement_occupied_outside_our_knowledge_is_refused_and_left_alone(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    profile = gpu.profile_named("2g.20gb")
    assert profile is not None
    node.host.set_mig_mode(gpu, enabled=True)
    foreign = node.host.create_gpu_instance(gpu, profile, Placement(4, 2))
    for name, device in (("same", "gpu-0-mig-2g20gb-4"), ("over", "gpu-0-mig-3g40gb-4"), ("full", "gpu-0")):
        claim = node.api.allocate(name, device)
        expected = rf"memory slices 4-5 of {gpu.uuid} are taken by GPU instance {foreign.gpu_instance_id} \(2g.20gb\)"
        with pytest.raises(HardwareError, match=expected):
            node.preparer.prepare(claim)
    assert node.partitions() == [foreign]
    assert node.records() == []
    assert node.cdi_specs() == {}


def test_foreign_partitions_are_not_offered_over_after_a_restart(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    profile = gpu.profile_named("2g.20gb")
    assert profile is not None
    node.host.set_mig_mode(gpu, enabled=True)
    node.host.create_gpu_instance(gpu, profile, Placement(4, 2))
    again = node.restart()
    assert "gpu-0" not in again.offered()
    assert "gpu-0-mig-1g10gb-5" not in again.offered()
    assert "gpu-0-mig-1g10gb-3" in again.offered()
    assert len(again.partitions()) == 1


def test_an_unwritable_cdi_directory_is_named_and_nothing_is_cut(
    node: NodeUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = node.root / "cdi"
    directory.rmdir()
    directory.write_text("not a directory")
    claim = node.api.allocate("infer", SMALL)
    with pytest.raises(StateError, match=f"can't write {directory}"):
        node.preparer.prepare(claim)
    directory.unlink()
    directory.mkdir()
    assert not any("cut partition" in record.getMessage() for record in caplog.records)
    assert node.partitions() == []
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_a_partition_still_in_use_is_reported_and_stays_held_until_it_is_free(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    [partition] = node.partitions()
    assert partition.uuid is not None
    with process_on(node.simulated, partition.uuid):
        holders = "a process still uses it; outside of pods usually dcgm-exporter or nvidia-persistenced"
        nodes = r"lsof /dev/nvidia0 /dev/nvidia-caps/nvidia-cap\d+ /dev/nvidia-caps/nvidia-cap\d+"
        with pytest.raises(HardwareError, match=rf"IN_USE \(19, {holders}\); on the node: {nodes}$"):
            node.preparer.unprepare(claim)
        assert node.held() == {SMALL}
        assert "gpu-0" not in node.offered()
    node.preparer.unprepare(claim)
    assert node.nothing_left()
