"""The fenced devices, stored in the ConfigMap that is the parameter of the admission policy (``fence.yaml``)."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from controller.cluster.claim_index import PoolDevice, reservations_in
from driver.clock import Clock
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.model.plan import FENCE

log = logging.getLogger(__name__)

MAX_ENTRIES = 5000
"""A third of a ConfigMap's 1 MiB where names are as long as they may be; a write of so many costs milliseconds."""

REREAD_SECONDS = 5.0
"""How long an entry that a leader whose term has ended writes late may go unnoticed."""

MAX_ATTEMPTS = 20
"""Attempts of one write: another leader writes for a moment at most."""


def read_fenced(client: KubeClient, namespace: str) -> frozenset[PoolDevice] | None:
    """The devices that the controller of ``namespace`` has fenced; None if this account may not read that."""
    try:
        stored = client.find(f"/api/v1/namespaces/{namespace}/configmaps/{FENCE}") or {}
    except ApiError:
        return None
    return frozenset(read(stored.get("data") or {}))


class FencedDevices:
    """The ConfigMap ``namespace/tessera-fence``: a key for each pool, the names of its fenced devices as the value.

    A key for each device would make every write many times dearer: the API server keeps account of who manages which
    key. Writes name the version they build on, so that two leaders for a moment undo nothing of each other.
    Thread-safe. Every method that writes raises ApiError.
    """

    def __init__(self, client: KubeClient, namespace: str, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._clock = clock
        self._lock = threading.Lock()
        self._version = ""
        self._read_at = -math.inf
        self.devices: dict[PoolDevice, float] = {}
        """When each was fenced. To look one up takes no lock, which is held over requests."""
        self.reservations: dict[PoolDevice, frozenset[str]] = {}
        """The entries of ``devices`` that reserve GPUs, with the UIDs of the claims and pods for which they do."""

    def load(self) -> None:
        """Read the ConfigMap; the age of new entries counts from now. Raises ApiError."""
        with self._lock:
            self._load()

    def reread(self) -> bool:
        """Read the ConfigMap again if it was read or written ``REREAD_SECONDS`` ago.

        Returns whether it has new entries: then what is offered must be lifted. One that was deleted keeps its entries
        here, and the next write restores them. Raises ApiError.
        """
        with self._lock:
            if self._clock.monotonic() - self._read_at < REREAD_SECONDS:
                return False
            before = self.devices.keys()
            if (stored := self._client.find(f"{self._folder}/{FENCE}")) is not None:
                self._remember(stored)
            self._read_at = self._clock.monotonic()
            return not self.devices.keys() <= before

    def add(self, devices: Collection[PoolDevice]) -> None:
        """Fence at most MAX_ENTRIES devices; the oldest others are dropped if there would be more in all, but no
        reservations."""
        new = set(devices)
        with self._lock:
            others = self.devices.keys() - self.reservations.keys() - new
            excess = max(0, len(self.devices.keys() | new) - MAX_ENTRIES)
            dropped = sorted(others, key=self.devices.__getitem__)[:excess]
            if dropped:
                log.warning("too many fenced devices: the oldest entries are dropped", extra={"count": len(dropped)})
            try:
                self._write(new, set(dropped))
            finally:
                # The response may have been lost: from here on they count as fenced.
                self._keep(self.devices | dict.fromkeys(new, self._clock.monotonic()))

    def remove(self, devices: Collection[PoolDevice], new: Set[PoolDevice] = frozenset()) -> None:
        """Remove the entries, and add ``new`` ones in their place; nothing is written if there are none."""
        with self._lock:
            if present := self.devices.keys() & set(devices):
                self._write(set(new), present)

    def room(self, seconds: float) -> int:
        """Number of devices that can be fenced if only entries of at least that age are dropped."""
        spared = len(self.devices) - len(self.older_than(seconds))
        return max(0, MAX_ENTRIES - spared)

    def older_than(self, seconds: float) -> set[PoolDevice]:
        """Devices, no reservations, that were fenced at least that long ago, as seen by this process."""
        with self._lock:
            ended = self._clock.monotonic() - seconds
            withdrawn = self.devices.keys() - self.reservations.keys()
            return {device for device in withdrawn if self.devices[device] <= ended}

    def _load(self) -> None:
        self._remember(self._client.find(f"{self._folder}/{FENCE}") or {})

    def _write(self, new: set[PoolDevice], gone: set[PoolDevice]) -> None:
        """Store the change on top of the latest version."""
        if not self._version:
            self._load()
        for tries_left in reversed(range(MAX_ATTEMPTS)):
            try:
                self._remember(self._store(new, gone))
                return
            except ApiError as error:
                if error.status != CONFLICT or not tries_left:
                    raise
                self._load()

    def _store(self, new: set[PoolDevice], gone: set[PoolDevice]) -> Object:
        fenced = (self.devices.keys() | new) - gone
        metadata = {"name": FENCE, "namespace": self._namespace}
        whole = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": written(fenced)}
        if not self._version:
            return self._client.create(self._folder, whole)
        changed = {device.pool for device in new | gone}
        data = dict.fromkeys(changed) | written(device for device in fenced if device.pool in changed)
        body = {"metadata": {"resourceVersion": self._version}, "data": data}
        return self._client.create_or_patch(f"{self._folder}/{FENCE}", body, whole)

    def _remember(self, stored: Object) -> None:
        devices = read(stored.get("data") or {})
        now = self._clock.monotonic()
        self._keep({device: self.devices.get(device, now) for device in devices})
        self._read_at = now
        self._version = stored.get("metadata", {}).get("resourceVersion", "")

    def _keep(self, devices: dict[PoolDevice, float]) -> None:
        self.devices, self.reservations = devices, reservations_in(devices)


def written(devices: Iterable[PoolDevice]) -> dict[str, str]:
    """The names of ``devices`` by pool."""
    names: dict[str, list[str]] = defaultdict(list)
    for device in sorted(devices):
        names[device.pool].append(device.device)
    return {pool: " ".join(of_pool) for pool, of_pool in names.items()}


def read(data: Mapping[str, str]) -> set[PoolDevice]:
    """The inverse of ``written``."""
    return {PoolDevice(pool, name) for pool, names in data.items() for name in names.split()}
