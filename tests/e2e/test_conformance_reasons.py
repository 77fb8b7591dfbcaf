"""What is said of pending claims and pods in generated situations, done on the real scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.allocator.judge import NO_LIMIT
from tests.conformance.reasons.__main__ import check
from tests.harness.cluster import Cluster
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("reasons-e2e", {"kube-scheduler": NO_LIMIT}) as running:
        yield running


@pytest.mark.parametrize(
    ("count", "number"), [pytest.param(80, 1, id="80"), pytest.param(1920, 2, id="1920", marks=pytest.mark.slow)]
)
def test_what_is_said_is_true_when_it_is_done(cluster: Cluster, count: int, number: int) -> None:
    false, summary = check(cluster, count, number)
    assert not false, "\n".join([summary, *false])
