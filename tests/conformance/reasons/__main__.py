"""``make conformance-reasons``: ask the real scheduler whether what is said of pending claims is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from controller.explain.reason import Reason
from tests.conformance.allocator.judge import NO_LIMIT
from tests.conformance.reasons.judge import RealScheduler, is_scheduled
from tests.conformance.reasons.pod_situations import pod_situations
from tests.conformance.reasons.quotas import quota_situations, walk_quotas
from tests.conformance.reasons.statements import (
    Question,
    questions,
    reasoning_of,
    situations,
    smaller_releases,
)
from tests.conformance.reasons.walks import described, message_of, walk
from tests.harness.cluster import Cluster
from tests.harness.progress import SILENT, Progress
from tests.support.control_plane import control_plane
from tests.support.features import has
from tests.support.queues import Situation

T = TypeVar("T")

QUESTIONS_PER_SECOND = 10
QUOTAS_SHARE = 20
"""One of so many situations has quotas."""


@click.command()
@click.option("--situations", "count", default=2000, show_default=True, help="Half of them with free devices.")
@click.option("--seed", "seed_", default=1, show_default=True, help="Of the generated situations.")
def main(count: int, seed_: int) -> None:
    """Check every statement about claims that wait, by doing what it says on the real scheduler; fail if one is false.

    In half of the situations a claim does not fit on up to three nodes of different products, with devices held,
    cordons, taints, DeviceTaintRules and faults. In the other half a free GPU is offered, and resources, taints,
    labels, or NICs of another driver are in the way of the pod; in one of ten a ResourceQuota is in that of its claim.
    """
    with control_plane("reasons", {"kube-scheduler": NO_LIMIT}) as cluster:
        false, summary = check(cluster, count, seed_, Progress())
    for text in false:
        click.echo(f"not true: {text}\n")
    click.echo(summary)
    raise SystemExit(1 if false else 0)


def check(cluster: Cluster, count: int, number: int, progress: Progress = SILENT) -> tuple[list[str], str]:
    """The false statements about ``count`` situations, and how many statements of which reasons there were.

    Without shared counters in ``cluster``, all situations are of the kind in which a GPU is free.
    """
    scheduler = RealScheduler(cluster)
    half = count // 2 if has(cluster, "shared counters") else 0
    lacking = generate(situations(), half, number, lambda there: _reason(there) is not None)
    asked = [question for there in lacking for question in (*questions(there), *smaller_releases(there))]
    codes = Counter(str(reason.code) for there in lacking if (reason := _reason(there)) is not None)
    refused = generate(quota_situations(has(cluster, "extended resources")), count // QUOTAS_SHARE, number)
    drawn = generate(pod_situations(has(cluster, "device taint rules")), count - half - len(refused), number)
    with progress.part(f"{len(drawn)} pods", len(drawn) * 3 / QUESTIONS_PER_SECOND):
        walks = walk(scheduler, drawn)
    with progress.part(f"{len(refused)} claims under quotas", len(refused)):
        quota_walks = walk_quotas(cluster.api, refused)
    false = [f"{text}\n{described(each.now)}" for each in walks for text in each.false]
    false += [f"{text}\n{quota_walk.quotas}" for quota_walk in quota_walks for text in quota_walk.false]
    asked += [question for each in walks for question in each.questions]
    said = [reason for pod_walk in walks for reason in pod_walk.reasons]
    said += [reason for quota_walk in quota_walks for reason in quota_walk.reasons]
    codes += Counter(str(reason.code) for reason in said)
    with progress.part(f"{len(asked)} statements", len(asked) / QUESTIONS_PER_SECOND):
        false += _false(scheduler, asked)
    kinds = ", ".join(f"{times} {code}" for code, times in codes.most_common())
    statements = len(asked) + len(said)
    return (
        false,
        f"{half + len(walks) + len(quota_walks)} situations ({kinds}), {statements} statements: {len(false)} false",
    )


def _false(scheduler: RealScheduler, asked: list[Question]) -> Iterable[str]:
    pods = scheduler.reports([question.there for question in asked])
    for question, pod in zip(asked, pods, strict=True):
        if is_scheduled(pod) != question.expected:
            yield f"{question.sentence} [{message_of(pod) or 'it fits'}]\n{described(question.there)}"


def generate(
    strategy: SearchStrategy[T],
    count: int,
    number: int,
    accepted: Callable[[T], Any] = lambda _: True,
) -> list[T]:
    """``count`` accepted situations; the same for the same ``number``."""
    found: list[T] = []
    if not count:
        return found

    @seed(number)
    @settings(
        max_examples=count * 4,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def gather(there: T) -> None:
        if len(found) < count and accepted(there):
            found.append(there)

    gather()
    assert len(found) == count
    return found


def _reason(there: Situation) -> Reason | None:
    reasoning, pending = reasoning_of(there)
    return reasoning.reason(pending)


if __name__ == "__main__":
    main()
