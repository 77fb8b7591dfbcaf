"""What happens to the hardware outside our hands, and what is published then."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from driver.errors import ClaimError, HardwareError, UsageError
from driver.model.gpu import Gpu, MigMode, Partition
from driver.model.offer import DeviceKind
from driver.slices.build import UNAVAILABLE
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.inventory.scan import NvmlEventListener, ScanLoop, Scanner
from kubelet_plugin.settings import node_settings
from tests.support.node import KeptNodeEvents, NodeUnderTest, choosing, start_node
from tests.support.published import build_slices
from tests.support.running import eventually, in_thread

SMALL = "gpu-0-mig-1g10gb-6"


def published(node: NodeUnderTest) -> dict[str, dict[str, object]]:
    """Every device in the slices, by name."""
    slices = build_slices(node.node.pool, node.node.inventory.published())
    return {device["name"]: device for content in slices.values() for device in content.get("devices", ())}


def tainted(node: NodeUnderTest) -> set[str]:
    """The GPUs all of whose devices are tainted; one that is tainted in part fails the test."""
    devices = published(node)
    gpus = {name.split("-mig-")[0] for name in devices}
    found = {
        gpu for gpu in gpus if "taints" in devices.get(gpu, devices[next(n for n in devices if n.startswith(gpu))])
    }
    for name, device in devices.items():
        assert (device.get("taints") == [UNAVAILABLE]) == (name.split("-mig-")[0] in found), name
    return found


def look(node: NodeUnderTest) -> bool:
    return node.scanner.scan(node.node.inventory)


def cut(node: NodeUnderTest, profile_name: str, gpu_index: int = 0, place: int = 0) -> tuple[Gpu, Partition]:
    """An admin cuts a partition by hand."""
    gpu, host = node.node.inventory.gpus[gpu_index], node.host
    profile = gpu.profile_named(profile_name)
    assert profile is not None
    if not host.mig_enabled(gpu):
        host.request_mig_mode(gpu)
    created = host.create_gpu_instance(gpu, profile, profile.placements[place])
    return gpu, host.create_compute_instance(gpu, created)


def test_a_look_that_finds_nothing_new_says_so(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    assert not look(node)
    assert not look(node)


def test_a_gpu_that_is_lost_stays_published_and_is_tainted_until_it_is_back(node: NodeUnderTest) -> None:
    before = published(node)
    fault = node.simulated.faults.lose_gpu(3)
    assert look(node)
    assert tainted(node) == {"gpu-3"}
    assert published(node).keys() == before.keys()
    node.simulated.faults.clear(fault)
    assert look(node)
    assert tainted(node) == set()


def test_a_gpu_that_disappears_takes_no_other_with_it(node: NodeUnderTest) -> None:
    node.simulated.faults.remove_gpu(0)
    assert look(node)
    assert tainted(node) == {"gpu-0"}
    assert node.preparer.prepare(node.api.allocate("infer", "gpu-1-mig-1g10gb-6"))
    claim = node.api.allocate("late", SMALL)
    with pytest.raises(HardwareError, match=r"gpu-0-mig-1g10gb-6 .* can't be used at present: NVML no longer finds it"):
        node.preparer.prepare(claim)
    node.simulated.faults.return_gpu(0)
    assert look(node)
    assert tainted(node) == set()
    assert node.preparer.prepare(claim)


def test_a_gpu_that_is_added_is_offered(node: NodeUnderTest) -> None:
    before = len(node.node.inventory.gpus)
    template = node.simulated.gpus[0]
    node.simulated.faults.add_gpu(template.replaced(pci_bus_id="0000:f1:00.0"))
    assert look(node)
    assert len(node.node.inventory.gpus) == before + 1
    assert "gpu-8" in published(node)


def test_a_held_device_of_a_lost_gpu_keeps_its_counters(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("infer", SMALL))
    before = published(node)[SMALL]
    node.simulated.faults.lose_gpu(0)
    look(node)
    after = published(node)[SMALL]
    assert after.pop("taints") == [UNAVAILABLE]
    assert after["consumesCounters"] == before["consumesCounters"]


@pytest.mark.parametrize("device", ["gpu-0", SMALL])
def test_a_gpu_that_was_away_at_start_comes_back_with_what_is_held_on_it(node: NodeUnderTest, device: str) -> None:
    node.preparer.prepare(node.api.allocate("holder", device))
    node.simulated.faults.remove_gpu(0)
    again = node.restart()
    again.simulated.faults.return_gpu(0)
    assert look(again)
    again.node.hold_all()
    returned = next(entry for entry in again.node.inventory.published() if entry.number == 0)
    assert [held.name for held in returned.held] == [device]
    with pytest.raises(ClaimError, match=r"claim default/holder .* still holds"):
        again.preparer.prepare(again.api.allocate("late", "gpu-0"))


def test_partitions_made_by_others_at_run_time_are_not_offered_over(node: NodeUnderTest) -> None:
    gpu, partition = cut(node, "2g.20gb", place=2)
    assert look(node)
    assert "gpu-0" not in node.offered()
    assert "gpu-0-mig-1g10gb-5" not in node.offered()
    assert "gpu-0-mig-1g10gb-3" in node.offered()
    node.host.destroy_compute_instance(gpu, partition)
    node.host.destroy_gpu_instance(gpu, partition)
    assert look(node)
    assert "gpu-0" in node.offered()


def test_mig_mode_switched_outside_our_hands_is_published(node: NodeUnderTest) -> None:
    node.host.set_mig_mode(node.node.inventory.gpus[2], enabled=True)
    assert look(node)
    assert published(node)["gpu-2"]["attributes"]["migMode"] == {"string": "enabled"}  # type: ignore[index]


def test_our_own_switch_is_published_without_another_look(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.preparer.unprepare(claim)
    assert published(node)["gpu-0"]["attributes"]["migMode"] == {"string": "enabled"}  # type: ignore[index]
    assert not look(node)


def test_an_event_makes_it_look_at_once(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubelet_plugin.inventory.scan.SCAN_INTERVAL_SECONDS", 60.0)
    monkeypatch.setattr("kubelet_plugin.inventory.scan.MIN_SCAN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("kubelet_plugin.inventory.scan.EVENT_TIMEOUT_SECONDS", 0.05)
    seen = threading.Event()
    listener, changes = NvmlEventListener(node.host, lambda _: node.scanner.scan_soon()), ChangeNotifier()
    changes.subscribe(NodeChange.HARDWARE, seen.set)
    loop = ScanLoop(node.scanner, node.node.inventory, (), changes)
    with in_thread(listener.run), in_thread(loop.run, node.scanner.scan_soon):
        cut(node, "1g.10gb")
        eventually(seen.is_set, "the change is noticed")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("all", "", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("0,1", "", [0, 1]),
        ("all", "7,0000:1b:00.0", [1, 2, 3, 4, 5, 6]),
        ("0,1,2", "1", [0, 2]),
    ],
)
def test_only_chosen_gpus_are_published(tmp_path: Path, include: str, exclude: str, left: list[int]) -> None:
    choice = choosing(include_gpus=include, exclude_gpus=exclude)
    node = start_node(tmp_path, choice=choice)
    assert [gpu.index for gpu in node.node.inventory.gpus] == left
    assert not look(node)


def test_a_gpu_is_chosen_by_uuid(tmp_path: Path, node: NodeUnderTest) -> None:
    uuid = node.node.inventory.gpus[4].uuid
    again = start_node(tmp_path, choice=choosing(include_gpus=uuid))
    assert [gpu.uuid for gpu in again.node.inventory.gpus] == [uuid]


def test_a_choice_that_makes_no_sense_names_the_flag_and_what_is_accepted() -> None:
    with pytest.raises(UsageError, match=r"--exclude-gpus.*'gpu3' is no index .*UUID.*PCI address"):
        node_settings(node_name="n", exclude_gpus="0,gpu3")


class TestAmpere:
    """A100: MIG mode needs a reset to switch."""

    def kinds(self, node: NodeUnderTest, gpu: int = 0) -> set[DeviceKind]:
        return {device.kind for device in node.node.inventory.published()[gpu].offers}

    def test_a_gpu_offers_what_its_mode_allows(self, tmp_path: Path) -> None:
        node = start_node(tmp_path, gpus="dgx-a100")
        assert self.kinds(node) == {DeviceKind.FULL}
        node.host.request_mig_mode(node.node.inventory.gpus[0])
        node.simulated.reset_gpu(0)
        assert look(node)
        assert self.kinds(node, 0) == {DeviceKind.PARTITION}
        assert self.kinds(node, 1) == {DeviceKind.FULL}

    def test_a_gpu_meant_for_mig_waits_for_its_reset_and_says_so(self, tmp_path: Path) -> None:
        node = start_node(tmp_path, gpus="dgx-a100", choice=choosing(mig_gpus="2"))
        look(node)
        assert [gpu.mig_mode for gpu in node.node.inventory.gpus[1:4]] == [
            MigMode.DISABLED,
            MigMode.RESET_TO_ENABLE,
            MigMode.DISABLED,
        ]
        assert self.kinds(node, 2) == {DeviceKind.FULL}
        node.simulated.reset_gpu(2)
        assert look(node)
        assert self.kinds(node, 2) == {DeviceKind.PARTITION}

    def test_whoever_can_reset_a_gpu_is_told_once_that_it_waits_for_that(self, tmp_path: Path) -> None:
        node = start_node(tmp_path, gpus="dgx-a100")
        events = KeptNodeEvents()
        scanner = Scanner(node.host, choosing(mig_gpus="2"), events)
        for _ in range(3):
            scanner.scan(node.node.inventory)
        [(reason, message)] = events.told
        assert reason == "GpuNeedsReset"
        assert message.startswith("GPU 2 ")
        node.simulated.reset_gpu(2)
        scanner.scan(node.node.inventory)
        assert len(events.told) == 1

    def test_a_claim_that_would_need_a_reset_is_refused_and_nothing_is_switched(self, tmp_path: Path) -> None:
        node = start_node(tmp_path, gpus="dgx-a100")
        claim = node.api.allocate("infer", "gpu-0-mig-1g10gb-0")
        with pytest.raises(HardwareError, match=r"MIG mode is off, and this Ampere GPU needs a reset .*--mig-gpus"):
            node.preparer.prepare(claim)
        assert not look(node)
        assert node.nothing_left()


class TestExistingPartitions:
    """Partitions of others, where settings say that they are given out as they are."""

    @pytest.fixture
    def shared(self, tmp_path: Path) -> NodeUnderTest:
        cut(start_node(tmp_path), "2g.20gb", place=1)
        return start_node(tmp_path, choice=choosing(existing_partitions="publish"))

    def test_they_are_offered_and_nothing_over_them(self, shared: NodeUnderTest) -> None:
        assert {name for name in shared.offered() if "2g20gb" in name} == {
            "gpu-0-mig-2g20gb-0",
            "gpu-0-mig-2g20gb-2",
            "gpu-0-mig-2g20gb-4",
        }
        assert "gpu-0-mig-1g10gb-2" not in shared.offered()

    def test_they_are_used_as_they_are_and_never_destroyed(self, shared: NodeUnderTest) -> None:
        [before] = shared.partitions()
        assert before.uuid is not None
        claim = shared.api.allocate("infer", "gpu-0-mig-2g20gb-2")
        shared.preparer.prepare(claim)
        assert shared.partitions() == [before]
        assert before.uuid in str(shared.cdi_specs())
        again = start_node(shared.root, shared.api, choice=choosing(existing_partitions="publish"))
        again.preparer.unprepare(claim)
        assert again.partitions() == [before]
        look(again)
        assert "gpu-0-mig-2g20gb-2" in again.offered()

    def test_they_are_offered_again_as_soon_as_they_are_free(self, shared: NodeUnderTest) -> None:
        claim = shared.api.allocate("infer", "gpu-0-mig-2g20gb-2")
        shared.preparer.prepare(claim)
        look(shared)
        shared.preparer.unprepare(claim)
        assert "gpu-0-mig-2g20gb-2" in shared.offered()
        assert "gpu-0-mig-1g10gb-2" not in shared.offered()
        assert shared.preparer.prepare(claim)


def test_a_gpu_whose_memory_is_lost_midway_is_reported_once(
    node: NodeUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    node.simulated.faults.lose_gpu(5)
    for _ in range(3):
        look(node)
    reports = [record for record in caplog.records if "can't be used" in record.getMessage()]
    assert len(reports) == 1
    assert "GPU_IS_LOST" in reports[0].why  # type: ignore[attr-defined]
