"""`make demo-54` resets its A100s once they wait for that, however late the plugin asks them for MIG mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from driver.simulator.description import load_description
from driver.simulator.node import describe
from kubelet_plugin.inventory.scan import Scanner
from tests.demo.nodes import NodePlan
from tests.demo.resets import reset, wait_asked
from tests.harness.waiting import DeadlineError
from tests.support.node import KeptNodeEvents, choosing, start_node
from tests.support.plugin import BareNode
from tests.support.published import build_slices

FIVE_A100 = Path(__file__).parents[2] / "demo" / "five-a100.yaml"
PLAN = NodePlan(mig=(2, 3), shared=())
NEVER = 1000


class LatePlugin:
    """A node plugin on five A100 that looks at its hardware whenever its slices are read, and asks GPUs 2 and 3 for
    MIG mode at the looks of these numbers. ``resets`` are the GPUs whose reset does something."""

    def __init__(self, root: Path, asks_at: Mapping[int, int], resets: tuple[int, ...] = PLAN.mig) -> None:
        self.node = BareNode("node-0", root, root)
        self.log = root / "tessera-node-0.log"
        self.resets = resets
        self.looks = 0
        self._under = start_node(root, gpus=load_description(str(FIVE_A100)))
        self._asks_at = asks_at
        self._scanner = Scanner(self._under.host, choosing(mig_gpus="2,3"), KeptNodeEvents())

    def devices(self) -> dict[str, dict[str, Any]]:
        self.looks += 1
        inventory = self._under.node.inventory
        asks_later = [gpu.uuid for gpu in inventory.gpus if self.looks < self._asks_at.get(gpu.index, 0)]
        inventory.set_reserved(dict.fromkeys(asks_later, "another driver owns it"))
        self._scanner.scan(inventory)
        inventory.set_reserved({})
        slices = build_slices(self._under.node.pool, self._under.node.inventory.published())
        return {device["name"]: device for content in slices.values() for device in content.get("devices", ())}

    def gpus(self) -> list[dict[str, Any]]:
        return describe(self._under.simulated, {})

    def fault(self, *arguments: str) -> None:
        what, option, number = arguments
        assert (what, option) == ("reset", "--gpu")
        if int(number) in self.resets:
            self._under.simulated.reset_gpu(int(number))


@pytest.mark.parametrize("asks_at", [{2: 1, 3: 1}, {2: 2, 3: 4}, {2: 4, 3: 2}])
def test_gpus_that_are_asked_for_mig_mode_late_still_come_to_offer_partitions(
    tmp_path: Path, asks_at: Mapping[int, int]
) -> None:
    plugin = LatePlugin(tmp_path, asks_at)
    reset(plugin, PLAN.mig, PLAN.types)
    assert [gpu["migMode"] for gpu in plugin.gpus()] == ["Disabled", "Disabled", "Enabled", "Enabled", "Disabled"]


def test_who_waits_too_long_for_the_plugin_to_ask_reads_which_gpu_it_is_and_where_the_log_lies(tmp_path: Path) -> None:
    plugin = LatePlugin(tmp_path, {2: 1, 3: NEVER})
    with pytest.raises(DeadlineError) as error:
        wait_asked(plugin, PLAN.mig, deadline_s=1)
    assert str(error.value) == (
        "node-0, 1 s after the start not yet waiting for a reset: gpu-3 (MIG mode Disabled). "
        f"Log: {tmp_path}/tessera-node-0.log"
    )


@pytest.mark.long
def test_a_gpu_that_goes_on_as_before_its_reset_is_told_in_words(tmp_path: Path) -> None:
    plugin = LatePlugin(tmp_path, {2: 1, 3: 1}, resets=(2,))
    with pytest.raises(DeadlineError) as error:
        reset(plugin, PLAN.mig, PLAN.types, deadline_s=1)
    assert str(error.value) == (
        "node-0, 1 s after the reset: gpu-3 (MIG mode Disabled, Enabled after another reset) offers full GPUs "
        f"instead of partitions. Log: {tmp_path}/tessera-node-0.log"
    )
