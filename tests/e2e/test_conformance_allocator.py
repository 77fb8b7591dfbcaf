"""Some generated scenarios, asked of the real scheduler again, so that the kept answers can't grow old unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.allocator import answers
from tests.conformance.allocator.judge import NO_LIMIT, WAVE, Judge
from tests.harness.cluster import Cluster
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("allocator-e2e", {"kube-scheduler": NO_LIMIT}) as running:
        yield running


@pytest.mark.needs("consumable capacity", "shared counters", "device taints")
def test_the_real_scheduler_still_answers_so(cluster: Cluster) -> None:
    kept = answers.read()
    if cluster.release.kubernetes != answers.release():
        pytest.skip(f"the answers are those of Kubernetes {answers.release()}")
    # A whole wave: its scenarios see each other's slices.
    numbers = range(WAVE)
    found = Judge(cluster).answers(numbers)
    different = {
        number: (found[number], kept[number]) for number in kept.keys() & numbers if found[number] != kept[number]
    }
    assert not different, "see what changed, and renew the answers with `make conformance-allocator`"
