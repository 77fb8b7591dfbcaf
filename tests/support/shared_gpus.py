"""GPUs that claims share by memory, and requests for memory of them, written short."""

from __future__ import annotations

from typing import Any

from controller.cluster.fleet import FleetGpu
from driver.model.device import shared_device
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from tests.support.gpus import H100
from tests.support.queues import DRIVER, fleet_gpu, request, selected_by

SHARED = selected_by('type == "shared"')


IN_TURNS, BY_MPS = SharingStrategy.TIME_SLICING, SharingStrategy.MPS


def shared_memory(gib: int, strategy: SharingStrategy = IN_TURNS) -> SharedMemory:
    """The shared device of a GPU with half a GiB more than claims can have."""
    return SharedMemory(strategy, gib * GIB + GIB // 2)


def shared_gpu(
    node: str,
    number: int,
    *held: int,
    gib: int = 80,
    product: str = H100,
    strategy: SharingStrategy = IN_TURNS,
    **more: Any,
) -> FleetGpu:
    """``held``: the GiB that each of its claims has."""
    entry = fleet_gpu(node, number, product, shared=shared_memory(gib, strategy), **more)
    shared = entry.shared
    assert shared is not None
    return entry.holding(shared_device(entry.gpu, number, shared, part) for part in held)


def memory(amount: str | int | None = None, name: str = "gpu", **more: Any) -> dict[str, Any]:
    """A request for ``amount`` of a shared GPU; None: it states no amount."""
    if amount is not None:
        more["capacity"] = {"requests": {"memory": amount}}
    return request(selector=SHARED, name=name, **more)


def shared_result(node: str, number: int, consumed: str | None = None, share: str = "1", **more: Any) -> dict[str, Any]:
    """The result of an allocation; ``consumed``: its part of the memory."""
    result = {"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": f"gpu-{number}-shared"}
    capacity = {} if consumed is None else {"consumedCapacity": {"memory": consumed}}
    return {**result, "shareID": share, **capacity, **more}
