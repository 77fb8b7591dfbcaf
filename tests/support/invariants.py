"""What must hold on a node at every moment after start-up, on plain facts: hardware, files, what the API server has.

``read_facts`` looks at a simulated node, ``violations`` says in sentences what is wrong, ``leftovers`` what is still
there when nothing should be. While claims are being prepared or unprepared look with ``at_rest=False``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from driver.model.gpu_settings import time_slice_in_force
from driver.model.offer import DeviceKind
from driver.model.shared_memory import GIB, MemoryLimit, SharingStrategy
from driver.simulator.node import SimulatedNode, describe
from kubelet_plugin.cdi.spec_format import variable
from kubelet_plugin.checkpoint.files import TEMPORARY
from kubelet_plugin.checkpoint.records import ClaimRecord, DeviceRecord

DRIVER = "gpu.tessera.dev"

Object = Mapping[str, Any]
Place = tuple[str, str, int]
"""A partition: UUID of its GPU, name of its profile, first memory slice."""

PodLimits = Mapping[tuple[str, str], int]
"""Bytes to which pods are limited, by UUID of the GPU and UID of the pod."""


@dataclass(frozen=True)
class Facts:
    """One look at a node.

    gpus         as ``tessera sim smi -o json`` tells it
    records      the checkpoint's files
    specs        CDI specs of ours, by claim uid
    temporary    names of files that a killed write left behind
    allocations  device names by uid of the claim they are allocated to; None: the API server was not asked
    published    device names in the node's slices; None: the API server was not asked
    answered     uids of the claims that the kubelet was told are prepared and has not had unprepared
    foreign      partitions that somebody else made
    limits       what the driver limits pods to
    daemons      UUIDs of the GPUs that an MPS daemon serves; None: nobody looked
    """

    gpus: Sequence[Object]
    records: Sequence[ClaimRecord]
    specs: Mapping[str, Object]
    temporary: Sequence[str] = ()
    allocations: Mapping[str, frozenset[str]] | None = None
    published: frozenset[str] | None = None
    answered: frozenset[str] = frozenset()
    foreign: frozenset[Place] = frozenset()
    limits: PodLimits = field(default_factory=dict)
    daemons: frozenset[str] | None = None

    def partitions(self) -> Iterator[tuple[Place, Object]]:
        for gpu in self.gpus:
            for row in gpu["migDevices"]:
                yield (gpu["uuid"], row["profile"], row["placement"]["start"]), row

    def held(self) -> Iterator[tuple[ClaimRecord, DeviceRecord]]:
        for record in self.records:
            for device in record.devices:
                yield record, device

    def prepared(self) -> Iterator[tuple[ClaimRecord, DeviceRecord]]:
        return ((record, device) for record, device in self.held() if not record.needs_release)

    def gpu(self, uuid: str) -> Object | None:
        return next((gpu for gpu in self.gpus if gpu["uuid"] == uuid), None)


def read_facts(host: Path | SimulatedNode, state_dir: Path, cdi_dir: Path, **more: Any) -> Facts:
    """Hardware (``host`` is the node or its directory) and files; ``more`` are fields that only the caller knows."""
    node = SimulatedNode.attach(host) if isinstance(host, Path) else host
    gpus, claims = describe(node, {}), state_dir / "claims"
    records = [msgspec.json.decode(content, type=ClaimRecord) for _, content in _files(claims, "[!.]*.json")]
    specs = {
        path.stem.removeprefix(f"{DRIVER}-claim_"): json.loads(content)
        for path, content in _files(cdi_dir, f"{DRIVER}-claim_*.json")
    }
    temporary = [path.name for folder in (claims, cdi_dir) for path in folder.glob(f".*{TEMPORARY}")]
    return Facts(gpus, records, specs, temporary, limits=limits_in_force(node), **more)


def limits_in_force(node: SimulatedNode) -> PodLimits:
    """What the simulated driver limits pods to, those that have a cgroup."""
    return {
        (node.uuids[minor], path.name.removeprefix("pod")): limit.hard
        for minor in node.present
        for limit in node.gpu_state(minor).limits
        if (path := Path(limit.cgroup)).exists()
    }


def limits_of(records: Iterable[ClaimRecord]) -> PodLimits:
    """What pods may use by the records of their claims: the sum of what these have of a GPU."""
    memory: Counter[tuple[str, str]] = Counter()
    for record in records:
        for device in record.devices:
            if device.limit is MemoryLimit.CGROUP:
                memory.update({(device.gpu_uuid, pod): device.gib * GIB for pod in record.pods})
    return memory


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, bytes]]:
    """Those that are there when they are read: a plugin at work may have deleted one since they were listed."""
    for path in sorted(folder.glob(pattern)):
        with suppress(FileNotFoundError):
            yield path, path.read_bytes()


def allocations(claims: Iterable[Object]) -> dict[str, frozenset[str]]:
    """Device names of ours by claim uid, from ResourceClaims as the API server has them."""
    found = {}
    for claim in claims:
        results = ((claim.get("status") or {}).get("allocation") or {}).get("devices", {}).get("results", ())
        found[claim["metadata"]["uid"]] = frozenset(r["device"] for r in results if r["driver"] == DRIVER)
    return found


def published(slices: Iterable[Object], node: str) -> frozenset[str]:
    """Names of every device in the node's slices, from ResourceSlices as the API server has them."""
    mine = (item["spec"] for item in slices if item["spec"].get("nodeName") == node)
    return frozenset(device["name"] for spec in mine for device in spec.get("devices") or ())


def violations(facts: Facts, *, at_rest: bool = True) -> list[str]:
    """Everything that is wrong, as sentences; empty where all is well.

    ``at_rest``: nobody prepares or unprepares at present, and nothing that failed is still owed.
    """
    rules = [*ALWAYS, *(AT_REST if at_rest else ())]
    return [sentence for rule in rules for sentence in rule(facts)]


def leftovers(facts: Facts) -> list[str]:
    """Everything that is still there though every claim was unprepared; foreign partitions may stay."""
    found = [f"record of {record.namespace}/{record.name} ({record.phase})" for record in facts.records]
    found += [f"CDI spec of {uid}" for uid in facts.specs]
    found += [f"partition {place}" for place, _ in facts.partitions() if place not in facts.foreign]
    found += [f"memory limit of pod {pod} on {gpu}" for gpu, pod in facts.limits]
    found += [f"time-slice {gpu['timeSlice']} of {gpu['uuid']}" for gpu in facts.gpus if gpu["timeSlice"] != "Default"]
    found += [f"mode {gpu['computeMode']} of {gpu['uuid']}" for gpu in facts.gpus if gpu["computeMode"] != "DEFAULT"]
    found += [f"MPS daemon of {gpu}" for gpu in facts.daemons or ()]
    return found + [f"temporary file {name}" for name in facts.temporary]


def _partitions_have_one_claim(facts: Facts) -> Iterator[str]:
    holders = Counter(place for _, device in facts.held() if (place := _place(device)) is not None)
    for place, _ in facts.partitions():
        if holders[place] != 1 and not (place in facts.foreign and not holders[place]):
            yield f"partition {place} on the hardware belongs to {holders[place]} claims, not to one"


def _specs_have_a_claim(facts: Facts) -> Iterator[str]:
    known = {record.uid for record in facts.records}
    yield from (f"the CDI spec of {uid} belongs to no recorded claim" for uid in facts.specs if uid not in known)


def _memory_is_given_once(facts: Facts) -> Iterator[str]:
    for (first, one), (second, other) in combinations(facts.held(), 2):
        if one.gpu_uuid != other.gpu_uuid:
            continue
        shares = one.kind is other.kind is DeviceKind.SHARE and one.device != other.device
        parts = one.kind is other.kind is DeviceKind.SHARED and one.key != other.key
        if not (shares or parts) and _slices(one) & _slices(other):
            yield f"{one.device} of {first.name} and {other.device} of {second.name} overlap on {one.gpu_uuid}"
    for gpu in facts.gpus:
        shares_held = [d for _, d in facts.held() if d.gpu_uuid == gpu["uuid"] and d.kind is DeviceKind.SHARE]
        if sum(1 / device.shares for device in shares_held) > 1 + 1e-9:
            yield f"{gpu['uuid']}: the shares {[device.device for device in shares_held]} are more than the GPU"
        gib = sum(device.gib for _, device in facts.held() if device.gpu_uuid == gpu["uuid"])
        if gib > gpu["memoryTotal"] >> 10:
            yield f"{gpu['uuid']}: claims have {gib} GiB of {gpu['memoryTotal']} MiB"


def _prepared_devices_are_there(facts: Facts) -> Iterator[str]:
    standing = dict(facts.partitions())
    for record, device in facts.prepared():
        what = f"{device.device} of prepared claim {record.name}"
        gpu, place = facts.gpu(device.gpu_uuid), _place(device)
        if gpu is None:
            yield f"{what}: its GPU {device.gpu_uuid} is gone"
        elif place is None:
            if gpu["migMode"] == "Enabled":
                yield f"{what}: its GPU is in MIG mode"
        elif place not in standing:
            yield f"{what}: there is no partition {place}"
        elif (found := _ids(standing[place])) != (device.gpu_instance_id, device.compute_instance_id, device.uuid):
            yield f"{what}: the record says {device}, the hardware {found}"


def _prepared_devices_are_allocated(facts: Facts) -> Iterator[str]:
    for record in facts.records if facts.allocations is not None else ():
        recorded = frozenset(device.device for device in record.devices)
        allocated = (facts.allocations or {}).get(record.uid)
        if not record.needs_release and recorded != allocated:
            yield f"prepared claim {record.name} has {sorted(recorded)}, allocated is {allocated and sorted(allocated)}"


def _specs_name_the_devices(facts: Facts) -> Iterator[str]:
    uuids = {place: row["uuid"] for place, row in facts.partitions()}
    for record in facts.records:
        if record.needs_release:
            continue
        if record.uid not in facts.specs:
            yield f"prepared claim {record.name} has no CDI spec"
            continue
        wanted = {
            f"{record.uid}-{d.key}": f"{variable(d.key)}={uuids.get(_place(d) or ('', '', 0), d.gpu_uuid)}"
            for d in record.devices
        }
        found = {device["name"]: device["containerEdits"] for device in facts.specs[record.uid]["devices"]}
        if found.keys() != wanted.keys():
            yield f"the CDI spec of {record.name} names {sorted(found)}, not {sorted(wanted)}"
        for name, edits in found.items():
            if wanted.get(name) not in edits["env"]:
                yield f"the CDI spec of {record.name} says {edits['env']} of {name}, not {wanted.get(name)}"
            yield from (f"{name}: no node {path} on the host" for path in _missing_nodes(edits))


def _held_devices_are_published(facts: Facts) -> Iterator[str]:
    for record, device in facts.held() if facts.published is not None else ():
        if device.device not in (facts.published or ()):
            yield f"{device.device}, held by {record.name}, is not in the node's slices"


def _nothing_is_half_done(facts: Facts) -> Iterator[str]:
    prepared = {record.uid for record in facts.records if not record.needs_release}
    yield from (
        f"claim {record.uid} is half prepared or unprepared" for record in facts.records if record.needs_release
    )
    yield from (f"claim {uid} was answered and is not prepared" for uid in facts.answered - prepared)
    yield from (f"a killed write left {name}" for name in facts.temporary)


def _time_slices_are_as_asked(facts: Facts) -> Iterator[str]:
    for gpu in facts.gpus:
        asked = time_slice_in_force(
            device.time_slice for _, device in facts.prepared() if device.gpu_uuid == gpu["uuid"]
        )
        if gpu["timeSlice"] != str(asked):
            yield f"{gpu['uuid']} has time-slice {gpu['timeSlice']}, its claims ask for {asked}"


def _pods_are_limited_to_what_their_claims_have(facts: Facts) -> Iterator[str]:
    wanted = limits_of(record for record in facts.records if not record.needs_release)
    for key in sorted(wanted.keys() | facts.limits.keys()):
        if wanted.get(key) != facts.limits.get(key):
            yield f"pod {key[1]} is limited to {facts.limits.get(key)} bytes of {key[0]}, not to {wanted.get(key)}"


def _mps_serves_the_gpus_that_claims_share_by_it(facts: Facts) -> Iterator[str]:
    shared = {device.gpu_uuid for _, device in facts.prepared() if device.strategy is SharingStrategy.MPS}
    for gpu in facts.gpus:
        mode = "EXCLUSIVE_PROCESS" if gpu["uuid"] in shared else "DEFAULT"
        if gpu["computeMode"] != mode:
            yield f"{gpu['uuid']} has compute mode {gpu['computeMode']}, not {mode}"
    if facts.daemons is not None and facts.daemons != shared:
        yield f"MPS daemons serve {sorted(facts.daemons)}, not {sorted(shared)}"


Rule = Callable[[Facts], Iterable[str]]

ALWAYS: Sequence[Rule] = (_partitions_have_one_claim, _specs_have_a_claim, _memory_is_given_once)
"""Whatever is going on, if the hardware is read before the records, and nothing is being undone in between."""

AT_REST: Sequence[Rule] = (
    _prepared_devices_are_there,
    _prepared_devices_are_allocated,
    _specs_name_the_devices,
    _held_devices_are_published,
    _nothing_is_half_done,
    _time_slices_are_as_asked,
    _pods_are_limited_to_what_their_claims_have,
    _mps_serves_the_gpus_that_claims_share_by_it,
)


def _place(device: DeviceRecord) -> Place | None:
    if device.profile is None or device.start is None:
        return None
    return device.gpu_uuid, device.profile, device.start


def _slices(device: DeviceRecord) -> int:
    """The memory slices it takes, as a bit mask; of a GPU that is not divided all there could be."""
    return (1 << 64) - 1 if device.placement is None else device.placement.mask


def _ids(row: Object) -> tuple[int, int | None, str | None]:
    return row["gpuInstance"], row["computeInstance"], row["uuid"]


def _missing_nodes(edits: Object) -> Iterator[str]:
    paths = (node.get("hostPath") for node in edits.get("deviceNodes", ()))
    return (path for path in paths if path is not None and not Path(path).exists())
