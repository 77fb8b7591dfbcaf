"""What ``tessera status`` looks at: one reading of everything at the API server that concerns the installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from driver.kube.heartbeat import HEARTBEAT
from driver.kube.plans import GpuNodePlan
from driver.kube.transport import Object

CONTROLLER_LEASE = "tessera-controller"
NODE, CONTROLLER = "tessera-node", "tessera-controller"
"""ServiceAccounts of the processes, and names of the DaemonSet and the Deployment."""


class What(StrEnum):
    """What is listed, as people read it."""

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


class Refused(NamedTuple):
    """Why something could not be read; ``forbidden`` for want of a right."""

    why: str
    forbidden: bool = False


@dataclass(frozen=True)
class Picture:
    """``slices`` and ``claims`` are our driver's, ``others`` NVIDIA's slices, ``pending`` claims of anybody without an
    allocation, ``events`` what the controller says of claims. ``plans`` is None where the cluster has no such
    resource; ``planned_at`` is when the controller wrote each. ``daemon_set`` is None where there is none, or it
    can't be read. ``unreadable`` is what could not be read, and why: its field is empty, which means nothing.
    """

    driver: str
    namespace: str
    version: str = ""
    nodes: Sequence[Object] = ()
    slices: Sequence[Object] = ()
    others: Sequence[Object] = ()
    plans: Mapping[str, GpuNodePlan] | None = None
    planned_at: Mapping[str, datetime] = field(default_factory=dict)
    claims: Sequence[Object] = ()
    pending: Sequence[Object] = ()
    events: Sequence[Object] = ()
    classes: Sequence[Object] = ()
    policies: Sequence[Object] = ()
    bindings: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    leases: Mapping[str, Object] = field(default_factory=dict)
    node_leases: Sequence[Object] = ()
    daemon_set: Object | None = None
    unreadable: Mapping[What, Refused] = field(default_factory=dict)

    def has_read(self, *whats: What) -> bool:
        """Whether all of these were read."""
        return not any(what in self.unreadable for what in whats)

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

    @property
    def is_in_namespace(self) -> bool:
        """Whether the namespace shows anything of Tessera's, as far as it was read."""
        seen = self.leases.keys() & {CONTROLLER_LEASE, HEARTBEAT}
        return bool(seen or self.pods_of(NODE) or self.pods_of(CONTROLLER) or self.daemon_set)

    def slices_of(self, node: str) -> list[Object]:
        """The driver's slices of a node."""
        return [item for item in self.slices if item["spec"].get("nodeName") == node]

    @property
    def gpu_nodes(self) -> list[str]:
        """Nodes on which a plugin runs or has run: by slices, plans and pods."""
        found = {str(item["spec"].get("nodeName", "")) for item in self.slices} | set(self.plans or ())
        found |= {str(pod["spec"].get("nodeName", "")) for pod in self.pods_of(NODE)}
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


def results_of(claim: Object) -> Sequence[Mapping[str, Any]]:
    """What a claim was allocated."""
    allocation = claim.get("status", {}).get("allocation") or {}
    found: Sequence[Mapping[str, Any]] = allocation.get("devices", {}).get("results") or ()
    return found
