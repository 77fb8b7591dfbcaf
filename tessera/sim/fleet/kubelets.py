"""Simulated kubelets of all nodes of the fleet: pods run and end without containers.

A pod that is bound to a node of the fleet runs once its claims are prepared. A deleted pod ends at once: its claims are
unprepared, then the object is removed, as a kubelet does.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec

from driver.clock import seconds_time
from driver.errors import CONFLICT, ApiError, accepted_status
from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Claim, Key, Pod
from driver.kube.watch_cache import Change, WatchCache
from driver.kube.work_loop import Loop, MakeLoop
from driver.model.device import Device
from driver.model.offer import DeviceKind
from kubelet_plugin.checkpoint.records import VERSION, ClaimRecord, device_record
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.status.claim_status import apply_body, device_statuses, status_path
from tessera.sim.fleet.simulated_plugin import FleetNode

log = logging.getLogger(__name__)

POD_COALESCE_SECONDS = 0.01
CONFLICT_RETRY_SECONDS = 1.0
"""Delay before a claim is prepared again whose devices overlap those of another claim."""


@dataclass(frozen=True)
class ClaimDevices:
    """The devices of one driver that are allocated to a claim, by the name of their pool."""

    uid: str
    devices: Mapping[str, tuple[str, ...]]
    users: frozenset[str]
    """UIDs of the pods that the claim is reserved for."""


def allocated(claim: Claim, driver: str) -> ClaimDevices | None:
    """The devices of ``driver`` that are allocated to ``claim``; None if there are none."""
    devices: dict[str, tuple[str, ...]] = {}
    for result in claim.results:
        if result.driver == driver:
            devices[result.pool] = (*devices.get(result.pool, ()), result.device)
    users = frozenset(consumer.uid for consumer in claim.pod_consumers)
    return ClaimDevices(claim.metadata.uid, devices, users) if devices else None


class Kubelets:
    """The kubelets of ``nodes``."""

    def __init__(self, client: KubeClient, driver: str, nodes: Iterable[FleetNode], loop: MakeLoop) -> None:
        self._client, self._driver = client, driver
        self._by_pool = {node.pool.name: node for node in nodes}
        names = {node.name for node in self._by_pool.values()}
        self._make_loop = loop
        self._lock = threading.Lock()
        self._loops: dict[Key, Loop] = {}
        self._prepared: dict[Key, ClaimDevices] = {}
        self._users: dict[Key, dict[str, Key]] = defaultdict(dict)
        """Pods that use a claim and are not being deleted, by uid."""
        claims, keep = f"{RESOURCE_GROUP}/resourceclaims", partial(allocated, driver=driver)
        self._claims = WatchCache(client, claims, Claim, keep, self._claims_changed)
        self._pods = WatchCache(
            client, "/api/v1/pods", Pod, lambda pod: pod if pod.spec.node_name in names else None, self._pods_changed
        )
        self.loops = (self._claims.run, self._pods.run)
        self._conflicts = 0

    def __str__(self) -> str:
        running = sum(pod.status.phase == "Running" for pod in self._pods.snapshot().values())
        refused = f", {self._conflicts} were refused: their devices are held" if self._conflicts else ""
        return f"{running} pods run, {len(self._prepared)} claims are prepared{refused}"

    def _pods_changed(self, changes: Sequence[Change[Pod]]) -> None:
        for change in changes:
            for claim in change.old.claims if change.old else ():
                self._users[claim].pop(change.old.metadata.uid, None)  # type: ignore[union-attr]
            if change.new and not change.new.metadata.deletion_timestamp:
                for claim in change.new.claims:
                    self._users[claim][change.new.metadata.uid] = change.key
            for claim in change.old.claims if change.old else ():
                self._release_unused(claim)
            self._sync_later(change.key)

    def _claims_changed(self, changes: Sequence[Change[ClaimDevices]]) -> None:
        for change in changes:
            self._release_unused(change.key)
            for pod in tuple(self._users.get(change.key, {}).values()):
                self._sync_later(pod)

    def _sync_later(self, key: Key) -> None:
        with self._lock:
            if key not in self._loops:
                name = f"simulated kubelet of pod {key}"
                self._loops[key] = self._make_loop(name, partial(self._sync, key), POD_COALESCE_SECONDS)
            loop = self._loops[key]
        loop.notify()

    def _sync(self, key: Key) -> float | None:
        """Start or end a pod; returns the delay of the next attempt. Raises ApiError."""
        pod = self._pods.get(key)
        if pod is None:
            self._loops.pop(key, None)
        elif pod.metadata.deletion_timestamp:
            with accepted_status(CONFLICT):
                self._client.delete(_path(key), pod.metadata.uid, grace_s=0, missing_ok=True)
        elif pod.status.phase == "Pending":
            return self._start(key, pod)
        return None

    def _start(self, key: Key, pod: Pod) -> float | None:
        for claim in pod.claims:
            devices = self._claims.get(claim)
            if devices is not None and pod.metadata.uid not in devices.users:
                return None  # an earlier claim of that name, or not reserved yet: the watch will report it
            if devices is not None and not self._prepare(claim, devices):
                return CONFLICT_RETRY_SECONDS
        if len(pod.claims) < len(pod.spec.resource_claims):
            return None
        now = seconds_time(datetime.now(UTC))
        ready = [{"type": condition, "status": "True"} for condition in ("Initialized", "ContainersReady", "Ready")]
        status = {"phase": "Running", "startTime": now, "conditions": ready}
        self._client.patch_existing(f"{_path(key)}/status", {"metadata": {"uid": pod.metadata.uid}, "status": status})
        return None

    def _prepare(self, key: Key, claim: ClaimDevices) -> bool:
        """Hold the claim's devices and write its status; False if another claim still holds them."""
        with self._lock:
            before = self._prepared.get(key)
            if before == claim:
                return True
            if before is None or before.uid != claim.uid:
                holder = ClaimReference(key.namespace, key.name, claim.uid)
                for node, names in self._held_by(claim):
                    conflict = node.hold(holder, names)
                    if conflict is not None:
                        self._conflicts += 1
                        log.warning("not prepared", extra={"claim": str(key), "node": node.name, "error": conflict})
                        return False
            self._prepared[key] = claim
        if before is None:
            self._write_status(key, claim)
        return True

    def _write_status(self, key: Key, claim: ClaimDevices) -> None:
        reference = ClaimReference(key.namespace, key.name, claim.uid)
        records = [_record(reference, node.pool.name, node.devices(names)) for node, names in self._held_by(claim)]
        statuses = device_statuses(records)[reference]
        now = seconds_time(datetime.now(UTC))
        body = apply_body(reference, self._driver, statuses, dict.fromkeys((status.device for status in statuses), now))
        try:
            self._client.apply(status_path(reference), body, self._driver)
        except ApiError as error:
            log.debug("a claim's status can't be written", extra={"claim": str(key), "error": str(error)})

    def _release_unused(self, key: Key) -> None:
        """Unprepare a claim that was deleted or replaced, or that no pod uses any more."""
        claim, prepared = self._claims.get(key), self._prepared.get(key)
        if prepared is None:
            return
        users = claim.users if claim is not None and claim.uid == prepared.uid else frozenset()
        if not users.isdisjoint(self._users.get(key, ())):
            return
        with self._lock:
            if self._prepared.pop(key, None) is not None:
                for node, _ in self._held_by(prepared):
                    node.release(prepared.uid)

    def _held_by(self, claim: ClaimDevices) -> list[tuple[FleetNode, tuple[str, ...]]]:
        return [(self._by_pool[pool], names) for pool, names in claim.devices.items() if pool in self._by_pool]


def _path(pod: Key) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _record(claim: ClaimReference, pool: str, devices: Iterable[Device]) -> ClaimRecord:
    """The record of a prepared claim; a partition has a UUID that follows from its name."""
    entries = []
    for device in devices:
        generated = uuid.uuid5(uuid.NAMESPACE_DNS, f"{device.gpu.uuid}/{device.name}")
        partition = f"MIG-{generated}" if device.kind is DeviceKind.PARTITION else None
        entries.append(msgspec.structs.replace(device_record(device, pool, (), 0), uuid=partition))
    return ClaimRecord(VERSION, claim.namespace, claim.name, claim.uid, "prepared", tuple(entries))
