"""Monitor devices: claims with adminAccess see GPUs and their partitions, and take nothing from anybody."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from driver.errors import ClaimError
from driver.simulator.node import SimulatedNode
from driver.slices.slice_names import MONITORS
from kubelet_plugin.checkpoint.records import DeviceRecord
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.claims import POOL, result
from tests.support.node import NodeUnderTest

SMALL, OTHER = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5"
CAPABILITY = "/dev/nvidia-caps/nvidia-cap"


def monitor(gpu: int, request: str = "gpus", **more: Any) -> dict[str, Any]:
    """The result of a request with adminAccess."""
    return result(f"gpu-{gpu}-monitor", request, pool=POOL + MONITORS, **{"adminAccess": True, **more})


def spec_of(node: NodeUnderTest, claim: ClaimReference) -> dict[str, Any]:
    """The edits of each device in the claim's CDI spec, by the device's name."""
    [spec] = [spec for name, spec in node.cdi_specs().items() if claim.uid in name]
    return {device["name"].removeprefix(f"{claim.uid}-"): device["containerEdits"] for device in spec["devices"]}


def paths(edits: dict[str, Any]) -> set[str]:
    return {device_node["path"] for device_node in edits["deviceNodes"]}


def test_a_monitor_sees_each_gpu_and_the_partitions_that_exist_next_to_the_claims_that_hold_them(
    node: NodeUnderTest,
) -> None:
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    node.preparer.prepare(node.api.allocate("train", "gpu-1"))
    watch = node.api.allocate("watch", *(monitor(gpu) for gpu in range(3)))
    answer = node.preparer.prepare(watch)
    assert [(device.pool, device.device, device.requests) for device in answer] == [
        (POOL + MONITORS, f"gpu-{gpu}-monitor", ("gpus",)) for gpu in range(3)
    ]
    edits = spec_of(node, watch)
    assert {f"/dev/nvidia{gpu}" for gpu in range(3)} <= set().union(*map(paths, edits.values()))
    of_partition = {path for path in paths(edits["gpu-0-monitor"]) if path.startswith(CAPABILITY)}
    of_full_gpu = {path for path in paths(edits["gpu-1-monitor"]) if path.startswith(CAPABILITY)}
    assert of_full_gpu == {f"{CAPABILITY}2"}, "the capability to monitor partitions"
    assert len(of_partition - of_full_gpu) == 2, "one of the GPU instance, one of the compute instance"
    uuid = node.node.inventory.gpus[0].uuid
    assert edits["gpu-0-monitor"]["env"] == [f"TESSERA_DEVICE_GPU_0_MONITOR={uuid}"]


def test_a_monitor_holds_nothing_and_leaves_nothing(node: NodeUnderTest) -> None:
    before = node.offered()
    watch = node.api.allocate("watch", monitor(0))
    node.preparer.prepare(watch)
    assert (node.offered(), node.held()) == (before, set())
    infer = node.api.allocate("infer", SMALL)
    node.preparer.prepare(infer)
    node.preparer.unprepare(watch)
    assert len(node.partitions()) == 1
    node.preparer.unprepare(infer)
    assert node.nothing_left()


def test_monitors_share_a_gpu(node: NodeUnderTest) -> None:
    claims = [node.api.allocate(f"watch-{number}", monitor(0)) for number in range(3)]
    assert all(node.preparer.prepare(claim) for claim in claims)


def test_one_claim_may_have_a_partition_and_monitor_devices(node: NodeUnderTest) -> None:
    both = node.api.allocate("both", SMALL, monitor(0), monitor(0, "again"))
    answer = {device.device: device.requests for device in node.preparer.prepare(both)}
    assert answer == {SMALL: ("gpu",), "gpu-0-monitor": ("gpus", "again")}
    assert node.held() == {SMALL}
    node.preparer.unprepare(both)
    assert node.nothing_left()


def test_a_repeat_finds_the_partitions_that_have_come_and_a_restart_keeps_the_claim(node: NodeUnderTest) -> None:
    watch = node.api.allocate("watch", monitor(0))
    first = node.preparer.prepare(watch)
    before = paths(spec_of(node, watch)["gpu-0-monitor"])
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    restarted = node.restart()
    assert restarted.preparer.prepare(watch) == first
    assert len(paths(spec_of(restarted, watch)["gpu-0-monitor"]) - before) == 2
    assert restarted.held() == {SMALL}
    restarted.preparer.unprepare(watch)
    assert len(restarted.records()) == 1


def test_a_gpu_that_does_not_answer_keeps_no_monitor_from_the_others(node: NodeUnderTest) -> None:
    gone, *others = node.node.inventory.gpus
    node.node.inventory.update(others, {gone.uuid: "NVML no longer finds it"})
    watch = node.api.allocate("watch", monitor(0), monitor(1))
    assert len(node.preparer.prepare(watch)) == 2
    edits = spec_of(node, watch)
    assert paths(edits["gpu-0-monitor"]) == set()
    assert "/dev/nvidia1" in paths(edits["gpu-1-monitor"])


def test_a_lost_spec_is_written_again(node: NodeUnderTest) -> None:
    watch = node.api.allocate("watch", monitor(0))
    node.preparer.prepare(watch)
    before = node.cdi_specs()
    for path in (node.root / "cdi").iterdir():
        path.unlink()
    assert [lost for _, lost in node.preparer.losses()] == [["its CDI spec"]]
    assert node.preparer.repair(watch.uid)
    assert node.cdi_specs() == before


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param(result("gpu-0", adminAccess=True), "DeviceClass gpu-monitor", id="adminAccess to a full GPU"),
        pytest.param(result(SMALL, adminAccess=True), "DeviceClass gpu-monitor", id="adminAccess to a partition"),
        pytest.param(monitor(0, adminAccess=False), "only requests with adminAccess: true", id="no adminAccess"),
        pytest.param(monitor(9), "gpu-9-monitor is unknown on this node", id="no such GPU"),
        pytest.param(
            {**monitor(0), "pool": "node-b-gpu.tessera.dev-monitor"}, "no monitor device of this node", id="other node"
        ),
    ],
)
def test_adminaccess_and_monitor_devices_belong_together(
    node: NodeUnderTest, device: dict[str, Any], message: str
) -> None:
    claim = node.api.allocate("watch", device)
    with pytest.raises(ClaimError, match=message):
        node.preparer.prepare(claim)
    assert node.nothing_left()


def test_an_earlier_version_reads_the_record_and_finds_no_device_in_it(node: NodeUnderTest) -> None:
    class EarlierRecord(msgspec.Struct, rename="camel"):
        """The fields of ClaimRecord in 3552cad."""

        version: int
        uid: str
        devices: tuple[DeviceRecord, ...]

    watch = node.api.allocate("watch", monitor(0))
    node.preparer.prepare(watch)
    record = msgspec.json.decode((node.root / "state/claims" / f"{watch.uid}.json").read_bytes(), type=EarlierRecord)
    assert (record.version, record.uid, record.devices) == (1, watch.uid, ())


def test_a_partition_that_goes_and_a_gpu_that_can_not_list_its_partitions_keep_no_monitor_waiting(
    node: NodeUnderTest,
) -> None:
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    access = next((node.root / "host/proc/driver/nvidia/capabilities/gpu0/mig").glob("gi*/ci*/access"))
    access.unlink()
    SimulatedNode.attach(node.root / "host").faults.fail("nvmlDeviceGetMigMode", code=999, gpu=1)
    watch = node.api.allocate("watch", monitor(0), monitor(1))
    node.preparer.prepare(watch)
    edits = spec_of(node, watch)
    assert {path for path in paths(edits["gpu-0-monitor"]) if path.startswith(CAPABILITY)} == {f"{CAPABILITY}2"}
    assert "/dev/nvidia1" in paths(edits["gpu-1-monitor"])


def test_a_gpu_that_another_driver_owns_is_not_given_to_a_monitor(node: NodeUnderTest) -> None:
    node.node.inventory.set_reserved({node.node.inventory.gpus[0].uuid: "the device plugin owns it"})
    watch = node.api.allocate("watch", monitor(0), monitor(1))
    node.preparer.prepare(watch)
    assert paths(spec_of(node, watch)["gpu-0-monitor"]) == set()


def test_a_record_that_an_earlier_version_has_written_again_gets_its_monitors_back_and_keeps_its_partition(
    node: NodeUnderTest,
) -> None:
    both = node.api.allocate("both", SMALL, monitor(0))
    answer, partitions = node.preparer.prepare(both), node.partitions()
    path = node.node.checkpoint.path(both.uid)
    without = {key: value for key, value in msgspec.json.decode(path.read_bytes()).items() if key != "monitors"}
    path.write_bytes(msgspec.json.encode(without))
    again = node.restart()
    assert again.preparer.prepare(both) == answer
    assert again.partitions() == partitions
    assert again.restart().preparer.prepare(both) == answer
