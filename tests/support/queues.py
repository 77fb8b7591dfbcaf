"""A cluster that waits, written short: claims, classes, pods and nodes as the API server sends them, GPUs as values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from controller.cluster.cache import _kept_claim, _kept_node, _kept_pod
from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.fleet import Fleet, FleetGpu
from controller.demand.feasibility import Matching
from controller.demand.pending_claims import PendingClaim, Queue
from driver.kube.slice_types import DetailedSlice
from driver.kube.types import Claim, ClaimTemplate, DeviceClass, DeviceTaintRule, Key, Node, Pod, PodGroup
from driver.model.gpu import Gpu
from tests.support.gpus import H100, gpu_of

DRIVER = "gpu.tessera.dev"
OURS = f'device.driver == "{DRIVER}"'
ATTRIBUTES = f'device.attributes["{DRIVER}"]'


def selected_by(*conditions: str) -> str:
    """A selector: our driver, and conditions on attributes such as ``profile == "1g.10gb"``."""
    return " && ".join([OURS, *(f"{ATTRIBUTES}.{each}" for each in conditions)])


def profile(name: str) -> str:
    return selected_by(f'profile == "{name}"')


FULL = selected_by('type == "gpu"')
SHARE = selected_by('type == "share"')


def gpu_in(node: str, number: int, product: str = H100, **facts: Any) -> Gpu:
    """A GPU whose UUID is ``<node>/<number>``."""
    return replace(gpu_of(product, number), uuid=f"{node}/{number}", **facts)


def fleet_gpu(node: str, number: int, product: str = H100, *held: str, **more: Any) -> FleetGpu:
    """``held`` are names of devices without ``gpu-<number>-``: ``mig-1g10gb-0``, or ``full``."""
    facts = more.pop("facts", {})
    entry = FleetGpu(node, gpu_in(node, number, product, **facts), number, **more)
    names = {f"gpu-{number}" if each == "full" else f"gpu-{number}-{each}" for each in held}
    devices = tuple(device for device in entry.devices if device.name in names)
    assert len(devices) == len(names), f"{names} are not all devices of {product}"
    return replace(entry, held=devices)


def request(device_class: str = "any", name: str = "gpu", selector: str | None = None, **more: Any) -> dict[str, Any]:
    """``exactly``; ``more`` are fields such as ``count``."""
    exactly = {"deviceClassName": device_class, **more}
    if selector is not None:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return {"name": name, "exactly": exactly}


def first_available(*alternatives: tuple[str, str], name: str = "gpu") -> dict[str, Any]:
    """Alternatives as (name, selector) of class ``any``."""
    wanted = [
        {"name": each, "deviceClassName": "any", "selectors": [{"cel": {"expression": selector}}]}
        for each, selector in alternatives
    ]
    return {"name": name, "firstAvailable": wanted}


@dataclass
class Situation:
    """What is in the cluster; ``queue`` holds it against the GPUs."""

    gpus: list[FleetGpu]
    claims: list[Claim] = field(default_factory=list)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    matching: Matching = field(default_factory=lambda: Matching(DRIVER))
    pod_groups: dict[Key, PodGroup] = field(default_factory=dict)
    taint_rules: list[DeviceTaintRule] = field(default_factory=list)
    templates: list[ClaimTemplate] = field(default_factory=list)
    slices: list[DetailedSlice] = field(default_factory=list)
    """Of other drivers."""

    def __post_init__(self) -> None:
        self.device_class("any", OURS)
        for name in {entry.node for entry in self.gpus}:
            self.node(name)

    def device_class(self, name: str, *selectors: str, **spec: Any) -> None:
        cel = [{"cel": {"expression": each}} for each in selectors]
        raw = {"metadata": {"name": name}, "spec": {"selectors": cel, **spec}}
        self.classes[name] = msgspec.convert(raw, DeviceClass)

    def node(self, name: str, labels: dict[str, str] | None = None, **spec: Any) -> None:
        self.nodes[name] = msgspec.convert({"metadata": {"name": name, "labels": labels or {}}, "spec": spec}, Node)

    def taint_rule(self, name: str, selector: dict[str, str] | None, **taint: str) -> None:
        raw = {"metadata": {"name": name}, "spec": {"deviceSelector": selector, "taint": taint}}
        self.taint_rules.append(msgspec.convert(raw, DeviceTaintRule))

    def claim(self, name: str, *requests: dict[str, Any], constraints: Any = (), **more: Any) -> str:
        """A claim without a pod; gives its name."""
        spec = {"devices": {"requests": requests, "constraints": constraints}}
        metadata = {"name": name, "namespace": "default", "uid": name, **more.pop("metadata", {})}
        self.claims.append(msgspec.convert({"metadata": metadata, "spec": spec, **more}, Claim))
        return name

    def template(self, name: str, *requests: dict[str, Any]) -> None:
        raw = {
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"spec": {"devices": {"requests": requests}}},
        }
        self.templates.append(msgspec.convert(raw, ClaimTemplate))

    def pod(self, name: str, *claims: str, status: dict[str, Any] | None = None, **spec: Any) -> None:
        """A pending pod that uses ``claims``."""
        used = [{"name": each, "resourceClaimName": each} for each in claims]
        metadata = {"name": name, "namespace": "default", "uid": name, **spec.pop("metadata", {})}
        raw = {"metadata": metadata, "spec": {"resourceClaims": used, **spec}, "status": status or {}}
        self.pods.append(msgspec.convert(raw, Pod))

    def wants(self, *requests: dict[str, Any], constraints: Any = (), name: str = "claim", **pod: Any) -> Situation:
        """A claim and its pod."""
        self.pod(f"pod-of-{name}", self.claim(name, *requests, constraints=constraints), **pod)
        return self

    def gang(self, name: str, *pods: dict[str, Any], min_count: int | None = None, **group: Any) -> Situation:
        """A PodGroup and its pods, each with a claim for one request. ``min_count``: by default all pods."""
        policy = {"gang": {"minCount": len(pods) if min_count is None else min_count}}
        raw = {"metadata": {"name": name, "namespace": "default"}, "spec": {"schedulingPolicy": policy}, **group}
        self.pod_groups[Key("default", name)] = msgspec.convert(raw, PodGroup)
        for number, each in enumerate(pods):
            self.wants(each, name=f"{name}-{number}", schedulingGroup={"podGroupName": name})
        return self

    def volcano_gang(
        self, name: str, *pods: dict[str, Any], min_member: int, status: dict[str, Any] | None = None, cpu: str = "1"
    ) -> Situation:
        """The same with a PodGroup of Volcano. ``cpu``: what each pod requests; empty: nothing but devices."""
        metadata = {"name": name, "namespace": "default"}
        raw = {"metadata": metadata, "spec": {"minMember": min_member}, "status": status or {}}
        self.pod_groups[Key("default", name)] = msgspec.convert(raw, PodGroup)
        annotations = {"annotations": {"scheduling.k8s.io/group-name": name}}
        container = {"resources": {"requests": {"cpu": cpu} if cpu else {}}}
        for number, each in enumerate(pods):
            pod = {"metadata": annotations, "schedulerName": "volcano", "containers": [container]}
            self.wants(each, name=f"{name}-{number}", **pod)
        return self

    def holding(self, name: str, node: str, *devices: str) -> Situation:
        """A claim that is allocated."""
        pool = f"{node}-{DRIVER}"
        results = [{"request": "gpu", "driver": DRIVER, "pool": pool, "device": device} for device in devices]
        self.claim(name, request(), status={"allocation": {"devices": {"results": results}}})
        return self

    @property
    def queue(self) -> Queue:
        """As the controller has it: with what its caches keep."""
        objects = ClusterState(
            ClaimIndex(DRIVER, map(_kept_claim, self.claims)),
            tuple(self.classes.values()),
            tuple(filter(None, map(_kept_pod, self.pods))),
            tuple(map(_kept_node, self.nodes.values())),
            self.pod_groups,
            tuple(self.taint_rules),
            tuple(self.templates),
        )
        return Queue(objects, Fleet.of(self.gpus), self.matching)

    def waiting(self, name: str = "claim") -> PendingClaim:
        return next(each for each in self.queue.pending if each.claim.metadata.name == name)


def node_of(node: str, *held: str, gpus: int = 2, product: str = H100, **more: Any) -> list[FleetGpu]:
    """A node's GPUs, all alike."""
    return [fleet_gpu(node, number, product, *held, **more) for number in range(gpus)]
