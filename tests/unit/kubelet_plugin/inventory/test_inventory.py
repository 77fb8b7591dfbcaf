"""Shares of a GPU: offered, prepared, kept apart from full and MIG use, and unchanged by a change of their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driver.errors import ClaimError, HardwareError
from driver.model.gpu_settings import GpuSelection, GpuSharing, TimeSlice
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.inventory.published_devices import PublishPolicy
from tests.support.claims import opaque, result
from tests.support.node import NodeUnderTest, start_node
from tests.support.nvml_client import set_compute_mode

SHARE = "gpu-0-share-3"
TEN = GpuSharing(lambda gpu: 10 if gpu.index == 0 else 0)


@pytest.fixture
def node(tmp_path: Path) -> NodeUnderTest:
    """A DGX H100 whose first GPU is divided into ten shares."""
    return start_node(tmp_path, sharing=TEN)


def shares(names: set[str]) -> set[str]:
    return {name for name in names if "-share-" in name}


def test_only_the_gpus_that_settings_name_are_shared(node: NodeUnderTest) -> None:
    # The others wait: beside 26 other devices there is room for six.
    assert shares(node.offered(0)) == {f"gpu-0-share-{index}" for index in range(6)}
    assert shares(node.offered(1)) == set()


def test_a_container_gets_the_whole_gpu_and_is_told_of_how_many_shares_it_has_one(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("notebook", SHARE))
    [spec] = node.cdi_specs().values()
    edits = spec["devices"][0]["containerEdits"]
    uuid = node.node.inventory.gpus[0].uuid
    assert edits["env"] == [f"TESSERA_DEVICE_GPU_0_SHARE_3={uuid}", "TESSERA_SHARES_GPU_0_SHARE_3=10"]
    assert edits["deviceNodes"][0]["path"] == "/dev/nvidia0"
    assert not [entry for entry in edits["deviceNodes"] if "caps" in entry["path"]]


def test_ten_claims_share_one_gpu_and_leave_nothing(node: NodeUnderTest) -> None:
    claims = [node.api.allocate(f"notebook-{index}", f"gpu-0-share-{index}") for index in range(10)]
    for claim in claims:
        node.preparer.prepare(claim)
    assert node.held() == {f"gpu-0-share-{index}" for index in range(10)}
    assert node.offered() == set()
    for claim in claims:
        node.preparer.unprepare(claim)
    assert node.nothing_left()
    assert "gpu-0" in node.offered()


def test_while_a_share_is_held_nothing_but_shares_is_offered(node: NodeUnderTest) -> None:
    node.preparer.prepare(node.api.allocate("notebook", SHARE))
    assert node.offered() == {f"gpu-0-share-{index}" for index in range(10)} - {SHARE}


@pytest.mark.parametrize("held", ["gpu-0", "gpu-0-mig-1g10gb-6"])
def test_while_something_else_is_held_no_share_is_offered(node: NodeUnderTest, held: str) -> None:
    node.preparer.prepare(node.api.allocate("other", held))
    assert shares(node.offered()) == set()


@pytest.mark.parametrize("first", ["gpu-0", "gpu-0-mig-1g10gb-6", SHARE])
@pytest.mark.parametrize("second", ["gpu-0", "gpu-0-mig-1g10gb-6", SHARE])
def test_the_plugin_refuses_what_excludes_each_other_in_every_order_and_says_who_holds_it(
    node: NodeUnderTest, first: str, second: str
) -> None:
    holder = node.api.allocate("first", first)
    node.preparer.prepare(holder)
    late = node.api.allocate("second", second)
    with pytest.raises(ClaimError, match=r"claim default/first .* still holds"):
        node.preparer.prepare(late)
    node.preparer.unprepare(holder)
    node.preparer.prepare(late)
    assert node.held() == {second}


def test_a_share_switches_mig_mode_off_where_partitions_were_before(node: NodeUnderTest) -> None:
    small = node.api.allocate("small", "gpu-0-mig-1g10gb-6")
    node.preparer.prepare(small)
    node.preparer.unprepare(small)
    node.preparer.prepare(node.api.allocate("notebook", SHARE))
    assert not node.host.mig_enabled(node.node.inventory.gpus[0])


def test_a_gpu_for_shares_only_offers_nothing_else(tmp_path: Path) -> None:
    node = start_node(tmp_path, sharing=GpuSharing(lambda _: 4, GpuSelection.parse("0")))
    assert node.offered(0) == {f"gpu-0-share-{index}" for index in range(4)}
    assert "gpu-1" in node.offered(1)


def test_an_ampere_gpu_in_mig_mode_offers_no_shares(tmp_path: Path) -> None:
    node = start_node(tmp_path, gpus="dgx-a100", sharing=GpuSharing(lambda _: 4))
    gpu = node.node.inventory.gpus[0]
    node.host.request_mig_mode(gpu)
    node.simulated.reset_gpu(0)
    node.scanner.scan(node.node.inventory)
    assert shares(node.offered(0)) == set()
    assert len(shares(node.offered(1))) == 4


def asking(interval: str, kind: str = "ShareConfig") -> dict[str, Any]:
    """A config entry that asks for a time-slice interval."""
    sharing = {"strategy": "TimeSlicing", "timeSlicing": {"interval": interval}}
    return opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": kind, "sharing": sharing})


class TestTimeSlice:
    """A GPU has one interval, whoever shares it."""

    def interval(self, node: NodeUnderTest) -> str:
        return list(TimeSlice)[node.simulated.gpu_state(0).time_slice].value

    def start(self, node: NodeUnderTest, index: int, interval: str | None = None) -> ClaimReference:
        config = [asking(interval)] if interval else []
        claim = node.api.allocate(f"notebook-{index}", f"gpu-0-share-{index}", config=config)
        node.preparer.prepare(claim)
        return claim

    @pytest.mark.parametrize("wishes", [("Short", "Long", None), (None, "Long", "Short"), ("Long", "Short", "Default")])
    def test_the_shortest_wish_is_in_force_in_every_order(
        self, node: NodeUnderTest, wishes: tuple[str | None, ...]
    ) -> None:
        for index, wish in enumerate(wishes):
            self.start(node, index, wish)
        assert self.interval(node) == "Short"

    def test_it_follows_who_is_left_and_ends_with_the_last(self, node: NodeUnderTest) -> None:
        short, long, none = self.start(node, 0, "Short"), self.start(node, 1, "Long"), self.start(node, 2)
        node.preparer.unprepare(short)
        assert self.interval(node) == "Long"
        node.preparer.unprepare(long)
        assert self.interval(node) == "Default"
        node.preparer.unprepare(none)
        assert self.interval(node) == "Default"

    def test_a_full_gpu_may_ask_too(self, node: NodeUnderTest) -> None:
        claim = node.api.allocate("train", "gpu-0", config=[asking("Long", "GpuConfig")])
        node.preparer.prepare(claim)
        assert self.interval(node) == "Long"
        node.preparer.unprepare(claim)
        assert self.interval(node) == "Default"

    def test_it_survives_a_restart_of_the_plugin(self, node: NodeUnderTest) -> None:
        claim = self.start(node, 0, "Medium")
        again = node.restart(sharing=TEN)
        assert self.interval(again) == "Medium"
        again.preparer.unprepare(claim)
        assert self.interval(again) == "Default"

    def test_a_repeat_sets_it_again_after_a_reset_of_the_gpu(self, node: NodeUnderTest) -> None:
        claim = self.start(node, 0, "Medium")
        node.simulated.reset_gpu(0)
        assert self.interval(node) == "Default"
        node.preparer.prepare(claim)
        assert self.interval(node) == "Medium"

    def test_a_node_without_the_tool_refuses_who_asks_and_serves_who_does_not(self, node: NodeUnderTest) -> None:
        (node.simulated.root / "usr/bin/nvidia-smi").unlink()
        with pytest.raises(HardwareError, match=r"nvidia-smi does not exist"):
            self.start(node, 0, "Medium")
        assert node.records() == []
        self.start(node, 1)
        assert node.held() == {"gpu-0-share-1"}


def test_a_gpu_in_exclusive_mode_is_not_shared_and_the_error_says_what_to_do(node: NodeUnderTest) -> None:
    set_compute_mode(node.simulated, "EXCLUSIVE_PROCESS")
    with pytest.raises(HardwareError, match=r"EXCLUSIVE_PROCESS.*nvidia-smi -i GPU-.* -c DEFAULT"):
        node.preparer.prepare(node.api.allocate("notebook", SHARE))
    assert node.nothing_left()
    node.preparer.prepare(node.api.allocate("train", "gpu-0"))


class TestAnotherNumberOfShares:
    """The setting changes from 10 to 4 while three of the ten are held."""

    HELD = ("gpu-0-share-0", "gpu-0-share-3", "gpu-0-share-9")

    @pytest.fixture
    def changed(self, node: NodeUnderTest) -> NodeUnderTest:
        for name in self.HELD:
            node.preparer.prepare(node.api.allocate(name, name))
        return node.restart(sharing=GpuSharing(lambda _: 4))

    def test_held_shares_stay_as_they_were_given_out(self, changed: NodeUnderTest) -> None:
        [published] = [entry for entry in changed.node.inventory.published() if entry.number == 0]
        assert {device.name: device.shares for device in published.held} == dict.fromkeys(self.HELD, 10)

    def test_as_many_new_ones_as_still_fit_can_be_prepared_under_names_of_their_own(
        self, changed: NodeUnderTest
    ) -> None:
        assert changed.offered() == {"gpu-0-share-1", "gpu-0-share-2", "gpu-0-share-4", "gpu-0-share-5"}
        for name in ("gpu-0-share-1", "gpu-0-share-5"):
            changed.preparer.prepare(changed.api.allocate(name, name))
        assert changed.offered() == set()

    def test_a_restart_changes_no_name(self, changed: NodeUnderTest) -> None:
        before = changed.offered()
        changed.preparer.prepare(changed.api.allocate("new", "gpu-0-share-5"))
        again = changed.restart(sharing=GpuSharing(lambda _: 4))
        assert again.held() == {*self.HELD, "gpu-0-share-5"}
        assert again.offered() == before - {"gpu-0-share-5"}

    def test_a_repeat_by_the_kubelet_finds_them(self, changed: NodeUnderTest) -> None:
        [device] = changed.preparer.prepare(changed.api.allocate("gpu-0-share-9", "gpu-0-share-9"))
        assert device.device == "gpu-0-share-9"

    def test_they_go_as_they_came_and_leave_four(self, changed: NodeUnderTest) -> None:
        for name in self.HELD:
            changed.preparer.unprepare(changed.api.allocate(name, name))
        assert changed.nothing_left()
        again = changed.restart(sharing=GpuSharing(lambda _: 4))
        assert shares(again.offered()) == {f"gpu-0-share-{index}" for index in range(4)}

    def test_a_share_that_was_given_out_but_never_prepared_is_refused_with_what_to_do(
        self, changed: NodeUnderTest
    ) -> None:
        with pytest.raises(ClaimError, match=r"gpu-0-share-8 .*4 shares"):
            changed.preparer.prepare(changed.api.allocate("late", "gpu-0-share-8"))


def test_a_share_that_was_allocated_before_the_number_of_shares_changed_is_published_and_prepared_as_it_was(
    tmp_path: Path,
) -> None:
    [gpu, *_] = start_node(tmp_path, gpus="h100-pcie-4").node.inventory.gpus
    inventory = Inventory([gpu], {gpu.uuid: 0}, GpuSharing(lambda _: 4), {gpu.uuid: {9: 10, 2: 10}})
    [published] = inventory.published(PublishPolicy(frozenset({"gpu-0-share-9"}), frozenset(), publish_held=False))
    assert [(device.name, device.shares) for device in published.held] == [("gpu-0-share-9", 10)]
    assert not published.unpublished
    share = inventory.device("gpu-0-share-9")
    assert share is not None
    assert share.shares == 10


def test_shares_of_two_gpus_serve_one_claim(tmp_path: Path) -> None:
    node = start_node(tmp_path, sharing=GpuSharing(lambda _: 4))
    devices = node.preparer.prepare(
        node.api.allocate("both", result("gpu-0-share-0", "a"), result("gpu-1-share-0", "b"))
    )
    assert [device.device for device in devices] == ["gpu-0-share-0", "gpu-1-share-0"]
