"""An API server that evicts pods, and claims with devices of a node."""

from __future__ import annotations

import json
from typing import Any

from tests.support.api_server import Exchange, Object, ObjectApi, Route
from tests.support.queues import DRIVER

NODE = "node-a"
POOL = f"{NODE}-{DRIVER}"


class ClusterApi(ObjectApi):
    """An API server that evicts pods: they are being deleted then."""

    def __init__(self) -> None:
        self.evicted: list[str] = []
        self.protected: dict[str, int] = {}
        """By name of the pod, the status with which evictions are refused."""
        self.protected_later: dict[str, int] = {}
        """The same, but dry runs are accepted."""
        super().__init__()

    def store(self, path: str, **fields: Any) -> Object:
        """As everywhere, but with the UID of ``fields``, if they have one."""
        item = super().store(path, **fields)
        item["metadata"] |= {key: uid for key, uid in fields.get("metadata", {}).items() if key == "uid"}
        return item

    def _write(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        if route.part != "eviction":
            return super()._write(exchange)
        pod, body = self.folder(f"/api/v1/namespaces/{route.namespace}/pods")[route.name], json.loads(exchange.body)
        assert (body["apiVersion"], body["kind"]) == ("policy/v1", "Eviction")
        assert body["deleteOptions"]["preconditions"] == {"uid": pod["metadata"]["uid"]}
        if route.name in self.protected:
            return exchange.refuse(self.protected[route.name], "refused for now")
        if body["deleteOptions"].get("dryRun") == ["All"]:
            return exchange.send_json({"kind": "Status", "status": "Success"}, 201)
        if route.name in self.protected_later:
            return exchange.refuse(self.protected_later[route.name], "refused meanwhile")
        self.evicted.append(route.name)
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
        return exchange.send_json({"kind": "Status", "status": "Success"}, 201)


def allocated(*devices: str, driver: str = DRIVER, **more: Any) -> Object:
    results = [{"request": "gpu", "driver": driver, "pool": POOL, "device": device, **more} for device in devices]
    return {"devices": {"results": results}}


def ready(device: str, status: str = "True", **other: str) -> list[Object]:
    """What the node plugin reports of a prepared claim."""
    condition = {"type": "Ready", "status": status, "reason": "Prepared", "message": ""}
    return [{"driver": DRIVER, "pool": POOL, "device": device, **other, "conditions": [condition]}]
