"""Reads what ``tessera status`` looks at: everything at the API server that concerns the installation, once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from driver.errors import NOT_FOUND, ApiError, UsageError
from driver.kube.claims import GROUP
from driver.kube.heartbeat import HEARTBEAT
from driver.kube.lease import leases
from driver.kube.paging import objects
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import KubeClient, Object
from driver.model.plan import PATH
from tessera.status_picture import CONTROLLER, CONTROLLER_LEASE, NODE, Picture, Refused, What, results_of, written_at

NAMESPACE = "tessera"
"""Where the chart's release is unless somebody says otherwise."""

FORBIDDEN = 403
POLICIES = "/apis/admissionregistration.k8s.io/v1"
APPS = "/apis/apps/v1"
SAID = "involvedObject.kind=ResourceClaim,reportingComponent=tessera-controller"


class Reader:
    """Reads a Picture; what is refused is noted, not fatal. Raises ApiError where the API server does not answer."""

    def __init__(self, client: KubeClient, driver: str, namespace: str) -> None:
        self._client, self._driver, self._namespace = client, driver, namespace
        self._unreadable: dict[What, Refused] = {}
        self._planned_at: dict[str, datetime] = {}

    def read(self) -> Picture:
        """Everything, as of now. Raises UsageError where Tessera is in another namespace than the one named."""
        claims = self._list(What.CLAIMS, f"{GROUP}/resourceclaims")
        picture = Picture(
            self._driver,
            self._namespace,
            version=self._version(),
            nodes=self._list(What.NODES, "/api/v1/nodes"),
            slices=self._slices(self._driver),
            others=self._slices("gpu.nvidia.com") if self._driver != "gpu.nvidia.com" else (),
            plans=self._plans(),
            planned_at=self._planned_at,
            claims=[claim for claim in claims if self._is_ours(claim)],
            pending=[claim for claim in claims if not claim.get("status", {}).get("allocation")],
            events=self._list(What.EVENTS, "/api/v1/events", SAID),
            classes=self._list(What.CLASSES, f"{GROUP}/deviceclasses"),
            policies=self._list(What.POLICIES, f"{POLICIES}/validatingadmissionpolicies"),
            bindings=self._list(What.BINDINGS, f"{POLICIES}/validatingadmissionpolicybindings"),
            pods=self._list(What.PODS, f"/api/v1/namespaces/{self._namespace}/pods"),
            leases={item["metadata"]["name"]: item for item in self._list(What.LEASES, leases(self._namespace))},
            node_leases=self._list(What.NODE_LEASES, leases("kube-node-lease")),
            daemon_set=next(iter(self._quietly(f"{APPS}/namespaces/{self._namespace}/daemonsets", NODE)), None),
            unreadable=self._unreadable,
        )
        self._check_namespace(picture)
        return picture

    def _check_namespace(self, picture: Picture) -> None:
        """A namespace without a trace of Tessera is a mistake where another one has it, or where it isn't there."""
        if not picture.has_read(What.LEASES, What.PODS) or picture.is_in_namespace:
            return
        if there := self._elsewhere():
            where = " and ".join(f"--namespace {name}" for name in there)
            raise UsageError(f"--namespace {self._namespace}: nothing of Tessera is there; it is in {where}")
        if self._namespace != NAMESPACE and not self._namespace_exists():
            raise UsageError(
                f"--namespace {self._namespace}: there is no such namespace, and none with Tessera is seen"
            )

    def _elsewhere(self) -> list[str]:
        """Namespaces with something of Tessera's, as far as it can be seen."""
        paths: dict[str, tuple[str, ...]] = {f"{APPS}/daemonsets": (NODE,), f"{APPS}/deployments": (CONTROLLER,)}
        paths["/apis/coordination.k8s.io/v1/leases"] = (CONTROLLER_LEASE, HEARTBEAT)
        found = (item for path, names in paths.items() for name in names for item in self._quietly(path, name))
        return sorted({str(item["metadata"]["namespace"]) for item in found})

    def _namespace_exists(self) -> bool:
        try:
            self._client.get_object(f"/api/v1/namespaces/{self._namespace}")
        except ApiError as error:
            return error.status != NOT_FOUND
        return True

    def _slices(self, driver: str) -> list[Object]:
        return self._list(What.SLICES, f"{GROUP}/resourceslices", f"spec.driver={driver}")

    def _is_ours(self, claim: Object) -> bool:
        return any(result["driver"] == self._driver for result in results_of(claim))

    def _version(self) -> str:
        return str(self._client.get_object("/version").get("gitVersion", ""))

    def _plans(self) -> Mapping[str, GpuNodePlan] | None:
        try:
            items = list(objects(self._client, PATH))
            self._planned_at |= {item["metadata"]["name"]: at for item in items if (at := written_at(item, CONTROLLER))}
            return {item["metadata"]["name"]: msgspec.convert(item, GpuNodePlan) for item in items}
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            self._note(What.PLANS, error)
        except msgspec.ValidationError as error:
            self._unreadable[What.PLANS] = Refused(str(error))
        return {}

    def _list(self, what: What, path: str, fields: str = "") -> list[Object]:
        try:
            return list(objects(self._client, path, {"fieldSelector": fields} if fields else {}))
        except ApiError as error:
            self._note(what, error)
            return []

    def _quietly(self, path: str, name: str) -> list[Object]:
        """Objects of one name, without which every check can do: who may not read them needn't hear of it."""
        try:
            return list(objects(self._client, path, {"fieldSelector": f"metadata.name={name}"}))
        except ApiError:
            return []

    def _note(self, what: What, error: ApiError) -> None:
        if error.status is None:
            raise error
        self._unreadable[what] = Refused(str(error), error.status == FORBIDDEN)
