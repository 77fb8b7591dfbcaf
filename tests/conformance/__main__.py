"""``python -m tests.conformance``, or ``make conformance``: ask a real cluster for every verdict, write the table."""

from __future__ import annotations

import sys

import click

from tests.conformance.devices import DEVICES
from tests.conformance.expressions import expressions
from tests.conformance.generated import differences, generated
from tests.conformance.judge import Judge, Pair, judging
from tests.conformance.table import Row, write
from tests.harness.progress import Progress


@click.command()
@click.option("--generated", "count", default=0, help="So many generated expressions are compared, too.")
@click.option("--seed", default=0, help="Other generated expressions for each number.")
def main(count: int, seed: int) -> None:
    """Start a cluster without nodes, ask its API server and its scheduler, write verdicts.json."""
    progress = Progress()
    with judging("conformance") as judge:
        with progress.part(f"{len(expressions())} expressions", 120):
            rows = rows_of(judge, expressions())
        with progress.part(f"{count} generated expressions", count):
            different, costly = differences(judge, generated(count, seed))
    write(judge.cluster.release.kubernetes, rows)
    pairs = sum(len(row.devices) for row in rows.values())
    valid = sum(row.valid for row in rows.values())
    click.echo(f"{len(rows)} expressions, {valid} of them valid; {pairs} verdicts on {len(DEVICES)} devices")
    click.echo(f"{count} generated expressions: {len(costly)} refused for their cost, {len(different)} differences")
    for difference in different:
        click.echo(f"  {difference}")
    sys.exit(1 if different else 0)


def rows_of(judge: Judge, texts: dict[str, str]) -> dict[str, Row]:
    """The table's rows, in order."""
    valid = {name for name, text in texts.items() if judge.problem(text) is None}
    verdicts = judge.verdicts(pair for name in texts if name in valid for pair in pairs_of(name, texts[name]))
    return {
        name: Row(
            text, name in valid, {pair[1]: verdicts[pair] for pair in pairs_of(name, text)} if name in valid else {}
        )
        for name, text in texts.items()
    }


def pairs_of(name: str, text: str) -> list[Pair]:
    """One device is enough for an expression that reads nothing of it, or that is about validity."""
    everywhere = "device" in text and not name.startswith("limit")
    return [(text, device) for device in (DEVICES if everywhere else list(DEVICES)[:1])]


if __name__ == "__main__":
    main()
