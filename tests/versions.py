"""``python -m tests.versions``, or ``make test-versions``: the cluster tests on every older version of Kubernetes.

With ``--smoke`` (``make test-smoke``, part of ``make test``) only the tests marked so, on one version, if it is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import click

from driver.errors import TesseraError
from tests.harness.binaries import cached, ensure_binaries
from tests.harness.progress import Progress, duration
from tests.harness.settings import Settings
from tests.harness.versions import OLDER, VARIABLE, KubernetesRelease, release

PYTEST = (sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadscope", "--no-loadscope-reorder")
SUITE, SMOKE = "cluster and not slow", "smoke"
SMOKE_RELEASE = release("1.35.4")
NAMED_BINARIES = ("TESSERA_BINARIES", "KUBEBUILDER_ASSETS")


@dataclass(frozen=True)
class Result:
    """How the tests ended on one version; ``summary`` is the last line of pytest."""

    passed: bool
    summary: str


def run_tests(on: KubernetesRelease, selection: str) -> Result:
    """Run the selected cluster tests on one version, which is built first where it is missing."""
    try:
        ensure_binaries(on, Progress())
    except TesseraError as error:
        return Result(False, f"not built: {error}")
    environment = {name: value for name, value in os.environ.items() if name not in NAMED_BINARIES}
    environment[VARIABLE] = on.kubernetes
    last = ""
    with subprocess.Popen(
        [*PYTEST, "-m", selection], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(line, nl=False)
            last = line.strip(" =\n") or last
    return Result(process.returncode == 0, last)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--smoke", is_flag=True, help=f"Only tests marked smoke, on {SMOKE_RELEASE.kubernetes} if it is built.")
def main(*, smoke: bool) -> None:
    """Run the cluster tests on every older version of Kubernetes; print a line for each; fail if any failed."""
    if smoke and not cached(SMOKE_RELEASE, Settings().cache).is_dir():
        version = SMOKE_RELEASE.kubernetes
        click.echo(f"Kubernetes {version} is not built: smoke tests skipped (make binaries {VARIABLE}={version})")
        return
    releases = [SMOKE_RELEASE] if smoke else OLDER[::-1]
    lines, failed = [], False
    for number, each in enumerate(releases, 1):
        click.echo(f"\nKubernetes {each.kubernetes} ({number} of {len(releases)})")
        begun = time.monotonic()
        result = run_tests(each, SMOKE if smoke else SUITE)
        failed |= not result.passed
        word = "ok" if result.passed else "FAILED"
        lines.append(f"Kubernetes {each.kubernetes}: {word}, {result.summary} ({duration(time.monotonic() - begun)})")
    click.echo("\n" + "\n".join(lines))
    sys.exit(failed)


if __name__ == "__main__":
    main()
