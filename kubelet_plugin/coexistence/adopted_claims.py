"""Claims that NVIDIA's DRA driver prepared before this driver took over its name, ``gpu.nvidia.com``.

Its checkpoint is only read. Each claim in it becomes a record here, under the pool and device names of that driver, so
that prepare, unprepare, orphans and usage find it. The scheduler subtracts no counter of ours for such names: a GPU on
which an adopted claim holds anything is not published until the claim has ended (``Inventory.hold_adopted``).

The checksum of the file is not compared: what is read here only keeps GPUs from being offered, and a partition is
removed only if it has the UUID in the file. A file that can't be understood holds every GPU of the node.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import Annotated

import msgspec
from msgspec import Struct, field

from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import RecoverableError, StateError
from driver.kube.tolerant_json import decode
from driver.kube.types import ClaimStatus
from driver.model.gpu import Gpu, Partition
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.records import Adoption, ClaimRecord, DeviceRecord, MonitorRecord
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.preparer import ClaimReader
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.events import EventReason, PluginEvents

log = logging.getLogger(__name__)

CHECKPOINT = Path("plugins", NVIDIA_DRIVER, "checkpoint.json")
"""The file of NVIDIA's driver, in the kubelet's directory."""

STARTED, COMPLETED = "PrepareStarted", "PrepareCompleted"

NAME = re.compile(r"gpu-(?P<minor>\d{1,4})(-mig-\d+g.*-(?P<id>\d{1,4})-(?P<start>\d{1,4}))?")
OLD_NAME = re.compile(r"gpu-(?P<minor>\d{1,4})-mig-(?P<id>\d{1,4})-(?P<start>\d{1,4})-\d+")
"""Device names of NVIDIA's driver; the old ones, before 25.12, are of partitions that it did not make itself."""

PATH_PART = re.compile(r"[A-Za-z0-9][-.A-Za-z0-9]{0,252}")
"""Uid, name and namespace of a claim: they become parts of paths."""

MAX_BYTES = 1 << 26
"""Size from which on the file is not read. A claim takes about 2 KB in it."""

InstanceId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]

UNFINISHED = "NVIDIA's DRA driver began to prepare it and did not finish"
MPS = "nobody ends its MPS control daemon, a Deployment of NVIDIA's driver: end it by hand"
PASSED_THROUGH = "its GPU is passed through to a virtual machine, and nobody gives it back: unbind vfio-pci by hand"


class NvidiaAnswer(Struct, frozen=True):
    """A device as the kubelet was answered."""

    device: str = field(name="DeviceName")
    pool: str = field(name="PoolName")
    requests: tuple[str, ...] | None = field(name="Requests", default=None)
    cdi_device_ids: tuple[str, ...] | None = field(name="CDIDeviceIDs", default=None)


class NvidiaGpu(Struct, frozen=True):
    class Info(Struct, frozen=True):
        uuid: str

    info: Info
    device: NvidiaAnswer


class NvidiaPartition(Struct, frozen=True):
    """``info``: earlier versions have only the UUID."""

    class Concrete(Struct, frozen=True, rename="camel"):
        mig_uuid: str = field(name="migUUID")
        parent_uuid: str = field(name="parentUUID")
        gi_id: InstanceId
        ci_id: InstanceId

    device: NvidiaAnswer
    concrete: Concrete | None = None
    info: NvidiaGpu.Info | None = None


class NvidiaDevice(Struct, frozen=True):
    gpu: NvidiaGpu | None = None
    mig: NvidiaPartition | None = None
    vfio: NvidiaGpu | None = None

    @property
    def answer(self) -> NvidiaAnswer:
        """Raises StateError."""
        device = self.gpu or self.mig or self.vfio
        if device is None:
            raise StateError("a prepared device is neither gpu nor mig nor vfio")
        return device.device


class NvidiaGroup(Struct, frozen=True, rename="camel"):
    """Devices with the same configuration."""

    class State(Struct, frozen=True, rename="camel"):
        mps_control_daemon_id: str = field(name="mpsControlDaemonID", default="")
        time_slice_applied: bool | None = None

    devices: tuple[NvidiaDevice, ...] | None = None
    config_state: State = State()

    @property
    def must_end(self) -> str:
        """Why its claim can not be taken over as it is; empty: it can."""
        if self.config_state.mps_control_daemon_id:
            return MPS
        return PASSED_THROUGH if any(device.vfio for device in self.devices or ()) else ""


class NvidiaClaim(Struct, frozen=True, rename="camel"):
    """Earlier versions have neither state (every claim is completed) nor name."""

    status: ClaimStatus = ClaimStatus()
    checkpoint_state: str = COMPLETED
    prepared_devices: tuple[NvidiaGroup, ...] | None = None
    name: str = ""
    namespace: str = ""


class NvidiaClaims(Struct, frozen=True, rename="camel"):
    prepared_claims: dict[str, NvidiaClaim] | None = None
    boot: str = field(name="nodeBootID", default="")


class NvidiaCheckpoint(Struct, frozen=True):
    """The versions in one file; the newest that both programs know counts."""

    v1: NvidiaClaims | None = None
    v2: NvidiaClaims | None = None


DECODER = msgspec.json.Decoder(NvidiaCheckpoint)


def read_claims(data: bytes) -> NvidiaClaims:
    """Decode the checkpoint of NVIDIA's driver. Raises StateError."""
    try:
        checkpoint = decode(data, DECODER)
    except msgspec.MsgspecError as error:
        raise StateError(f"it is no checkpoint of NVIDIA's DRA driver: {error}") from error
    claims = checkpoint.v2 or checkpoint.v1
    if claims is None:
        raise StateError("it has neither v1 nor v2, the versions that this program reads")
    for uid, claim in (claims.prepared_claims or {}).items():
        for text in (uid, claim.namespace, claim.name) if claim.name else (uid,):
            if not PATH_PART.fullmatch(text):
                raise StateError(f"preparedClaims has {text!r}, which is no uid, namespace or name of a claim")
    return claims


def adopt_claims(
    stores: ClaimStores,
    settings: NodeSettings,
    partitions_of: Callable[[Gpu], Sequence[Partition]],
    claims: ClaimReader,
    events: PluginEvents,
) -> None:
    """Record the claims that NVIDIA's driver prepared on this node in this boot. Call it before the first prepare."""
    if settings.driver_name != NVIDIA_DRIVER:
        return
    path = settings.kubelet_dir / CHECKPOINT
    try:
        for record in stores.checkpoint.records():
            if record.adopted is not None and record.is_of_earlier_boot(stores.boot):
                stores.checkpoint.remove(record.uid)
        if (data := _read(path)) is not None:
            Adopter(stores, partitions_of, claims, keeps_partitions=settings.publish_existing).adopt(path, data, events)
    except RecoverableError as error:
        why = (
            f"the claims in {path} of NVIDIA's DRA driver are unknown ({error}): nothing of this GPU is offered; "
            "restart the plugin to try again, or end the pods with its claims on this node, delete the file and "
            "restart the plugin"
        )
        stores.inventory.hold_adopted(str(path), why)
        log.error("can't adopt the claims of NVIDIA's DRA driver", extra={"path": str(path), "error": str(error)})
        events.node(EventReason.CLAIM_MUST_END, why)


def _read(path: Path) -> bytes | None:
    """The content; None if there is no such file. Raises StateError."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise StateError(f"it is no file of at most {MAX_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"it can't be read: {error.strerror}") from error


class Adopter:
    """Makes records of the claims of NVIDIA's driver. ``keeps_partitions``: it made none of the partitions itself."""

    def __init__(
        self,
        stores: ClaimStores,
        partitions_of: Callable[[Gpu], Sequence[Partition]],
        claims: ClaimReader,
        *,
        keeps_partitions: bool,
    ) -> None:
        self._stores, self._partitions_of, self._claims = stores, partitions_of, claims
        self._keeps_partitions = keeps_partitions

    def adopt(self, path: Path, data: bytes, events: PluginEvents) -> None:
        """Write the record of each claim that has none yet. Raises RecoverableError."""
        theirs, checkpoint = read_claims(data), self._stores.checkpoint
        if theirs.boot and self._stores.boot and theirs.boot != self._stores.boot:
            log.info("NVIDIA's DRA driver prepared claims in an earlier boot only", extra={"path": str(path)})
            return
        new = {
            uid: claim
            for uid, claim in (theirs.prepared_claims or {}).items()
            if not self._is_recorded(uid) and not checkpoint.was_settled_since(uid, path)
        }
        records = [self._record(reference, new[reference.uid]) for reference in self._references(new)]
        adopted = (record for record in checkpoint.records() if record.adopted is not None)
        named = {device.uuid for record in (*adopted, *records) for device in record.devices}
        for record in records:
            devices = (self._as_made(device, named) for device in record.devices)
            checkpoint.put(msgspec.structs.replace(record, devices=tuple(devices)))
            checkpoint.settle_unrecorded(record.uid)
            _report(record, events)

    def _is_recorded(self, uid: str) -> bool:
        """Whether the claim has a record that needs no more facts of its GPUs."""
        record = self._stores.checkpoint.get(uid)
        return record is not None and (
            record.adopted is None
            or record.releasing
            or all(device.kind is DeviceKind.FULL or device.placement is not None for device in record.devices)
        )

    def _references(self, claims: Mapping[str, NvidiaClaim]) -> Iterator[ClaimReference]:
        """The claims by name; those without a name in the file are looked up, and left out if they do not exist."""
        nameless = {uid for uid, claim in claims.items() if not claim.name}
        for uid in claims.keys() - nameless:
            yield ClaimReference(claims[uid].namespace, claims[uid].name, uid)
        for existing in self._claims.read_all() if nameless else ():
            if existing.metadata.uid in nameless:
                yield ClaimReference(existing.metadata.namespace, existing.metadata.name, existing.metadata.uid)

    def _record(self, reference: ClaimReference, claim: NvidiaClaim) -> ClaimRecord:
        """Raises StateError if the claim has a device of an unknown kind or GPU, or was prepared without one."""
        allocation = claim.status.allocation
        results = [r for r in (allocation.devices.results if allocation else ()) if r.driver == NVIDIA_DRIVER]
        # One claim can have a device with admin access and, by another request, for its own use.
        monitored = {r.device for r in results if r.admin_access} - {r.device for r in results if not r.admin_access}
        if claim.checkpoint_state == COMPLETED:
            groups = claim.prepared_devices or ()
            devices = [self._prepared(device, group.config_state) for group in groups for device in group.devices or ()]
            answers = [device.answer for group in groups for device in group.devices or ()]
            must_end = next(filter(None, (group.must_end for group in groups)), "")
        else:
            answers = [NvidiaAnswer(r.device, r.pool, (r.request,)) for r in results]
            devices, must_end = [self._device(answer) for answer in answers], UNFINISHED
        ids = {answer.device: answer.cdi_device_ids or () for answer in answers}
        if lacking := {result.device for result in results} - ids.keys():
            raise StateError(f"preparedDevices of claim {reference} lacks {min(lacking)}, which is allocated to it")
        return ClaimRecord.of(
            reference,
            "prepared",
            tuple(device for device in devices if device.device not in monitored),
            self._stores.boot,
            monitors=tuple(
                MonitorRecord(device.requests, device.pool, device.device, device.gpu_uuid)
                for device in devices
                if device.device in monitored
            ),
            adopted=Adoption(ids, must_end, unfinished=must_end == UNFINISHED),
        )

    def _prepared(self, device: NvidiaDevice, state: NvidiaGroup.State) -> DeviceRecord:
        gpu, partition, replace = device.gpu or device.vfio, device.mig, msgspec.structs.replace
        if gpu is not None:
            record = self._device(gpu.device, gpu.info.uuid)
            # The interval is not in the file. Any but the default makes the release restore the default.
            return replace(record, time_slice=TimeSlice.LONG) if state.time_slice_applied else record
        if partition is None or partition.concrete is None:
            record = self._device(device.answer)
            return replace(record, uuid=partition.info.uuid if partition and partition.info else None)
        made = partition.concrete
        record = self._device(partition.device, made.parent_uuid)
        return replace(record, gpu_instance_id=made.gi_id, compute_instance_id=made.ci_id, uuid=made.mig_uuid)

    def _device(self, answer: NvidiaAnswer, gpu_uuid: str = "") -> DeviceRecord:
        """The record of a device by its name, without ``gpu_uuid`` also its GPU."""
        inventory, old = self._stores.inventory, OLD_NAME.fullmatch(answer.device)
        match = old or NAME.fullmatch(answer.device)
        minor = int(match["minor"]) if match else None
        by_minor = (gpu for gpu in inventory.gpus if gpu.minor == minor)
        gpu = inventory.gpu(gpu_uuid) if gpu_uuid else next(by_minor, None)
        if gpu is None and not gpu_uuid:
            raise StateError(f"device {answer.device} is on none of this node's GPUs")
        numbers = {inventory.number(gpu) for gpu in inventory.gpus}  # none of them is renamed for an unknown GPU
        record = DeviceRecord(
            requests=answer.requests or (),
            pool=answer.pool,
            device=answer.device,
            number=inventory.number(gpu) if gpu else next(n for n in count(minor or 0) if n not in numbers),
            gpu_uuid=gpu.uuid if gpu else gpu_uuid,
            kind=DeviceKind.PARTITION if match and match["id"] else DeviceKind.FULL,
            preexisting=self._keeps_partitions or old is not None,
        )
        if gpu is None or match is None or not match["id"]:
            return record
        profile_id, start = int(match["id"]), int(match["start"])
        for profile in gpu.profiles:
            for place in profile.placements:
                if (profile.id, place.start) == (profile_id, start):
                    return msgspec.structs.replace(
                        record, profile=profile.name, profile_id=profile.id, start=start, size=place.size
                    )
        return record

    def _as_made(self, device: DeviceRecord, named: Collection[str | None]) -> DeviceRecord:
        """``device``, as preexisting if NVIDIA's driver has not made its partition.

        When it makes partitions, it removes those that its file does not name at each start; one that is there all the
        same means that it only publishes what somebody else has made.
        """
        gpu = self._stores.inventory.gpu(device.gpu_uuid)
        if device.kind is DeviceKind.FULL or gpu is None:
            return device
        is_made = all(item.uuid in named or item.placement == device.placement for item in self._partitions_of(gpu))
        return device if is_made else msgspec.structs.replace(device, preexisting=True)


def _report(record: ClaimRecord, events: PluginEvents) -> None:
    why, devices = record.adopted.must_end if record.adopted else "", ", ".join(sorted(record.names))
    log.warning("adopted a claim", extra={"claim": str(record), "devices": devices, "why": why})
    taken = f"NVIDIA's DRA driver prepared {devices} of this claim: nothing of its GPUs is offered until its pod ends"
    if why:
        events.claim(record.reference, EventReason.CLAIM_MUST_END, f"{taken}, which must be soon: {why}")
    else:
        events.claim(record.reference, EventReason.CLAIM_ADOPTED, taken, warning=False)
