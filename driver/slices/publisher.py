"""Publishes the node's ResourceSlices in the order of ``SliceBuilder.build``; restores what other writers change."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from driver.kube.client import KubeClient, Object
from driver.kube.types import Key, ObjectMeta
from driver.kube.watch_cache import WatchCache
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.plan import COUNTERS_FIELD
from driver.slices.build import UNHEALTHY, Content, PublishedGpu, slice_object, slice_spec
from driver.slices.dropped_fields import SLICES as SLICES
from driver.slices.dropped_fields import KeptFields
from driver.slices.slice_names import Pool

Slices = Mapping[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """The spec that was last sent for a slice, and the resource version of the response."""

    version: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """Writes in order (names and contents, at one pool generation), deletions, and the objects that exist."""

    pool: Pool
    generation: int
    count: int
    write: list[tuple[str, Content]] = field(default_factory=list)
    delete: dict[str, dict[str, Any]] = field(default_factory=dict)
    existing: Slices = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.write or self.delete)


def changes(
    desired: Mapping[str, Content], actual: Slices, sent: Mapping[str, Stored], pool: Pool, missing: int = 0
) -> Changes:
    """The writes and deletions that lead from ``actual`` to ``desired``, a pool that lacks ``missing`` slices.

    Slices of one pool generation belong together: while they are rewritten the scheduler skips the whole
    pool. So a change of devices stays in the generation, each slice being complete in itself; the set of
    slices or a counter set changing, or a device that moves to another slice, starts a new one. Counter sets come and
    go within a generation: a set is written before the first device that refers to it, and removed after the last. A
    slice that nobody changed since we sent it counts as what we sent, so that an API server which drops fields is not
    written to for ever.
    """
    specs = {name: _believed(item, sent.get(name)) for name, item in actual.items()}
    current = max((spec["pool"]["generation"] for spec in specs.values()), default=1)
    count = len(desired) + missing
    todo = _at_generation(current, count, desired, actual, specs, pool)
    if _needs_new_generation(current, desired, specs):
        todo = _at_generation(current + 1, count, desired, actual, specs, pool)
    return todo


def _at_generation(
    generation: int, count: int, desired: Mapping[str, Content], actual: Slices, specs: Slices, pool: Pool
) -> Changes:
    todo = Changes(pool, generation, count, existing=actual)
    removals: list[tuple[str, Content]] = []
    for name, content in desired.items():
        if specs.get(name) == slice_spec(content, pool, generation, count):
            continue
        sets, before = _sets(content), _sets(specs.get(name, {}))
        if before.keys() <= sets.keys():
            todo.write.append((name, content))
            continue
        if sets.keys() - before.keys():
            todo.write.append((name, {"sharedCounters": list((before | sets).values())}))
        removals.append((name, content))
    todo.write.extend(removals)
    todo.delete.update((name, item) for name, item in actual.items() if name not in desired)
    return todo


def _sets(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The counter sets by name."""
    return {counters["name"]: counters for counters in spec.get("sharedCounters") or ()}


def _needs_new_generation(current: int, desired: Mapping[str, Content], specs: Slices) -> bool:
    """Whether what is there is complete by itself and would stop being so half-way through."""
    there = {name: spec for name, spec in specs.items() if spec["pool"]["generation"] == current}
    complete = there and all(spec["pool"]["resourceSliceCount"] == len(there) for spec in there.values())
    if not complete:
        return False
    return set(there) != set(desired) or _counters_differ(there, desired) or _moved(there, desired)


def _counters_differ(there: Slices, desired: Mapping[str, Content]) -> bool:
    """Whether the counters of a set change that stays."""
    pairs = ((_sets(spec), _sets(desired[name])) for name, spec in there.items())
    return any(before[name] != after[name] for before, after in pairs for name in before.keys() & after.keys())


def _moved(there: Slices, desired: Mapping[str, Content]) -> bool:
    """Whether a device goes from one slice to another: the two are written one after the other."""
    before = {device["name"]: name for name, spec in there.items() for device in spec.get("devices") or ()}
    after = ((device["name"], name) for name, content in desired.items() for device in content.get("devices", ()))
    return any(before.get(device, name) != name for device, name in after)


def _believed(item: Mapping[str, Any], sent: Stored | None) -> dict[str, Any]:
    if sent is not None and sent.version == item["metadata"]["resourceVersion"]:
        return dict(sent.spec)
    return _as_sent(item["spec"])


def _as_sent(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without the times of taints, which the API server adds, and with the empty list that it drops."""
    devices = spec.get("devices") or []
    if "sharedCounters" in spec and not devices:
        return dict(spec)
    return {**spec, "devices": [_without_times(device) if "taints" in device else device for device in devices]}


def _without_times(device: Mapping[str, Any]) -> dict[str, Any]:
    """The time of a fault's taint is ours; the API server sets that of any other taint."""

    def without_time(taint: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in taint.items() if key != "timeAdded" or taint["key"] == UNHEALTHY}

    return {**device, "taints": [without_time(taint) for taint in device["taints"]]}


def dropped_fields(sent: Any, stored: Any, path: str = "spec") -> Iterator[str]:
    """Paths of what was sent but did not come back, with list indices left out."""
    if sent == stored:
        return
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            if key in stored:
                yield from dropped_fields(value, stored[key], f"{path}.{key}")
            elif value not in ([], {}):
                yield f"{path}.{key}"
    elif isinstance(sent, list) and isinstance(stored, list):
        for ours, theirs in zip(sent, stored, strict=False):
            yield from dropped_fields(ours, theirs, f"{path}[]")
        if len(stored) < len(sent):
            yield f"{path}[{len(stored)}]"


log = logging.getLogger(__name__)

COALESCE_INTERVAL_SECONDS = 0.02
"""How long to gather changes before writing them: each write of a slice wakes every waiting pod of the cluster,
and claims come in bursts. With 50 ms no fewer slices are written in a burst (``make bench-scale``)."""


class SliceStep(StrEnum):
    """A request that changes one slice."""

    WRITE = "write-slice"
    DELETE = "delete-slice"


class Slice(msgspec.Struct, frozen=True):
    """A ResourceSlice, its content as it is."""

    metadata: ObjectMeta
    spec: dict[str, Any]


def _kept(item: Slice) -> Object:
    metadata = item.metadata
    names = {"name": metadata.name, "uid": metadata.uid, "resourceVersion": metadata.resource_version}
    return {"metadata": names, "spec": item.spec}


class SliceStore(Protocol):
    """The node's slices at the API server; ``observe`` and ``forget`` record writes of this process."""

    @property
    def synced(self) -> bool: ...

    def snapshot(self) -> Mapping[Key, Object]: ...

    def observe(self, stored: Object) -> None: ...

    def forget(self, key: Key) -> None: ...


class PresentSlices(Protocol):
    """The node's slices as they are."""

    def device_names(self) -> set[str]:
        """The devices in the slices."""

    def has_counters(self, gpu: PublishedGpu) -> bool:
        """Whether a device in the slice of ``gpu`` consumes counters: then an API server keeps all counters in it."""


class SliceSource(Protocol):
    """What the slices of the node must contain."""

    def desired(self, slices: PresentSlices) -> Mapping[str, Content]:
        """The content of every slice by name, given the present ``slices``. Raises RecoverableError."""

    def monitors(self) -> Mapping[str, Content] | None:
        """The content of the slice in the pool of monitor devices by its name; empty: there is none, None: as it is."""

    def is_complete(self) -> bool:
        """Asked after ``desired``: while this is False the pool has one slice, and says that it has more, so that
        nobody relies on it."""

    def creation_delay(self, absent_since: float | None) -> float:
        """Seconds until slices may be created, asked while there are none; infinite: until ``Publisher.notify``.

        ``absent_since``: the monotonic time at which those that this process has published were missing; None: it has
        published none.
        """

    def owner(self) -> Mapping[str, Any]:
        """The Node's owner reference, asked for every new slice: a Node that was deleted and registered again has
        another uid, and what the old one owns is garbage. Raises ApiError."""


class SliceWriteObserver:
    """Observes the writes of slices; this one does nothing."""

    def step(self, step: SliceStep, slice_name: str) -> AbstractContextManager[object]:
        """Return a block to enter around every request that changes a slice."""
        return nullcontext()

    def written(self, count: int, seconds: float) -> None:
        """``count`` slices were written or deleted in ``seconds``."""


class Publisher:
    """The only writer of its node's slices. Call ``notify`` when the answers of ``source`` may have changed.

    ``store`` knows the slices instead of a watch of this object; whoever passes one calls ``notify`` when the API
    server has others than it says. ``fields`` is checked before ``source`` is asked.
    """

    def __init__(
        self,
        client: KubeClient,
        pool: Pool,
        source: SliceSource,
        fields: KeptFields | None = None,
        observer: SliceWriteObserver | None = None,
        store: SliceStore | None = None,
        loop: MakeLoop = Loop,
    ) -> None:
        self._client, self._pool, self._source = client, pool, source
        self._observer = observer or SliceWriteObserver()
        self._fields = fields
        self._owner: Mapping[str, Any] | None = None
        self._sent: dict[str, Stored] = {}
        self._reported: set[str] = set()
        self._has_published = False
        self._absent_since: float | None = None
        work = loop("publishing slices", self._reconcile, COALESCE_INTERVAL_SECONDS)
        self.notify, self.notify_within, self.run = work.notify, work.notify_within, work.run
        self.published = threading.Event()
        selector = {"fieldSelector": f"spec.nodeName={pool.node},spec.driver={pool.driver}"}
        self.cache = WatchCache(client, SLICES, Slice, _kept, lambda _: self.notify(), selector)
        self._store: SliceStore = store or self.cache

    def device_names(self) -> set[str]:
        specs = [item["spec"] for item in self._stored(self._pool).values()]
        return {device["name"] for spec in specs for device in spec.get("devices") or ()}

    def _stored(self, pool: Pool) -> dict[str, Object]:
        """The slices of ``pool`` by name; slices of pools with other names count as of the pool of devices."""
        of_monitors = self._pool.of_monitors.name
        slices = self._store.snapshot().items()
        return {
            key.name: item
            for key, item in slices
            if (item["spec"]["pool"]["name"] == of_monitors) is (pool.name == of_monitors)
        }

    def has_counters(self, gpu: PublishedGpu) -> bool:
        item = self._store.snapshot().get(Key("", self._pool.device_slice(gpu.number, divided=gpu.divided)))
        return item is not None and any(COUNTERS_FIELD in device for device in item["spec"].get("devices") or ())

    def _reconcile(self) -> float | None:
        """Write what differs, or return after how many seconds to call again. Raises RecoverableError."""
        if not self._store.synced:
            return None
        delay = self._creation_delay()
        if delay > 0.0:
            return None if delay == math.inf else delay
        if self._fields is not None:
            self._fields.check(self._client, self._pool)
        desired, missing = self._source.desired(self), 0
        if desired and not self._source.is_complete():
            first = min(desired)
            desired, missing = {first: desired[first]}, 1
        self._publish(changes(desired, self._stored(self._pool), self._sent, self._pool, missing))
        self.published.set()
        self._has_published = bool(desired)
        of_monitors, monitors = self._pool.of_monitors, self._source.monitors()
        if monitors is not None:
            self._publish(changes(monitors, self._stored(of_monitors), self._sent, of_monitors))
        return None

    def _publish(self, todo: Changes) -> None:
        """Write what differs in one pool. Raises ApiError."""
        if not todo:
            return
        if todo.write and (self._owner is None or any(name not in todo.existing for name, _ in todo.write)):
            self._owner = self._source.owner()
        started = time.perf_counter()
        self._write(todo)
        self._observer.written(len(todo.write) + len(todo.delete), time.perf_counter() - started)
        log.info(
            "published slices",
            extra={
                "pool": todo.pool.name,
                "generation": todo.generation,
                "written": len(todo.write),
                "deleted": len(todo.delete),
            },
        )

    def _creation_delay(self) -> float:
        """Seconds until slices may be written; single ones that are missing are created at once."""
        if self._store.snapshot():
            self._absent_since = None
            return 0.0
        if self._has_published and self._absent_since is None:
            self._absent_since = time.monotonic()
        return self._source.creation_delay(self._absent_since)

    def _write(self, todo: Changes) -> None:
        existing = dict(todo.existing)
        for name, content in todo.write:
            desired = slice_object(name, content, todo.pool, todo.generation, todo.count, self._owner)
            with self._observer.step(SliceStep.WRITE, name):
                stored = existing[name] = self._put(desired, existing.get(name))
            self._sent[name] = Stored(_version(stored), desired["spec"])
            dropped = [*dropped_fields(desired["spec"], stored["spec"])]
            self._report_dropped(name, dropped)
            self._store.observe(stored)
            if self._fields is not None and self._fields.learn(dropped):
                del self._sent[name]  # it must be written again even if another API server keeps the fields
                self.notify()
                return
        for name, item in todo.delete.items():
            with self._observer.step(SliceStep.DELETE, name):
                self._delete(item)
            self._sent.pop(name, None)
            self._store.forget(Key("", name))

    def _put(self, desired: Object, existing: Object | None) -> Object:
        if existing is not None and existing["spec"]["pool"]["name"] != desired["spec"]["pool"]["name"]:
            self._delete(existing)  # the field is immutable
            existing = None
        if existing is None:
            return self._client.create(SLICES, desired)
        desired["metadata"]["resourceVersion"] = _version(existing)
        return self._client.replace(f"{SLICES}/{desired['metadata']['name']}", desired)

    def _delete(self, item: Object) -> None:
        metadata = item["metadata"]
        self._client.delete(f"{SLICES}/{metadata['name']}", metadata["uid"], missing_ok=True)

    def _report_dropped(self, name: str, dropped: Iterable[str]) -> None:
        """Log each field that the API server dropped, once: it does so silently when a feature gate is off."""
        for path in dropped:
            if path not in self._reported:
                self._reported.add(path)
                log.error(
                    "the API server dropped a field of a ResourceSlice: feature gate off, or older than 1.37?",
                    extra={"field": path, "slice": name},
                )


def _version(item: Object) -> str:
    return str(item["metadata"]["resourceVersion"])
