"""Helm itself on a local cluster, as the admin, with the chart as people get it."""

from __future__ import annotations

import json
import subprocess
import sys

from driver.errors import EnvironmentFault
from tests.harness.cluster import Cluster

HELM = """
import json, sys, helm_python
kubeconfig, namespace, action, arguments, options = sys.argv[1:]
with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
    getattr(config, action)(*json.loads(arguments), **json.loads(options))
"""
HELM_S = 300.0


def helm(cluster: Cluster, namespace: str, action: str, *arguments: object, **options: object) -> None:
    """A method of ``helm_python.Config`` by its name: install, upgrade, uninstall. Raises EnvironmentFault.

    In a process of its own, whose home is the cluster's directory: helm leaves its cache there.
    """
    given = (str(cluster.kubeconfig), namespace, action, json.dumps(arguments), json.dumps(options))
    command = [sys.executable, "-c", HELM, *given]
    home = {"HOME": str(cluster.directory)}
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=HELM_S, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(f"helm {action}: {done.stderr.strip()}")
