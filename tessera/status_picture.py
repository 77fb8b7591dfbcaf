"""What ``tessera status`` looks at: one reading of everything at the API server that concerns the installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from driver.errors import NOT_FOUND, ApiError
from driver.kube.claims import GROUP
from driver.kube.lease import leases
from driver.kube.paging import objects
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient, Object
from driver.model.plan import PATH

POLICIES = "/apis/admissionregistration.k8s.io/v1"
NODE_LEASES = leases("kube-node-lease")


@dataclass(frozen=True)
class Picture:
    """``slices`` and ``claims`` are our driver's, ``others`` NVIDIA's slices. ``plans`` is None where the cluster has
    no such resource; ``planned_at`` is when the controller wrote each. ``unreadable`` is what could not be
    read, and why."""

    driver: str
    namespace: str
    version: str = ""
    nodes: Sequence[Object] = ()
    slices: Sequence[Object] = ()
    others: Sequence[Object] = ()
    plans: Mapping[str, GpuNodePlan] | None = None
    planned_at: Mapping[str, datetime] = field(default_factory=dict)
    claims: Sequence[Object] = ()
    classes: Sequence[Object] = ()
    policies: Sequence[Object] = ()
    bindings: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    leases: Mapping[str, Object] = field(default_factory=dict)
    node_leases: Sequence[Object] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def now(self) -> datetime:
        """The API server's clock, as late as anything shows it: nobody compares it with the clock of this machine."""
        stamps = [written_at(lease) for lease in (*self.leases.values(), *self.node_leases)]
        return max((stamp for stamp in stamps if stamp is not None), default=datetime.now(UTC))

    def pods_of(self, account: str) -> list[Object]:
        """The pods of a process, by its ServiceAccount; those that have ended do not count."""
        return [
            pod
            for pod in self.pods
            if pod["spec"].get("serviceAccountName") == account
            and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ]

    def slices_of(self, node: str) -> list[Object]:
        """The driver's slices of a node."""
        return [item for item in self.slices if item["spec"].get("nodeName") == node]

    @property
    def gpu_nodes(self) -> list[str]:
        """Nodes on which a plugin runs or has run: by slices, plans and pods."""
        found = {str(item["spec"].get("nodeName", "")) for item in self.slices} | set(self.plans or ())
        found |= {str(pod["spec"].get("nodeName", "")) for pod in self.pods_of("tessera-node")}
        return sorted(found - {""})


def read_time(text: object) -> datetime | None:
    """A time as Kubernetes writes it; None where it is none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None


def written_at(item: Object, manager: str = "") -> datetime | None:
    """When an object was written last, by the API server's clock; with ``manager`` by one whose name begins so."""
    fields = item.get("metadata", {}).get("managedFields") or ()
    stamps = [read_time(entry.get("time")) for entry in fields if str(entry.get("manager", "")).startswith(manager)]
    return max((stamp for stamp in stamps if stamp is not None), default=None)


class Reader:
    """Reads a Picture; what is refused is noted, not fatal. Raises ApiError where the API server does not answer."""

    def __init__(self, client: KubeClient, driver: str, namespace: str) -> None:
        self._client, self._driver, self._namespace = client, driver, namespace
        self._unreadable: dict[str, str] = {}
        self._planned_at: dict[str, datetime] = {}

    def read(self) -> Picture:
        """Everything, as of now."""
        ours = {"fieldSelector": f"spec.driver={self._driver}"}
        theirs = {"fieldSelector": "spec.driver=gpu.nvidia.com"}
        return Picture(
            self._driver,
            self._namespace,
            version=self._version(),
            nodes=self._list("nodes", "/api/v1/nodes"),
            slices=self._list("ResourceSlices", f"{GROUP}/resourceslices", ours),
            others=self._list("ResourceSlices", f"{GROUP}/resourceslices", theirs) if self._others else (),
            plans=self._plans(),
            planned_at=self._planned_at,
            claims=[claim for claim in self._list("ResourceClaims", f"{GROUP}/resourceclaims") if self._is_ours(claim)],
            classes=self._list("DeviceClasses", f"{GROUP}/deviceclasses"),
            policies=self._list("admission policies", f"{POLICIES}/validatingadmissionpolicies"),
            bindings=self._list("admission policies", f"{POLICIES}/validatingadmissionpolicybindings"),
            pods=self._list("pods", f"/api/v1/namespaces/{self._namespace}/pods"),
            leases={item["metadata"]["name"]: item for item in self._list("Leases", leases(self._namespace))},
            node_leases=self._list("Leases of nodes", NODE_LEASES),
            unreadable=self._unreadable,
        )

    @property
    def _others(self) -> bool:
        return self._driver != "gpu.nvidia.com"

    def _is_ours(self, claim: Object) -> bool:
        return any(result["driver"] == self._driver for result in results_of(claim))

    def _version(self) -> str:
        return str(self._client.get_object("/version").get("gitVersion", ""))

    def _plans(self) -> Mapping[str, GpuNodePlan] | None:
        try:
            items = self._items(PATH, {})
            self._planned_at |= {
                item["metadata"]["name"]: at for item in items if (at := written_at(item, "tessera-controller"))
            }
            return {item["metadata"]["name"]: msgspec.convert(item, GpuNodePlan) for item in items}
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            self._note("GpuNodePlans", error)
        except msgspec.ValidationError as error:
            self._unreadable["GpuNodePlans"] = str(error)
        return {}

    def _list(self, what: str, path: str, selectors: Mapping[str, str] | None = None) -> list[Object]:
        try:
            return self._items(path, selectors or {})
        except ApiError as error:
            self._note(what, error)
            return []

    def _note(self, what: str, error: ApiError) -> None:
        if error.status is None:
            raise error
        self._unreadable[what] = str(error)

    def _items(self, path: str, selectors: Mapping[str, str]) -> list[Object]:
        return list(objects(self._client, path, selectors))


def results_of(claim: Object) -> Sequence[Mapping[str, Any]]:
    """What a claim was allocated."""
    allocation = claim.get("status", {}).get("allocation") or {}
    found: Sequence[Mapping[str, Any]] = allocation.get("devices", {}).get("results") or ()
    return found
