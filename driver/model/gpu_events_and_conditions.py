"""Values about the health of GPUs: NVML events, recovery actions, and the conditions of devices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from driver.model.device import Device


class EventKind(StrEnum):
    """Kinds of NVML events."""

    XID = "xid"
    MIG_CHANGED = "mig-changed"
    UNAVAILABLE = "unavailable"
    RECOVERY = "recovery-action"
    """The recovery action of the GPU has changed; NVML must be asked for the new one."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """One event of a GPU.

    ``gpu_uuid`` is None for a GPU that was never scanned; ``xid`` is set for XIDs. The instance ids are None if the
    event concerns the whole GPU.
    """

    kind: EventKind
    gpu_uuid: str | None
    xid: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


NO_ACTION = 0
"""The recovery action (``NVML_GPU_RECOVERY_ACTION_*``) of a healthy GPU."""

RECOVERY_ACTIONS = {
    1: ("needs-reset", "a reset of the GPU"),
    2: ("needs-reboot", "a reboot of the node"),
    3: ("needs-drain", "an end of all peer-to-peer traffic"),
    4: ("needs-reset", "an end of all peer-to-peer traffic and a reset of the GPU"),
    5: ("needs-imex", "its IMEX domain to be recovered"),
    6: ("needs-reset", "a reset of its PCIe bus"),
    7: ("needs-reboot", "a reboot of the system"),
}
"""The other recovery actions: taint value and description (NVIDIA, "Error Recovery and Response Flags")."""


class ConditionType(StrEnum):
    """Conditions of single devices, set and cleared by the plugin itself; an operator cannot clear them."""

    LOST = "lost"
    """A partition of a running claim has disappeared and can't be created again."""

    STUCK = "stuck"
    """A partition can't be removed after its claim has ended."""

    MPS_LOST = "mps-lost"
    """The MPS daemon or server of a shared device has ended, and no other one has the limits of all claims yet."""


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """A reason why devices of a GPU must not be allocated to new claims.

    ``value`` is the value of the taint, such as ``xid-48``, ``lost`` or ``stuck``. The condition affects the devices on
    ``slices`` (bit mask of memory slices; None: the whole GPU), or only ``device`` if that is set. ``stamp`` is when it
    was found, in seconds since 1970. A ``cordon`` was requested by an operator; the device is healthy.
    """

    value: str
    reason: str
    slices: int | None = None
    device: str | None = None
    stamp: int = 0
    cordon: bool = False

    def affects(self, device: Device) -> bool:
        """Whether the condition affects ``device``, which is on the GPU."""
        if self.device is not None:
            return device.name == self.device
        return self.slices is None or bool(self.slices & device.mask)

    def __str__(self) -> str:
        return self.reason if self.cordon else f"{self.value}: {self.reason}"
