"""The opaque parameters of classes and claims, ``gpu.tessera.dev/v1alpha1``.

The API group is fixed; it does not follow the driver name.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from driver.config.schema import Group, Strict
from driver.model.sharing import TimeSlice

API_VERSION = "gpu.tessera.dev/v1alpha1"

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
        """The interval asked for; None: no wish."""
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
    """For a time-sliced share: how the claims on one GPU take turns, as far as this claim has a wish."""

    kind: ClassVar = "ShareConfig"


AnyParameters = GpuConfig | MigDeviceConfig | ShareConfig

TESSERA = Group(API_VERSION, {kind.kind: kind for kind in (GpuConfig, MigDeviceConfig, ShareConfig)}, {})
