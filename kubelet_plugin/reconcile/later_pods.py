"""Pods that begin to use a claim after it was prepared.

The kubelet asks the plugin for a claim once, and adds later pods to its own cache only (``Manager.prepareResources`` in
pkg/kubelet/cm/dra of Kubernetes). Without a watch on claims, the plugin finds such pods by reading the claim again, as
soon as the cgroup of a pod appears on the node: claims are reserved for a pod before the kubelet knows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from driver.errors import NOT_FOUND, ApiError
from kubelet_plugin.checkpoint.gpu_and_claim_locks import claim_key
from kubelet_plugin.checkpoint.records import ClaimRecord
from kubelet_plugin.claims.allocation import pods_of
from kubelet_plugin.claims.claim_memory import ClaimMemory
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.preparer import ClaimReader

log = logging.getLogger(__name__)

PODS_INTERVAL_SECONDS = 60.0
"""How often the pods are read that use a claim which several can use."""

STARTED_PODS_INTERVAL_SECONDS = 4.0
"""The same while pods start on the node: only scans in quick succession do not read each time."""

OWNED_PODS_INTERVAL_SECONDS = 600.0
"""The same for a claim that says it was made for one pod, whatever starts: most claims do, and a tenant can, too."""


class LaterPods:
    """Records them, so that they get their limits. For one thread."""

    def __init__(
        self,
        stores: ClaimStores,
        memory: ClaimMemory,
        claims: ClaimReader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores, self._memory, self._claims, self._clock = stores, memory, claims, clock
        self._read_at: dict[str, float] = {}
        self._failed_at = self._started_at = float("-inf")
        self._running: set[str] = set()

    def find_started(self) -> None:
        """Find out whether a pod has started on the node that is recorded for no claim. Call it before ``note``."""
        running = self._memory.running()
        recorded = {pod for record in self._stores.checkpoint.records() for pod in record.pods}
        if running - self._running - recorded:
            self._started_at = self._clock()
        self._running = running

    def note(self, record: ClaimRecord) -> None:
        """Record the pods that use a claim now, if others than those that it was prepared for may do so.

        Raises StateError.
        """
        now = self._clock()
        never, interval = float("-inf"), PODS_INTERVAL_SECONDS
        if record.of_one_pod:
            never, interval = now, OWNED_PODS_INTERVAL_SECONDS
        read_at = self._read_at.setdefault(record.uid, never)
        if self._started_at > read_at and not record.of_one_pod:
            interval = STARTED_PODS_INTERVAL_SECONDS
        # A scan must not wait for an API server that does not answer once for each claim.
        if now - read_at < interval or now - self._failed_at < PODS_INTERVAL_SECONDS:
            return
        recorded = {other.uid for other in self._stores.checkpoint.records()}
        self._read_at = {uid: at for uid, at in self._read_at.items() if uid in recorded} | {record.uid: now}
        try:
            claim = self._claims.read(record.namespace, record.name, any_age=True)
        except ApiError as error:
            log.debug("the pods of a claim are unknown", extra={"claim": str(record), "error": str(error)})
            if error.status != NOT_FOUND:
                self._failed_at = now
            return
        if claim.metadata.uid != record.uid or pods_of(claim) == record.pods:
            return
        with self._stores.locks.hold([claim_key(record.uid), *record.gpu_uuids], f"noting the pods of claim {record}"):
            current = self._stores.checkpoint.get(record.uid)
            if current is None or current.needs_release:
                return
            # A pod that the claim is not reserved for any more has ended, unless it still has a cgroup.
            pods = tuple(sorted({*pods_of(claim), *self._running.intersection(current.pods)}))
            if pods != current.pods:
                self._stores.checkpoint.put(msgspec.structs.replace(current, pods=pods), durable=False)
