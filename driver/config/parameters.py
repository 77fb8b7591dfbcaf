"""Kinds of opaque parameters: Tessera's own, ``gpu.tessera.dev/v1alpha1``, and those of NVIDIA's DRA driver.

The API group of Tessera's kinds does not change with the driver name. Parameters for ``resource.nvidia.com/v1beta1``
are translated, so that existing classes and claims keep their meaning; unsupported ones are rejected by name. Their
field names are from kubernetes-sigs/dra-driver-nvidia-gpu, ``api/nvidia.com/resource/v1beta1``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from driver.config.schema import Group, Strict
from driver.model.device import DeviceKind
from driver.model.sharing import TimeSlice

API_VERSION = "gpu.tessera.dev/v1alpha1"
NVIDIA_API_VERSION = "resource.nvidia.com/v1beta1"

NO_MPS = "MPS is not supported, and time-slicing has no limits on memory or threads"


class TimeSlicing(Strict, frozen=True):
    """How long each process runs before the next has its turn."""

    interval: TimeSlice | None = None


class Sharing(Strict, frozen=True):
    """How the processes on one device take turns."""

    REFUSED: ClassVar = {"MPS": NO_MPS, "mps": NO_MPS, "mpsConfig": NO_MPS}

    strategy: Literal["TimeSlicing"] | None = None
    time_slicing: TimeSlicing | None = None


class Parameters(Strict, frozen=True):
    """What every kind has in common."""

    kind: ClassVar[str]

    @property
    def time_slice(self) -> TimeSlice | None:
        """The requested interval; None: no request."""
        return None


class TimeSliced(Parameters, frozen=True):
    """Parameters of a device whose processes take turns on the whole GPU."""

    sharing: Sharing | None = None

    @property
    def time_slice(self) -> TimeSlice | None:
        if self.sharing is None:
            return None
        slicing = self.sharing.time_slicing or TimeSlicing()
        return slicing.interval or TimeSlice.DEFAULT


class GpuConfig(TimeSliced, frozen=True):
    """For a full GPU: how several processes of its claim take turns on it."""

    kind: ClassVar = "GpuConfig"


class MigDeviceConfig(Parameters, frozen=True):
    """For a MIG partition. It has no settings: its presence says that the class means partitions."""

    kind: ClassVar = "MigDeviceConfig"

    REFUSED: ClassVar = {"sharing": "time-slicing settings have no effect on a MIG partition"}


class ShareConfig(TimeSliced, frozen=True):
    """For a time-sliced share: the time-slice interval that this claim requests."""

    kind: ClassVar = "ShareConfig"


AnyParameters = GpuConfig | MigDeviceConfig | ShareConfig

TESSERA = Group(API_VERSION, {kind.kind: kind for kind in (GpuConfig, MigDeviceConfig, ShareConfig)}, {})


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
    NVIDIA_API_VERSION,
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
