"""A container that fails while its partition is full gets an Event that says so, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from driver.clock import seconds_time
from driver.errors import ApiError
from driver.kube.types import Consumer, PodDetails
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from driver.model.usage import GpuProcess, UsageReading, UsageTotals
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.usage.labels import ClaimLabels
from kubelet_plugin.usage.out_of_memory_events import SUSPECT_SECONDS, FullPartitions
from kubelet_plugin.usage.sampler import MeasuredDevice
from tests.support.clock import FakeClock
from tests.support.gpus import gpu_of

GIB = 1 << 30
KEY = ("uid-1", "gpu-0-mig-1g10gb-0")
GPU = gpu_of()
PROFILE = GPU.profile_named("1g.10gb")
assert PROFILE is not None


def reading(used: float, *pids: int) -> UsageReading:
    processes = [GpuProcess(pid, None) for pid in pids]
    return UsageReading(memory_used=int(used * GIB), memory_total=int(9.75 * GIB), processes=processes)


def usage(now: UsageReading | None) -> MeasuredDevice:
    device = DeviceRecord(
        requests=("gpu",),
        pool="pool",
        device=KEY[1],
        number=0,
        gpu_uuid=GPU.uuid,
        kind=DeviceKind.PARTITION,
        profile="1g.10gb",
        profile_id=PROFILE.id if PROFILE else None,
    )
    record = ClaimRecord(1, "default", "claim", "uid-1", "prepared", (device,))
    labels = ClaimLabels((Consumer("pods", "pod", "uid-pod"),), {"gpu": "small"})
    return MeasuredDevice(record, device, UsageTotals(1.0, 0.0, 0.0), 0.0, labels, now)


class Node:
    """The pod's status as the API server has it, and the Events that were recorded."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.statuses: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.reads = 0
        parts: Any = self
        self.full = FullPartitions(parts, parts, parts, self.clock)

    def gpu(self, uuid: str) -> Gpu | None:
        return GPU if uuid == GPU.uuid else None

    def read(self, namespace: str, name: str) -> PodDetails:
        assert (namespace, name) == ("default", "pod")
        self.reads += 1
        if not self.statuses:
            raise ApiError("no answer")
        written = {"metadata": {"name": name}, "status": {"containerStatuses": self.statuses}}
        return msgspec.convert(written, PodDetails)

    def claim(self, claim: ClaimReference, reason: str, message: str) -> None:
        self.events.append(f"{claim} {reason}: {message}")

    def ends(self, code: int, container: str = "main", *, restarted: bool = False) -> None:
        end = {"terminated": {"exitCode": code, "finishedAt": seconds_time(self.clock.now())}}
        self.statuses.append({"name": container, "lastState" if restarted else "state": end})

    def sample(self, now: UsageReading | None) -> float | None:
        self.clock.advance(1.0)
        return self.full.check({KEY: usage(now)})


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("after", [reading(0.1), reading(9.7, 8), None])
def test_a_failed_container_is_told_that_its_partition_was_full(after: UsageReading | None, restarted: bool) -> None:
    node = Node()
    node.sample(reading(9.7, 7))
    node.ends(1, restarted=restarted)
    node.sample(after)
    node.sample(after)
    [event] = node.events
    assert event == (
        "default/claim PartitionFull: partition 1g.10gb was full (9.7 of 9.75 GiB) when container main ended with "
        "code 1; next larger profiles: 1g.20gb, 2g.20gb, 3g.40gb"
    )


def test_a_failed_container_is_told_that_its_part_of_a_shared_gpu_was_full() -> None:
    node, part = Node(), usage(reading(9.7, 7))
    shared = msgspec.structs.replace(part.device, device="gpu-0-shared", kind=DeviceKind.SHARED, profile=None, gib=10)
    node.full.check({KEY: replace(part, device=shared)})
    node.clock.advance(1.0)
    node.ends(1)
    node.full.check({KEY: replace(part, device=shared, reading=None)})
    [event] = node.events
    assert event == (
        "default/claim PartitionFull: the claim's part of gpu-0-shared was full (9.7 of 9.75 GiB) when container main "
        "ended with code 1; request more memory of it"
    )


def test_the_kubelet_may_write_the_status_later() -> None:
    node = Node()
    node.sample(reading(9.7, 7))
    assert node.sample(reading(0.1)) is not None
    node.ends(137)
    assert node.sample(reading(0.1)) is None
    assert len(node.events) == 1


def test_nobody_looks_for_long_or_at_pods_whose_partition_was_not_full() -> None:
    node = Node()
    node.ends(0)
    node.sample(reading(9.0, 7))
    node.sample(reading(0.1))
    assert node.reads == 0
    node.sample(reading(9.7, 7))
    node.sample(reading(9.7, 7))
    assert node.reads == 0
    node.sample(reading(0.1))
    node.clock.advance(SUSPECT_SECONDS)
    assert node.sample(reading(0.1)) is None
    reads = node.reads
    node.sample(reading(0.1))
    assert (node.reads, node.events) == (reads, [])


def test_a_container_that_ended_well_or_before_the_partition_was_full_is_not_reported() -> None:
    node = Node()
    node.ends(1, "earlier")
    node.clock.advance(60.0)
    node.sample(reading(9.7, 7))
    node.ends(0)
    node.sample(reading(0.1))
    assert node.events == []
