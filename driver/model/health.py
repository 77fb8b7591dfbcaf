"""What hardware reports of a GPU's health, and what is wrong with devices because of it: values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from driver.model.device import Device


class EventKind(StrEnum):
    """What an event of NVML is about."""

    XID = "xid"
    MIG_CHANGED = "mig-changed"
    UNAVAILABLE = "unavailable"
    RECOVERY = "recovery-action"
    """What the GPU needs to recover has changed; what it is now has to be asked."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that happened to a GPU.

    ``gpu_uuid`` is None for a GPU that was never looked at; ``xid`` is set for XIDs. The instance ids are None where
    the whole GPU is meant.
    """

    kind: EventKind
    gpu_uuid: str | None
    xid: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


NO_ACTION = 0
"""Of NVML's recovery actions (``NVML_GPU_RECOVERY_ACTION_*``) the one that says that the GPU is well."""

RECOVERY_ACTIONS = {
    1: ("needs-reset", "a reset of the GPU"),
    2: ("needs-reboot", "a reboot of the node"),
    3: ("needs-drain", "an end of all peer-to-peer traffic"),
    4: ("needs-reset", "an end of all peer-to-peer traffic and a reset of the GPU"),
    5: ("needs-imex", "its IMEX domain to be recovered"),
    6: ("needs-reset", "a reset of its PCIe bus"),
    7: ("needs-reboot", "a reboot of the system"),
}
"""What each of the others asks for, as a word and for people (NVIDIA, "Error Recovery and Response Flags")."""


class Trouble(StrEnum):
    """What those who prepare claims report of a device; it ends when they say so, and no operator can clear it."""

    LOST = "lost"
    """A partition that is gone under a running claim and can't be made again."""

    STUCK = "stuck"
    """A partition that can't be removed after its claim has ended."""


@dataclass(frozen=True, slots=True)
class Ailment:
    """Why some devices of a GPU must not be given to anybody new.

    ``value`` is a word such as ``xid-48``, ``lost`` or ``stuck``. It concerns what lies on ``slices`` (bit mask of
    memory slices; None: the whole GPU), or only ``device`` where that is set. ``stamp`` is when it was found, in
    seconds since 1970. A ``cordon`` is an operator's wish: the device is well.
    """

    value: str
    reason: str
    slices: int | None = None
    device: str | None = None
    stamp: int = 0
    cordon: bool = False

    def concerns(self, device: Device) -> bool:
        """Whether ``device``, which is on the GPU, is among those meant."""
        if self.device is not None:
            return device.name == self.device
        return self.slices is None or bool(self.slices & device.mask)

    def __str__(self) -> str:
        return self.reason if self.cordon else f"{self.value}: {self.reason}"


def written_time(stamp: int) -> str:
    """Seconds since 1970 as Kubernetes writes times (RFC 3339, UTC)."""
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> int | None:
    """What ``written_time`` was given; None where ``text`` is no such time."""
    try:
        return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None
