"""The reconciler of a node under test, by hand: rounds when a test wants them, a clock that stands, Events kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from driver.kube.events import Type
from driver.kube.types import Reference
from driver.model.gpu_events_and_conditions import ConditionType
from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.health.failed_preparations import FailedPreparations
from kubelet_plugin.reconcile.orphans import Orphans
from kubelet_plugin.reconcile.recovery import ClaimReconciler
from kubelet_plugin.status.events import PluginEvents
from tests.support.claims import NODE
from tests.support.node import NodeUnderTest

HOUR_S = 3600.0


@dataclass
class Care:
    """``events`` are (kind and name of the object, reason, message); ``troubles`` what devices lack, by name."""

    under: NodeUnderTest
    now: float = 1000.0
    events: list[tuple[str, str, str]] = field(default_factory=list)
    troubles: dict[tuple[str, ConditionType], str] = field(default_factory=dict)
    orphans_of: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.teller = PluginEvents(self._record, NODE)
        node, preparer, api = self.under.node, self.under.preparer, self.under.api
        self.orphans = Orphans(node, preparer, api, self.teller, self.orphans_of.append, lambda: self.now)
        search = self.orphans.search_if_due
        notifier = ChangeNotifier()
        self.failed = FailedPreparations(notifier, lambda: self.now, lambda: self.now)
        observe = self.failed.observe
        self.reconciler = ClaimReconciler(node, preparer, self.teller, self.note, search, observe, lambda: self.now)

    def look(self, after_s: float = 0.0) -> None:
        """One round, so much later."""
        self.now += after_s
        self.reconciler.reconcile()

    def look_long(self) -> None:
        """As many rounds as an hour brings."""
        for _ in range(30):
            self.look(HOUR_S / 30)

    def reasons(self, about: str) -> list[str]:
        return [reason for each, reason, _ in self.events if each == about]

    def note(self, device: str, kind: ConditionType, reason: str | None) -> None:
        if reason is None:
            self.troubles.pop((device, kind), None)
        else:
            self.troubles[device, kind] = reason

    def _record(self, about: Reference, reason: str, message: str, _type: Type, series: str) -> None:
        self.events.append((f"{about.kind}/{about.name}", reason, message))
