"""The GPUs that a node is known to have, and what records say of them.

A GPU that is lost when the plugin starts stays visible, with its fault.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from driver.errors import StateError
from driver.model.device import share_index
from driver.model.gpu import Gpu
from driver.model.offer import DeviceKind
from driver.model.reported_gpus import GpuReport, decode_inventory, encode_inventory
from driver.model.shared_memory import SharingStrategy
from kubelet_plugin.checkpoint.files import write_atomically
from kubelet_plugin.checkpoint.records import ClaimRecord

log = logging.getLogger(__name__)


class KnownGpusContent(msgspec.Struct, frozen=True):
    """``boot``: the boot in which the GPUs were seen; ``inventory``: the GPUs as in the plan's status."""

    boot: str
    inventory: str


class KnownGpus:
    """The file ``gpus.json`` in the state directory."""

    def __init__(self, state_dir: Path, boot: str) -> None:
        """Read the file; one that cannot be read counts as missing."""
        self._path, self._boot = state_dir / "gpus.json", boot
        self._saved: Sequence[Gpu] | None = None
        self._same_boot, self._known = True, list[Gpu]()
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=KnownGpusContent)
            self._known = [report.gpu for report in decode_inventory(content.inventory)]
            self._same_boot = content.boot == boot
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, StateError) as error:
            log.warning("can't read the GPUs of the last start", extra={"error": f"{self._path}: {error}"})

    def missing(self, present: Sequence[Gpu], silent: Collection[int], held: Collection[str]) -> list[Gpu]:
        """The known GPUs that are not ``present``; ``silent``: the indices of GPUs that did not answer.

        A GPU is forgotten if another one is in its place, or if NVML does not count it any more after a reboot, unless
        claims hold something of it (``held``: UUIDs).
        """
        uuids, taken = {gpu.uuid for gpu in present}, {gpu.pci_bus_id for gpu in present}
        return [
            gpu
            for gpu in self._known
            if gpu.uuid not in uuids
            and (gpu.uuid in held or (gpu.pci_bus_id not in taken and (self._same_boot or gpu.index in silent)))
        ]

    def save(self, gpus: Sequence[Gpu]) -> None:
        """Save the GPUs for the next start if they have changed. A failure is logged, and the next call repeats it."""
        if gpus == self._saved:
            return
        content = KnownGpusContent(self._boot, encode_inventory(GpuReport(gpu, gpu.minor) for gpu in gpus))
        try:
            write_atomically(self._path, msgspec.json.encode(content), durable=False)
            self._saved = gpus
        except StateError as error:
            log.warning("can't save the GPUs for the next start", extra={"error": str(error)})


def held_strategies(records: Iterable[ClaimRecord]) -> dict[str, SharingStrategy]:
    """How claims share the compute of the GPUs of which they have memory, by UUID."""
    devices = (device for record in records for device in record.devices)
    return {device.gpu_uuid: device.strategy for device in devices if device.strategy is not None}


def held_profiles(records: Iterable[ClaimRecord]) -> dict[str, dict[int, str]]:
    """The profiles of the partitions in ``records``, by GPU: the name of each by its id."""
    profiles: dict[str, dict[int, str]] = {}
    for device in (device for record in records for device in record.devices):
        if device.profile is not None and device.profile_id is not None:
            profiles.setdefault(device.gpu_uuid, {})[device.profile_id] = device.profile
    return profiles


def held_shares(records: Iterable[ClaimRecord]) -> dict[str, dict[int, int]]:
    """The shares in ``records``, by GPU: the number of each and of how many it is one."""
    shares: dict[str, dict[int, int]] = {}
    for device in (device for record in records for device in record.devices):
        if device.kind is DeviceKind.SHARE:
            shares.setdefault(device.gpu_uuid, {})[share_index(device.device)] = device.shares
    return shares


def slices_of_instance(records: Iterable[ClaimRecord], gpu_uuid: str, gpu_instance_id: int) -> int | None:
    """Bit mask of the memory slices of a GPU instance that a claim has; None where no claim has it."""
    for record in records:
        for device in record.devices:
            if (device.gpu_uuid, device.gpu_instance_id) == (gpu_uuid, gpu_instance_id) and device.placement:
                return device.placement.mask
    return None
