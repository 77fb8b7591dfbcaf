"""The rules of MIG as a table: a call, the state it finds, what NVML answers, and who says so.

A row is worth what its source is. "manual" is NVIDIA's NVML API reference, "guide" its MIG user guide, "facts" and
"reference" are this project's collections of public captures; "estimate" nobody published.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import pytest

from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode, describe
from driver.simulator.state.latency import ZERO_LATENCY
from tests.support.nvml_client import create, cut, mig_uuids, placements, profiles_by_name, remaining_capacity

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
INVALID_ARGUMENT = pynvml.NVML_ERROR_INVALID_ARGUMENT
NO_ROOM = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
IN_USE = pynvml.NVML_ERROR_IN_USE
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
RESET_REQUIRED = pynvml.NVML_ERROR_RESET_REQUIRED


class Error(NamedTuple):
    """The call raises NVMLError with that code."""

    code: int


class Gpu:
    """The first GPU of a fresh node, and the calls of the table."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node, self.nvml = node, node.nvml
        self.nvml.nvmlInit()
        self.handle = self.nvml.nvmlDeviceGetHandleByIndex(0)
        self.ids = {profile.name: profile.id for profile in node.description.gpu_product.profiles}
        self.sizes = {profile.name: profile.size for profile in node.description.gpu_product.profiles}

    def mode(self) -> list[int]:
        return self.nvml.nvmlDeviceGetMigMode(self.handle)

    def set_mode(self, mode: int) -> int:
        return self.nvml.nvmlDeviceSetMigMode(self.handle, mode)

    def create(self, profile: str, start: int) -> Any:
        return create(self.nvml, self.handle, self.ids[profile], start, self.sizes[profile])

    def cut(self, profile: str, start: int) -> Any:
        return cut(self.nvml, self.handle, self.ids[profile], start, self.sizes[profile])

    def made(self, profile: str, start: int) -> tuple[int, int]:
        place = self.nvml.nvmlGpuInstanceGetInfo(self.create(profile, start)).placement
        return place.start, place.size

    def capacity(self, profile: str) -> int:
        product = self.node.description.gpu_product
        return remaining_capacity(product, self.node.gpu_state(0), profiles_by_name(product)[profile])

    def placements(self, profile: str) -> list[tuple[int, int]]:
        return placements(self.nvml, self.handle, self.ids[profile])

    def instances(self, profile: str) -> int:
        handles, count = (pynvml.c_nvmlGpuInstance_t * 14)(), c_uint()
        self.nvml.nvmlDeviceGetGpuInstances(self.handle, self.ids[profile], handles, byref(count))
        return count.value

    def memory(self, profile: str, start: int) -> int:
        self.cut(profile, start)
        [gpu] = describe(self.node, {})
        return int(gpu["migDevices"][0]["memory"])

    def gi_id(self, profile: str, start: int) -> int:
        return int(self.nvml.nvmlGpuInstanceGetInfo(self.create(profile, start)).id)

    def indices(self) -> list[int]:
        return sorted(mig_uuids(self.nvml, self.handle))


def off(_: Gpu) -> None:
    """MIG mode as the machine comes: off."""


def on(gpu: Gpu) -> None:
    """MIG mode on, after a reset where one is needed."""
    if gpu.set_mode(1) == RESET_REQUIRED:
        gpu.node.reset_gpu(0)
    assert gpu.mode() == [1, 1]


def waiting(gpu: Gpu) -> None:
    """MIG mode wished, not in force."""
    gpu.set_mode(1)


def waited(gpu: Gpu) -> None:
    """MIG mode wished, and then a reset."""
    waiting(gpu)
    gpu.node.reset_gpu(0)


def rebooted(gpu: Gpu) -> None:
    """On, and then the machine rebooted."""
    on(gpu)
    gpu.node.reboot()


def reset_with(profile: str, start: int) -> Callable[[Gpu], None]:
    """An instance, and then a reset of the GPU."""

    def set_up(gpu: Gpu) -> None:
        having((profile, start))(gpu)
        gpu.node.reset_gpu(0)

    return set_up


def having(*instances: tuple[str, int]) -> Callable[[Gpu], None]:
    """On, with these instances."""

    def set_up(gpu: Gpu) -> None:
        on(gpu)
        for profile, start in instances:
            gpu.create(profile, start)

    return set_up


def gap(gpu: Gpu) -> None:
    """Three partitions, of which the second was destroyed."""
    on(gpu)
    cuts = [gpu.cut("1g.10gb", start) for start in range(3)]
    gpu.nvml.nvmlComputeInstanceDestroy(cuts[1].compute_instance)
    gpu.nvml.nvmlGpuInstanceDestroy(cuts[1].gpu_instance)


def upper_id_freed(gpu: Gpu) -> None:
    """The first 3g instance lay in the upper half and is gone."""
    on(gpu)
    gpu.nvml.nvmlGpuInstanceDestroy(gpu.create("3g.40gb", 4))


class Row(NamedTuple):
    """One rule: on ``node``, in ``state``, ``call`` gives ``result``, says ``source``."""

    node: str
    state: Callable[[Gpu], None]
    call: Callable[[Gpu], Any]
    result: object
    source: str


H, A, A40, A30, RTX, T4, L40S, B = (
    "h100-1", "dgx-a100", "dgx-a100-40gb", "a30-4", "rtx-pro-6000-4", "t4-4", "l40s-8", "hgx-b200",
)  # fmt: skip

MANUAL_CREATE = "manual, nvmlDeviceCreateGpuInstanceWithPlacement"
MANUAL_MODE = "manual, nvmlDeviceSetMigMode"
FACTS_FIT = "facts, mig_geometry.json: oracle_rule"

TABLE = [
    Row(H, off, lambda g: g.mode(), [0, 0], "manual, nvmlDeviceGetMigMode"),
    Row(T4, off, lambda g: g.mode(), Error(NOT_SUPPORTED), "facts, qx-t4.xml: current_mig N/A"),
    Row(L40S, off, lambda g: g.mode(), Error(NOT_SUPPORTED), "facts, qx-l40s.xml"),
    Row(T4, off, lambda g: g.set_mode(1), Error(NOT_SUPPORTED), MANUAL_MODE),
    Row(
        L40S,
        off,
        lambda g: g.nvml.nvmlDeviceGetGpuInstanceProfileInfo(g.handle, 0),
        Error(NOT_SUPPORTED),
        "manual, nvmlDeviceGetGpuInstanceProfileInfo",
    ),
    # MIG mode
    Row(H, off, lambda g: (g.set_mode(1), g.mode()), (0, [1, 1]), "guide: Hopper needs no reset"),
    Row(B, off, lambda g: (g.set_mode(1), g.mode()), (0, [1, 1]), "guide: Hopper and newer need no reset"),
    Row(A, off, lambda g: (g.set_mode(1), g.mode()), (RESET_REQUIRED, [0, 1]), MANUAL_MODE + ": activation status"),
    Row(A30, off, lambda g: (g.set_mode(1), g.mode()), (RESET_REQUIRED, [0, 1]), MANUAL_MODE + ": activation status"),
    Row(A, waited, lambda g: g.mode(), [1, 1], "guide: in force after a GPU reset"),
    Row(A, waiting, lambda g: g.create("1g.10gb", 0), Error(NOT_SUPPORTED), "manual: MIG mode must be in force"),
    Row(A, waiting, lambda g: (g.set_mode(0), g.mode()), (0, [0, 0]), "estimate: the wish is withdrawn"),
    Row(A, rebooted, lambda g: g.mode(), [1, 1], "guide: Ampere's mode persists over reboot (InfoROM)"),
    Row(A, rebooted, lambda g: g.instances("1g.10gb"), 0, "guide: instances don't persist"),
    Row(H, rebooted, lambda g: g.mode(), [0, 0], "guide: Hopper's mode is lost with the kernel module"),
    Row(A, reset_with("3g.40gb", 0), lambda g: g.mode(), [1, 1], "guide"),
    Row(A, reset_with("3g.40gb", 0), lambda g: g.instances("3g.40gb"), 0, "guide: a reset destroys instances"),
    Row(H, reset_with("3g.40gb", 0), lambda g: g.instances("3g.40gb"), 0, "guide: a reset destroys instances"),
    Row(H, having(("1g.10gb", 0)), lambda g: g.set_mode(0), Error(IN_USE), "estimate: mode stays with instances"),
    # What works with MIG off
    Row(H, off, lambda g: g.placements("3g.40gb"), [(0, 4), (4, 4)], "reference: works with MIG off"),
    Row(H, off, lambda g: g.instances("1g.10gb"), Error(NOT_SUPPORTED), "reference: needs MIG on"),
    Row(H, off, lambda g: g.create("1g.10gb", 0), Error(NOT_SUPPORTED), MANUAL_CREATE),
    # Geometry of 4, 8 and 12 memory slices
    Row(A30, on, lambda g: g.placements("2g.12gb"), [(0, 2), (2, 2)], "facts, A30 capture of lgipp"),
    Row(A30, on, lambda g: g.placements("1g.6gb"), [(0, 1), (1, 1), (2, 1), (3, 1)], "facts, A30 capture of lgipp"),
    Row(RTX, on, lambda g: g.placements("1g.24gb"), [(0, 3), (3, 3), (6, 3), (9, 3)], "facts, RTX PRO 6000 capture"),
    Row(RTX, on, lambda g: g.made("2g.48gb", 6), (6, 6), "facts, RTX PRO 6000 capture"),
    Row(A30, having(("1g.6gb", 0), ("1g.6gb", 1)), lambda g: g.made("2g.12gb", 2), (2, 2), "facts, A30: seen"),
    Row(A30, having(("1g.6gb", 1)), lambda g: g.create("2g.12gb", 0), Error(NO_ROOM), FACTS_FIT),
    Row(H, on, lambda g: g.create("4g.40gb", 4), Error(INVALID_ARGUMENT), "estimate: never a legal placement"),
    Row(H, having(("2g.20gb", 4)), lambda g: g.create("3g.40gb", 4), Error(NO_ROOM), "reference: occupied slot"),
    Row(H, having(("4g.40gb", 0)), lambda g: g.made("3g.40gb", 4), (4, 4), "guide: 4g + 3g"),
    Row(H, having(("3g.40gb", 4)), lambda g: g.capacity("1g.10gb"), 4, "guide, nvidia-smi mig -lgip"),
    # Media engines
    Row(H, having(("1g.10gb+me", 0)), lambda g: g.create("1g.10gb+me", 1), Error(NO_ROOM), "guide: one +me a GPU"),
    Row(A30, having(("1g.6gb+me", 0)), lambda g: g.create("2g.12gb+me", 2), Error(NO_ROOM), "guide: one +me a GPU"),
    Row(A30, having(("1g.6gb+me", 0)), lambda g: g.made("2g.12gb", 2), (2, 2), "guide: others are unaffected"),
    Row(RTX, having(("1g.24gb+me.all", 0)), lambda g: g.create("1g.24gb", 3), Error(NO_ROOM), "nvml.h, ALL_ME"),
    Row(RTX, having(("1g.24gb+me.all", 0)), lambda g: g.made("1g.24gb-me", 3), (3, 3), "nvml.h, NO_ME"),
    Row(RTX, having(("1g.24gb", 0)), lambda g: g.create("1g.24gb+me.all", 3), Error(NO_ROOM), "nvml.h, ALL_ME"),
    Row(RTX, on, lambda g: g.capacity("1g.24gb+gfx"), 4, "facts, RTX PRO 6000 capture"),
    # Instances
    Row(A40, on, lambda g: g.memory("3g.20gb", 0), 20096, "facts, _about.memory_mb; which start: estimate"),
    Row(A40, on, lambda g: g.memory("3g.20gb", 4), 20224, "facts, _about.memory_mb; which start: estimate"),
    Row(H, upper_id_freed, lambda g: g.gi_id("3g.40gb", 0), 1, "reference: ids are no function of placement"),
    Row(H, gap, lambda g: g.indices(), [0, 2], "reference: MIG device index has gaps"),
    Row(H, on, lambda g: g.nvml.nvmlDeviceGetGpuInstanceById(g.handle, 3), Error(NOT_FOUND), "manual"),
    Row(
        H,
        on,
        lambda g: g.nvml.nvmlGpuInstanceDestroy(g.cut("1g.10gb", 0).gpu_instance),
        Error(IN_USE),
        "manual, nvmlGpuInstanceDestroy",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.node}: {row.source}")
def test_the_simulator_obeys_the_recorded_rule(row: Row, tmp_path: Path) -> None:
    description = load_description(row.node)
    alone = description.replaced(gpus=description.gpus[:1], nics=())
    gpu = Gpu(SimulatedNode.open(alone, tmp_path, latency=ZERO_LATENCY))
    row.state(gpu)
    if isinstance(row.result, Error):
        with pytest.raises(pynvml.nvmlExceptionClass(row.result.code)):
            row.call(gpu)
    else:
        assert row.call(gpu) == row.result


def test_every_row_names_its_source() -> None:
    known = ("manual", "guide", "facts", "reference", "estimate", "nvml.h")
    assert all(row.source.startswith(known) for row in TABLE)
