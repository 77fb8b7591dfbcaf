"""The ``tessera`` command in the process of the test.

A test that waits runs a command again and again, and the start of an interpreter takes longer than the command.
"""

from __future__ import annotations

from click.testing import CliRunner, Result

from tessera.cli import main
from tests.harness.cluster import Cluster


def run_tessera(cluster: Cluster, command: str, *arguments: str, stdin: str | None = None) -> Result:
    """Run ``tessera COMMAND`` as the administrator of ``cluster``, unless ``arguments`` name another kubeconfig."""
    whole = [command, "--kubeconfig", str(cluster.kubeconfig), *arguments]
    return CliRunner().invoke(main, whole, input=stdin, catch_exceptions=False)
