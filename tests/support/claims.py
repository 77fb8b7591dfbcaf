"""ResourceClaims as the API server would return them, written short."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

from driver.errors import ApiError
from driver.kube.get_and_list import CLAIM
from driver.kube.types import Claim, ReportedDevice
from kubelet_plugin.claims.preparer import ClaimReader
from kubelet_plugin.inventory.inventory import ClaimReference

NODE = "node-a"
DRIVER = "gpu.tessera.dev"
POOL = f"{NODE}-{DRIVER}"


def result(device: str, request: str = "gpu", driver: str = DRIVER, pool: str = POOL, **more: Any) -> dict[str, Any]:
    """One entry of ``status.allocation.devices.results``."""
    return {"request": request, "driver": driver, "pool": pool, "device": device, **more}


def opaque(parameters: dict[str, Any], requests: tuple[str, ...] = (), source: str = "FromClaim") -> dict[str, Any]:
    """One entry of ``status.allocation.devices.config``."""
    return {"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}}


@dataclass
class ClaimApi(ClaimReader):
    """The claims that exist, by (namespace, name); its ``read`` stands for the GET a prepare makes."""

    claims: dict[tuple[str, str], Claim] = field(default_factory=dict)
    reads: int = 0
    away: bool = False

    def read(self, namespace: str, name: str, *, any_age: bool = False) -> Claim:
        self.reads += 1
        if self.away:
            raise ApiError("GET resourceclaims: no answer from https://127.0.0.1:6443: connection refused")
        try:
            return self.claims[namespace, name]
        except KeyError:
            raise ApiError(f'resourceclaims "{name}" not found', 404) from None

    def read_all(self) -> list[Claim]:
        self.reads += 1
        if self.away:
            raise ApiError("GET resourceclaims: no answer from https://127.0.0.1:6443: connection refused")
        return list(self.claims.values())

    def delete(self, claim: ClaimReference) -> None:
        del self.claims[claim.namespace, claim.name]

    def allocate(
        self, name: str, *devices: str | dict[str, Any], config: Any = (), uid: str = "", pods: tuple[str, ...] = ()
    ) -> ClaimReference:
        """Create (or allocate anew) a claim with these devices, and say how the kubelet would name it.

        ``pods``: the UIDs of the pods that use it.
        """
        known = self.claims.get(("default", name))
        uid = uid or (known.metadata.uid if known else str(uuid.uuid4()))
        results = [result(device) if isinstance(device, str) else device for device in devices]
        allocation = {"devices": {"results": results, "config": list(config)}}
        users = [{"resource": "pods", "name": f"pod-{pod}", "uid": pod} for pod in pods]
        users = users or [{"resource": "pods", "name": "pod"}]
        return self.put(name, uid, {"allocation": allocation, "reservedFor": users})

    def report(self, claim: ClaimReference, device: str, partition_uuid: str) -> None:
        """What the node plugin writes into ``status.devices`` after it has prepared a partition."""
        known = self.claims[claim.namespace, claim.name]
        entry = ReportedDevice(DRIVER, POOL, device, msgspec.Raw(msgspec.json.encode({"uuid": partition_uuid})))
        status = msgspec.structs.replace(known.status, devices=(entry,))
        self.claims[claim.namespace, claim.name] = msgspec.structs.replace(known, status=status)

    def put(self, name: str, uid: str, status: dict[str, Any]) -> ClaimReference:
        raw = {"metadata": {"name": name, "namespace": "default", "uid": uid}, "status": status}
        self.claims["default", name] = CLAIM.decode(msgspec.json.encode(raw))
        return ClaimReference("default", name, uid)
