"""What is the case at the moment of a scrape: read then, from memory, never kept up to date by those who work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from driver.model.device import DeviceKind
from driver.model.health import Trouble
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.faults import FaultKind
from kubelet_plugin.meter import Sources
from kubelet_plugin.records import ClaimRecord

FAULT_KINDS = (*(kind.value for kind in FaultKind), *(kind.value for kind in Trouble), "cordoned")


class NodeGauges(Collector):
    """``now`` is the clock that files are stamped with (seconds since 1970)."""

    def __init__(self, sources: Sources, now: Callable[[], float]) -> None:
        self._sources = sources
        self._now = now

    def collect(self) -> Iterable[Metric]:
        node = self._sources.node
        records = node.checkpoint.records()
        unfinished = [record for record in records if record.owed]
        releasing = [record for record in records if record.releasing]
        devices = [device for record in records for device in record.devices]
        cut = sum(1 for device in devices if device.partition is not None and not device.existing)
        yield _gauge("tessera_partitions", "Partitions that Tessera has cut for claims.", cut)
        yield _gauge(
            "tessera_prepared_claims", "Claims whose devices are ready for their pods.", len(records) - len(unfinished)
        )
        yield _gauge("tessera_releasing_claims", "Claims whose devices still have to be taken away.", len(releasing))
        yield _gauge(
            "tessera_oldest_unfinished_claim_age_seconds",
            "Age of the oldest checkpoint record of a claim that is being prepared or released; 0 without any.",
            oldest_s(node.checkpoint, unfinished, self._now()),
        )
        held, offers = _by_type(device.kind for device in devices), self._offers({each.device for each in devices})
        meaning = "Devices of claims that are prepared, being prepared or being released."
        yield _counts("tessera_held_devices", meaning, "type", held)
        yield _counts("tessera_offers", "Published devices that no such claim has.", "type", offers)
        yield _gauge("tessera_gpus", "GPUs of this node, in trouble or not.", len(node.inventory.gpus))
        yield _gauge("tessera_unhealthy_gpus", "GPUs of which some device is not fit for work.", self._unhealthy())
        faults = {**dict.fromkeys(FAULT_KINDS, 0), **self._sources.faults()}
        yield _counts("tessera_gpu_faults", "Faults of GPUs at present; of kind cordoned: cordons.", "kind", faults)

    def _offers(self, held: set[str]) -> Mapping[str, int]:
        inventory = self._sources.node.inventory
        known = (inventory.device(name) for name in self._sources.published() - held)
        return _by_type(device.kind for device in known if device is not None)

    def _unhealthy(self) -> int:
        inventory, trouble = self._sources.node.inventory, self._sources.trouble
        return sum(any(trouble(device) for device in inventory.devices_on(gpu)) for gpu in inventory.gpus)


def oldest_s(checkpoint: Checkpoint, records: Iterable[ClaimRecord], now: float) -> float:
    """Seconds since the oldest of ``records`` was written; one that went meanwhile does not count."""
    written = []
    for record in records:
        try:
            written.append(checkpoint.path(record.uid).stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now - min(written, default=now))


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value)


def _counts(name: str, meaning: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _by_type(kinds: Iterable[DeviceKind]) -> dict[str, int]:
    """How many there are of each type; every type is there."""
    counts = Counter(kinds)
    return {kind.value: counts[kind] for kind in DeviceKind}
