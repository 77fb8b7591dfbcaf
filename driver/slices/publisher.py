"""Keeps the node's ResourceSlices as they should be, whoever changes or deletes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from driver.errors import ApiError
from driver.kube.backoff import Backoff
from driver.kube.claims import GROUP
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


class Publisher:
    """The only writer of its node's slices.

    ``desired`` is asked at each reconciliation for the content of every slice by name; call ``notify``
    when its answer may have changed. ``owner`` is asked for the Node's owner reference when it is first
    needed and for every new slice: a Node that was deleted and registered again has another uid, and what
    the old one owns is garbage.
    """

    def __init__(
        self,
        client: KubeClient,
        pool: Pool,
        desired: Callable[[], Mapping[str, Content]],
        owner: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._client = client
        self._pool = pool
        self._desired = desired
        self._find_owner = owner
        self._owner: Mapping[str, Any] | None = None
        self._sent: dict[str, Stored] = {}
        self._reported: set[str] = set()
        self._wake = threading.Event()
        self.published = threading.Event()
        selector = {"fieldSelector": f"spec.nodeName={pool.node},spec.driver={pool.driver}"}
        self.cache = WatchCache(client, SLICES, selector, self.notify)

    def notify(self) -> None:
        """Reconcile soon; cheap, from any thread."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Reconcile at every notification until ``stop`` is set (then call ``notify`` once more)."""
        backoff = Backoff()
        while not stop.is_set():
            self._wake.wait()
            stop.wait(COALESCE_S)
            self._wake.clear()
            if stop.is_set() or not self.cache.synced:
                continue
            try:
                self._reconcile()
                backoff.reset()
            except ApiError as error:
                self._failed(str(error), backoff, stop)
            except Exception as error:
                # A defect of ours must not end the thread: the slices would stay as they are for ever.
                log.exception("defect while publishing")
                self._failed(f"{type(error).__name__}: {error}", backoff, stop)

    def _failed(self, error: str, backoff: Backoff, stop: threading.Event) -> None:
        delay = backoff.next_s()
        log.warning("publishing failed, trying again", extra={"error": error, "retryIn": f"{delay:.1f}s"})
        stop.wait(delay)
        self.notify()

    def _reconcile(self) -> None:
        todo = changes(self._desired(), self.cache.snapshot(), self._sent, self._pool)
        if todo.write and (self._owner is None or not todo.write.keys() <= todo.existing.keys()):
            self._owner = self._find_owner()
        self._write(todo)
        if not todo:
            self.published.set()
            return
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
            stored = self._put(wanted, todo.existing.get(name))
            self._sent[name] = Stored(_version(stored), wanted["spec"])
            self._report_dropped(wanted, stored)
            self.cache.observe(stored)
        for name, item in todo.delete.items():
            self._delete(item)
            self._sent.pop(name, None)
            self.cache.forget(name)

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
            if error.status != 404:
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
