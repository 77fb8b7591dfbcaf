"""A part of the conformance table, asked of the real cluster again, so that the table can't grow old unnoticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import table
from tests.conformance.__main__ import rows_of
from tests.conformance.judge import Judge, judging
from tests.conformance.table import Row

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ASKED = 25
RENEW = "renew the table with `make conformance` and see what our engine says of the difference"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging("conformance-e2e") as asked:
        yield asked


def spread(rows: dict[str, Row], count: int) -> dict[str, Row]:
    """So many of the rows, from all over the table."""
    names = list(rows)
    return {name: rows[name] for name in names[:: -(-len(names) // count)]}


def test_the_real_cluster_still_says_what_the_table_says(judge: Judge) -> None:
    kept = spread(table.read(), ASKED)
    assert {row.valid for row in kept.values()} == {True, False}
    assert {answer for row in kept.values() for answer in row.devices.values()} == {True, False, "error"}
    assert rows_of(judge, {name: row.expression for name, row in kept.items()}) == kept, RENEW
