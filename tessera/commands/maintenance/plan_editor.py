"""The GPUs of the cluster and the plans of their nodes, in which operators write cordons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from driver.errors import CONFLICT, EnvironmentFault, StateError, accepted_status
from driver.kube.client import KubeClient, Object
from driver.kube.get_and_list import read_all
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import GpuNodePlan
from driver.model.plan import API_VERSION, KIND, PATH, PlanSpec
from driver.slices.publisher import SLICES
from tessera.cluster_options import find_plans
from tessera.gpu_names_and_faults import GpuName, names_of

WRITE_ATTEMPTS = 5
"""Attempts to write a plan, which the controller may change at the same time."""


class PlanEditor:
    """The slices of one driver and the plans of all nodes, read when the command starts.

    Raises ApiError if they can't be read, EnvironmentFault without a cluster.
    """

    def __init__(self, client: KubeClient, driver_name: str) -> None:
        self._client, self._driver = client, driver_name
        try:
            self.slices = self.read_slices()
            plans = find_plans(self._client)
        except msgspec.MsgspecError as error:
            raise StateError(f"a ResourceSlice or {KIND} can't be read: {error}") from error
        if plans is None:
            remedy = "install the chart's CRD (docs/install.md)"
            raise EnvironmentFault(f"{KIND}, which stores cordons, is not installed: {remedy}")
        self.plans = {plan.metadata.name: plan for plan in plans}

    def read_slices(self) -> list[ResourceSlice]:
        """The slices as they are now. Raises ApiError and MsgspecError."""
        return list(read_all(self._client, SLICES, ResourceSlice, {"fieldSelector": f"spec.driver={self._driver}"}))

    def names(self) -> list[GpuName]:
        return names_of(self.slices, self.plans.values())

    def spec(self, node: str) -> PlanSpec:
        return self.plans[node].spec if node in self.plans else PlanSpec()

    def cordon(self, name: GpuName, reason: str | None) -> str:
        """Cordon a GPU. Return the reason, by default that of an earlier cordon."""

        def cordoned(spec: PlanSpec) -> Object:
            line = f"{name.uuid} {_reason(spec, name, reason)}".rstrip()
            return {"cordoned": [*other_lines(spec.cordoned, name), line]}

        self.edit(name.node, cordoned)
        return _reason(self.spec(name.node), name, reason)

    def edit(self, node: str, change: Callable[[PlanSpec], Object]) -> None:
        """Patch the plan's spec with the result of ``change``; create the plan if the node has none."""
        for _ in range(WRITE_ATTEMPTS - 1):
            with accepted_status(CONFLICT):
                return self._write(node, change)
            self.plans[node] = msgspec.convert(self._client.get_object(f"{PATH}/{node}"), GpuNodePlan)
        return self._write(node, change)

    def _write(self, node: str, change: Callable[[PlanSpec], Object]) -> None:
        body = {"spec": change(self.spec(node))}
        plan = self.plans.get(node)
        if plan is not None:
            version = {"metadata": {"resourceVersion": plan.metadata.resource_version}}
            self._client.patch(f"{PATH}/{node}", {**version, **body})
            return
        uid = self._client.get_object(f"/api/v1/nodes/{node}")["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        metadata = {"name": node, "ownerReferences": [owner]}
        self._client.create(PATH, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, **body})


def _reason(spec: PlanSpec, name: GpuName, reason: str | None) -> str:
    """The reason on one line; by default the reason of an earlier cordon."""
    return spec.cordons.get(name.uuid, "") if reason is None else " ".join(reason.split())


def other_lines(lines: Sequence[str], name: GpuName) -> list[str]:
    """The lines about other GPUs."""
    return [text for text in lines if text.partition(" ")[0] != name.uuid]
