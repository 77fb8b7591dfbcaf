"""GpuNodePlan as the API server has it: one a node, named after it."""

from __future__ import annotations

import msgspec

from driver.kube.objects import ObjectMeta
from driver.model.plan import PlanMode, PlanSpec, PlanStatus

PAUSED = "gpu.tessera.dev/paused"
"""Annotation of a plan: with the value "true" the controller leaves its spec alone, so that a person may edit it."""


class PlanMetadata(ObjectMeta, frozen=True, rename="camel"):
    resource_version: str = ""
    generation: int = 0
    annotations: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def paused(self) -> bool:
        return self.annotations.get(PAUSED) == "true"


class GpuNodePlan(msgspec.Struct, frozen=True):
    """``spec`` is the controller's, ``status`` the node's."""

    metadata: PlanMetadata
    spec: PlanSpec = PlanSpec()
    status: PlanStatus = PlanStatus()

    @property
    def followed(self) -> bool:
        """Whether the node says that it does what this plan, or an earlier one of the same epoch, says."""
        return self.status.mode is PlanMode.PLANNED and self.spec.epoch == self.status.epoch
