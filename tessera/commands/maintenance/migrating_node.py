"""A Node that moves from NVIDIA's drivers to Tessera, or back: what holds its GPUs, its labels, its cordon.

The labels are those of the GPU Operator (controllers/state_manager.go, version 26.7): a component runs on a node while
its label is "true", and the operator never changes a label that has another value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

import msgspec

from driver.config.flag_values import NVIDIA_DRIVER
from driver.errors import FatalError, StateError, UsageError
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import list_claims, read_all
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Claim, Pod, Struct
from driver.slices.publisher import SLICES
from driver.slices.slice_names import Pool
from kubelet_plugin.coexistence.other_drivers import is_gpu_resource
from tessera.status.processes import OWN_LABEL

STATE = "gpu.tessera.dev/migration"
"""Annotation of a Node that was moved, or is being moved: what to restore."""

DEPLOY = "nvidia.com/gpu.deploy."
MONITORS = tuple(f"{DEPLOY}{name}" for name in ("dra-validator", "dcgm-dra", "dcgm-exporter-dra"))
"""Components with claims of NVIDIA's DRA driver: they end before it does, because it releases their claims."""

DRIVERS = tuple(f"{DEPLOY}{name}" for name in ("device-plugin", "mig-manager", "dra-driver"))
OPERATOR_APPS = ("nvidia-device-plugin-daemonset", "nvidia-mig-manager", "nvidia-dra-driver-kubelet-plugin")
"""The label ``app`` of the pods that DRIVERS start."""

PASSED_THROUGH, MPS = "gpu-vfio-", b'"MPS"'
"""How NVIDIA's DRA driver names devices for virtual machines, and the sharing strategy in its parameters."""

PAUSED = "paused-for-driver-upgrade"
"""Part of a label's value while the GPU Operator replaces the node's driver."""

MOVING, HERE = "moving", "true"
"""Values of OWN_LABEL: nobody manages the GPUs; Tessera does."""


class MigrationStep(StrEnum):
    """How far a node is."""

    MOVING = "moving"
    MOVED = "moved"
    RETURNING = "returning"


class MigrationState(Struct, frozen=True):
    """The annotation. ``labels`` and ``unschedulable`` are as they were; None: there was no such label. Whoever may
    annotate a Node, as its kubelet may, chooses no other labels.

    ``had_plugin`` and ``had_dra_driver`` are which drivers served the node: ``--back`` waits for them. ``driver``: the
    name under which it moves.
    """

    step: MigrationStep
    unschedulable: bool = False
    labels: dict[str, str | None] = msgspec.field(default_factory=dict)
    had_plugin: bool = False
    had_dra_driver: bool = False
    driver: str = ""

    def __post_init__(self) -> None:
        if others := self.labels.keys() - {*MONITORS, *DRIVERS, OWN_LABEL}:
            raise ValueError(f"it has {min(others)!r}, a label that no move changes")


class MigratingNode:
    """One Node, read anew by each method. Methods raise ApiError."""

    def __init__(self, client: KubeClient, name: str, driver: str) -> None:
        self._client, self.name, self.driver = client, name, driver
        self._path, self._pools = f"/api/v1/nodes/{name}", Pool(name, driver).names

    def read(self) -> Object:
        """Raises UsageError if there is no such Node."""
        node = self._client.find(self._path)
        if node is None or node["metadata"].get("name") != self.name:  # such as NODE/status
            raise UsageError(f"NODE {self.name}: the cluster has no such node: kubectl get nodes")
        return node

    def state(self) -> MigrationState | None:
        """None: no migration has begun. Raises StateError."""
        text = (self.read()["metadata"].get("annotations") or {}).get(STATE)
        try:
            return None if text is None else msgspec.json.decode(text, type=MigrationState)
        except (msgspec.MsgspecError, RecursionError) as error:
            remedy = f"write its labels back by hand, and remove it: kubectl annotate node {self.name} {STATE}-"
            raise StateError(f"node {self.name}: annotation {STATE} can't be read: {error}; {remedy}") from error

    def labels(self) -> dict[str, str]:
        return self.read()["metadata"].get("labels") or {}

    def resources(self) -> dict[str, str]:
        """What a device plugin offers."""
        allocatable = self.read().get("status", {}).get("allocatable") or {}
        return {name: amount for name, amount in allocatable.items() if is_gpu_resource(name) and amount != "0"}

    def pods(self) -> list[Pod]:
        """The pods that have not ended."""
        path, selector = "/api/v1/pods", {"fieldSelector": f"spec.nodeName={self.name}"}
        pods = read_all(self._client, path, Pod, selector)
        return [pod for pod in pods if pod.status.phase not in {"Succeeded", "Failed"}]

    def plugin_pods(self) -> list[tuple[Pod, list[str]]]:
        """The pods with GPUs of a device plugin, and the resources that they request."""
        # For the resources of the others the scheduler made a claim.
        pods = [pod for pod in self.pods() if pod.status.extended_resource_claim_status is None]
        resources = ((pod, sorted(filter(is_gpu_resource, pod.spec.resource_names))) for pod in pods)
        return [(pod, names) for pod, names in resources if names]

    def slices(self, *, ours: bool) -> list[ResourceSlice]:
        """Those of Tessera, or else those of NVIDIA's DRA driver."""
        selector = {"fieldSelector": f"spec.nodeName={self.name},spec.driver={self.driver if ours else NVIDIA_DRIVER}"}
        slices = read_all(self._client, SLICES, ResourceSlice, selector)
        return [item for item in slices if (item.spec.pool.name in self._pools) is ours]

    def claims(self, *, ours: bool) -> list[Claim]:
        """The claims with devices of Tessera, or else of NVIDIA's DRA driver, whose pool has the name of the node."""
        driver, pools = (self.driver, self._pools) if ours else (NVIDIA_DRIVER, (self.name,))
        return [claim for claim in list_claims(self._client) if claim.results_in(driver, pools)]

    def must_end(self) -> list[tuple[Claim, str]]:
        """The claims of NVIDIA's DRA driver that Tessera can not adopt, and why."""
        waiting = {pod.metadata.uid for pod in self.pods() if pod.status.phase == "Pending"}
        reasons = ((claim, self._why_not_adopted(claim, waiting)) for claim in self.claims(ours=False))
        return [(claim, reason) for claim, reason in reasons if reason]

    def _why_not_adopted(self, claim: Claim, waiting: Collection[str]) -> str:
        """Empty: it can be adopted. What is prepared is in a file of the node: here a pod that waits tells it."""
        if self.driver != NVIDIA_DRIVER:
            return f"only --driver-name {NVIDIA_DRIVER} adopts claims"
        if any(result.device.startswith(PASSED_THROUGH) for result in claim.results):
            return "its GPU is passed through to a virtual machine"
        allocation = claim.status.allocation
        configs = allocation.devices.config if allocation is not None else ()
        if any(MPS in bytes(config.opaque.parameters) for config in configs if config.opaque is not None):
            return "an MPS control daemon serves it, which nobody would end"
        if any(pod.uid in waiting for pod in claim.pod_consumers):
            return "its pod has not started"
        return ""

    def operator_pods(self) -> list[str]:
        pods = (pod for pod in self.pods() if pod.metadata.labels.get("app") in OPERATOR_APPS)
        return [str(pod.metadata.key) for pod in pods]

    def begin(self, step: MigrationStep) -> MigrationState:
        """Record what the node is like, unless that was done before, and cordon it. Raises FatalError."""
        node, state = self.read(), self.state()
        if state is not None and state.driver not in ("", self.driver):  # its claims would not be waited for
            raise UsageError(f"--driver-name {self.driver}: node {self.name} moves to {state.driver!r}: give that name")
        is_cordoned = bool(node["spec"].get("unschedulable"))
        labels = node["metadata"].get("labels") or {}
        if paused := [f"{name}={value}" for name, value in labels.items() if DEPLOY in name and PAUSED in value]:
            raise FatalError(
                f"node {self.name}: the GPU Operator is replacing its driver ({paused[0]}): try again afterwards"
            )
        if state is None:
            names = [name for name in (*MONITORS, *DRIVERS) if name in labels]
            state = MigrationState(
                step,
                is_cordoned,
                {name: labels.get(name) for name in (*names, OWN_LABEL)},
                bool(self.resources()),
                bool(self.slices(ours=False)),
                self.driver,
            )
        elif state.step is MigrationStep.MOVED:  # whoever has cordoned it since is not overruled
            state = msgspec.structs.replace(state, unschedulable=is_cordoned)
        self._patch(msgspec.structs.replace(state, step=step), unschedulable=True)
        return state

    def set_labels(self, labels: Mapping[str, str | None]) -> None:
        """None removes a label."""
        self._client.patch(self._path, {"metadata": {"labels": dict(labels)}})

    def switch_off(self, names: Iterable[str]) -> None:
        """Set those labels of the GPU Operator that the node has to false."""
        labels = self.labels()
        self.set_labels({name: "false" for name in names if name in labels})

    def end(self, state: MigrationState, step: MigrationStep | None) -> None:
        """Restore the cordon that was, and record that the node was moved; None: it is back."""
        kept = None if step is None else msgspec.structs.replace(state, step=step)
        self._patch(kept, unschedulable=state.unschedulable)

    def _patch(self, state: MigrationState | None, *, unschedulable: bool) -> None:
        text = None if state is None else msgspec.json.encode(state).decode()
        body = {"metadata": {"annotations": {STATE: text}}, "spec": {"unschedulable": unschedulable or None}}
        self._client.patch(self._path, body)
