"""What ``tessera uninstall`` takes out of a cluster, step by step; each can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.canary import CANARY
from driver.errors import NOT_FOUND, ApiError
from driver.kube.claims import GROUP, Claim, list_claims
from driver.kube.heartbeat import HEARTBEAT, LEAVING
from driver.kube.lease import LeaseSpec, lease_object, leases
from driver.kube.paging import objects
from driver.kube.transport import KubeClient
from driver.model.plan import FENCE
from driver.slices.publisher import SLICES
from tessera.controller import LEASE

WORKLOADS = ("daemonsets/tessera-node", "deployments/tessera-controller")
PROCESSES = "app.kubernetes.io/name=tessera,app.kubernetes.io/component in (node,controller)"

LOOK_S = 0.5


@dataclass(frozen=True)
class Removal:
    """Of the driver ``driver``, installed in ``namespace``. Methods raise ApiError."""

    client: KubeClient
    driver: str
    namespace: str

    def holders(self) -> list[Claim]:
        """The claims that have a device."""
        return [claim for claim in list_claims(self.client) if self._has_device(claim)]

    def announce(self) -> None:
        """Tell every node plugin that it is to offer nothing any more."""
        annotation = {"metadata": {"annotations": {LEAVING: "true"}}}
        try:
            self.client.patch(self._lease(HEARTBEAT), annotation)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            body = lease_object(self.namespace, HEARTBEAT, LeaseSpec())
            body["metadata"].update(annotation["metadata"])
            self.client.create(leases(self.namespace), body)

    def recall(self) -> None:
        """Tell them that it was not meant: they offer again."""
        try:
            self.client.patch(self._lease(HEARTBEAT), {"metadata": {"annotations": {LEAVING: None}}})
        except ApiError as error:
            if error.status != NOT_FOUND:  # nobody has been told yet
                raise

    def publishing(self) -> dict[str, list[str]]:
        """The slices that there are, by node."""
        found: dict[str, list[str]] = {}
        for item in objects(self.client, SLICES, {"fieldSelector": f"spec.driver={self.driver}"}):
            found.setdefault(item["spec"].get("nodeName", ""), []).append(item["metadata"]["name"])
        return found

    def delete_slices(self, names: Iterable[str]) -> None:
        for name in names:
            self._delete(f"{SLICES}/{name}")

    def end_processes(self) -> None:
        """Delete the workloads: their pods end, and no others come."""
        for workload in WORKLOADS:
            self._delete(f"/apis/apps/v1/namespaces/{self.namespace}/{workload}")

    def running(self) -> list[str]:
        """The pods that have not ended."""
        pods = objects(self.client, f"/api/v1/namespaces/{self.namespace}/pods", {"labelSelector": PROCESSES})
        return [pod["metadata"]["name"] for pod in pods]

    def delete_own_objects(self) -> None:
        """What the processes made themselves, so that no release knows it."""
        self._delete(f"{GROUP}/namespaces/{self.namespace}/resourceclaims/{CANARY}")
        self._delete(f"/api/v1/namespaces/{self.namespace}/configmaps/{FENCE}")
        self._delete(self._lease(LEASE))
        self._delete(self._lease(HEARTBEAT))

    def _has_device(self, claim: Claim) -> bool:
        allocation = claim.status.allocation
        return allocation is not None and any(each.driver == self.driver for each in allocation.devices.results)

    def _lease(self, name: str) -> str:
        return f"{leases(self.namespace)}/{name}"

    def _delete(self, path: str) -> None:
        try:
            self.client.delete(path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise


def taking_back(namespace: str) -> str:
    """The command by which nodes offer again."""
    return f"kubectl -n {namespace} annotate lease {HEARTBEAT} {LEAVING}-"
