"""The fenced devices, kept in the ConfigMap that the admission policy looks into (the chart's ``fence.yaml``)."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.clock import Clock
from driver.kube.transport import KubeClient, Object
from driver.model.plan import FENCE

log = logging.getLogger(__name__)

MOST_ENTRIES = 5000
"""A third of a ConfigMap's 1 MiB where names are as long as they may be; a write of so many costs milliseconds."""

TRIES = 20
"""Another leader writes for a moment at most, so that its writes don't come between ours again and again."""


class PoolDevice(NamedTuple):
    """A device by the names that an allocation has."""

    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.pool}/{self.device}"


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
        self._since: dict[PoolDevice, float] = {}

    def load(self) -> None:
        """Read what is there; the age of entries that were not known counts from now. Raises ApiError."""
        with self._lock:
            self._load()

    def __contains__(self, device: PoolDevice) -> bool:
        # Without the lock, which is held over requests: every decision asks this of every offer.
        return device in self._since

    def add(self, devices: Collection[PoolDevice]) -> None:
        """Fence at most MOST_ENTRIES; the oldest of the others go where there would be more than that in all."""
        new = set(devices)
        with self._lock:
            others = sorted(self._since.keys() - new, key=lambda device: self._since[device])
            dropped = others[: max(0, len(others) + len(new) - MOST_ENTRIES)]
            if dropped:
                log.warning("too many devices are fenced: the oldest are let go", extra={"count": len(dropped)})
            try:
                self._write(new, set(dropped))
            finally:
                # The answer may have got lost: from here on they count as fenced.
                self._since |= dict.fromkeys(new, self._clock.monotonic())

    def remove(self, devices: Collection[PoolDevice]) -> None:
        """Nothing is written where none of them is there."""
        with self._lock:
            if present := self._since.keys() & set(devices):
                self._write(set(), present)

    def room(self, seconds: float) -> int:
        """How many more can be fenced if only those go that have been there for that long."""
        spared = len(self._since) - len(self.older_than(seconds))
        return max(0, MOST_ENTRIES - spared)

    def older_than(self, seconds: float) -> set[PoolDevice]:
        """Devices that have been there for that long, as far as we saw."""
        with self._lock:
            ended = self._clock.monotonic() - seconds
            return {device for device, since in self._since.items() if since <= ended}

    def _load(self) -> None:
        try:
            found = self._client.get_object(f"{self._folder}/{FENCE}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            found = {}
        self._remember(found)

    def _write(self, new: set[PoolDevice], gone: set[PoolDevice]) -> None:
        """Store the change, on top of what others have written meanwhile."""
        if not self._version:
            self._load()
        for tries_left in reversed(range(TRIES)):
            try:
                self._remember(self._store(new, gone))
                return
            except ApiError as error:
                if error.status != CONFLICT or not tries_left:
                    raise
                self._load()

    def _store(self, new: set[PoolDevice], gone: set[PoolDevice]) -> Object:
        wanted = (self._since.keys() | new) - gone
        if self._version:
            changed = {device.pool for device in new | gone}
            data = dict.fromkeys(changed) | written(device for device in wanted if device.pool in changed)
            body = {"metadata": {"resourceVersion": self._version}, "data": data}
            try:
                return self._client.patch(f"{self._folder}/{FENCE}", body)
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
        metadata = {"name": FENCE, "namespace": self._namespace}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": written(wanted)}
        return self._client.create(self._folder, body)

    def _remember(self, stored: Object) -> None:
        found = read(stored.get("data") or {})
        now = self._clock.monotonic()
        self._since = {device: self._since.get(device, now) for device in found}
        self._version = stored.get("metadata", {}).get("resourceVersion", "")


def written(devices: Iterable[PoolDevice]) -> dict[str, str]:
    """The names of ``devices`` by pool."""
    names: dict[str, list[str]] = defaultdict(list)
    for device in sorted(devices):
        names[device.pool].append(device.device)
    return {pool: " ".join(of_pool) for pool, of_pool in names.items()}


def read(data: Mapping[str, str]) -> set[PoolDevice]:
    """What ``written`` was given."""
    return {PoolDevice(pool, name) for pool, names in data.items() for name in names.split()}
