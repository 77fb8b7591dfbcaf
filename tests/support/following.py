"""What a plan follower is given by the cluster and by its disk, as a test wants it at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from driver.kube.types import GpuNodePlan
from driver.slices.build import PublishedGpu
from driver.slices.dropped_fields import KeptFields
from kubelet_plugin.plan.plan_file import PlanMemory, RememberedPlan


@dataclass(frozen=True)
class GivenInstructions:
    """``Instructions`` that are asked of the test."""

    plan: Callable[[], GpuNodePlan | None]
    controller_is_alive: Callable[[], bool] = lambda: True
    publishes_all: Callable[[], bool | None] = lambda: False
    has_controller: Callable[[], bool] = lambda: False
    lacks_plan: Callable[[], bool] = lambda: False
    labels: Callable[[], Mapping[str, str] | None] = lambda: None
    configs: Callable[[], str | None] = lambda: None


class GivenSlices:
    """``PublishedSlices`` that are asked of the test."""

    def __init__(
        self, names: Callable[[], Iterable[str]] = tuple, has_counters: Callable[[PublishedGpu], bool] = lambda _: False
    ) -> None:
        self._names, self.has_counters = names, has_counters

    def device_names(self) -> set[str]:
        return set(self._names())


class GivenFields(KeptFields):
    """What the API server drops, by the test."""

    def __init__(self, dropped: Callable[[], tuple[str, ...]]) -> None:
        self._given = dropped

    @property
    def dropped(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._given()


class GivenStore(RememberedPlan):
    """Starts with ``memory`` and passes what is saved to ``keep``."""

    def __init__(self, memory: PlanMemory | None, keep: Callable[[PlanMemory], None] = lambda _: None) -> None:
        super().__init__(memory)
        self._keep = keep

    def save(self, memory: PlanMemory, *, durable: bool) -> None:
        self._keep(memory)
