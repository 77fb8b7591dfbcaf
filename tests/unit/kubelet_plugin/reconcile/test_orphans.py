"""Claims that vanished, CDI specs without a claim, records that can't be read: found, released only without doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from driver.errors import ApiError, ClaimError, StateError
from driver.model.gpu import Partition, Placement
from driver.slices.slice_names import MONITORS
from driver.step_observer import Moment
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.step_names import NodeStep
from tests.support.care import Care
from tests.support.claims import POOL, result
from tests.support.node import NodeUnderTest, choosing, start_node
from tests.support.nvml_client import process_on

SMALL = "gpu-0-mig-1g10gb-6"
MONITOR = result("gpu-0-monitor", "monitor", pool=POOL + MONITORS, adminAccess=True)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    return start_node(tmp_path, gpus="h100-1")


def record_of(node: NodeUnderTest, claim: ClaimReference) -> Path:
    return node.node.checkpoint.path(claim.uid)


class TestClaimsThatVanished:
    @pytest.mark.parametrize("device", [SMALL, "gpu-0"])
    def test_a_claim_deleted_while_the_plugin_was_away_is_released(self, node: NodeUnderTest, device: str) -> None:
        claim = node.api.allocate("infer", device)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        again = node.restart()
        assert again.held() == {device}
        care = Care(again)
        care.look_long()
        assert again.nothing_left()
        assert care.reasons("Node/node-a") == ["OrphanReleased"]
        assert device in care.events[0][2]
        assert care.orphans_of == ["claim"]

    def test_one_of_the_same_name_is_not_the_claim(self, node: NodeUnderTest) -> None:
        node.preparer.prepare(node.api.allocate("infer", SMALL, uid="old"))
        node.api.allocate("infer", "gpu-1-mig-1g10gb-0", uid="new")
        Care(node).look_long()
        assert node.nothing_left()

    def test_a_claim_that_is_not_allocated_any_more_is_released(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.put("infer", claim.uid, {})
        Care(node).look_long()
        assert node.nothing_left()

    def test_a_claim_that_is_there_stays(self, node: NodeUnderTest) -> None:
        node.preparer.prepare(node.api.allocate("infer", SMALL))
        care = Care(node)
        care.look_long()
        assert node.held() == {SMALL}
        assert not care.events

    @pytest.mark.parametrize("devices", [(MONITOR,), (SMALL, MONITOR)], ids=["monitor", "partition and monitor"])
    def test_a_claim_with_monitor_devices_stays_while_it_is_there(
        self, node: NodeUnderTest, devices: tuple[str | dict[str, Any], ...]
    ) -> None:
        claim = node.api.allocate("watch", *devices)
        node.preparer.prepare(claim)
        care = Care(node)
        care.look_long()
        care.look_long()
        assert len(node.records()) == len(node.cdi_specs()) == 1
        assert not care.events
        node.api.delete(claim)
        care.look_long()
        assert node.nothing_left()
        assert "gpu-0-monitor" in care.events[0][2]

    def test_nothing_is_released_while_the_api_server_cannot_be_read(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        node.api.away = True
        care = Care(node)
        care.look_long()
        assert node.held() == {SMALL}
        node.api.away = False
        care.look_long()
        assert node.nothing_left()

    def test_a_claim_is_gone_only_when_it_is_twice_a_minute_apart(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        kept = node.api.claims["default", "infer"]
        node.api.delete(claim)
        care = Care(node)
        care.look(after_s=30)
        assert node.held() == {SMALL}
        node.api.claims["default", "infer"] = kept
        care.look_long()
        assert node.held() == {SMALL}

    def test_a_full_gpu_on_which_a_process_runs_stays_held_until_that_ends(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("train", "gpu-0")
        node.preparer.prepare(claim)
        node.api.delete(claim)
        care = Care(node)
        with process_on(node.simulated, node.node.inventory.gpus[0].uuid):
            care.look_long()
            assert node.held() == {"gpu-0"}
            assert set(care.reasons("Node/node-a")) == {"OrphanInUse"}
        care.look_long()
        assert node.nothing_left()

    def test_what_an_earlier_boot_left_on_a_gpu_that_is_lost_is_released(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("train", "gpu-0")
        node.preparer.prepare(claim)
        node.api.delete(claim)
        node.simulated.reboot()
        rebooted = node.restart()
        lost, *others = rebooted.node.inventory.gpus
        rebooted.node.inventory.update(others, {lost.uuid: "NVML no longer finds it"})
        rebooted.simulated.faults.fail("nvmlDeviceGetComputeRunningProcesses", code=pynvml.NVML_ERROR_GPU_IS_LOST)
        Care(rebooted).look_long()
        assert rebooted.held() == set()
        assert rebooted.records() == []

    def test_a_partition_in_use_stays_held_until_it_is_free(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        [partition] = node.partitions()
        assert partition.uuid is not None
        care = Care(node)
        with process_on(node.simulated, partition.uuid):
            care.look_long()
            assert node.held() == {SMALL}
        care.look_long()
        assert node.nothing_left()

    def test_idle_looks_ask_for_each_claim_every_few_minutes_and_no_more(self, node: NodeUnderTest) -> None:
        node.preparer.prepare(node.api.allocate("infer", SMALL))
        care, before = Care(node), node.api.reads
        care.look_long()
        assert 8 <= node.api.reads - before <= 16


class TestSpecsWithoutAClaim:
    def test_a_spec_that_no_record_explains_is_removed_while_the_plugin_runs(self, node: NodeUnderTest) -> None:
        stray = node.root / "cdi" / "gpu.tessera.dev-claim_dead.json"
        stray.write_text("{}")
        others = node.root / "cdi" / "nvidia.json"
        others.write_text("{}")
        care = Care(node)
        care.look_long()
        assert not stray.exists()
        assert others.exists()
        assert care.orphans_of == ["cdi-spec"]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b'{"devices": null}',
            b'{"devices": [{"name": "\xff"}]}',
            b'{"devices": [{"name": "a", "containerEdits": {"env": [1]}}]}',
            b'{"a":' * 5000,
        ],
    )
    def test_one_that_makes_no_sense_does_not_keep_the_plugin_from_starting_and_is_removed(
        self, node: NodeUnderTest, content: bytes
    ) -> None:
        stray = node.root / "cdi" / "gpu.tessera.dev-claim_dead.json"
        stray.write_bytes(content)
        again = node.restart()
        Care(again).look_long()
        assert not stray.exists()


def test_a_spec_that_is_being_written_is_left_to_who_writes_it(node: NodeUnderTest) -> None:
    half = node.root / "cdi" / ".gpu.tessera.dev-claim_new.json.tmp"
    half.write_text("{")
    care = Care(node)
    care.look()
    care.look_long()
    assert half.exists()


class TestRecordsThatCannotBeRead:
    @pytest.mark.parametrize(
        "content", [b"", b'{"version": 1, "name', b'{"version": 2, "new": true}', b'{"version": 0}', b"\xff\x00garbage"]
    )
    @pytest.mark.parametrize("device", [SMALL, "gpu-0"])
    def test_it_is_set_aside_and_made_anew_from_the_claim(
        self, node: NodeUnderTest, content: bytes, device: str
    ) -> None:
        claim = node.api.allocate("infer", device)
        node.preparer.prepare(claim)
        good, partitions, specs = record_of(node, claim).read_bytes(), node.partitions(), node.cdi_specs()
        record_of(node, claim).write_bytes(content)
        again = node.restart()
        care = Care(again)
        care.look_long()
        assert record_of(again, claim).read_bytes() == good
        assert (again.partitions(), again.cdi_specs(), again.held()) == (partitions, specs, {device})
        assert care.reasons("Node/node-a") == ["CheckpointRecordUnreadable"]
        assert care.reasons("ResourceClaim/infer") == ["CheckpointRecordRebuilt"]
        assert record_of(again, claim).with_suffix(".settled").read_bytes() == content
        again.preparer.unprepare(claim)
        assert not again.partitions()

    def test_a_repeated_prepare_takes_its_own_partition_back(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        before = node.partitions()
        record_of(node, claim).write_bytes(b"{")
        again = node.restart()
        assert [device.device for device in again.preparer.prepare(claim)] == [SMALL]
        assert again.partitions() == before

    def test_of_a_claim_that_is_gone_its_cdi_spec_tells_what_to_release(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        record_of(node, claim).write_bytes(b"{")
        node.api.delete(claim)
        again = node.restart()
        assert len(again.cdi_specs()) == 1
        Care(again).look_long()
        assert not again.partitions()
        assert not again.cdi_specs()
        assert again.records() == [f"{claim.uid}.settled"]

    def test_nothing_is_taken_from_it_while_the_api_server_cannot_be_read(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        record_of(node, claim).write_bytes(b"{")
        again = node.restart()
        again.api.away = True
        Care(again).look_long()
        assert len(again.partitions()) == 1
        assert again.offered().isdisjoint({"gpu-0", SMALL})
        with pytest.raises(ApiError):
            again.preparer.prepare(claim)
        assert len(again.partitions()) == 1

    def test_a_partition_that_is_not_the_claims_is_not_taken_for_it(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", "gpu-0")
        node.preparer.prepare(claim)
        record_of(node, claim).write_bytes(b"{")
        gpu = node.node.inventory.gpus[0]
        profile = gpu.profile_named("1g.10gb")
        assert profile is not None
        node.host.set_mig_mode(gpu, enabled=True)
        node.host.create_gpu_instance(gpu, profile, Placement(0, 1))
        again = node.restart()
        care = Care(again)
        care.look_long()
        assert len(again.partitions()) == 1
        assert "can't be rebuilt" in care.events[-1][2]


def lose(node: NodeUnderTest, claim: ClaimReference, *, spec: bool = False) -> NodeUnderTest:
    """The plugin is killed, the claim's record (and CDI spec) is deleted, and the plugin is started again.

    The claim's status, which the plugin wrote before, names the partition.
    """
    record = node.node.checkpoint.get(claim.uid)
    for entry in record.devices if record is not None else ():
        if entry.uuid is not None and (claim.namespace, claim.name) in node.api.claims:
            node.api.report(claim, entry.device, entry.uuid)
    record_of(node, claim).unlink()
    if spec:
        spec_of(node, claim).unlink()
    return node.restart()


def spec_of(node: NodeUnderTest, claim: ClaimReference) -> Path:
    return node.root / "cdi" / f"gpu.tessera.dev-claim_{claim.uid}.json"


def cut(node: NodeUnderTest, start: int) -> Partition:
    """A partition of somebody else."""
    gpu = node.node.inventory.gpus[0]
    profile = gpu.profile_named("1g.10gb")
    assert profile is not None
    node.host.set_mig_mode(gpu, enabled=True)
    made = node.host.create_gpu_instance(gpu, profile, Placement(start, 1))
    return node.host.create_compute_instance(gpu, made)


class TestRecordsThatAreMissing:
    @pytest.mark.parametrize("device", [SMALL, "gpu-0"])
    def test_the_claim_keeps_everything_and_its_record_is_rebuilt(self, node: NodeUnderTest, device: str) -> None:
        claim = node.api.allocate("infer", device)
        node.preparer.prepare(claim)
        good, partitions, specs = record_of(node, claim).read_bytes(), node.partitions(), node.cdi_specs()
        again = lose(node, claim)
        assert (again.partitions(), again.cdi_specs(), again.held()) == (partitions, specs, {device})
        care = Care(again)
        care.look_long()
        assert record_of(again, claim).read_bytes() == good
        assert (again.partitions(), again.cdi_specs(), again.held()) == (partitions, specs, {device})
        assert care.reasons("Node/node-a") == ["CheckpointRecordMissing"]
        assert care.reasons("ResourceClaim/infer") == ["CheckpointRecordRebuilt"]
        again.preparer.unprepare(claim)
        assert again.nothing_left()

    def test_of_a_claim_that_is_gone_everything_stays_until_that_is_certain_and_then_goes(
        self, node: NodeUnderTest
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        again = lose(node, claim)
        care = Care(again)
        care.look(after_s=30)
        assert len(again.partitions()) == len(again.cdi_specs()) == 1
        care.look(after_s=61)
        assert again.nothing_left()
        assert again.held() == set()
        assert care.orphans_of == ["cdi-spec"]
        assert care.reasons("Node/node-a") == ["CheckpointRecordMissing", "OrphanReleased"]

    def test_while_the_api_server_cannot_be_read_nothing_is_taken_and_nothing_given_out_twice(
        self, node: NodeUnderTest
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        again = lose(node, claim)
        other = again.api.allocate("greedy", "gpu-0")
        again.api.away = True
        care = Care(again)
        care.look_long()
        assert len(again.partitions()) == len(again.cdi_specs()) == 1
        assert again.held() == {SMALL}
        assert "gpu-0" not in again.offered()
        again.api.away = False
        with pytest.raises(
            ClaimError, match=f"{SMALL} .*, which claim {claim.uid}, whose checkpoint record is .* still"
        ):
            again.preparer.prepare(other)
        care.look_long()
        assert record_of(again, claim).exists()

    def test_an_unprepare_before_the_record_is_rebuilt_releases_what_the_spec_names(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("two", result("gpu-0-mig-2g20gb-0", "a"), result(SMALL, "b"))
        node.preparer.prepare(claim)
        again = lose(node, claim)
        again.preparer.unprepare(claim)
        assert again.nothing_left()
        assert again.held() == set()

    def test_a_partition_that_others_made_where_an_old_spec_names_one_stays(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        spec = spec_of(node, claim).read_bytes()
        node.preparer.unprepare(claim)
        node.api.delete(claim)
        theirs = cut(node, 6)
        spec_of(node, claim).write_bytes(spec)
        again = node.restart()
        Care(again).look_long()
        assert again.partitions() == [theirs]
        assert not again.cdi_specs()
        assert again.held() == set()

    def test_where_partitions_of_others_are_given_out_an_adopted_one_is_never_removed(self, tmp_path: Path) -> None:
        published = choosing(existing_partitions="publish")
        node = start_node(tmp_path, gpus="h100-1")
        theirs = cut(node, 6)
        node = start_node(tmp_path, node.api, gpus="h100-1", choice=published)
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        record_of(node, claim).unlink()
        again = start_node(tmp_path, node.api, gpus="h100-1", choice=published)
        Care(again).look_long()
        assert record_of(again, claim).exists()
        again.preparer.unprepare(claim)
        assert again.partitions() == [theirs]

    def test_a_gpu_that_is_away_at_the_start_keeps_what_the_spec_names_until_it_is_back(
        self, node: NodeUnderTest
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        stays = node.simulated.faults.fail("nvmlDeviceGetUUID", code=pynvml.NVML_ERROR_UNKNOWN)
        again = lose(node, claim)
        assert not again.node.inventory.gpus
        care = Care(again)
        care.look_long()
        assert len(again.cdi_specs()) == 1
        again.simulated.faults.clear(stays)
        again.scanner.scan(again.node.inventory)
        again.node.hold_all()
        assert again.held() == {SMALL}
        care.look_long()
        assert again.nothing_left()

    @pytest.mark.parametrize("moment", ["before", "after"])
    @pytest.mark.parametrize("step", [NodeStep.WRITE_INTENT, NodeStep.WRITE_CDI_SPEC])
    def test_a_kill_while_the_record_is_rebuilt_takes_nothing_from_the_claim(
        self, node: NodeUnderTest, step: NodeStep, moment: Moment
    ) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        partitions, specs = node.partitions(), node.cdi_specs()
        record_of(node, claim).unlink()

        def kill(at: NodeStep, when: Moment) -> None:
            if (at, when) == (step, moment):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Care(node.restart(kill)).look_long()
        again = node.restart()
        assert (again.partitions(), again.cdi_specs(), again.held()) == (partitions, specs, {SMALL})
        Care(again).look_long()
        assert (again.partitions(), again.cdi_specs(), again.held()) == (partitions, specs, {SMALL})
        again.preparer.unprepare(claim)
        assert again.nothing_left()

    def test_a_rebuild_that_fails_half_way_takes_nothing_from_the_claim(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        partitions = node.partitions()
        spec_of(node, claim).write_text("{}")
        broken = [NodeStep.WRITE_CDI_SPEC]

        def fail(step: NodeStep, moment: Moment) -> None:
            if moment == "before" and step in broken:
                raise StateError("simulated fault")

        record_of(node, claim).unlink()
        again = node.restart(fail)
        care = Care(again)
        care.look_long()
        assert again.partitions() == partitions
        broken.clear()
        care.look_long()
        assert again.partitions() == partitions
        assert not [record for record in again.node.checkpoint.records() if record.needs_release]
        again.preparer.unprepare(claim)
        assert again.nothing_left()


class TestRecordAndSpecAreMissing:
    def test_the_claim_that_is_allocated_just_that_partition_gets_both_back(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        good, partitions, specs = record_of(node, claim).read_bytes(), node.partitions(), node.cdi_specs()
        again = lose(node, claim, spec=True)
        Care(again).look_long()
        assert (record_of(again, claim).read_bytes(), again.partitions(), again.cdi_specs()) == (
            good,
            partitions,
            specs,
        )
        again.preparer.unprepare(claim)
        assert again.nothing_left()

    def test_it_is_looked_for_until_the_api_server_can_be_read(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        again = lose(node, claim, spec=True)
        again.api.away = True
        care = Care(again)
        care.look_long()
        again.api.away = False
        care.look_long()
        assert record_of(again, claim).exists()

    @pytest.mark.parametrize("reported", [None, "MIG-another"])
    def test_a_partition_that_somebody_else_cut_where_a_claim_is_allocated_is_left_alone(
        self, node: NodeUnderTest, reported: str | None
    ) -> None:
        claim = node.api.allocate("never-prepared", SMALL)
        cut(node, 6)
        partitions = node.partitions()
        if reported is not None:
            node.api.report(claim, SMALL, reported)
        again = node.restart()
        Care(again).look_long()
        assert not again.records()
        again.preparer.unprepare(claim)
        assert again.partitions() == partitions

    def test_a_partition_that_no_claim_explains_is_left_alone(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        partitions = node.partitions()
        again = lose(node, claim, spec=True)
        again.api.allocate("next", "gpu-0-mig-1g10gb-0")
        Care(again).look_long()
        assert again.partitions() == partitions
        assert not again.records()
