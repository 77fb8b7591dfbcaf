"""What nobody asks for again: releases that failed, and what prepared claims have lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

from driver.errors import HardwareError, StateError
from driver.model.gpu import Placement
from driver.model.gpu_events_and_conditions import ConditionType
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.care import Care
from tests.support.claims import result
from tests.support.node import NodeUnderTest, choosing, start_node
from tests.support.nvml_client import process_on
from tests.support.running import eventually

PUBLISHED = choosing(existing_partitions="publish")
SMALL = "gpu-0-mig-1g10gb-6"
OTHER = "gpu-0-mig-2g20gb-0"


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path, gpus="h100-1")


@pytest.fixture
def care(node: NodeUnderTest) -> Care:
    return Care(node)


@contextmanager
def prepared_and_in_use(node: NodeUnderTest, claim: ClaimReference) -> Iterator[None]:
    """A process uses the claim's partition while the block runs."""
    node.preparer.prepare(claim)
    [partition] = node.partitions()
    assert partition.uuid is not None
    with process_on(node.simulated, partition.uuid):
        yield


class TestWhatIsOwed:
    def test_a_partition_in_use_at_unprepare_is_removed_once_it_is_free(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        with prepared_and_in_use(node, claim):
            with pytest.raises(HardwareError, match="IN_USE"):
                node.preparer.unprepare(claim)
            care.look()
            assert node.held() == {SMALL}
            assert "gpu-0" not in node.offered()
        care.look(after_s=10)
        assert node.nothing_left()
        assert "gpu-0" in node.offered()
        assert care.reasons("ResourceClaim/infer") == ["ReleasedLate"]

    def test_a_release_that_lasts_is_reported_and_the_report_ends_with_it(
        self, node: NodeUnderTest, care: Care
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        with prepared_and_in_use(node, claim):
            with pytest.raises(HardwareError):
                node.preparer.unprepare(claim)
            care.look()
            assert not care.troubles
            care.look(after_s=61)
            [reported] = care.failed.reported("unprepare")
            assert (reported.claim, reported.since) == ("default/infer", "1970-01-01T00:16:40Z")
            assert "default/infer can't be released" in care.troubles[SMALL, ConditionType.STUCK]
            assert "a process still uses it" in care.troubles[SMALL, ConditionType.STUCK]
        care.look(after_s=10)
        assert not care.troubles
        assert care.failed.reported("unprepare") == ()

    def test_the_report_ends_too_when_the_kubelets_own_try_succeeds(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        with prepared_and_in_use(node, claim):
            with pytest.raises(HardwareError):
                node.preparer.unprepare(claim)
            care.look()
            care.look(after_s=61)
            assert care.troubles
        node.preparer.unprepare(claim)
        care.look(after_s=10)
        assert not care.troubles

    def test_a_claim_whose_unprepare_was_begun_is_released_after_a_restart_though_nobody_asks(
        self, node: NodeUnderTest
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        with prepared_and_in_use(node, claim):
            with pytest.raises(HardwareError):
                node.preparer.unprepare(claim)
            again = node.restart()
            assert again.held() == {SMALL}
        Care(again).look()
        assert again.nothing_left()

    def test_a_claim_that_is_asked_for_again_while_it_is_owed_is_prepared_and_stays(
        self, node: NodeUnderTest, care: Care
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        with prepared_and_in_use(node, claim), pytest.raises(HardwareError):
            node.preparer.unprepare(claim)
        node.preparer.prepare(claim)
        care.look_long()
        assert len(node.partitions()) == len(node.cdi_specs()) == len(node.records()) == 1
        assert not node.node.checkpoint.records()[0].needs_release

    def test_a_failed_prepare_that_could_not_be_undone_is_undone_later(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        faults = node.simulated.faults
        faults.fail("nvmlGpuInstanceCreateComputeInstance", code=pynvml.NVML_ERROR_UNKNOWN, times=1)
        stays = faults.fail("nvmlGpuInstanceDestroy", code=pynvml.NVML_ERROR_UNKNOWN)
        with pytest.raises(HardwareError):
            node.preparer.prepare(claim)
        assert len(node.partitions()) == 1
        faults.clear(stays)
        care.look()
        assert node.nothing_left()


class TestWhatIsLost:
    def test_a_partition_lost_to_a_reset_is_cut_again_and_its_user_hears_of_it(
        self, node: NodeUnderTest, care: Care
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        [before] = node.partitions()
        repaired: list[str] = []
        node.repaired.append(lambda record, made: repaired.append(made))
        node.simulated.reset_gpu(0)
        assert node.partitions() == []
        care.look()
        [now] = node.partitions()
        assert now.placement == Placement(6, 1)
        assert now.uuid != before.uuid
        [spec] = node.cdi_specs().values()
        assert f"TESSERA_DEVICE_GPU_0_MIG_1G10GB_6={now.uuid}" in spec["devices"][0]["containerEdits"]["env"]
        assert node.node.checkpoint.records()[0].devices[0].uuid == now.uuid
        assert [str(before.uuid) in line and str(now.uuid) in line for line in repaired] == [True]

    def test_a_cdi_spec_that_somebody_deleted_is_written_again(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        before = node.cdi_specs()
        for path in (node.root / "cdi").iterdir():
            path.unlink()
        care.look()
        assert node.cdi_specs() == before

    @pytest.mark.parametrize("directory", [True, False])
    def test_specs_are_back_within_one_look_at_the_hardware_though_nothing_was_reported(
        self, node: NodeUnderTest, care: Care, directory: bool
    ) -> None:
        for number in range(2):
            node.preparer.prepare(node.api.allocate(f"infer-{number}", f"gpu-0-mig-1g10gb-{number}"))
        before = node.cdi_specs()
        care.look()
        if directory:
            shutil.rmtree(node.root / "cdi")
        else:
            (node.root / "cdi" / next(iter(before))).unlink()
        stop = threading.Event()
        thread = threading.Thread(target=care.reconciler.run, args=(stop,))
        care.now += 100.0
        care.reconciler.handle_scan([])
        thread.start()
        try:
            names = {node.root / "cdi" / name for name in before}
            eventually(lambda: set((node.root / "cdi").glob("*.json")) == names, "the specs are back")
        finally:
            stop.set()
            care.reconciler.notify()
            thread.join(60)
        assert node.cdi_specs() == before

    def test_a_missing_directory_is_created_again_though_nothing_is_prepared(
        self, node: NodeUnderTest, care: Care
    ) -> None:
        (node.root / "cdi").rmdir()
        care.reconciler.handle_scan([])
        assert (node.root / "cdi").is_dir()

    def test_what_cannot_be_made_again_is_reported_until_it_can(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("two", result(OTHER, "a"), result(SMALL, "b"))
        node.preparer.prepare(claim)
        node.simulated.reset_gpu(0)
        faults = node.simulated.faults
        stays = faults.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=pynvml.NVML_ERROR_UNKNOWN)
        care.look()
        assert care.troubles.keys() == {(OTHER, ConditionType.LOST), (SMALL, ConditionType.LOST)}
        assert "UNKNOWN" in care.troubles[SMALL, ConditionType.LOST]
        assert care.reasons("ResourceClaim/two") == ["DeviceLost"]
        faults.clear(stays)
        care.look(after_s=10)
        assert not care.troubles
        assert len(node.partitions()) == 2

    def test_what_was_lost_is_no_news_once_its_claim_has_ended(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.simulated.reset_gpu(0)
        stays = node.simulated.faults.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code=pynvml.NVML_ERROR_UNKNOWN)
        care.look()
        assert care.troubles
        node.preparer.unprepare(claim)
        node.simulated.faults.clear(stays)
        care.look(after_s=10)
        assert not care.troubles

    def test_after_a_reboot_nothing_is_cut_before_the_kubelet_asks(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.simulated.reboot()
        again = node.restart()
        care = Care(again)
        care.look()
        assert again.partitions() == []
        assert not care.troubles
        again.preparer.prepare(claim)
        assert len(again.partitions()) == 1
        again.simulated.reset_gpu(0)
        care.look(after_s=10)
        assert len(again.partitions()) == 1

    def test_a_gpu_that_does_not_answer_has_lost_nothing(self, node: NodeUnderTest, care: Care) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.simulated.faults.lose_gpu(0)
        node.scanner.scan(node.node.inventory)
        care.look()
        assert not care.events

    def test_a_partition_that_others_made_and_that_is_gone_is_not_made_by_us(self, node: NodeUnderTest) -> None:
        gpu = node.node.inventory.gpus[0]
        profile = gpu.profile_named("1g.10gb")
        assert profile is not None
        node.host.set_mig_mode(gpu, enabled=True)
        made = node.host.create_gpu_instance(gpu, profile, Placement(6, 1))
        node.host.create_compute_instance(gpu, made)
        again = start_node(node.root, node.api, gpus="h100-1", choice=PUBLISHED)
        claim = again.api.allocate("infer", SMALL)
        again.preparer.prepare(claim)
        again.simulated.reset_gpu(0)
        care = Care(again)
        care.look()
        assert again.partitions() == []
        assert "which Tessera published but did not create, is gone" in care.troubles[SMALL, ConditionType.LOST]
        again.preparer.unprepare(claim)
        assert again.records() == []


def test_a_hung_release_does_not_keep_others_from_being_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubelet_plugin.reconcile.recovery.ROUND_TIMEOUT_SECONDS", 0.5)
    node = start_node(tmp_path)
    claims = [node.api.allocate(f"infer-{gpu}", f"gpu-{gpu}-mig-1g10gb-6") for gpu in range(2)]
    with monkeypatch.context() as broken:
        broken.setattr(CdiDirectory, "remove", refuse)
        for claim in claims:
            node.preparer.prepare(claim)
            with pytest.raises(StateError):
                node.preparer.unprepare(claim)
    with node.locks.hold([node.node.inventory.gpus[0].uuid], "something that hangs"):
        Care(node).look()
        eventually(lambda: node.records() == [f"{claims[0].uid}.json"], "the other one is released")
    Care(node).look()
    eventually(node.nothing_left, "both are released")


def refuse(self: CdiDirectory, uid: str) -> None:
    raise StateError(f"can't remove {self._path(uid)}: Read-only file system")
