"""Keeps the node's ResourceSlices as they should be, whoever changes or deletes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from driver.errors import NOT_FOUND, ApiError
from driver.kube.claims import GROUP
from driver.kube.loop import Loop, MakeLoop
from driver.kube.objects import Key, ObjectMeta
from driver.kube.transport import KubeClient, Object
from driver.kube.watch_cache import WatchCache
from driver.slices.build import Content, slice_object
from driver.slices.names import Pool
from driver.slices.reconcile import Changes, Stored, changes, dropped_fields

log = logging.getLogger(__name__)

COALESCE_S = 0.05
"""How long to gather changes before writing them: each write of a slice wakes every waiting pod of the cluster,
and claims come in bursts."""

SLICES = f"{GROUP}/resourceslices"


class SliceStep(StrEnum):
    """What is done to one slice at the API server."""

    WRITE = "write-slice"
    DELETE = "delete-slice"


Around = Callable[[SliceStep, str], AbstractContextManager[object]]
"""(step, the slice's name) -> what to enter around the step."""


class Slice(msgspec.Struct, frozen=True):
    """A ResourceSlice, its content as it is."""

    metadata: ObjectMeta
    spec: dict[str, Any]


def _kept(item: Slice) -> Object:
    metadata = item.metadata
    names = {"name": metadata.name, "uid": metadata.uid, "resourceVersion": metadata.resource_version}
    return {"metadata": names, "spec": item.spec}


class Store(Protocol):
    """The node's slices, as far as they are known; ``observe`` and ``forget`` tell of writes of our own."""

    @property
    def synced(self) -> bool: ...

    def snapshot(self) -> Mapping[Key, Object]: ...

    def observe(self, stored: Object) -> None: ...

    def forget(self, key: Key) -> None: ...


class Publisher:
    """The only writer of its node's slices.

    ``desired`` is asked at each reconciliation for the content of every slice by name; call ``notify``
    when its answer may have changed. ``owner`` is asked for the Node's owner reference when it is first
    needed and for every new slice: a Node that was deleted and registered again has another uid, and what
    the old one owns is garbage. ``around`` is entered around every request that changes a slice; ``on_written`` is
    told after each reconciliation that wrote something how many slices were written or deleted, and how many seconds
    that took. ``store`` knows the slices instead of a watch of its own; who gives one calls ``notify`` when the API
    server has others than it says.
    """

    def __init__(
        self,
        client: KubeClient,
        pool: Pool,
        desired: Callable[[], Mapping[str, Content]],
        owner: Callable[[], Mapping[str, Any]],
        around: Around = lambda *_: nullcontext(),
        on_written: Callable[[int, float], None] = lambda objects, seconds: None,
        store: Store | None = None,
        loop: MakeLoop = Loop,
    ) -> None:
        self._client = client
        self._pool = pool
        self._desired = desired
        self._find_owner = owner
        self._around = around
        self._on_written = on_written
        self._owner: Mapping[str, Any] | None = None
        self._sent: dict[str, Stored] = {}
        self._reported: set[str] = set()
        self._loop = loop("publishing slices", self._reconcile, COALESCE_S)
        self.published = threading.Event()
        selector = {"fieldSelector": f"spec.nodeName={pool.node},spec.driver={pool.driver}"}
        self.cache = WatchCache(client, SLICES, Slice, _kept, lambda _: self.notify(), selector)
        self._store: Store = store or self.cache

    def device_names(self) -> set[str]:
        """The devices in the slices as they are."""
        specs = [item["spec"] for item in self._store.snapshot().values()]
        return {device["name"] for spec in specs for device in spec.get("devices") or ()}

    def notify(self) -> None:
        """Reconcile soon; cheap, from any thread."""
        self._loop.notify()

    def notify_within(self, seconds: float) -> None:
        """Reconcile in so many seconds, or sooner along with something else."""
        self._loop.notify_within(seconds)

    def run(self, stop: threading.Event) -> None:
        """Reconcile at every notification until ``stop`` is set (then call ``notify`` once more)."""
        self._loop.run(stop)

    def _reconcile(self) -> None:
        if not self._store.synced:
            return
        todo = changes(self._desired(), self._stored(), self._sent, self._pool)
        if todo.write and (self._owner is None or not todo.write.keys() <= todo.existing.keys()):
            self._owner = self._find_owner()
        started = time.perf_counter()
        self._write(todo)
        self.published.set()
        if not todo:
            return
        self._on_written(len(todo.write) + len(todo.delete), time.perf_counter() - started)
        log.info(
            "published slices",
            extra={
                "pool": self._pool.name,
                "generation": todo.generation,
                "written": len(todo.write),
                "deleted": len(todo.delete),
            },
        )

    def _write(self, todo: Changes) -> None:
        for name, content in todo.write.items():
            wanted = slice_object(name, content, self._pool, todo.generation, todo.count, self._owner)
            with self._around(SliceStep.WRITE, name):
                stored = self._put(wanted, todo.existing.get(name))
            self._sent[name] = Stored(_version(stored), wanted["spec"])
            self._report_dropped(wanted, stored)
            self._store.observe(stored)
        for name, item in todo.delete.items():
            with self._around(SliceStep.DELETE, name):
                self._delete(item)
            self._sent.pop(name, None)
            self._store.forget(Key("", name))

    def _stored(self) -> dict[str, Object]:
        return {key.name: item for key, item in self._store.snapshot().items()}

    def _put(self, wanted: Object, existing: Object | None) -> Object:
        if existing is not None and existing["spec"]["pool"]["name"] != self._pool.name:
            self._delete(existing)  # the field is immutable
            existing = None
        if existing is None:
            return self._client.create(SLICES, wanted)
        wanted["metadata"]["resourceVersion"] = _version(existing)
        return self._client.replace(f"{SLICES}/{wanted['metadata']['name']}", wanted)

    def _delete(self, item: Object) -> None:
        metadata = item["metadata"]
        try:
            self._client.delete(f"{SLICES}/{metadata['name']}", metadata["uid"])
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    def _report_dropped(self, wanted: Object, stored: Object) -> None:
        """An API server with a feature gate off drops fields in silence: say it once for each field."""
        for field in dropped_fields(wanted["spec"], stored["spec"]):
            if field not in self._reported:
                self._reported.add(field)
                log.error(
                    "the API server dropped a field of a ResourceSlice: feature gate off, or older than 1.37?",
                    extra={"field": field, "slice": wanted["metadata"]["name"]},
                )


def _version(item: Object) -> str:
    return str(item["metadata"]["resourceVersion"])
