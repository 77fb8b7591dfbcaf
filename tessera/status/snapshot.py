"""Input and output of the checks of ``tessera status``: API objects that concern the installation, and findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from controller.app import LEASE
from controller.eviction.recent_evictions import Eviction, read_evictions
from controller.explain.events import COMPONENT, WrittenEvent
from controller.report.claim_explainer import Explainer, Explanation
from controller.report.cluster_view import read_cluster
from controller.report.map_model import requested_kinds
from controller.report.slice_states import Capacity, capacity_of
from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import FORBIDDEN, ApiError, FatalError, UsageError
from driver.kube.client import Object
from driver.kube.controller_heartbeat import HEARTBEAT, is_silent, renewed_at
from driver.kube.get_and_list import RESOURCE_GROUP, read_all
from driver.kube.lease import leases
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Claim, DeviceClass, DeviceTaintRule, GpuNodePlan
from driver.model.device import is_monitor
from driver.model.plan import PATH
from driver.slices.publisher import SLICES
from tessera.cluster_options import ListOnceClient, find_plans

EVENT_LIFETIME = timedelta(minutes=10)
"""Processes repeat the Event of a lasting condition every few minutes at the latest: an older Event is outdated."""

LAG_SECONDS, LAG_INTERVAL_SECONDS = 6.0, 0.5
"""Time that nodes have to follow a new version of their plan and to report that; it is read again meanwhile."""

NODE_PLUGIN, CONTROLLER = "tessera-node", "tessera-controller"
"""ServiceAccounts of the processes, and names of the DaemonSet and the Deployment."""

NAMESPACE = "tessera"
"""Default namespace of the chart's release."""

AUTOSCALER = "cluster-autoscaler-status"

POLICIES = "/apis/admissionregistration.k8s.io/v1"
NO_CAPACITY = Capacity({}, {}, {})
APPS = "/apis/apps/v1"
EVENTS_OF_CONTROLLER = f"reportingComponent={COMPONENT}"
EVENTS_OF_NODES = "involvedObject.kind=Node,reportingComponent=tessera-node"

Listed = TypeVar("Listed")


class Listing(StrEnum):
    """A list that is read from the API server, by the name that people see."""

    NODES = "nodes"
    SLICES = "ResourceSlices"
    PLANS = "GpuNodePlans"
    CLAIMS = "ResourceClaims"
    CLASSES = "DeviceClasses"
    POLICIES = "ValidatingAdmissionPolicies"
    BINDINGS = "ValidatingAdmissionPolicyBindings"
    PODS = "pods"
    LEASES = "Leases"
    NODE_LEASES = "Leases of nodes"
    EVENTS = "Events"
    PENDING = "pending claims"
    DAEMON_SETS = "DaemonSets"
    DEPLOYMENTS = "Deployments"
    EVICTIONS = "evicted pods"


class ReadFailure(NamedTuple):
    """The reason why a list can't be read; ``forbidden`` if the account lacks the right."""

    reason: str
    forbidden: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: the object, what is wrong with it, what to do."""

    about: str
    message: str
    remedy: str


CheckOutput = Iterator[str | Problem | Eviction]
"""Parts of a check's summary, its findings, and evictions that it lists."""


@dataclass(frozen=True)
class StatusSnapshot:
    """API objects by list.

    now            by the API server's clock
    version        that of the API server
    slices         of the driver, without those of monitor devices; ``others`` are NVIDIA's
    claims         with a device of the driver
    pending        all pending claims, with the reason that this command finds; ``unprepared`` those that are allocated
                   and that their nodes can not prepare, ``unreleased`` those that they can not release;
                   read together with ``taint_rules`` and ``capacity``
    events         of the controller, about any object; ``node_events`` of node plugins, about their nodes
    plans          None if the CustomResourceDefinition is not installed
    daemon_set     None if there is none, or if it can't be read
    deployment     the same; only ``read_rollout`` reads it and ``revisions``, the versions of ``daemon_set``
    autoscaler     status ConfigMap of cluster-autoscaler; None if there is none, or if it can't be read
    evictions      of the last day, the oldest first
    unreadable     lists that can't be read, with the reason; their fields are empty
    """

    driver: str
    namespace: str
    now: datetime
    version: Object = field(default_factory=dict)
    nodes: Sequence[Object] = ()
    slices: Sequence[ResourceSlice] = ()
    others: Sequence[ResourceSlice] = ()
    plans: Mapping[str, GpuNodePlan] | None = None
    claims: Sequence[Claim] = ()
    pending: Sequence[Explanation] = ()
    unprepared: Sequence[Explanation] = ()
    unreleased: Sequence[Explanation] = ()
    taint_rules: Sequence[DeviceTaintRule] = ()
    capacity: Capacity = NO_CAPACITY
    events: Sequence[WrittenEvent] = ()
    node_events: Sequence[WrittenEvent] = ()
    classes: Sequence[DeviceClass] = ()
    policies: Sequence[Object] = ()
    bindings: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    leases: Mapping[str, Object] = field(default_factory=dict)
    node_leases: Sequence[Object] = ()
    daemon_set: Object | None = None
    deployment: Object | None = None
    revisions: Sequence[Object] = ()
    autoscaler: Object | None = None
    evictions: Sequence[Eviction] = ()
    unreadable: Mapping[Listing, ReadFailure] = field(default_factory=dict)

    def has_read(self, *listings: Listing) -> bool:
        return not any(listing in self.unreadable for listing in listings)

    def age_of(self, lease: Object | None) -> float | None:
        """Seconds since a Lease was renewed, by the API server's clock."""
        renewed = None if lease is None else renewed_at(lease)
        return None if renewed is None else (self.now - renewed).total_seconds()

    @property
    def is_led(self) -> bool:
        """Whether a controller has sent a heartbeat recently."""
        return not is_silent(self.age_of(self.leases.get(HEARTBEAT)))

    def pods_of(self, account: str) -> list[Object]:
        """The pods of a process that have not ended, by its ServiceAccount."""
        return [
            pod
            for pod in self.pods
            if pod["spec"].get("serviceAccountName") == account
            and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ]

    @property
    def is_in_namespace(self) -> bool:
        """Whether an object of Tessera was read in the namespace."""
        heartbeats = self.leases.keys() & {LEASE, HEARTBEAT}
        return bool(heartbeats or self.pods_of(NODE_PLUGIN) or self.pods_of(CONTROLLER) or self.daemon_set)

    def is_recent(self, event: WrittenEvent) -> bool:
        """Whether the condition that an Event reports may still last."""
        at = moment_of(event.last_timestamp)
        return at is not None and self.now - at <= EVENT_LIFETIME

    @property
    def has_controller(self) -> bool:
        """Whether a controller runs or has run: by its Lease and its pods."""
        return bool(LEASE in self.leases or self.pods_of(CONTROLLER))

    def slices_of(self, node: str) -> list[ResourceSlice]:
        return [item for item in self.slices if item.spec.node_name == node]

    @cached_property
    def gpu_nodes(self) -> list[str]:
        """Nodes on which a plugin runs or has run: by slices, plans and pods."""
        nodes = {item.spec.node_name for item in self.slices} | set(self.plans or ())
        nodes |= {str(pod["spec"].get("nodeName", "")) for pod in self.pods_of(NODE_PLUGIN)}
        return sorted(nodes - {""})


def condition_of(item: Object, kind: str) -> Object | None:
    """The condition of this type in the status of an object."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), None)


def moment_of(text: str | None) -> datetime | None:
    """Parse a time as Kubernetes writes it; None if it is not one."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None


class SnapshotReader:
    """Reads a StatusSnapshot. A refused list is recorded, not fatal; ApiError: the API server does not answer."""

    def __init__(self, client: ListOnceClient, driver: str, namespace: str) -> None:
        self._client, self._driver, self._namespace = client, driver, namespace
        self._unreadable: dict[Listing, ReadFailure] = {}

    def read(self) -> StatusSnapshot:
        """Read everything. Raises UsageError if Tessera is in another namespace than the given one."""
        claims = self._read(Listing.CLAIMS, f"{RESOURCE_GROUP}/resourceclaims", Claim)
        plans, own_leases = self._plans(), self._read(Listing.LEASES, leases(self._namespace), Object)
        version = self._client.get_object("/version")
        snapshot = StatusSnapshot(self._driver, self._namespace, self._client.clock.now())
        snapshot = self._explained(snapshot) if plans is not None else snapshot
        slices = self._read(Listing.SLICES, SLICES, ResourceSlice, f"spec.driver={self._driver}")
        snapshot = replace(
            snapshot,
            now=self._client.clock.now(),
            version=version,
            nodes=self._read(Listing.NODES, "/api/v1/nodes", Object),
            slices=_without_monitors(slices),
            others=self._read(Listing.SLICES, SLICES, ResourceSlice, f"spec.driver={NVIDIA_DRIVER}"),
            plans=plans,
            claims=[claim for claim in claims if any(result.driver == self._driver for result in claim.results)],
            events=self._read(Listing.EVENTS, "/api/v1/events", WrittenEvent, EVENTS_OF_CONTROLLER),
            node_events=self._read(Listing.EVENTS, "/api/v1/events", WrittenEvent, EVENTS_OF_NODES),
            classes=self._read(Listing.CLASSES, f"{RESOURCE_GROUP}/deviceclasses", DeviceClass),
            policies=self._read(Listing.POLICIES, f"{POLICIES}/validatingadmissionpolicies", Object),
            bindings=self._read(Listing.BINDINGS, f"{POLICIES}/validatingadmissionpolicybindings", Object),
            pods=self._read(Listing.PODS, f"/api/v1/namespaces/{self._namespace}/pods", Object),
            leases={lease["metadata"]["name"]: lease for lease in own_leases},
            node_leases=self._read(Listing.NODE_LEASES, leases("kube-node-lease"), Object),
            daemon_set=self._find(f"{APPS}/namespaces/{self._namespace}/daemonsets", NODE_PLUGIN),
            evictions=self._evictions(),
            autoscaler=self._find("/api/v1/namespaces/kube-system/configmaps", AUTOSCALER),
            unreadable=self._unreadable,
        )
        self._check_namespace(snapshot)
        return snapshot

    def read_rollout(self) -> StatusSnapshot:
        """Read what a rollout changes: little, so that it can be read often. Raises UsageError as ``read`` does."""
        of_namespace = f"{APPS}/namespaces/{self._namespace}"
        own_leases = self._read(Listing.LEASES, leases(self._namespace), Object)
        workloads = (
            self._read(listing, f"{of_namespace}/{kind}", Object, f"metadata.name={name}")
            for listing, kind, name in (
                (Listing.DAEMON_SETS, "daemonsets", NODE_PLUGIN),
                (Listing.DEPLOYMENTS, "deployments", CONTROLLER),
            )
        )
        daemon_set, deployment = (next(iter(objects), None) for objects in workloads)
        snapshot = StatusSnapshot(
            self._driver,
            self._namespace,
            self._client.clock.now(),
            pods=self._read(Listing.PODS, f"/api/v1/namespaces/{self._namespace}/pods", Object),
            leases={lease["metadata"]["name"]: lease for lease in own_leases},
            daemon_set=daemon_set,
            deployment=deployment,
            revisions=self._revisions(),
            unreadable=self._unreadable,
        )
        self._check_namespace(snapshot)
        return snapshot

    def _revisions(self) -> list[Object]:
        """The versions of the DaemonSet's template; a failure is not recorded, because they only add names of nodes."""
        with suppress(ApiError):
            path = f"{APPS}/namespaces/{self._namespace}/controllerrevisions"
            return [item for item in read_all(self._client, path, Object) if NODE_PLUGIN in _owners(item)]
        return []

    def with_nodes(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The same, with what nodes publish and report."""
        slices = self._read(Listing.SLICES, SLICES, ResourceSlice, f"spec.driver={self._driver}")
        return replace(snapshot, slices=_without_monitors(slices), plans=self._plans())

    def _check_namespace(self, snapshot: StatusSnapshot) -> None:
        """Refuse a namespace without Tessera if another one has it, or if the namespace doesn't exist."""
        if not snapshot.has_read(Listing.LEASES, Listing.PODS) or snapshot.is_in_namespace:
            return
        given = f"--namespace {self._namespace}"
        if others := self._other_namespaces():
            where = " and ".join(f"--namespace {name}" for name in others)
            raise UsageError(f"{given}: Tessera is not installed there; it is in {where}")
        with suppress(ApiError):
            if self._namespace != NAMESPACE and self._client.find(f"/api/v1/namespaces/{self._namespace}") is None:
                raise UsageError(f"{given}: the namespace does not exist, and no other one has Tessera")

    def _other_namespaces(self) -> list[str]:
        """Namespaces in which an object of Tessera can be read."""
        processes = [(f"{APPS}/daemonsets", NODE_PLUGIN), (f"{APPS}/deployments", CONTROLLER)]
        all_leases = [("/apis/coordination.k8s.io/v1/leases", name) for name in (LEASE, HEARTBEAT)]
        objects = (item for path, name in processes + all_leases for item in self._list_named(path, name))
        return sorted({str(item["metadata"]["namespace"]) for item in objects})

    @contextmanager
    def _recorded(self, listing: Listing) -> Iterator[None]:
        """Record why the block can't read a list. Raises ApiError if the API server does not answer."""
        try:
            yield
        except ApiError as error:
            if error.status is None:
                raise
            self._unreadable[listing] = ReadFailure(str(error), error.status == FORBIDDEN)
        except (FatalError, msgspec.MsgspecError) as error:
            cause = error.__cause__
            forbidden = isinstance(cause, ApiError) and cause.status == FORBIDDEN
            self._unreadable[listing] = ReadFailure(str(error), forbidden)

    def _evictions(self) -> Sequence[Eviction]:
        with self._recorded(Listing.EVICTIONS):
            return read_evictions(self._client, self._namespace)
        return ()

    def _read(self, listing: Listing, path: str, kind: type[Listed], selector: str = "") -> list[Listed]:
        """All objects of a list, with the fields of ``kind``."""
        with self._recorded(listing):
            return list(read_all(self._client, path, kind, {"fieldSelector": selector} if selector else {}))
        return []

    def _explained(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """``snapshot`` with what is read together with the pending claims."""
        with self._recorded(Listing.PENDING):
            view = read_cluster(self._client, self._driver)
            explainer = Explainer(view)
            return replace(
                snapshot,
                pending=[*explainer.pending()],
                unprepared=[*explainer.unprepared()],
                unreleased=[*explainer.unreleased()],
                taint_rules=view.snapshot.cluster.taint_rules,
                capacity=capacity_of(view.fleet, (), requested_kinds(view)),
            )
        return snapshot

    def _plans(self) -> Mapping[str, GpuNodePlan] | None:
        with self._recorded(Listing.PLANS):
            plans = find_plans(self._client)
            first = {plan.metadata.name: plan.metadata.generation for plan in plans or ()}
            until = time.monotonic() + LAG_SECONDS
            while any(plan.versions_behind for plan in plans or ()) and time.monotonic() < until:
                time.sleep(LAG_INTERVAL_SECONDS)
                self._client.forget(PATH)
                plans = [_as_of(plan, first) for plan in find_plans(self._client) or ()]
            return None if plans is None else {plan.metadata.name: plan for plan in plans}
        return {}

    def _find(self, path: str, name: str) -> Object | None:
        return next(iter(self._list_named(path, name)), None)

    def _list_named(self, path: str, name: str) -> list[Object]:
        """Objects of one name; a failure is not recorded, because no check depends on them."""
        with suppress(ApiError):
            return list(read_all(self._client, path, Object, {"fieldSelector": f"metadata.name={name}"}))
        return []


def _owners(item: Object) -> list[str]:
    return [owner["name"] for owner in item["metadata"].get("ownerReferences") or ()]


def _without_monitors(slices: Iterable[ResourceSlice]) -> list[ResourceSlice]:
    return [item for item in slices if not any(is_monitor(device.name) for device in item.spec.devices)]


def _as_of(plan: GpuNodePlan, generations: Mapping[str, int]) -> GpuNodePlan:
    """``plan`` with the version that it had before: its node has not had the time to follow a later one."""
    generation = generations.get(plan.metadata.name, 0)
    return msgspec.structs.replace(plan, metadata=msgspec.structs.replace(plan.metadata, generation=generation))
