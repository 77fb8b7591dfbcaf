"""Opaque device parameters in classes and claims: Tessera's kinds, and those of NVIDIA's DRA driver translated.

The API group of Tessera's kinds, ``gpu.tessera.dev/v1alpha1``, does not change with the driver name. Parameters for
``resource.nvidia.com/v1beta1`` are translated, so that existing classes and claims keep their meaning; unsupported
ones are rejected by name. Their field names are from kubernetes-sigs/dra-driver-nvidia-gpu,
``api/nvidia.com/resource/v1beta1``.

Strict: a wrong apiVersion, kind, field, value or type is refused, all of them at once, each with its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from driver.config.strict_schema import Fault, Group, InvalidParameters, Strict, faults_of, shown, wrong_name
from driver.config.suggestions import nearest
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind

__all__ = ["InvalidParameters"]

API_VERSION = "gpu.tessera.dev/v1alpha1"
NVIDIA_API_VERSION = "resource.nvidia.com/v1beta1"

NO_MPS = "MPS is for shared devices (kind SharedConfig), which several claims hold at once"
NO_MEMORY = "the memory of a claim is its limit: request it as capacity of the device, not here"

Strategy = Literal["MPS", "TimeSlicing"]
Percentage = Annotated[int, msgspec.Meta(ge=1, le=100)]


class TimeSlicing(Strict, frozen=True):
    """How long each process runs before the next has its turn."""

    interval: TimeSlice | None = None


class Sharing(Strict, frozen=True):
    """How the processes on one device take turns."""

    REFUSED: ClassVar = {"MPS": NO_MPS, "mps": NO_MPS, "mpsConfig": NO_MPS}

    strategy: Literal["TimeSlicing"] | None = None
    time_slicing: TimeSlicing | None = None


class Parameters(Strict, frozen=True):
    """What every kind has in common. The kind is the name of its class."""

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


class MigDeviceConfig(Parameters, frozen=True):
    """For a MIG partition. It has no settings: its presence says that the class means partitions."""

    REFUSED: ClassVar = {"sharing": "time-slicing settings have no effect on a MIG partition"}


class ShareConfig(TimeSliced, frozen=True):
    """For a time-sliced share: the time-slice interval that this claim requests."""


class MpsSettings(Strict, frozen=True):
    """What a claim gets by MPS: at most this part of the GPU's threads."""

    active_thread_percentage: Percentage | None = None


class SharedConfig(Parameters, frozen=True):
    """For a shared device: how its claims must share the GPU (None: either way), and what this claim gets then."""

    strategy: Strategy | None = None
    mps: MpsSettings | None = None
    time_slicing: TimeSlicing | None = None

    @property
    def time_slice(self) -> TimeSlice | None:
        return None if self.time_slicing is None else self.time_slicing.interval or TimeSlice.DEFAULT


AnyParameters = GpuConfig | MigDeviceConfig | ShareConfig | SharedConfig

TESSERA = Group(
    API_VERSION, {kind.__name__: kind for kind in (GpuConfig, MigDeviceConfig, ShareConfig, SharedConfig)}, {}
)


class NvidiaMps(Strict, frozen=True):
    """``mpsConfig`` of a GpuConfig."""

    REFUSED: ClassVar = {
        "defaultPinnedDeviceMemoryLimit": NO_MEMORY,
        "defaultPerDevicePinnedMemoryLimit": NO_MEMORY,
        "multiUser": "an MPS server serves all users wherever the driver can do that",
    }

    default_active_thread_percentage: Percentage | None = None


class NvidiaSharing(Strict, frozen=True):
    """``sharing`` of a GpuConfig."""

    strategy: Strategy | None = None
    time_slicing_config: TimeSlicing | None = None
    mps_config: NvidiaMps | None = None


class NvidiaGpuConfig(Strict, frozen=True):
    """Their GpuConfig, for a full GPU, a share of one, or a shared device; MPS is for the latter only."""

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
        "SharedConfig": f"is a kind of {TESSERA.api_version}",
    },
)


def translate(theirs: Strict, device: DeviceKind | None) -> AnyParameters:
    """Return our kind for theirs. A GpuConfig on a share is a ShareConfig; on a shared device, or one with MPS where
    ``device`` is not known, it is a SharedConfig.
    """
    if not isinstance(theirs, NvidiaGpuConfig):
        return MigDeviceConfig()
    sharing = theirs.sharing or NvidiaSharing()
    if device is DeviceKind.SHARED or (device is None and sharing.strategy == "MPS"):
        mps = sharing.mps_config
        settings = None if mps is None else MpsSettings(mps.default_active_thread_percentage)
        return SharedConfig(sharing.strategy, settings, sharing.time_slicing_config)
    ours = None if theirs.sharing is None else Sharing("TimeSlicing", sharing.time_slicing_config)
    return ShareConfig(ours) if device is DeviceKind.SHARE else GpuConfig(ours)


def contradictions(parsed: SharedConfig | NvidiaGpuConfig, device: DeviceKind) -> list[Fault]:
    """What ``parsed`` says that can't be together, or not on this kind of device."""
    if isinstance(parsed, SharedConfig):
        return _unfitting(parsed.strategy, "", mps=parsed.mps, timeSlicing=parsed.time_slicing)
    sharing = parsed.sharing
    if sharing is None:
        return []
    if device is DeviceKind.SHARED:
        mps, slicing = sharing.mps_config, sharing.time_slicing_config
        return _unfitting(sharing.strategy, "sharing.", mpsConfig=mps, timeSlicingConfig=slicing)
    faults = [Fault("sharing.strategy", '"MPS"', f"{NO_MPS}; accepted: TimeSlicing")] * (sharing.strategy == "MPS")
    return faults + [Fault("sharing.mpsConfig", "{...}", f"{NO_MPS}; leave it out")] * (sharing.mps_config is not None)


def _unfitting(strategy: str | None, place: str, **settings: Strict | None) -> list[Fault]:
    """The faults of settings that belong to the other strategy; in the order MPS, time-slicing."""
    fitting = {"MPS": 0, "TimeSlicing": 1}.get(strategy or "")
    return [
        Fault(f"{place}{name}", "{...}", f"{place}strategy is {strategy}, which has no such settings; leave one out")
        for at, (name, value) in enumerate(settings.items())
        if value is not None and fitting not in (None, at)
    ]


FITTING: Mapping[type[AnyParameters], DeviceKind] = {
    GpuConfig: DeviceKind.FULL,
    MigDeviceConfig: DeviceKind.PARTITION,
    ShareConfig: DeviceKind.SHARE,
    SharedConfig: DeviceKind.SHARED,
}
"""Which kind of device each kind of parameters is for."""

GROUPS = {group.api_version: group for group in (TESSERA, NVIDIA)}


def parse_parameters(raw: object, where: str, device: DeviceKind | None = None) -> AnyParameters:
    """``raw`` (decoded JSON or YAML) as one of our kinds; ``device`` says what kind of device it is for, if known.

    Raises InvalidParameters, a ClaimError that lists every fault; ``where`` names the object in it.
    """
    if not isinstance(raw, Mapping):
        raise InvalidParameters(where, [Fault("parameters", shown(raw), "must be an object with apiVersion and kind")])
    faults, version = _chosen(raw, "apiVersion", GROUPS, {})
    group = GROUPS.get(version, TESSERA)
    unknown_kind, kind = _chosen(raw, "kind", group.kinds, group.refused)
    faults, model = faults + unknown_kind, group.kinds.get(kind)
    settings = {name: value for name, value in raw.items() if name not in {"apiVersion", "kind"}}
    try:
        parsed = None if model is None or faults else msgspec.convert(settings, model)
    except msgspec.ValidationError:
        parsed = None
    if parsed is None:
        raise InvalidParameters(where, [*faults, *(faults_of(model, settings) if model else [])])
    if device is not None and isinstance(parsed, SharedConfig | NvidiaGpuConfig):
        contrary = contradictions(parsed, device)
        if contrary:
            raise InvalidParameters(where, contrary)
    return parsed if isinstance(parsed, AnyParameters) else translate(parsed, device)


def devices_for(raw: object) -> frozenset[DeviceKind]:
    """The kinds of devices that ``raw`` is for; none where it is not valid."""
    return frozenset(kind for kind in DeviceKind if _is_for(raw, kind))


def _is_for(raw: object, kind: DeviceKind) -> bool:
    try:
        return FITTING[type(parse_parameters(raw, "", kind))] is kind
    except InvalidParameters:
        return False


def _chosen(
    raw: Mapping[Any, Any], field: str, known: Iterable[str], refused: Mapping[str, str]
) -> tuple[list[Fault], str]:
    """The value of ``field``; where it is not one of ``known``, the one that was most probably meant, if any, or ""."""
    names, written = list(known), raw.get(field)
    name = written if isinstance(written, str) else ""
    if name in names:
        return [], name
    return [wrong_name(field, written, names, refused)], (nearest(name, names) if name not in refused else None) or ""
