"""Why claims are pending, as the page of a standby and the commands find it: the same that the leader reports."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from controller.cluster.claim_index import PoolDevice
from controller.decision.explain import decided_view
from controller.explain.pipeline import NOT_EXAMINED, ReasonFinder
from controller.explain.reason import ClaimReason, ReasonCode
from controller.explain.situation import Situation
from controller.report.claim_explainer import Explainer
from controller.report.cluster_view import ClusterReads, ClusterView, unreported_nodes
from controller.settings import ControllerSettings
from driver.clock import Clock, seconds_time
from driver.kube.controller_heartbeat import EVICT_AFTER
from tests.support.api_server import ObjectApi
from tests.support.clock import FakeClock
from tests.support.map_cluster import MapCluster
from tests.support.queues import FULL, profile, request
from tests.support.queues import Situation as Objects

OLD = "2026-01-01T00:00:00Z"
FENCE = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
HEARTBEAT = "/apis/coordination.k8s.io/v1/namespaces/tessera/leases/tessera-controller-heartbeat"
REFUSED: dict[str, Any] = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable",
        }
    ]
}


def disjoint() -> MapCluster:
    """One GPU, which is offered whole."""
    return MapCluster().node("n", {"spec": {"offerMode": "Disjoint"}}).gpu("n", 0).offers("n", "gpu-0")


def said(view: ClusterView, claim: str) -> tuple[str, str]:
    [found] = [each for each in Explainer(view).pending(lambda: False) if each.claim == f"default/{claim}"]
    return found.code, found.message


def test_with_disjoint_offers_a_claim_behind_others_is_told_so() -> None:
    cluster = MapCluster().node("n", {"spec": {"offerMode": "Disjoint"}}).gpu("n", 0)
    cluster.offers("n", "gpu-0-mig-1g10gb-6")
    cluster.situation.wants(request(selector=FULL), name="first", priority=1)
    cluster.situation.wants(request(selector=FULL), name="second")
    code, message = said(cluster.view(), "second")
    assert code == ReasonCode.BEHIND
    assert message.endswith("is planned or reserved for other pods (planned for default/first)")
    assert said(cluster.view(), "first")[0] == ReasonCode.RESHAPING


def test_with_disjoint_offers_a_claim_for_which_a_gpu_is_changed_is_told_so() -> None:
    cluster = disjoint()
    cluster.situation.wants(request(selector=profile("1g.10gb")))
    assert said(cluster.view(), "claim") == (ReasonCode.RESHAPING, "gpu-0 of node n is changed to offer 1g.10gb")


def test_a_pod_that_waits_for_long_keeps_its_reservation_before_others() -> None:
    cluster = MapCluster().node("n", {"spec": {"offerMode": "Disjoint"}})
    cluster.gpu("n", 0).holds("team/holder", "n", "gpu-0-mig-1g10gb-0")
    cluster.situation.wants(request(selector=FULL), name="large", priority=1, metadata={"creationTimestamp": OLD})
    now = {"creationTimestamp": seconds_time(datetime.now(UTC))}
    cluster.situation.wants(request(selector=profile("1g.10gb")), name="small", metadata=now)
    assert said(cluster.view(), "large")[0] == ReasonCode.HELD
    assert said(cluster.view(), "small")[0] == ReasonCode.BEHIND


def test_what_is_not_known_of_nodes_that_have_not_reported_is_said() -> None:
    cluster = MapCluster().gpu("n", 0).node("n2", {"metadata": {"creationTimestamp": OLD}})
    cluster.situation.wants(request(selector=profile("9g.90gb")))
    code, message = said(cluster.view(), "claim")
    assert code == ReasonCode.NOTHING_MATCHES
    assert message.endswith("(nothing is known yet of the GPUs of n2)")


def test_while_a_node_may_still_report_nothing_is_said_of_what_all_lack() -> None:
    started = {"metadata": {"creationTimestamp": seconds_time(datetime.now(UTC))}}
    cluster = MapCluster().gpu("n", 0).node("n2", started)
    cluster.situation.wants(request(selector=profile("9g.90gb")))
    code, message = said(cluster.view(), "claim")
    assert code == ReasonCode.WAITS
    assert message.startswith("no known GPU satisfies it, and the GPUs of n2 have not been reported yet")


def pending_long() -> MapCluster:
    """A claim for which a device has been offered for longer than scheduling takes."""
    cluster = MapCluster().gpu("n", 0).offers("n", "gpu-0")
    cluster.situation.wants(request(selector=FULL), metadata={"creationTimestamp": OLD}, status=REFUSED)
    return cluster


class Reads(ClusterReads):
    """What a view reads."""

    def __init__(self, fenced: frozenset[PoolDevice] | None = frozenset(), silent: float | None = None) -> None:
        self._fenced, self._silent = fenced, silent
        self.clock = Clock()

    def fenced(self) -> frozenset[PoolDevice] | None:
        return self._fenced

    def controller_silent(self) -> float | None:
        return self._silent


def test_a_fenced_device_is_none_that_the_scheduler_could_take() -> None:
    view, fenced = pending_long().view(), frozenset({PoolDevice("n-gpu.tessera.dev", "gpu-0")})
    assert said(replace(view, reads=Reads()), "claim")[0] == ReasonCode.UNUSED
    assert said(replace(view, reads=Reads(fenced)), "claim")[0] == ReasonCode.WAITS


def test_where_the_fence_can_not_be_read_no_device_is_said_to_be_offered() -> None:
    code, message = said(replace(pending_long().view(), reads=Reads(None)), "claim")
    assert code == ReasonCode.UNUSED
    assert message.endswith("; gpu-0 of node n would do and has been published")


def test_a_silent_controller_is_named_where_enough_is_free() -> None:
    cluster = MapCluster().gpu("n", 0).offers("n", "gpu-0-mig-1g10gb-6")
    cluster.situation.wants(request(selector=FULL))
    code, message = said(replace(cluster.view(), reads=Reads(silent=37.2)), "claim")
    assert code == ReasonCode.WAITS
    assert "the controller, which decides what is offered, has sent no heartbeat for 37 s" in message


@pytest.mark.parametrize(("settings", "heartbeats"), [(ControllerSettings(), 0), (None, 1)])
def test_the_fence_is_read_where_the_controller_is(settings: ControllerSettings | None, heartbeats: int) -> None:
    with ObjectApi() as api:
        api.store(FENCE, data={"n-gpu.tessera.dev": "gpu-0 gpu-1"})
        writer = {"time": seconds_time(datetime.now(UTC)), "fieldsV1": {"f:spec": {"f:renewTime": {}}}}
        metadata = {"name": "tessera-controller-heartbeat", "namespace": "tessera", "managedFields": [writer]}
        api.store(HEARTBEAT, spec={}, metadata=metadata)
        reads = ClusterReads(api.server.client(), settings)
        pool = "n-gpu.tessera.dev"
        assert reads.fenced() == frozenset({PoolDevice(pool, "gpu-0"), PoolDevice(pool, "gpu-1")})
        assert reads.controller_silent() is None
        assert api.count("list", "/apis/coordination.k8s.io/v1/leases") == heartbeats


@pytest.mark.parametrize(
    ("settings", "annotation", "evicts_after"),
    [
        (None, "5.0", 5.0),
        (None, "0.0", 0.0),
        (None, None, None),
        (None, "soon", None),
        (ControllerSettings(evict_failed_starts_s=7), "5.0", 7.0),
    ],
)
def test_when_pods_are_evicted_is_what_the_controller_publishes_or_its_own_setting(
    settings: ControllerSettings | None, annotation: str | None, evicts_after: float | None
) -> None:
    with ObjectApi() as api:
        annotations = {EVICT_AFTER: annotation} if annotation is not None else {}
        api.store(HEARTBEAT, spec={}, metadata={"namespace": "tessera", "annotations": annotations})
        assert ClusterReads(api.server.client(), settings).evicts_after == evicts_after


def test_the_page_of_the_leader_shows_what_it_decided_and_finds_nothing_anew() -> None:
    cluster = pending_long()
    view = cluster.view()
    [pending] = view.queue.pending
    reasons = {pending.key: ClaimReason(pending, ReasonCode.HELD, "as decided")}
    decided = decided_view(view.snapshot, view.devices, view.queue, reasons, Reads())
    assert said(decided, "claim") == (ReasonCode.HELD, "as decided")
    assert decided.queue.pending is view.queue.pending
    assert decided.queue.feasibility is not view.queue.feasibility
    assert decided.queue.feasibility.matching is view.queue.feasibility.matching


class Ticking(FakeClock):
    """Ten seconds pass whenever somebody looks at it."""

    def monotonic(self) -> float:
        self.advance(10)
        return super().monotonic()


def test_a_reason_that_was_kept_for_want_of_time_says_when_it_was_found() -> None:
    objects = Objects(list(MapCluster().gpu("n", 0).view().fleet))
    for name in ("a", "b"):
        objects.wants(request(selector=FULL, count=2), name=name)
    finder = ReasonFinder(60, Ticking(), limit_seconds=15)
    first = {reason.pending.key: reason for reason in finder.find(Situation(objects.queue))}
    second = {reason.pending.key: reason for reason in finder.find(Situation(objects.queue))}
    assert (first["default/a"].found_at, first["default/b"].text) == (None, NOT_EXAMINED)
    assert second["default/b"].found_at is None
    assert second["default/a"].sentence == first["default/a"].sentence
    assert second["default/a"].text.endswith("Z)")
    assert " (as of 2026-11-21T00:" in second["default/a"].text


def test_nodes_have_not_reported_by_the_age_of_their_plans() -> None:
    view = MapCluster().gpu("n", 0).node("n2", {"metadata": {"creationTimestamp": OLD}}).view()
    unreported = unreported_nodes(view.snapshot, Clock())
    assert (unreported.nodes, unreported.may_report) == (("n2",), False)
