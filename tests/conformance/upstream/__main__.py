"""``make conformance-upstream``: Tessera with the scheduler as it is, and as kubernetes#140806 would make it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tests.conformance.upstream.churn import Churn
from tests.conformance.upstream.rule import check_rule
from tests.conformance.upstream.scheduler import PATCH, changed_programs
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.versions import REFERENCE
from tests.support.chart import install
from tests.support.field import field

NODES = 8


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--pods", default=300, show_default=True, help="Number of pods that come and go.")
@click.option("--seed", default=1, show_default=True, help="Of the pods and of who is killed.")
def main(pods: int, seed: int) -> None:
    """Pods of four profiles come and go on eight nodes whose held devices are published only beside offers, while node
    plugins and the controller are killed; exit code 1 unless whatever fits is bound and nothing is given out twice."""
    progress = Progress()
    failed = False
    for title, programs in (
        (f"Kubernetes {REFERENCE.kubernetes} with {PATCH.name}", changed_programs(REFERENCE, progress)),
        (f"Kubernetes {REFERENCE.kubernetes}", None),
    ):
        problems = run(programs, pods, seed, progress, title)
        failed |= bool(problems)
        for problem in problems:
            click.echo(f"FAILED: {title}: {problem}", err=True)
    sys.exit(failed)


def run(programs: Path | None, pods: int, seed: int, progress: Progress, title: str) -> list[str]:
    """One run; what was wrong. ``programs``: those with the change; None: the release as it is."""
    with Cluster.start(Settings(name="upstream", nodes=0, binaries=programs), progress) as cluster:
        install(cluster)
        check_rule(cluster, changed=programs is not None)
        with field(cluster, [f"n{number}" for number in range(NODES)]) as there, Churn(there, seed) as churn:
            with progress.part(f"{pods} pods come and go on {title}", pods) as part:
                churn.run(pods, part)
            click.echo(f"{title}: {churn.summary()} (seed {seed})")
            return churn.problems()


if __name__ == "__main__":
    main()
