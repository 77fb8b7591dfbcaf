"""Which optional fields of devices the API server keeps.

An API server silently drops the fields of disabled feature gates when a slice is created, and when a slice is updated
whose stored version does not use them (``dropDisabledFields`` in pkg/registry/resource/resourceslice/strategy.go; the
same for these fields in Kubernetes 1.34 to 1.37). So a downgraded API server keeps counters in slices that have any.
The schedulers of 1.34 and 1.35 never allocate a device with counters, and ignore taints.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from driver.errors import INVALID, ApiError
from driver.kube.client import KubeClient, Object, RequestObserver
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.model.plan import COUNTERS_FIELD, TAINTS_FIELD
from driver.model.shared_memory import SHARING_FIELD
from driver.slices.build import CLOSED, slice_object
from driver.slices.slice_names import Pool, shortened

log = logging.getLogger(__name__)

SLICES = f"{RESOURCE_GROUP}/resourceslices"

BAD_REQUEST = 400

FIELDS = (COUNTERS_FIELD, TAINTS_FIELD, SHARING_FIELD)

FIELD_OF = {**{field: field for field in FIELDS}, "sharedCounters": COUNTERS_FIELD, "requestPolicy": SHARING_FIELD}
"""The field of a device that is dropped together with a field of a slice."""


class KeptFields:
    """Found by a server-side dry run, and from answers to writes. Thread-safe.

    The dry run is repeated after the connection to the API server was lost and whenever the watch of slices begins
    anew, because that may be another API server. ``on_due`` is called when the watch begins; it must return quickly.
    """

    def __init__(self, on_due: Callable[[], None] = lambda: None) -> None:
        self._on_due = on_due
        self.dropped: tuple[str, ...] = ()
        """The fields that are not kept, of FIELDS."""

        self._due = True
        self._lock = threading.Lock()

    def observer(self, observe: RequestObserver | None) -> RequestObserver:
        """An observer of a KubeClient that updates this object and calls ``observe``."""

        def both(method: str, path: str, query: Mapping[str, str] | None, status: int | None, seconds: float) -> None:
            is_watch = path == SLICES and "watch" in (query or {})
            if status is None or is_watch:
                self.expire()
            if is_watch:
                self._on_due()
            if observe is not None:
                observe(method, path, query, status, seconds)

        return both

    def expire(self) -> None:
        """Repeat the dry run at the next ``check``."""
        self._due = True

    def check(self, client: KubeClient, pool: Pool) -> None:
        """Repeat the dry run if it is due. Raises ApiError."""
        with self._lock:
            if not self._due:
                return
            self._due = False
            try:
                self._set(_dry_run(client, pool))
            except ApiError:
                self._due = True
                raise

    def learn(self, dropped: Iterable[str]) -> bool:
        """Take over the paths that were dropped from a write; returns whether that is news."""
        with self._lock:
            fields = {FIELD_OF.get(path.rpartition(".")[2]) for path in dropped}
            all_dropped = {*fields, *self.dropped}
            return self._set(tuple(field for field in FIELDS if field in all_dropped))

    def _set(self, dropped: tuple[str, ...]) -> bool:
        """The caller holds the lock."""
        if dropped == self.dropped:
            return False
        self.dropped = dropped
        log.info("which fields of devices the API server keeps", extra={"dropped": ", ".join(dropped) or "none"})
        return True


def _dry_run(client: KubeClient, pool: Pool) -> tuple[str, ...]:
    """The fields of a device that would be lost. Raises ApiError."""
    fields: Object = {
        COUNTERS_FIELD: [{"counterSet": "gpu-0", "counters": {"memory-slice-0": {"value": "1"}}}],
        TAINTS_FIELD: [CLOSED],
        SHARING_FIELD: True,
    }
    content = {"devices": [{"name": "gpu-0", **fields}]}
    body = slice_object(shortened(f"dry-run-{pool.node}-{pool.driver}"), content, pool, 1, 1, None)
    try:
        stored = client.create(SLICES, body, {"dryRun": "All"})
    except ApiError as error:
        if error.status not in (BAD_REQUEST, INVALID):
            raise
        # 1.34 with the gate on admits counters only in the slice of their set, which newer versions refuse.
        log.warning(
            "the API server refuses a device with counters, taints and shared memory", extra={"error": str(error)}
        )
        return tuple(fields)
    [device] = stored["spec"]["devices"]
    return tuple(field for field in fields if field not in device)
