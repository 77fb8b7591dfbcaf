"""A claim of our own, to see what the API server does and how far a cache of claims is."""

from __future__ import annotations

import uuid

from controller.fenced import PoolDevice
from driver.errors import CONFLICT, NOT_FOUND, ApiError
from driver.kube.claims import GROUP
from driver.kube.transport import KubeClient, Object

CANARY = "tessera-canary"
"""No pod uses this claim, and its class does not exist: it is never allocated and waits for nothing."""

ANNOTATION = "gpu.tessera.dev/canary"


class Canary:
    """The claim ``namespace/tessera-canary``, made when it is first needed."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._folder = f"{GROUP}/namespaces/{namespace}/resourceclaims"
        self._path = f"{self._folder}/{CANARY}"

    def touch(self) -> int:
        """Change it; returns the version it has now. Raises ApiError."""
        try:
            stored = self._client.patch(self._path, {"metadata": {"annotations": {ANNOTATION: uuid.uuid4().hex}}})
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            stored = self._create()
        return int(stored["metadata"]["resourceVersion"])

    def refusal(self, device: PoolDevice) -> str:
        """Why ``device`` can't be allocated to it, by one server-side dry run; empty: it can. Raises ApiError."""
        result = {"request": "canary", "driver": "gpu.tessera.dev", "pool": device.pool, "device": device.device}
        body = {**self._object(), "status": {"allocation": {"devices": {"results": [result]}}}}
        try:
            self._dry_run(body)
        except ApiError as error:
            if error.status not in (403, 422):
                raise
            return str(error)
        return ""

    def _dry_run(self, body: Object) -> None:
        try:
            self._client.replace(f"{self._path}/status", body, {"dryRun": "All"})
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._create()
            self._client.replace(f"{self._path}/status", body, {"dryRun": "All"})

    def _create(self) -> Object:
        """Make it; where another leader was faster, what that one made: it was not there a moment ago."""
        try:
            return self._client.create(self._folder, self._object())
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        return self._client.patch(self._path, {})

    def _object(self) -> Object:
        request = {"name": "canary", "exactly": {"deviceClassName": CANARY}}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": CANARY, "namespace": self._namespace},
            "spec": {"devices": {"requests": [request]}},
        }
