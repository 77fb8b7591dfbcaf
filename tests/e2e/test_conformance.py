"""A part of the conformance table, asked of the real cluster again, so that the table can't grow old unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import table
from tests.conformance.__main__ import rows_of
from tests.conformance.generated import differences, generated
from tests.conformance.judge import NO_LIMIT, Judge, publish
from tests.conformance.table import Row
from tests.harness.cluster import Cluster
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ASKED = 25
GENERATED = 40
RENEW = "renew the table with `make conformance` and see what our engine says of the difference"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("conformance-e2e", {"kube-scheduler": NO_LIMIT}) as running:
        yield running


def spread(rows: dict[str, Row], count: int) -> dict[str, Row]:
    """So many of the rows, from all over the table."""
    names = list(rows)
    return {name: rows[name] for name in names[:: -(-len(names) // count)]}


@pytest.fixture(scope="module")
def judge(cluster: Cluster) -> Judge:
    publish(cluster)
    return Judge(cluster)


@pytest.mark.needs("consumable capacity")
def test_the_real_cluster_still_says_what_the_table_says(judge: Judge) -> None:
    kept = spread(table.read(), ASKED)
    assert {row.valid for row in kept.values()} == {True, False}
    assert {answer for row in kept.values() for answer in row.devices.values()} == {True, False, "error"}
    assert rows_of(judge, {name: row.expression for name, row in kept.items()}) == kept, RENEW


@pytest.mark.needs("consumable capacity")
def test_generated_expressions_have_the_verdicts_of_the_real_cluster(judge: Judge) -> None:
    texts = generated(GENERATED, seed=1)
    different, costly = differences(judge, texts)
    assert different == []
    assert len(costly) < len(texts) // 4
