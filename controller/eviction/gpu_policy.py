"""GpuPolicy: which pods may be evicted for which others (docs/taking-back.md).

The policy of the victim decides. A pod that no policy matches, or whose policy enables neither preemption nor reclaim,
is never evicted for another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from driver.errors import invalid_fields
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_all
from driver.kube.types import Reference
from driver.model.plan import API_VERSION

PATH = f"/apis/{API_VERSION}/gpupolicies"

Names = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=253)], ...], Field(max_length=1000)]

TimeOfDay = Annotated[str, Field(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
Duration = Annotated[str, Field(min_length=2, pattern="^([0-9]{1,4}h)?([0-9]{1,4}m)?([0-9]{1,4}s)?$")]


def seconds_of(duration: str) -> int:
    parts = re.findall("([0-9]+)([hms])", duration)
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


class _PolicyPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class PreemptionRules(_PolicyPart):
    """Pods of the policy may be evicted for waiting pods of higher priority.

    ``victims``: DeviceClasses, of which each claim of a victim has one; none: of any. ``by_namespaces``: of the waiting
    pods. Tenants can choose any PriorityClass, so an empty list allows none.
    """

    enabled: Annotated[bool, Field(strict=True)] = False
    victims: Annotated[Names, Field(alias="from")] = ()
    by_namespaces: Names = ()


class ReclaimRules(_PolicyPart):
    """Pods with idle devices may be evicted, whatever their priority.

    ``when``: Contended only for a pod that waits for these devices. ``action``: Event evicts no pod. ``keep_at_most``:
    how long after their last activity the annotation ``keep_until`` of a pod protects it.
    """

    idle_after: Duration = "15m"
    when: Literal["Contended", "Always"] = "Contended"
    action: Literal["Event", "Evict"] = "Event"
    keep_at_most: Duration = "24h"


class RepackRules(_PolicyPart):
    """``movable``: pods of the policy that can have their devices elsewhere may be evicted so that a waiting pod gets
    full GPUs; ``max_per_hour`` of them."""

    movable: Annotated[bool, Field(strict=True)] = False
    max_per_hour: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 4


class EvictionBudget(_PolicyPart):
    """Most pods that are evicted within an hour by the policy, and of one namespace. Victims go all or none."""

    pods_per_hour: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 10
    per_namespace: Annotated[int, Field(strict=True, ge=0, le=10_000)] | None = None


class QuietHours(_PolicyPart):
    """A part of the day in which the policy evicts no pod. It ends on the next day unless ``begin`` is before
    ``end``; ``days``: those on which it begins."""

    begin: Annotated[TimeOfDay, Field(alias="from")]
    end: Annotated[TimeOfDay, Field(alias="to")]
    days: Annotated[tuple[Day, ...], Field(min_length=1, max_length=7)] = get_args(Day)
    time_zone: ZoneInfo

    def end_of(self, now: datetime) -> datetime | None:
        """When the part that ``now`` is in ends; None: it is in none."""
        zone, begin, end = self.time_zone, time.fromisoformat(self.begin), time.fromisoformat(self.end)
        today = now.astimezone(zone).date()
        for day in (today - timedelta(1), today):
            # When clocks are set back, a time is there twice: the first one begins, the second one ends.
            begins = min(_both(day, begin, zone), key=datetime.timestamp)
            ends = max(_both(day + timedelta(begin >= end), end, zone), key=datetime.timestamp)
            if get_args(Day)[day.weekday()] in self.days and begins <= now < ends:
                return ends
        return None


def _both(day: date, at: time, zone: ZoneInfo) -> list[datetime]:
    return [datetime.combine(day, at.replace(fold=fold), zone) for fold in (0, 1)]


class PolicySpec(_PolicyPart):
    """``priority``: of several policies that match a pod the highest counts, then the first by name.

    ``mode``: DryRun evicts no pod. ``namespaces``, ``device_classes``: those of the pods that it matches; empty: all.
    """

    priority: Annotated[int, Field(strict=True)] = 0
    mode: Literal["DryRun", "Active"] = "DryRun"
    namespaces: Names = ()
    device_classes: Names = ()
    preemption: PreemptionRules = PreemptionRules()
    reclaim: ReclaimRules | None = None
    repack: RepackRules = RepackRules()
    budget: EvictionBudget = EvictionBudget()
    quiet_hours: Annotated[tuple[QuietHours, ...], Field(max_length=20)] = ()

    @property
    def evicts_idle(self) -> bool:
        return self.mode == "Active" and self.reclaim is not None and self.reclaim.action == "Evict"

    @property
    def acting(self) -> PolicySpec:
        """Without what it only reports."""
        nothing = PolicySpec()
        parts = {"preemption": nothing.preemption, "repack": nothing.repack} if self.mode == "DryRun" else {}
        return self if self.evicts_idle else self.model_copy(update={**parts, "reclaim": None})

    def matches(self, namespace: str, classes: Iterable[str]) -> bool:
        return (not self.namespaces or namespace in self.namespaces) and (
            not self.device_classes or not set(self.device_classes).isdisjoint(classes)
        )


class PolicyMetadata(BaseModel):
    """What else a manifest has there does not matter."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    uid: str = ""


class GpuPolicy(_PolicyPart):
    """One policy of the cluster."""

    api_version: Literal["gpu.tessera.dev/v1alpha1"]
    kind: Literal["GpuPolicy"]
    metadata: PolicyMetadata
    spec: PolicySpec = PolicySpec()

    @property
    def reference(self) -> Reference:
        return policy_reference(self.metadata.name, self.metadata.uid)


class GpuPolicies:
    """All policies."""

    def __init__(self, policies: Iterable[GpuPolicy]) -> None:
        self._in_order = sorted(policies, key=lambda policy: (-policy.spec.priority, policy.metadata.name))

    @property
    def acting(self) -> list[GpuPolicies]:
        """The same without what they only report, which must not keep others from acting; empty if that is all, or
        nothing."""
        acting = [policy.model_copy(update={"spec": policy.spec.acting}) for policy in self._in_order]
        acts = any(policy.spec.mode == "Active" for policy in acting)
        return [GpuPolicies(acting)] if acts and acting != self._in_order else []

    def of_pod(self, namespace: str, classes: Iterable[str]) -> GpuPolicy | None:
        """The policy that decides over a pod of ``namespace`` with claims of ``classes``."""
        names = frozenset(classes)
        return next((policy for policy in self._in_order if policy.spec.matches(namespace, names)), None)

    def refusal(self, namespace: str, classes: frozenset[str], contender: str) -> str | None:
        """Why such a pod may not be evicted for one of the namespace ``contender``; None: it may."""
        policy = self.of_pod(namespace, classes)
        if policy is None:
            return "no GpuPolicy matches it"
        name, rules = policy.metadata.name, policy.spec.preemption
        if not rules.enabled:
            return f"GpuPolicy {name} does not enable preemption"
        if contender not in rules.by_namespaces:
            return f"GpuPolicy {name} lets no pods of namespace {contender} take its devices (preemption.byNamespaces)"
        if rules.victims and not classes <= set(rules.victims):
            others = ", ".join(sorted(classes - set(rules.victims)))
            return f"GpuPolicy {name} does not list class {others} in preemption.from"
        return None


def policy_reference(name: str, uid: str) -> Reference:
    return Reference("GpuPolicy", name, uid=uid, api_version=API_VERSION)


def parse_policy(content: object, place: str) -> GpuPolicy:
    """The policy that a manifest holds. Raises UsageError that names every invalid field; ``place`` begins it."""
    try:
        return GpuPolicy.model_validate(content)
    except ValidationError as error:
        raise invalid_fields(place, error) from error


def read_policies(client: KubeClient) -> Iterator[dict[str, Any]]:
    """The manifests of all policies of the cluster. Raises ApiError, with status 404 if it knows no such objects."""
    for item in read_all(client, PATH, dict):
        yield {"apiVersion": API_VERSION, "kind": "GpuPolicy", **item}
