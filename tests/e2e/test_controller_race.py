"""The real scheduler's late decisions against the real controller's taking back: with the fence nothing overlaps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from driver.errors import ApiError
from tests.bench.kubelet import allocated_claim
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.faults import Circumstances, FaultyController, HeldScheduler, held_scheduler
from tests.support.field import CONFIG_MAP, PROMISED_S, Field, field
from tests.support.late_decisions import LateDecisions, Outcome
from tests.support.workloads import CLAIMS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

LONG_S = float(os.environ.get("TESSERA_RACE_S", "600"))
"""How long the slow race takes."""

BINDING = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/tessera-fence"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("race") as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[Field]:
    with field(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster, nodes: Field) -> Iterator[HeldScheduler]:
    with held_scheduler(cluster) as found:
        yield found


@pytest.fixture
def controller(cluster: Cluster, nodes: Field) -> Iterator[FaultyController]:
    found = FaultyController(cluster, "late", Circumstances(hasty=True, offers=4))
    found.start()
    wait_for(found.leads, 60, "the controller leads")
    nodes.wait_curated()
    yield found
    nodes.end_all()
    found.stop()


def race(
    nodes: Field, scheduler: HeldScheduler, controller: FaultyController, seconds: float, most_s: float
) -> Outcome:
    outcome = LateDecisions(nodes, scheduler, controller, seed=7).run(seconds, most_s)
    print(f"delays up to {most_s:g} s: {outcome}")
    assert outcome.tries
    assert outcome.taken_back
    return outcome


def all_is_well(nodes: Field, outcome: Outcome) -> None:
    assert outcome.overlaps == 0
    assert outcome.refused_by_node == 0
    assert outcome.unpublished
    assert outcome.republished
    nodes.untouched()
    # Not all that still wait would fit beside those that are served.
    nodes.jobs.end(*(name for name in nodes.jobs.names if nodes.allocations.of(name)))
    if waiting := list(nodes.jobs.names):
        nodes.served(*waiting, within_s=PROMISED_S + 600)


@pytest.mark.slow
def test_no_late_decision_of_the_scheduler_overlaps(
    nodes: Field, scheduler: HeldScheduler, controller: FaultyController
) -> None:
    all_is_well(nodes, race(nodes, scheduler, controller, 8, most_s=1))


@pytest.mark.slow
def test_no_late_decision_of_the_scheduler_overlaps_in_thousands_of_tries(
    nodes: Field, scheduler: HeldScheduler, controller: FaultyController
) -> None:
    all_is_well(nodes, race(nodes, scheduler, controller, LONG_S, most_s=10))


@pytest.mark.slow
def test_without_the_fence_whatever_overlaps_is_not_prepared(
    cluster: Cluster, nodes: Field, scheduler: HeldScheduler, controller: FaultyController
) -> None:
    cluster.api.request("DELETE", BINDING)
    outcome = race(nodes, scheduler, controller, LONG_S / 2, most_s=0.1)
    assert outcome.refused == 0
    assert outcome.refused_by_node >= outcome.overlaps


def test_of_two_claims_that_were_given_the_same_memory_the_node_prepares_one(cluster: Cluster, nodes: Field) -> None:
    with suppress(ApiError):  # nothing is fenced
        cluster.api.request("DELETE", CONFIG_MAP)
    kubelets = nodes.kubelets
    for name, device in (("first", "gpu-3-mig-1g10gb-0"), ("second", "gpu-3")):
        allocated_claim(cluster, name, "n1", device)
        wait_for(lambda: kubelets.prepared.keys() | kubelets.refused.keys() >= {name}, 60, "an answer")  # noqa: B023
    assert list(nodes.kubelets.prepared) == ["first"]
    assert "overlaps" in nodes.kubelets.refused.pop("second")
    [overlap] = wait_for(lambda: list(nodes.allocations.overlaps), 60, "the watch has brought both allocations")
    nodes.allocations.overlaps.clear()
    nodes.allocations.touched.clear()  # the node does not publish what overlaps the device that it prepared
    assert "second got n1-gpu.tessera.dev/gpu-3; first has" in overlap
    nodes.kubelets.unprepare("first")
    for name in ("first", "second"):
        cluster.api.request("DELETE", f"{CLAIMS}/{name}")
