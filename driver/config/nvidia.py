"""Parameters written for NVIDIA's own DRA driver, ``resource.nvidia.com/v1beta1``, as ours.

What people have in their classes and claims keeps its meaning; what Tessera does not do is refused by name.
Field names: kubernetes-sigs/dra-driver-nvidia-gpu, ``api/nvidia.com/resource/v1beta1``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from driver.config.parameters import (
    NO_MPS,
    TESSERA,
    AnyParameters,
    GpuConfig,
    MigDeviceConfig,
    ShareConfig,
    Sharing,
    TimeSlicing,
)
from driver.config.schema import Group, Strict
from driver.model.device import DeviceKind

API_VERSION = "resource.nvidia.com/v1beta1"


class NvidiaSharing(Strict, frozen=True):
    """``sharing`` of a GpuConfig."""

    REFUSED: ClassVar = {"MPS": NO_MPS, "mpsConfig": NO_MPS}

    strategy: Literal["TimeSlicing"] | None = None
    time_slicing_config: TimeSlicing | None = None


class NvidiaGpuConfig(Strict, frozen=True):
    """Their GpuConfig, for a full GPU or for a share of one."""

    sharing: NvidiaSharing | None = None


class NvidiaMigDeviceConfig(Strict, frozen=True):
    """Their MigDeviceConfig, whose only setting is MPS."""

    REFUSED: ClassVar = {"sharing": NO_MPS}


COMPUTE_DOMAIN = "is for the driver compute-domain.nvidia.com, not for GPUs"

NVIDIA = Group(
    API_VERSION,
    {"GpuConfig": NvidiaGpuConfig, "MigDeviceConfig": NvidiaMigDeviceConfig},
    {
        "VfioDeviceConfig": "passing a GPU through to a virtual machine is not supported",
        "ComputeDomainChannelConfig": COMPUTE_DOMAIN,
        "ComputeDomainDaemonConfig": COMPUTE_DOMAIN,
        "ShareConfig": f"is a kind of {TESSERA.api_version}",
    },
)


def translate(theirs: Strict, device: DeviceKind | None) -> AnyParameters:
    """Our kind for theirs. They know no shares: a GpuConfig on one is a ShareConfig."""
    if not isinstance(theirs, NvidiaGpuConfig):
        return MigDeviceConfig()
    ours = ShareConfig if device is DeviceKind.SHARE else GpuConfig
    return ours(sharing=_sharing(theirs.sharing))


def _sharing(theirs: NvidiaSharing | None) -> Sharing | None:
    if theirs is None:
        return None
    return Sharing(strategy=theirs.strategy, time_slicing=theirs.time_slicing_config)
