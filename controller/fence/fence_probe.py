"""The canary claim, which proves what the API server and the cache of claims have seen; how the scheduler is woken."""

from __future__ import annotations

import uuid

from controller.cluster.claim_index import PoolDevice
from driver.errors import CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, ApiError, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.types import Pod

CANARY = "tessera-canary"
"""Name of the canary claim. No pod uses it and its class does not exist, so the scheduler never allocates it."""

CANARY_DRIVER = "canary.tessera.dev"
"""Of no node, so that nothing of this driver is counted as allocated."""

ANNOTATION = "gpu.tessera.dev/canary"


class Canary:
    """The claim ``namespace/tessera-canary``, created on first use."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._folder = f"{RESOURCE_GROUP}/namespaces/{namespace}/resourceclaims"
        self._path = f"{self._folder}/{CANARY}"
        request = {"name": "canary", "exactly": {"deviceClassName": CANARY}}
        self._object: Object = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": CANARY, "namespace": namespace},
            "spec": {"devices": {"requests": [request]}},
        }

    def touch(self) -> int:
        """Change the claim. Returns its new version. Raises ApiError."""
        body = {"metadata": {"annotations": {ANNOTATION: uuid.uuid4().hex}}}
        stored = self._client.patch_existing(self._path, body) or self._create()
        return int(stored["metadata"]["resourceVersion"])

    def refusal(self, device: PoolDevice, pod: str = "") -> str:
        """The refusal of a dry run that allocates ``device`` to the claim; empty if accepted. Raises ApiError.

        ``pod``: the UID of a pod for which that would be.
        """
        result = {"request": "canary", "driver": "gpu.tessera.dev", "pool": device.pool, "device": device.device}
        status: Object = {"allocation": {"devices": {"results": [result]}}}
        status |= {"reservedFor": [{"resource": "pods", "name": CANARY, "uid": pod}]} if pod else {}
        body = {**self._object, "status": status}
        try:
            self._dry_run(body)
        except ApiError as error:
            if error.status not in (FORBIDDEN, INVALID):
                raise
            return str(error)
        return ""

    def wake_parked_pods(self) -> None:
        """Let the scheduler try again the pods that it found no devices for, as it does after any deallocation:
        allocate a device that does not exist, and deallocate it. Raises ApiError.

        Necessary after an allocation was refused, which tells the scheduler's other pods nothing.
        """
        result = {"request": "canary", "driver": CANARY_DRIVER, "pool": CANARY, "device": CANARY}
        self.touch()
        self._replace_status({"allocation": {"devices": {"results": [result]}}})
        self.deallocate()

    def deallocate(self) -> None:
        """Undo what a kill has left of ``wake_parked_pods``: dry runs would show nothing any more. Raises ApiError."""
        with accepted_status(NOT_FOUND):
            self._replace_status({})

    def _replace_status(self, status: Object) -> None:
        self._client.replace(f"{self._path}/status", {**self._object, "status": status})

    def _dry_run(self, body: Object) -> None:
        with accepted_status(NOT_FOUND):
            self._client.replace(f"{self._path}/status", body, {"dryRun": "All"})
            return
        self._create()
        self._client.replace(f"{self._path}/status", body, {"dryRun": "All"})

    def _create(self) -> Object:
        """Create the claim, or read the one that another leader has just created."""
        with accepted_status(CONFLICT):
            return self._client.create(self._folder, self._object)
        return self._client.patch(self._path, {})


def try_again(client: KubeClient, pod: Pod) -> bool:
    """Let the scheduler try ``pod`` again, and no other pod: it does so when the claims in its status change.

    False: the scheduler makes the claim of ``pod`` itself. Raises ApiError.
    """
    claims = pod.status.resource_claim_statuses or pod.spec.resource_claims
    entered = [{"name": claim.name, "resourceClaimName": claim.resource_claim_name} for claim in claims]
    path = f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}/status"
    # Of a pod that was read between the two writes the names of claims from templates are not known.
    is_known = all(claim.resource_claim_template_name is None for claim in claims)
    for statuses in ([], entered) if claims and is_known else ():
        with accepted_status(NOT_FOUND, CONFLICT, INVALID):  # it ended, or is bound
            client.patch(path, {"metadata": {"uid": pod.metadata.uid}, "status": {"resourceClaimStatuses": statuses}})
    return bool(claims)
