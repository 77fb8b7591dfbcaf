"""What the controller reads of Kubernetes' objects (wire types; ``resource.k8s.io/v1`` and ``v1``).

Whatever is not named here is skipped while decoding: a cluster has tens of thousands of claims and pods.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from driver.kube.claims import Consumer, Result
from driver.kube.objects import ObjectMeta


class Struct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Immutable, with Kubernetes' spelling of names."""


class Metadata(ObjectMeta, frozen=True, rename="camel", omit_defaults=True):
    resource_version: str = "0"
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def path(self) -> str:
        """``namespace/name``; the name alone where there is no namespace."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Expression(Struct, frozen=True):
    """A NodeSelectorRequirement."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeTerm(Struct, frozen=True):
    """All of its expressions hold; one without any holds nowhere."""

    match_expressions: tuple[Expression, ...] = ()
    match_fields: tuple[Expression, ...] = ()


class NodeSelector(Struct, frozen=True):
    """One of its terms holds."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


class Cel(Struct, frozen=True):
    expression: str


class DeviceSelector(Struct, frozen=True):
    cel: Cel | None = None


class Toleration(Struct, frozen=True):
    """Of a pod for nodes, or of a request for devices."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class CapacityRequirements(Struct, frozen=True):
    """Quantities, as written, by the name of a capacity as slices spell it."""

    requests: dict[str, str | int] = {}


class DeviceRequest(Struct, frozen=True):
    """An ``exactly``, or one alternative of ``firstAvailable``; only the latter has a name."""

    device_class_name: str
    name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool = False
    capacity: CapacityRequirements | None = None
    tolerations: tuple[Toleration, ...] = ()

    @property
    def takes_all(self) -> bool:
        return self.allocation_mode == "All"


class Request(Struct, frozen=True):
    name: str
    exactly: DeviceRequest | None = None
    first_available: tuple[DeviceRequest, ...] = ()

    @property
    def alternatives(self) -> tuple[DeviceRequest, ...]:
        """What would do, the best first."""
        return (self.exactly,) if self.exactly is not None else self.first_available


class Constraint(Struct, frozen=True):
    """No ``requests`` means all of them."""

    requests: tuple[str, ...] = ()
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class DeviceClaim(Struct, frozen=True):
    requests: tuple[Request, ...] = ()
    constraints: tuple[Constraint, ...] = ()


class ClaimSpec(Struct, frozen=True):
    devices: DeviceClaim = DeviceClaim()


class Results(Struct, frozen=True):
    results: tuple[Result, ...] = ()


class Allocation(Struct, frozen=True):
    """``node_selector`` are the nodes from which the devices can be used; None: all."""

    devices: Results = Results()
    node_selector: NodeSelector | None = None


class ClaimStatus(Struct, frozen=True):
    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class Claim(Struct, frozen=True):
    """A ResourceClaim."""

    metadata: Metadata
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class ClassSpec(Struct, frozen=True):
    selectors: tuple[DeviceSelector, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(Struct, frozen=True):
    metadata: Metadata
    spec: ClassSpec = ClassSpec()


class NodeAffinity(Struct, frozen=True):
    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(Struct, frozen=True):
    node_affinity: NodeAffinity | None = None


class PodResourceClaim(Struct, frozen=True):
    """``resource_claim_name`` is None where the claim is made from a template: its name is then in the status."""

    name: str
    resource_claim_name: str | None = None


class Resources(Struct, frozen=True):
    """Quantities by resource name, as written."""

    requests: dict[str, str | int] = {}
    limits: dict[str, str | int] = {}


class Container(Struct, frozen=True):
    resources: Resources = Resources()
    restart_policy: str | None = None


class SchedulingGate(Struct, frozen=True):
    name: str


class PodSpec(Struct, frozen=True):
    node_name: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    resource_claims: tuple[PodResourceClaim, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    scheduler_name: str = ""


class PodClaimStatus(Struct, frozen=True):
    name: str
    resource_claim_name: str | None = None


class ExtendedClaimStatus(Struct, frozen=True):
    """The claim that the scheduler made for a pod's extended resources (KEP-5004)."""

    resource_claim_name: str = ""


class Condition(Struct, frozen=True):
    type: str
    status: str = ""
    message: str = ""

    @property
    def keeps_from_scheduling(self) -> bool:
        return self.type == "PodScheduled" and self.status == "False"

    @property
    def lacks_devices(self) -> bool:
        """Whether the scheduler says of some node that it lacks devices (dynamicresources.go, 1.34 to 1.37)."""
        return self.keeps_from_scheduling and "cannot allocate all claims" in self.message


class PodStatus(Struct, frozen=True):
    phase: str = "Pending"
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    resource_claim_statuses: tuple[PodClaimStatus, ...] = ()
    extended_resource_claim_status: ExtendedClaimStatus | None = None


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Taint(Struct, frozen=True):
    key: str
    effect: str
    value: str = ""


class NodeSpec(Struct, frozen=True):
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class Node(Struct, frozen=True):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()


Kind = TypeVar("Kind", Claim, DeviceClass, Pod, Node)


def decode(data: bytes | dict[str, Any], kind: type[Kind]) -> Kind:
    """An object from JSON or from its fields. Raises msgspec.MsgspecError where it is none of that kind."""
    return msgspec.json.decode(data, type=kind) if isinstance(data, bytes) else msgspec.convert(data, kind)
