"""Half-failed rollbacks, vanished GPUs, renamed profiles and claims that race: nothing is lost or given out twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from driver.errors import ClaimError, HardwareError, RecoverableError, StateError
from driver.model.gpu import Placement
from driver.step_observer import Moment
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.support.claims import result
from tests.support.node import NodeUnderTest, start_node
from tests.support.nvml_client import process_on
from tests.support.published import build_slices

SMALL = "gpu-0-mig-1g10gb-6"
OTHER = "gpu-0-mig-2g20gb-0"


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    """One H100 with nothing prepared."""
    return start_node(tmp_path, gpus="h100-1")


def break_cdi(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CDI directory that was mounted read-only: nothing in it can be removed."""

    def refuse(self: CdiDirectory, uid: str) -> None:
        raise StateError(f"can't remove {self._path(uid)}: Read-only file system")

    monkeypatch.setattr(CdiDirectory, "remove", refuse)


def test_a_broken_cdi_directory_does_not_keep_the_partition(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    with monkeypatch.context() as broken:
        break_cdi(broken)
        with pytest.raises(StateError, match="Read-only file system"):
            node.preparer.unprepare(claim)
        assert node.partitions() == []
        assert node.held() == {SMALL}
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_one_partition_in_use_does_not_keep_the_claims_other_one(node: NodeUnderTest) -> None:
    claim = node.api.allocate("two", result(OTHER, "a"), result(SMALL, "b"))
    node.preparer.prepare(claim)
    busy = next(partition for partition in node.partitions() if partition.placement == Placement(0, 2))
    assert busy.uuid is not None
    with process_on(node.simulated, busy.uuid):
        with pytest.raises(HardwareError, match=r"IN_USE"):
            node.preparer.unprepare(claim)
        assert node.partitions() == [busy]
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_when_the_second_device_fails_the_first_is_undone(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    blocker = gpu.profile_named("1g.20gb")
    assert blocker is not None
    node.host.set_mig_mode(gpu, enabled=True)
    foreign = node.host.create_gpu_instance(gpu, blocker, Placement(6, 2))
    claim = node.api.allocate("two", result(OTHER, "a"), result(SMALL, "b"))
    with pytest.raises(HardwareError, match=r"memory slices 6-7 .* taken by GPU instance"):
        node.preparer.prepare(claim)
    assert node.partitions() == [foreign]
    assert node.records() == []
    assert node.held() == set()


@pytest.mark.parametrize("devices", [("gpu-0", SMALL), (SMALL, "gpu-0"), (OTHER, "gpu-0-mig-1g10gb-1")])
def test_a_claim_whose_own_devices_overlap_is_refused(node: NodeUnderTest, devices: tuple[str, str]) -> None:
    claim = node.api.allocate("greedy", result(devices[0], "a"), result(devices[1], "b"))
    with pytest.raises(ClaimError, match=r"claim default/greedy: its own devices .* overlap"):
        node.preparer.prepare(claim)
    assert node.nothing_left()


def edit_record(node: NodeUnderTest, claim: ClaimReference, **fields: object) -> None:
    """Change the one device of the claim's record on disk."""
    path = node.root / "state" / "claims" / f"{claim.uid}.json"
    record = json.loads(path.read_text())
    record["devices"][0] |= fields
    path.write_text(json.dumps(record))


def test_a_full_claim_can_be_unprepared_after_its_gpu_is_gone(node: NodeUnderTest) -> None:
    claim = node.api.allocate("train", "gpu-0")
    node.preparer.prepare(claim)
    edit_record(node, claim, gpuUUID="GPU-gone")
    again = node.restart()
    again.preparer.unprepare(claim)
    assert again.nothing_left()


def test_a_partition_whose_gpu_is_gone_stays_recorded_and_the_error_says_what_to_do(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    edit_record(node, claim, gpuUUID="GPU-gone")
    again = node.restart()
    record = f"{node.root}/state/claims/{claim.uid}.json"
    with pytest.raises(ClaimError, match=rf"GPU-gone, which did not answer .* delete {record} and restart"):
        again.preparer.unprepare(claim)
    assert again.records() == [f"{claim.uid}.json"]


def test_the_number_of_a_vanished_gpu_is_not_given_to_another(node: NodeUnderTest) -> None:
    claim = node.api.allocate("train", "gpu-0")
    node.preparer.prepare(claim)
    edit_record(node, claim, gpuUUID="GPU-gone")
    again = node.restart()
    assert [entry.number for entry in again.node.inventory.published()] == [1]
    assert "gpu-1" in again.offered()


def test_a_partition_whose_profile_was_renamed_is_still_held_and_removed(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    edit_record(node, claim, profile="1g.9gb", device="gpu-0-mig-1g9gb-6")
    again = node.restart()
    assert again.held() == {"gpu-0-mig-1g9gb-6"}
    assert not again.offered() & {SMALL, "gpu-0", "gpu-0-mig-1g20gb-6"}
    late = again.api.allocate("late", SMALL)
    with pytest.raises(ClaimError, match=r"overlaps gpu-0-mig-1g9gb-6 .* still holds"):
        again.preparer.prepare(late)
    again.preparer.unprepare(claim)
    assert again.nothing_left()


def test_a_record_that_makes_no_sense_any_more_leaves_its_partition_alone_and_unoffered(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    edit_record(node, claim, profile="9g.99gb", profileId=99, device="gpu-0-mig-9g99gb-6")
    again = node.restart()
    assert len(again.partitions()) == 1
    assert not again.offered() & {SMALL, "gpu-0", "gpu-0-mig-1g20gb-6"}


def test_a_checkpoint_that_was_set_aside_leaves_its_partition_alone_and_unoffered(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    (node.root / "state" / "claims" / f"{claim.uid}.json").write_text("{")
    again = node.restart()
    assert len(again.partitions()) == 1
    assert not again.offered() & {SMALL, "gpu-0", "gpu-0-mig-1g20gb-6"}
    assert "gpu-0-mig-3g40gb-0" in again.offered()


def test_offers_are_ranked_around_partitions_of_others(node: NodeUnderTest) -> None:
    gpu = node.node.inventory.gpus[0]
    profile = gpu.profile_named("1g.10gb")
    assert profile is not None
    node.host.set_mig_mode(gpu, enabled=True)
    node.host.create_gpu_instance(gpu, profile, Placement(4, 1))
    slices = build_slices(node.node.pool, node.restart().node.inventory.published())
    [names] = [[device["name"] for device in content["devices"]] for content in slices.values() if "devices" in content]
    assert names[0] == "gpu-0-mig-1g10gb-5"


def test_a_cdi_directory_that_cannot_be_listed_does_not_keep_the_plugin_from_starting(
    node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)

    def unreadable(self: CdiDirectory) -> list[str]:
        raise StateError("can't list /var/run/cdi: Input/output error")

    monkeypatch.setattr(CdiDirectory, "claim_uids", unreadable)
    assert node.restart().held() == {SMALL}
    assert "can't tidy the CDI directory" in caplog.text


def test_a_start_removes_half_written_specs_and_no_whole_one_even_without_a_record(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    for name in ("gpu.tessera.dev-claim_ghost.json", ".gpu.tessera.dev-claim_u.json.tmp", "nvidia.com-gpu.json"):
        (node.root / "cdi" / name).write_text("{}")
    node.restart()
    left = {path.name for path in (node.root / "cdi").iterdir()}
    assert left == {
        f"gpu.tessera.dev-claim_{claim.uid}.json",
        "gpu.tessera.dev-claim_ghost.json",
        "nvidia.com-gpu.json",
    }


def test_a_reboot_takes_the_partitions_and_the_next_prepare_makes_them_again(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.simulated.reboot()
    again = node.restart()
    assert again.held() == {SMALL}
    again.preparer.prepare(claim)
    assert [partition.placement for partition in again.partitions()] == [Placement(6, 1)]
    again.preparer.unprepare(claim)
    assert again.nothing_left()


def test_a_reboot_before_unprepare_leaves_nothing_to_do(node: NodeUnderTest) -> None:
    claim = node.api.allocate("infer", SMALL)
    node.preparer.prepare(claim)
    node.simulated.reboot()
    again = node.restart()
    again.preparer.unprepare(claim)
    assert again.nothing_left()


def run_at_once(*calls: Callable[[], object]) -> list[BaseException | None]:
    """What each call raised, or None."""
    start = threading.Barrier(len(calls))
    outcome: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        start.wait(60)
        try:
            calls[index]()
        except RecoverableError as error:
            outcome[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return outcome


def test_of_two_claims_for_overlapping_slices_at_once_exactly_one_wins(node: NodeUnderTest) -> None:
    claims = [node.api.allocate(name, device) for name, device in (("a", "gpu-0-mig-3g40gb-4"), ("b", SMALL))]
    outcome = run_at_once(*[partial(node.preparer.prepare, claim) for claim in claims])
    [refused] = [error for error in outcome if error is not None]
    assert isinstance(refused, ClaimError)
    assert len(node.partitions()) == len(node.records()) == len(node.cdi_specs()) == 1


def test_disjoint_claims_on_one_gpu_at_once_all_succeed(node: NodeUnderTest) -> None:
    claims = [node.api.allocate(f"c{start}", f"gpu-0-mig-1g10gb-{start}") for start in range(7)]
    outcome = run_at_once(*[partial(node.preparer.prepare, claim) for claim in claims])
    assert outcome == [None] * 7
    assert len({partition.placement for partition in node.partitions()}) == 7
    for claim in claims:
        node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_prepare_and_unprepare_of_one_claim_at_once_end_in_one_state_or_the_other(node: NodeUnderTest) -> None:
    claim = node.api.allocate("torn", SMALL)
    calls = [lambda: node.preparer.prepare(claim), lambda: node.preparer.unprepare(claim)] * 4
    assert run_at_once(*calls) == [None] * 8
    assert len(node.partitions()) == len(node.records()) == len(node.cdi_specs()) == len(node.held())
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_a_rollback_that_fails_half_way_is_finished_by_the_retry(tmp_path: Path) -> None:
    broken = {NodeStep.WRITE_CDI_SPEC, NodeStep.DESTROY_GPU_INSTANCE}

    def fail(step: NodeStep, moment: Moment) -> None:
        if moment == "before" and step in broken:
            raise HardwareError("simulated fault")

    node = start_node(tmp_path, observer=fail, gpus="h100-1")
    claim = node.api.allocate("infer", SMALL)
    with pytest.raises(HardwareError, match="simulated fault"):
        node.preparer.prepare(claim)
    assert len(node.partitions()) == len(node.records()) == 1
    assert node.held() == {SMALL}
    broken.clear()
    node.preparer.prepare(claim)
    assert node.partitions()[0].complete
    node.preparer.unprepare(claim)
    assert node.nothing_left()


def test_a_defect_in_the_middle_leaves_a_record_that_the_retry_heals(tmp_path: Path) -> None:
    broken = [NodeStep.WRITE_CDI_SPEC]

    def fail(step: NodeStep, moment: Moment) -> None:
        if moment == "before" and step in broken:
            raise KeyError("a defect")

    node = start_node(tmp_path, observer=fail, gpus="h100-1")
    claim = node.api.allocate("infer", SMALL)
    with pytest.raises(KeyError):
        node.preparer.prepare(claim)
    broken.clear()
    node.preparer.unprepare(claim)
    assert node.nothing_left()
