"""Claims that vanished, CDI specs without a claim, records that can't be read: found, released only without doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.errors import ApiError
from driver.model.gpu import Placement
from kubelet_plugin.claims import ClaimReference
from tests.support.care import Care
from tests.support.node import NodeUnderTest, start_node

SMALL = "gpu-0-mig-1g10gb-6"


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
        with node.simulated.process_on(node.node.inventory.gpus[0].uuid):
            care.look_long()
            assert node.held() == {"gpu-0"}
            assert set(care.reasons("Node/node-a")) == {"OrphanInUse"}
        care.look_long()
        assert node.nothing_left()

    def test_a_partition_in_use_stays_held_until_it_is_free(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("infer", SMALL)
        node.preparer.prepare(claim)
        node.api.delete(claim)
        [partition] = node.partitions()
        assert partition.uuid is not None
        care = Care(node)
        with node.simulated.process_on(partition.uuid):
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
        node.node.host.set_mig_mode(gpu, enabled=True)
        node.node.host.create_gpu_instance(gpu, profile, Placement(0, 1))
        again = node.restart()
        care = Care(again)
        care.look_long()
        assert len(again.partitions()) == 1
        assert "can't be rebuilt" in care.events[-1][2]
