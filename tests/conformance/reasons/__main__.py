"""``make conformance-reasons``: ask the real scheduler whether what is said of pending claims is true."""

from __future__ import annotations

from collections import Counter

import click
from hypothesis import HealthCheck, Phase, given, seed, settings

from controller.explain.reason import Reason
from tests.conformance.allocator.judge import NO_LIMIT
from tests.conformance.reasons.judge import RealScheduler
from tests.conformance.reasons.statements import questions, reasoning_of, situations, smaller_releases
from tests.harness.progress import Progress
from tests.support.control_plane import control_plane
from tests.support.queues import Situation

QUESTIONS_PER_SECOND = 10


@click.command()
@click.option("--situations", "count", default=2000, show_default=True, help="Number in which a claim does not fit.")
@click.option("--seed", "seed_", default=1, show_default=True, help="Of the generated situations.")
def main(count: int, seed_: int) -> None:
    """Check every statement about claims that wait, by doing what it says on the real scheduler; fail if one is false.

    The situations have up to three nodes of different products, with devices held, cordons, taints, DeviceTaintRules
    and faults.
    """
    waiting = generate(count, seed_)
    asked = [question for there in waiting for question in (*questions(there), *smaller_releases(there))]
    progress = Progress()
    with control_plane("reasons", {"kube-scheduler": NO_LIMIT}) as cluster:
        scheduler = RealScheduler(cluster)
        with progress.part(f"{len(asked)} statements", len(asked) / QUESTIONS_PER_SECOND):
            answers = list(scheduler.fits([each.there for each in asked]))
    false = [each for each, answer in zip(asked, answers, strict=True) if answer != each.expected]
    for each in false:
        click.echo(f"not true: {each.sentence}\n")
    codes = Counter(str(reason.code) for there in waiting if (reason := _reason(there)) is not None)
    kinds = ", ".join(f"{number} {code}" for code, number in codes.most_common())
    click.echo(f"{count} situations ({kinds}), {len(asked)} statements: {len(false)} false")
    raise SystemExit(1 if false else 0)


def generate(count: int, number: int) -> list[Situation]:
    """``count`` situations in which a claim does not fit; the same for the same ``number``."""
    found: list[Situation] = []

    @seed(number)
    @settings(
        max_examples=count * 4,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(situations())
    def gather(there: Situation) -> None:
        if len(found) < count and _reason(there) is not None:
            found.append(there)

    gather()
    assert len(found) == count
    return found


def _reason(there: Situation) -> Reason | None:
    reasoning, pending = reasoning_of(there)
    return reasoning.reason(pending)


if __name__ == "__main__":
    main()
