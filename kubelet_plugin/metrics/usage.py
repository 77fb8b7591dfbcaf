"""The usage of claims as metrics; docs/usage.md says what each figure means.

The labels contain names of claims and pods, so the number of series grows with the node's claims: SERIES_PER_DEVICE
for each device of a claim, until LINGER_SECONDS after the claim's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from driver.clock import Clock
from driver.hardware.host import Host
from driver.hardware.host_paths import HOST, HostPaths
from driver.model.device import full_device
from driver.model.offer import WITHOUT_OWN_ACTIVITY, DeviceKind
from driver.model.usage import UsageReading
from kubelet_plugin.api_writers import ApiAccess
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.preparer import ClaimReader
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.usage.labels import ClaimLabels, ClaimsAndPods
from kubelet_plugin.usage.out_of_memory_events import FullPartitions, PodReader
from kubelet_plugin.usage.sampler import IdleClaims, MeasuredDevice, UsageSampler, since_boot
from kubelet_plugin.usage.totals_file import TotalsFile

CLAIM_LABELS = ("namespace", "claim", "pod", "class", "profile", "device", "gpu", "node", "source")
NO_PROFILE_LABEL = "none"

GPM_SOURCE, UTILIZATION_SOURCE, SHARED_SOURCE, MEMORY_SOURCE = "gpm", "utilization", "shared", "memory"
"""Values of the label ``source``."""

Value = float | int | None


class UsageMetric(NamedTuple):
    name: str
    meaning: str
    of: Callable[[MeasuredDevice, float], Value]


def _reading(read: Callable[[UsageReading], Value]) -> Callable[[MeasuredDevice, float], Value]:
    return lambda usage, _: None if usage.reading is None else read(usage.reading)


def _activity(name: str) -> Callable[[MeasuredDevice, float], Value]:
    return _reading(lambda reading: None if reading.activity is None else getattr(reading.activity, name))


def _idle(usage: MeasuredDevice, now: float) -> Value:
    """Unknown without activity."""
    if usage.ended_at is not None or usage.activity_at is None:
        return None
    return max(0.0, now - usage.totals.active_at)


GAUGES = (
    UsageMetric(
        "tessera_claim_slices",
        "Memory slices of the device.",
        lambda usage, _: usage.totals.slices if usage.ended_at is None else None,
    ),
    UsageMetric("tessera_claim_sm_active_ratio", "Average SM activity of the last interval.", _activity("sm")),
    UsageMetric("tessera_claim_sm_occupancy_ratio", "Average SM occupancy.", _activity("occupancy")),
    UsageMetric("tessera_claim_tensor_active_ratio", "Average activity of the tensor cores.", _activity("tensor")),
    UsageMetric("tessera_claim_dram_active_ratio", "Average memory-bandwidth activity.", _activity("dram")),
    UsageMetric(
        "tessera_claim_gpu_utilization_ratio",
        "Share of the driver's last sampling period in which a kernel ran; not activity.",
        _reading(lambda reading: reading.utilization),
    ),
    UsageMetric("tessera_claim_memory_used_bytes", "GPU memory in use.", _reading(lambda reading: reading.memory_used)),
    UsageMetric("tessera_claim_memory_total_bytes", "GPU memory.", _reading(lambda reading: reading.memory_total)),
    UsageMetric(
        "tessera_claim_processes",
        "Compute processes.",
        _reading(lambda reading: None if reading.processes is None else len(reading.processes)),
    ),
    UsageMetric("tessera_claim_idle_seconds", "Time since the last activity above 1 %.", _idle),
)

COUNTERS = (
    UsageMetric("tessera_claim_nvlink_bytes", "NVLink traffic, both directions.", lambda usage, _: usage.totals.nvlink),
    UsageMetric("tessera_claim_pcie_bytes", "PCIe traffic, both directions.", lambda usage, _: usage.totals.pcie),
    UsageMetric(
        "tessera_claim_allocated_slice_seconds",
        "Memory slices x seconds for which the claim was prepared.",
        lambda usage, now: usage.totals.counted(now).allocated if usage.ended_at is None else usage.totals.allocated,
    ),
    UsageMetric(
        "tessera_claim_measured_slice_seconds",
        "Memory slices x seconds of known activity.",
        lambda usage, _: usage.totals.measured,
    ),
    UsageMetric(
        "tessera_claim_used_slice_seconds",
        "Memory slices x seconds x the larger of SM and memory-bandwidth activity.",
        lambda usage, _: usage.totals.used,
    ),
)

INFO = "tessera_claim_device_info"
INFO_LABELS = ("UUID", "GPU_I_ID")
"""Named as dcgm-exporter names them, so that its series can be joined."""

SERIES_PER_DEVICE = len(GAUGES) + len(COUNTERS) + 1


class UsageCollector(Collector):
    """Reads only memory, in the thread of the scrape. What is unknown has no series."""

    def __init__(self, stores: ClaimStores, sampler: UsageSampler, now: Callable[[], float] = since_boot) -> None:
        self._stores, self._sampler, self._now = stores, sampler, now

    def collect(self) -> Iterable[Metric]:
        now, devices = self._now(), self._sampler.devices.values()
        labelled = [(usage, self._values(usage, usage.labels)) for usage in devices if usage.labels is not None]
        for families, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for metric in metrics:
                family = families(metric.name, metric.meaning, labels=CLAIM_LABELS)
                for usage, labels in labelled:
                    value = metric.of(usage, now)
                    if value is not None:
                        family.add_metric(labels, value)
                yield family
        info = GaugeMetricFamily(
            INFO, "GPU and GPU instance of a claim's device; always 1.", labels=CLAIM_LABELS + INFO_LABELS
        )
        for usage, labels in labelled:
            if usage.ended_at is None:
                instance = usage.device.gpu_instance_id
                info.add_metric([*labels, usage.device.gpu_uuid, "" if instance is None else str(instance)], 1)
        yield info
        yield from self._gpus()

    def _values(self, usage: MeasuredDevice, labels: ClaimLabels) -> list[str]:
        record, device = usage.record, usage.device
        return [
            record.namespace,
            record.name,
            labels.pod,
            labels.class_of(device.requests),
            device.profile or NO_PROFILE_LABEL,
            device.key,
            f"gpu-{device.number}",
            self._stores.pool.node,
            self._source(usage),
        ]

    def _source(self, usage: MeasuredDevice) -> str:
        """The same as long as the claim lasts."""
        if usage.device.kind in WITHOUT_OWN_ACTIVITY:
            return SHARED_SOURCE
        if self._sampler.has_activity(usage.device.gpu_uuid):
            return GPM_SOURCE
        return MEMORY_SOURCE if usage.device.kind is DeviceKind.PARTITION else UTILIZATION_SOURCE

    def _gpus(self) -> Iterator[Metric]:
        inventory, node = self._stores.inventory, self._stores.pool.node
        slices = GaugeMetricFamily(
            "tessera_gpu_memory_slices", "Memory slices of a GPU.", labels=["node", "gpu", "product"]
        )
        unknown = GaugeMetricFamily(
            "tessera_gpu_activity_unknown", "Why claims on a GPU have no activity.", labels=["node", "gpu", "reason"]
        )
        reasons = self._sampler.unknown()
        for gpu in inventory.gpus:
            name = full_device(gpu, inventory.number(gpu)).name
            slices.add_metric([node, name, gpu.product_name], gpu.memory_slices)
            if gpu.uuid in reasons:
                unknown.add_metric([node, name, reasons[gpu.uuid]], 1)
        yield slices
        yield unknown


def usage_sampler(
    settings: NodeSettings,
    stores: ClaimStores,
    host: Host,
    api: ApiAccess,
    claims: ClaimReader,
    idle: IdleClaims,
) -> UsageSampler:
    # The processes on simulated GPUs are those of this machine.
    machine = HostPaths(HOST if settings.simulated else settings.host_root, HOST)
    return UsageSampler(
        stores,
        host.usage_reader(),
        ClaimsAndPods(claims, machine),
        TotalsFile(settings.state_dir, stores.boot),
        settings.usage_interval or math.inf,
        (FullPartitions(PodReader(api.client), api.events, stores.inventory, Clock()).check, idle.check),
    )
