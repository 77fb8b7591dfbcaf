"""The slices of a node whose only writer we are, without a watch of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from driver.kube.objects import Key
from driver.kube.transport import KubeClient, Object
from driver.slices.names import Pool
from driver.slices.publisher import SLICES


class OwnSlices:
    """What we wrote: of each slice its name, its version, and the pool it says it belongs to.

    The content is the publisher's to know (``driver.slices.reconcile.Stored``). After a failure everything is read
    anew: then, and only then, somebody else may have been at it.
    """

    def __init__(self, client: KubeClient, pool: Pool) -> None:
        self._client = client
        self._query = {"fieldSelector": f"spec.nodeName={pool.node},spec.driver={pool.driver}"}
        self._kept: dict[Key, Object] = {}
        self.synced = True

    def snapshot(self) -> Mapping[Key, Object]:
        return self._kept

    def observe(self, stored: Object) -> None:
        metadata, spec = stored["metadata"], stored["spec"]
        names = {name: metadata[name] for name in ("name", "uid", "resourceVersion")}
        self._kept = {
            **self._kept,
            Key("", metadata["name"]): {"metadata": names, "spec": {"pool": spec["pool"]}},
        }

    def forget(self, key: Key) -> None:
        self._kept = {known: item for known, item in self._kept.items() if known != key}

    def read(self) -> None:
        """Take over what the API server has. Raises ApiError."""
        found = msgspec.json.decode(self._client.get(SLICES, self._query), type=Object)
        self._kept = {}
        for item in found.get("items") or ():
            self.observe(item)
