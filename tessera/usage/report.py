"""Usage of devices, summed by tenant, class, claim or label, and its cost (pure).

Amounts are slices where usage was read at one moment, and slice-hours over a period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import NamedTuple

from tessera.usage.prices import Prices

NO_REASON = "no activity has been measured yet"
UNKNOWN_PRODUCT = "an unknown product"


class GpuOfNode(NamedTuple):
    """A GPU of the cluster: its node and its published name."""

    node: str
    gpu: str


def gpu_of(labels: Mapping[str, str]) -> GpuOfNode:
    """The GPU that the labels of a metric name."""
    return GpuOfNode(labels.get("node", ""), labels.get("gpu", ""))


class GpuSlices(NamedTuple):
    """What a node plugin says of a GPU: product name of NVML, and number of memory slices."""

    product: str
    slices: float


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Usage of a device, or in a period of all devices of a tenant on a GPU. None: unknown.

    ``used`` is None if the activity is unknown: then nothing of ``allocated`` counts as used or as idle.
    """

    gpu: GpuOfNode
    allocated: float
    used: float | None
    namespace: str = ""
    claim: str = ""
    device_class: str = ""
    memory: tuple[float, float] | None = None
    """Bytes used, bytes in total."""
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Amounts:
    """An allocated amount; ``used`` and ``unknown`` are parts of it, and the rest is idle."""

    allocated: float
    used: float
    unknown: float

    @property
    def known(self) -> float:
        """What has a known activity."""
        return self.allocated - self.unknown

    @property
    def idle(self) -> float:
        return self.known - self.used

    @property
    def used_ratio(self) -> float | None:
        """Used, of what has a known activity; None if nothing has."""
        return self.used / self.known if self.known > 0 else None


@dataclass(frozen=True, slots=True)
class Row:
    """Sums of the devices with one key.

    idle_claims  number of claims that have been idle for long; None if the idle time of no claim is known
    cost         of the devices with a price; ``unpriced`` is the amount of the others
    """

    key: tuple[str | None, ...]
    amounts: Amounts
    memory: tuple[float, float] | None
    claims: int
    idle_claims: int | None
    cost: Amounts | None
    unpriced: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Usage as it was read. ``seconds``: length of the period; None: at one moment. ``capacity``: of all GPUs."""

    devices: Sequence[UsageRecord]
    gpus: Mapping[GpuOfNode, GpuSlices]
    reasons: Mapping[GpuOfNode, str]
    capacity: float | None
    warnings: Sequence[str] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Rows by key, largest first, and their total. ``unknown``: amounts without known activity, by reason."""

    reading: Reading
    rows: Sequence[Row]
    total: Row
    unknown: Mapping[str, float]
    unpriced: Mapping[str, float]


KeyOf = Callable[[UsageRecord], tuple[str | None, ...]]
PriceOf = Callable[[UsageRecord], float | None]


def summarize(reading: Reading, key_of: KeyOf, prices: Prices | None, idle_seconds: float) -> Report:
    """Sum a reading by key. A claim counts as idle from ``idle_seconds`` on."""
    groups: dict[tuple[str | None, ...], list[UsageRecord]] = defaultdict(list)
    for device in reading.devices:
        groups[key_of(device)].append(device)
    price_of = None if prices is None else partial(_slice_price, reading.gpus, prices)
    rows = [_row(key, devices, price_of, idle_seconds) for key, devices in groups.items()]
    rows.sort(key=lambda row: (-row.amounts.allocated, [part or "" for part in row.key]))
    total = _row((), reading.devices, price_of, idle_seconds)
    unknown: dict[str, list[float]] = defaultdict(list)
    unpriced: dict[str, list[float]] = defaultdict(list)
    for device in reading.devices:
        if device.used is None:
            unknown[reading.reasons.get(device.gpu, NO_REASON)].append(device.allocated)
        if price_of is not None and price_of(device) is None:
            gpu = reading.gpus.get(device.gpu)
            unpriced[UNKNOWN_PRODUCT if gpu is None else gpu.product].append(device.allocated)
    return Report(reading, rows, total, _largest_first(unknown), _largest_first(unpriced))


def _largest_first(amounts: Mapping[str, list[float]]) -> Mapping[str, float]:
    sums = {name: fsum(parts) for name, parts in amounts.items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _row(
    key: tuple[str | None, ...], devices: Sequence[UsageRecord], price_of: PriceOf | None, idle_seconds: float
) -> Row:
    memories = [device.memory for device in devices if device.memory is not None]
    memory = (fsum(used for used, _ in memories), fsum(total for _, total in memories)) if memories else None
    claims: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for device in devices:
        claims[device.namespace, device.claim].append(device.idle_seconds)
    # A claim with several devices is idle as long as the busiest of them; it is unknown if that of one is.
    measured = [times for times in claims.values() if None not in times]
    idle = (all(seconds is not None and seconds >= idle_seconds for seconds in times) for times in measured)
    idle_claims = sum(idle) if measured else None
    amounts, cost, unpriced = _amounts((device, 1.0) for device in devices), None, 0.0
    if price_of is not None:
        rates = [(device, price_of(device)) for device in devices]
        priced = [(device, rate) for device, rate in rates if rate is not None]
        cost = _amounts(priced) if priced else None
        unpriced = fsum(device.allocated for device, rate in rates if rate is None)
    return Row(key, amounts, memory, len(claims), idle_claims, cost, unpriced)


def _amounts(devices: Iterable[tuple[UsageRecord, float]]) -> Amounts:
    """Sums of amounts, each multiplied by a rate."""
    rated = list(devices)
    return Amounts(
        fsum(device.allocated * rate for device, rate in rated),
        fsum(device.used * rate for device, rate in rated if device.used is not None),
        fsum(device.allocated * rate for device, rate in rated if device.used is None),
    )


def _slice_price(gpus: Mapping[GpuOfNode, GpuSlices], prices: Prices, device: UsageRecord) -> float | None:
    """The price of a slice for an hour; None if the product has no price or is unknown."""
    gpu = gpus.get(device.gpu)
    price = None if gpu is None else prices.price_of(gpu.product)
    return None if gpu is None or price is None else price / gpu.slices
