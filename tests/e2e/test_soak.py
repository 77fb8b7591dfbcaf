"""A minute of `make soak`: hundreds of random claims on a real API server and scheduler leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.soak.run import Plan, soak
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.metrics import total

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.needs("shared counters")]

LOAD = Plan(duration_s=40, rate=200, kills=0, seed=7)
"""With the start of the cluster and the end of the last pods that is a minute."""

BUSY = 100
"""Claims that must have been served, or it was no load: four of five that come."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("soak") as running:
        install(running)
        yield running


def test_claims_that_come_and_go_by_the_hundred_leave_nothing_behind(cluster: Cluster) -> None:
    report = soak(cluster, LOAD, Progress())
    assert report.problems == []
    assert report.tally.served > BUSY
    assert len(report.taken) > 10
    metrics, tally = report.metrics, report.tally
    assert total(metrics, "tessera_prepare_duration_seconds", "_count", result="success") == len(tally.prepare_ms)
    assert total(metrics, "tessera_partitions") == 0
    assert total(metrics, "tessera_held_devices") == 0
    assert total(metrics, "tessera_prepared_claims") == 0
    assert total(metrics, "tessera_offers", type="gpu") == 8
    assert total(metrics, "tessera_slice_writes_total") > 0
    assert total(metrics, "tessera_api_requests_total", verb="get", resource="resourceclaims", code="200") > BUSY
    assert total(metrics, "tessera_faults_total") == tally.retried
