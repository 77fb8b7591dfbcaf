"""Types of the API server's objects, with the fields that Tessera reads; other fields are skipped while decoding.

Objects of tenants are decoded by ``driver.kube.tolerant_json``. All types are immutable and without reference cycles,
so that the garbage collector need not track them: a cluster has tens of thousands of claims and pods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from driver.model.plan import PlanMode, PlanSpec, PlanStatus


class Key(NamedTuple):
    """Namespace and name of an object; ``namespace`` is empty for cluster-scoped resources."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Struct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """A part of an object, with Kubernetes' spelling of field names."""


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The part of ``metadata`` that every reader needs; subclasses add labels, deletionTimestamp, and so on."""

    name: str
    resource_version: str
    namespace: str = ""
    uid: str = ""

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def version(self) -> int:
        """Resource versions of one resource compare as integers (KEP-5504; true of every supported release)."""
        return int(self.resource_version)


class Unreadable(NamedTuple):
    """An object that could not be decoded or projected, and the reason."""

    metadata: ObjectMeta
    why: str


class KubeObject(Protocol):
    """A msgspec struct with metadata and the fields that its reader needs."""

    @property
    def metadata(self) -> ObjectMeta: ...


@dataclass(frozen=True, slots=True)
class Reference:
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"


class OwnerReference(Struct, frozen=True):
    """``controller``: whether the owner is the controller that replaces the object."""

    kind: str
    name: str
    controller: bool = False
    uid: str = ""
    api_version: str = ""


class Annotations(Struct, frozen=True):
    """``volcano_group``: of a pod, the PodGroup with which Volcano schedules it.

    ``checkpointed_at``: of a pod, when its work was saved last (RFC 3339), as it says itself. ``keep_until``: of a pod,
    until when it may be idle and keep its devices, as its owner says.
    """

    volcano_group: str = msgspec.field(default="", name="scheduling.k8s.io/group-name")
    checkpointed_at: str = msgspec.field(default="", name="gpu.tessera.dev/checkpointed-at")
    keep_until: str = msgspec.field(default="", name="gpu.tessera.dev/keep-until")


class Metadata(ObjectMeta, frozen=True, rename="camel", omit_defaults=True):
    resource_version: str = "0"
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: Annotations = Annotations()
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def controller(self) -> OwnerReference | None:
        """The owner that manages the object; of a pod it creates another one afterwards, such as a Job."""
        return next((owner for owner in self.owner_references if owner.controller), None)


class Expression(Struct, frozen=True):
    """A NodeSelectorRequirement."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeTerm(Struct, frozen=True):
    """A NodeSelectorTerm: all expressions must match; a term without expressions matches no node."""

    match_expressions: tuple[Expression, ...] = ()
    match_fields: tuple[Expression, ...] = ()


class NodeSelector(Struct, frozen=True):
    """Matches a node if one of the terms does."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


class Cel(Struct, frozen=True):
    expression: str


class DeviceSelector(Struct, frozen=True):
    cel: Cel | None = None


class Taint(Struct, frozen=True):
    """A taint of a node or of a device."""

    key: str
    effect: str
    value: str = ""

    def is_tolerated(self, tolerations: Iterable[Toleration]) -> bool:
        """Whether one of ``tolerations``, of a pod or of a device request, tolerates it."""
        return any(toleration.tolerates(self) for toleration in tolerations)

    @property
    def text(self) -> str:
        """``KEY=VALUE:EFFECT``, as kubectl writes it."""
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class DeviceTaintSelector(Struct, frozen=True):
    """The devices of a rule; an absent field selects all."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class DeviceTaintRuleSpec(Struct, frozen=True):
    taint: Taint
    device_selector: DeviceTaintSelector | None = None


class DeviceTaintRule(Struct, frozen=True):
    metadata: Metadata
    spec: DeviceTaintRuleSpec

    def selects(self, driver: str, pool: str, device: str) -> bool:
        """Whether the rule gives its taint to that device."""
        selector = self.spec.device_selector
        if selector is None:
            return False
        pairs = ((selector.driver, driver), (selector.pool, pool), (selector.device, device))
        return all(value is None or value == actual for value, actual in pairs)


class Toleration(Struct, frozen=True):
    """A toleration of a pod for nodes, or of a request for devices."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (self.operator in ("", "Equal") and self.value == taint.value)


Quantity = str | int | float
"""A quantity in a manifest; the API server returns it as text."""


class CapacityRequirements(Struct, frozen=True):
    """Quantities as written, by the name of the capacity."""

    requests: dict[str, Quantity] = {}


MAX_DEVICES = 32
"""Devices that one claim can be allocated (``resource.k8s.io/v1``); the API server accepts claims that ask for more."""


class ExactDeviceRequest(Struct, frozen=True):
    """The ``exactly`` of a request, or an alternative of its ``firstAvailable``; only the latter has a name."""

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
    exactly: ExactDeviceRequest | None = None
    first_available: tuple[ExactDeviceRequest, ...] = ()

    @property
    def alternatives(self) -> tuple[ExactDeviceRequest, ...]:
        """The alternatives in order of preference."""
        return (self.exactly,) if self.exactly is not None else self.first_available

    def name_of(self, alternative: ExactDeviceRequest) -> str:
        """The name under which the scheduler reports it: ``REQUEST``, or ``REQUEST/ALTERNATIVE``."""
        return f"{self.name}/{alternative.name}" if self.first_available else self.name


class DeviceConstraint(Struct, frozen=True):
    """No ``requests`` means all of them."""

    requests: tuple[str, ...] = ()
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class DeviceClaim(Struct, frozen=True):
    written_requests: tuple[Request, ...] | None = msgspec.field(default=(), name="requests")
    """None: an empty list."""
    constraints: tuple[DeviceConstraint, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.written_requests or ()


class ClaimSpec(Struct, frozen=True):
    devices: DeviceClaim = DeviceClaim()


class OpaqueParameters(Struct, frozen=True):
    """``parameters`` is JSON that only ``driver`` interprets: tenants may write anything into it."""

    driver: str
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class Configuration(Struct, frozen=True):
    """A config entry of an allocation; ``source`` is FromClass or FromClaim, no ``requests`` means all of them."""

    source: str = "FromClaim"
    requests: tuple[str, ...] = ()
    opaque: OpaqueParameters | None = None


class Result(Struct, frozen=True):
    """An allocated device; with ``share_id`` it is shared, and ``consumed_capacity`` is the part of this claim."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, str | int] | None = None


class DeviceAllocation(Struct, frozen=True):
    results: tuple[Result, ...] = ()
    config: tuple[Configuration, ...] = ()


class Allocation(Struct, frozen=True):
    """``node_selector`` selects the nodes on which the devices can be used; None: all nodes."""

    devices: DeviceAllocation = DeviceAllocation()
    node_selector: NodeSelector | None = None


class Consumer(Struct, frozen=True):
    """An entry of ``status.reservedFor``."""

    resource: str
    name: str
    uid: str = ""


class Condition(Struct, frozen=True):
    type: str
    status: str = ""
    message: str = ""
    last_transition_time: str | None = None

    @property
    def keeps_from_scheduling(self) -> bool:
        return self.type == "PodScheduled" and self.status == "False"

    @property
    def lacks_devices(self) -> bool:
        """Whether the scheduler found a node that lacks devices (dynamicresources.go, 1.34 to 1.37)."""
        return self.keeps_from_scheduling and "cannot allocate all claims" in self.message


class ReportedDevice(Struct, frozen=True):
    """An entry of ``status.devices``; ``data`` is JSON that only ``driver`` interprets."""

    driver: str
    pool: str
    device: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    written_conditions: tuple[Condition, ...] | None = msgspec.field(default=(), name="conditions")
    """None: an empty list."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return self.written_conditions or ()


class ClaimStatus(Struct, frozen=True):
    allocation: Allocation | None = None
    devices: tuple[ReportedDevice, ...] = ()
    reserved_for: tuple[Consumer, ...] = ()


class Claim(Struct, frozen=True):
    metadata: Metadata
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()

    @property
    def results(self) -> tuple[Result, ...]:
        """The allocated devices, of all drivers."""
        return self.status.allocation.devices.results if self.status.allocation is not None else ()

    @property
    def has_admin_access(self) -> bool:
        """Whether a device is allocated to it with adminAccess, of whatever driver: its pods are never evicted."""
        return any(result.admin_access for result in self.results)

    def results_in(self, driver: str, pools: Collection[str]) -> list[Result]:
        """The allocated devices of some pools of a driver."""
        return [result for result in self.results if result.driver == driver and result.pool in pools]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of all requests and alternatives, in order."""
        requests = self.spec.devices.requests
        return tuple(alternative.device_class_name for request in requests for alternative in request.alternatives)

    @property
    def pod_consumers(self) -> tuple[Consumer, ...]:
        """The pods that it is reserved for."""
        return tuple(consumer for consumer in self.status.reserved_for if consumer.resource == "pods")

    @property
    def pods(self) -> str:
        """The names of the pods that it is reserved for, for logs."""
        return ",".join(user.name for user in self.status.reserved_for if user.resource == "pods")


class ClassSpec(Struct, frozen=True):
    selectors: tuple[DeviceSelector, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(Struct, frozen=True):
    metadata: Metadata
    spec: ClassSpec = ClassSpec()


class NodeAffinity(Struct, frozen=True):
    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class LabelSelector(Struct, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[Expression, ...] = ()


class PodAffinityTerm(Struct, frozen=True):
    """Pods with these labels, of ``namespaces`` and those that ``namespace_selector`` selects or of the pod's own."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None


class PodAntiAffinity(Struct, frozen=True):
    required: tuple[PodAffinityTerm, ...] = msgspec.field(
        default=(), name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(Struct, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_anti_affinity: PodAntiAffinity | None = None


class PodResourceClaim(Struct, frozen=True):
    """A claim of a pod, in its spec or status.

    In the spec ``resource_claim_name`` is None if the claim is created from a template; its name is in the status.
    """

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class Resources(Struct, frozen=True):
    """Quantities by resource name, as written."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class Container(Struct, frozen=True):
    name: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class SchedulingGroup(Struct, frozen=True):
    """The PodGroup of a pod, in its namespace (Kubernetes 1.36 and newer)."""

    pod_group_name: str | None = None


DEFAULT_SCHEDULER = "default-scheduler"


class PodSpec(Struct, frozen=True):
    node_name: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    resource_claims: tuple[PodResourceClaim, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    scheduling_gates: tuple[dict[str, str], ...] = ()
    scheduler_name: str = DEFAULT_SCHEDULER
    scheduling_group: SchedulingGroup | None = None
    priority: int = 0
    preemption_policy: str = ""
    termination_grace_period_seconds: int = 30
    resources: Resources | None = None
    """Of the whole pod, in place of its containers' (KEP-2837)."""
    overhead: dict[str, Quantity] = {}
    """What its RuntimeClass adds (KEP-688)."""

    @property
    def resource_names(self) -> frozenset[str]:
        """The resources that its containers, or it as a whole, request or limit."""
        amounts = [container.resources for container in (*self.containers, *self.init_containers)]
        amounts += [self.resources or Resources(), Resources(self.overhead)]
        return frozenset(name for resources in amounts for name in (*resources.requests, *resources.limits))


class ExtendedClaimStatus(Struct, frozen=True):
    """The claim that the scheduler created for a pod's extended resources (KEP-5004)."""

    resource_claim_name: str = ""


class PodStatus(Struct, frozen=True):
    phase: str = "Pending"
    conditions: tuple[Condition, ...] = ()
    resource_claim_statuses: tuple[PodResourceClaim, ...] = ()
    extended_resource_claim_status: ExtendedClaimStatus | None = None
    nominated_node_name: str = ""
    start_time: str | None = None


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def controller(self) -> OwnerReference | None:
        """The owner, such as a Job or a ReplicaSet, that creates another pod after this one."""
        return self.metadata.controller

    @property
    def claims(self) -> tuple[Key, ...]:
        """The claims that have been created; that for extended resources is the last."""
        created = {status.name: status.resource_claim_name for status in self.status.resource_claim_statuses}
        extended = self.status.extended_resource_claim_status
        names = [claim.resource_claim_name or created.get(claim.name) for claim in self.spec.resource_claims]
        names += [extended.resource_claim_name] if extended is not None else []
        return tuple(Key(self.metadata.namespace, name) for name in names if name)

    @property
    def lacks_devices(self) -> bool:
        """Whether the scheduler has refused it on a node that lacks devices."""
        return any(condition.lacks_devices for condition in self.status.conditions)

    @property
    def pod_group(self) -> Key | None:
        """The key of its PodGroup, which may not exist: of Volcano's, unless the default scheduler places it."""
        name = "" if self.spec.scheduler_name == DEFAULT_SCHEDULER else self.metadata.annotations.volcano_group
        if not name and self.spec.scheduling_group is not None:
            name = self.spec.scheduling_group.pod_group_name or ""
        return Key(self.metadata.namespace, name) if name else None


class ConfigMap(Struct, frozen=True):
    metadata: Metadata
    data: dict[str, str] = {}


class ContainerPort(Struct, frozen=True):
    container_port: int
    name: str = ""


class ContainerDetails(Struct, frozen=True):
    args: tuple[str, ...] = ()
    ports: tuple[ContainerPort, ...] = ()


class PodDetailsSpec(Struct, frozen=True):
    service_account_name: str = ""
    node_name: str = ""
    containers: tuple[ContainerDetails, ...] = ()


class Terminated(Struct, frozen=True):
    exit_code: int
    finished_at: str | None = None


class ContainerState(Struct, frozen=True):
    terminated: Terminated | None = None


class ContainerStatus(Struct, frozen=True):
    name: str
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodDetailsStatus(Struct, frozen=True):
    """The lists of container statuses are None where the API server writes null."""

    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None


class PodDetails(Struct, frozen=True):
    """What is read of single pods only. Pod does not have it, because the controller keeps tens of thousands."""

    metadata: Metadata
    spec: PodDetailsSpec = PodDetailsSpec()
    status: PodDetailsStatus = PodDetailsStatus()

    @property
    def has_ended(self) -> bool:
        return self.status.phase in {"Succeeded", "Failed"}

    @property
    def is_ready(self) -> bool:
        ready = any(condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions)
        return ready and self.metadata.deletion_timestamp is None

    def port(self, name: str) -> int | None:
        """The number of the port with that name; None if there is none."""
        ports = (port for container in self.spec.containers for port in container.ports)
        return next((port.container_port for port in ports if port.name == name), None)

    def failures(self, since: str) -> Iterator[tuple[str, Terminated]]:
        """Name and end of each container that has failed at ``since`` or later (RFC 3339, UTC)."""
        for container in (*(self.status.init_container_statuses or ()), *(self.status.container_statuses or ())):
            for end in (container.state.terminated, container.last_state.terminated):
                if end is not None and end.exit_code != 0 and (end.finished_at or "") >= since:
                    yield container.name, end


class GangPolicy(Struct, frozen=True):
    min_count: int = 1


class GroupPolicy(Struct, frozen=True):
    """Without ``gang`` the pods of the group are scheduled one by one."""

    gang: GangPolicy | None = None


class PodGroupSpec(Struct, frozen=True):
    """``resource_claims``: those that all pods with the same entry share (KEP-5729). ``min_member``: Volcano's."""

    scheduling_policy: GroupPolicy = GroupPolicy()
    resource_claims: tuple[PodResourceClaim, ...] = ()
    min_member: int = 0


class PodGroupStatus(Struct, frozen=True):
    """``phase``: Volcano's."""

    conditions: tuple[Condition, ...] = ()
    phase: str = ""


POD_GROUP_VERSION = "scheduling.k8s.io/v1beta1"
VOLCANO_GROUP_VERSION = "scheduling.volcano.sh/v1beta1"


class PodGroup(Struct, frozen=True):
    """A PodGroup of Kubernetes or, with ``spec.minMember``, of Volcano."""

    metadata: Metadata
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()

    @property
    def is_of_volcano(self) -> bool:
        return self.spec.min_member != 0

    @property
    def api_version(self) -> str:
        return VOLCANO_GROUP_VERSION if self.is_of_volcano else POD_GROUP_VERSION

    @property
    def min_count(self) -> int:
        """The number of pods that the scheduler places together or not at all; 0: it places each by itself.

        Once that many have been placed, further pods of the group are placed one by one.
        """
        if self.is_of_volcano:
            is_waiting = self.spec.min_member > 1 and self.status.phase in {"", "Pending", "Inqueue"}
            return self.spec.min_member if is_waiting else 0
        placed = any(
            condition.type == "PodGroupInitiallyScheduled" and condition.status == "True"
            for condition in self.status.conditions
        )
        gang = self.spec.scheduling_policy.gang
        return gang.min_count if gang is not None and not placed else 0

    def places_alone(self, pod: Pod) -> bool:
        """Whether ``pod`` is placed by itself: Volcano does so if it requests neither CPU nor memory."""
        return self.is_of_volcano and not pod.spec.resource_names


class NodeSpec(Struct, frozen=True):
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False


class NodeSystemInfo(Struct, frozen=True):
    """What is the same on all nodes of a kind."""

    architecture: str = ""
    operating_system: str = ""
    kernel_version: str = ""
    os_image: str = msgspec.field(default="", name="osImage")
    container_runtime_version: str = ""
    kubelet_version: str = ""


class NodeStatus(Struct, frozen=True):
    """``capacity`` and ``allocatable`` have quantities by resource name."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    node_info: NodeSystemInfo = NodeSystemInfo()


class Node(Struct, frozen=True):
    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


PAUSED = "gpu.tessera.dev/paused"
"""Annotation of a plan: with the value "true" the controller leaves the spec alone, so that a person may edit it."""


class PlanMetadata(ObjectMeta, frozen=True, rename="camel"):
    resource_version: str = ""
    generation: int = 0
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    creation_timestamp: str | None = None

    @property
    def paused(self) -> bool:
        return self.annotations.get(PAUSED) == "true"


class GpuNodePlan(msgspec.Struct, frozen=True):
    """The plan of one node, named after it. The controller writes ``spec``, the node ``status``."""

    metadata: PlanMetadata
    spec: PlanSpec = PlanSpec()
    status: PlanStatus = PlanStatus()

    @property
    def followed(self) -> bool:
        """Whether the node follows this plan or an earlier one of the same epoch, by its status."""
        return self.status.mode is PlanMode.PLANNED and self.spec.epoch == self.status.epoch

    @property
    def versions_behind(self) -> int:
        """How many versions the node that follows this plan has not followed yet."""
        behind = self.metadata.generation - self.status.observed_generation
        return max(0, behind) if self.status.mode is PlanMode.PLANNED else 0


class WorkloadPodTemplate(Struct, frozen=True):
    spec: PodSpec = PodSpec()


class PodSet(Struct, frozen=True):
    """Pods of a Workload that are alike."""

    name: str = "main"
    template: WorkloadPodTemplate = WorkloadPodTemplate()


class WorkloadSpec(Struct, frozen=True):
    pod_sets: tuple[PodSet, ...] = ()
    priority: int | None = None
    active: bool = True


class WorkloadStatus(Struct, frozen=True):
    conditions: tuple[Condition, ...] = ()


class KueueWorkload(Struct, frozen=True):
    metadata: Metadata
    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()

    @property
    def is_queued(self) -> bool:
        """Whether it waits for quota, or for Kueue to find out how much it needs."""
        done = {condition.type for condition in self.status.conditions if condition.status == "True"}
        return self.spec.active and not self.metadata.deletion_timestamp and not done & {"QuotaReserved", "Finished"}


class ClaimTemplateSpec(Struct, frozen=True):
    spec: ClaimSpec = ClaimSpec()


class ClaimTemplate(Struct, frozen=True):
    metadata: Metadata
    spec: ClaimTemplateSpec = ClaimTemplateSpec()
