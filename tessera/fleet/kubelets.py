"""The kubelets of all nodes of the fleet, played: pods run, and end, without containers.

A pod that is bound to a node of ours runs once its claims are prepared; one that is deleted ends at once, its claims
are unprepared and then it goes, as with a kubelet.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial

from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.claims import GROUP
from driver.kube.clock import seconds_time
from driver.kube.loop import MakeLoop, Repeating
from driver.kube.objects import Key
from driver.kube.transport import KubeClient
from driver.kube.watch_cache import Change, WatchCache
from driver.model.device import Device, DeviceKind
from kubelet_plugin.claim_status import ReadyDevice, Share, apply_body, device_statuses, status_path
from kubelet_plugin.claims import ClaimReference
from kubelet_plugin.inventory import Holder
from tessera.fleet.node import FleetNode
from tessera.fleet.wire import Allocated, Claim, Pod, allocated

log = logging.getLogger(__name__)

COALESCE_S = 0.01
CONFLICT_RETRY_S = 1.0
"""After how long a claim is tried again whose devices overlap what another one has still."""


class Kubelets:
    """Of ``nodes``."""

    def __init__(self, client: KubeClient, driver: str, nodes: Iterable[FleetNode], loop: MakeLoop) -> None:
        self._client = client
        self._driver = driver
        self._by_pool = {node.pool.name: node for node in nodes}
        self._names = {node.name for node in self._by_pool.values()}
        self._make_loop = loop
        self._lock = threading.Lock()
        self._loops: dict[Key, Repeating] = {}
        self._prepared: dict[Key, Allocated] = {}
        self._users: dict[Key, dict[str, Key]] = defaultdict(dict)
        """The pods that name a claim, by uid: those that are not ending."""
        self._claims = WatchCache(
            client, f"{GROUP}/resourceclaims", Claim, partial(allocated, driver=driver), self._claims_changed
        )
        self._pods = WatchCache(client, "/api/v1/pods", Pod, self._ours, self._pods_changed)
        self.loops = (self._claims.run, self._pods.run)
        self.conflicts = 0

    @property
    def prepared(self) -> int:
        """How many claims are prepared."""
        return len(self._prepared)

    @property
    def running(self) -> int:
        """How many pods run."""
        return sum(pod.status.phase == "Running" for pod in self._pods.snapshot().values())

    def _ours(self, pod: Pod) -> Pod | None:
        return pod if pod.spec.node_name in self._names else None

    def _pods_changed(self, changes: Sequence[Change[Pod]]) -> None:
        for change in changes:
            for claim in change.old.claims if change.old else ():
                self._users[claim].pop(change.old.metadata.uid, None)  # type: ignore[union-attr]
            if change.new and not change.new.metadata.deletion_timestamp:
                for claim in change.new.claims:
                    self._users[claim][change.new.metadata.uid] = change.key
            for claim in change.old.claims if change.old else ():
                self._release_unused(claim)
            self._play(change.key)

    def _claims_changed(self, changes: Sequence[Change[Allocated]]) -> None:
        for change in changes:
            self._release_unused(change.key)
            for pod in tuple(self._users.get(change.key, {}).values()):
                self._play(pod)

    def _play(self, key: Key) -> None:
        with self._lock:
            loop = self._loops.get(key)
            if loop is None:
                loop = self._make_loop(f"playing the kubelet for pod {key}", partial(self._turn, key), COALESCE_S)
                self._loops[key] = loop
        loop.notify()

    def _turn(self, key: Key) -> float | None:
        """Bring a pod further. Raises ApiError."""
        pod = self._pods.get(key)
        if pod is None:
            self._loops.pop(key, None)
        elif pod.metadata.deletion_timestamp:
            self._end(key, pod)
        elif pod.status.phase == "Pending":
            return self._start(key, pod)
        return None

    def _start(self, key: Key, pod: Pod) -> float | None:
        for claim in pod.claims:
            found = self._claims.get(claim)
            if found is not None and pod.metadata.uid not in found.users:
                return None  # of an earlier claim of that name, or not reserved yet: the watch brings it
            if found is not None and not self._prepare(claim, found):
                return CONFLICT_RETRY_S
        if len(pod.claims) < len(pod.spec.resource_claims):
            return None
        now = seconds_time(datetime.now(UTC))
        ready = [{"type": each, "status": "True"} for each in ("Initialized", "ContainersReady", "Ready")]
        self._write(key, "/status", {"status": {"phase": "Running", "startTime": now, "conditions": ready}}, pod)
        return None

    def _end(self, key: Key, pod: Pod) -> None:
        try:
            self._client.delete(_path(key), pod.metadata.uid, grace_s=0)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    def _prepare(self, key: Key, claim: Allocated) -> bool:
        """Hold its devices and say so in its status; False where another claim has them still."""
        with self._lock:
            if self._prepared.get(key) == claim:
                return True
            known = self._prepared.get(key)
            if known is None or known.uid != claim.uid:
                holder = Holder(claim.uid, key.namespace, key.name)
                for node, names in self._held_by(claim):
                    if (conflict := node.hold(holder, names)) is not None:
                        self.conflicts += 1
                        log.warning("not prepared", extra={"claim": str(key), "node": node.name, "error": conflict})
                        return False
            self._prepared[key] = claim
        if known is None:
            self._tell_status(key, claim)
        return True

    def _tell_status(self, key: Key, claim: Allocated) -> None:
        reference = ClaimReference(key.namespace, key.name, claim.uid)
        ready = [
            _ready(reference, node.pool.name, device)
            for node, names in self._held_by(claim)
            for device in node.devices(names)
        ]
        statuses = device_statuses(ready)[reference]
        now = seconds_time(datetime.now(UTC))
        body = apply_body(reference, self._driver, statuses, dict.fromkeys((each.device for each in ready), now))
        try:
            self._client.apply(status_path(reference), body, self._driver)
        except ApiError as error:
            log.debug("a claim's status can't be written", extra={"claim": str(key), "error": str(error)})

    def _release_unused(self, key: Key) -> None:
        """Unprepare a claim that is gone, another by now, or that no pod uses any more."""
        claim, known = self._claims.get(key), self._prepared.get(key)
        users = claim.users if claim is not None and known is not None and claim.uid == known.uid else frozenset()
        if known is None or not users.isdisjoint(self._users.get(key, ())):
            return
        with self._lock:
            if self._prepared.pop(key, None) is not None:
                for node, _ in self._held_by(known):
                    node.release(known.uid)

    def _held_by(self, claim: Allocated) -> list[tuple[FleetNode, tuple[str, ...]]]:
        return [(self._by_pool[pool], names) for pool, names in claim.devices.items() if pool in self._by_pool]

    def _write(self, key: Key, subresource: str, body: dict[str, object], pod: Pod) -> None:
        try:
            self._client.patch(f"{_path(key)}{subresource}", {"metadata": {"uid": pod.metadata.uid}, **body})
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise


def _path(pod: Key) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _ready(claim: ClaimReference, pool: str, device: Device) -> ReadyDevice:
    made_up = uuid.uuid5(uuid.NAMESPACE_DNS, f"{device.gpu.uuid}/{device.name}")
    partition = f"MIG-{made_up}" if device.kind is DeviceKind.PARTITION else None
    share = Share(device.shares) if device.kind is DeviceKind.SHARE else None
    return ReadyDevice(claim, pool, device.name, device.gpu.uuid, partition, share)
