"""One real cluster for all end-to-end tests, and a plugin process on its node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.features import has
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import Workloads

DISJOINT = PluginFlags(layout="0=1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb;1=3g.40gb,3g.40gb")
"""A node without controller whose API server keeps no counters offers partitions only where its layout names them."""


@pytest.fixture(autouse=True, scope="module")
def _features_of_module(request: pytest.FixtureRequest) -> None:
    """Before other fixtures of the module, which may need the features."""
    skip_without_features(request)


@pytest.fixture(autouse=True)
def _features(request: pytest.FixtureRequest) -> None:
    skip_without_features(request)


def skip_without_features(request: pytest.FixtureRequest) -> None:
    """Skip the tests on a cluster that lacks a feature of their mark ``needs``."""
    needed = [feature for mark in request.node.iter_markers("needs") for feature in mark.args]
    if needed:
        skip_without(request.getfixturevalue("cluster"), *needed)


def skip_without(cluster: Cluster, *features: str) -> None:
    missing = [feature for feature in features if not has(cluster, feature)]
    if missing:
        pytest.skip(f"Kubernetes {cluster.release.kubernetes} has no {', '.join(missing)}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster with one node, Tessera's classes and RBAC."""
    binaries = os.environ.get("TESSERA_BINARIES")
    settings = Settings(name="e2e", binaries=Path(binaries) if binaries else None)
    with Cluster.start(settings, Progress()) as running:
        install(running)
        yield running


@pytest.fixture(scope="session")
def plugin_process(cluster: Cluster) -> Iterator[PluginProcess]:
    process = PluginProcess(cluster, cluster.nodes[0], PluginFlags() if has(cluster, "shared counters") else DISJOINT)
    process.start()
    yield process
    process.stop()
    assert process.refused() == []


@pytest.fixture
def plugin(plugin_process: PluginProcess) -> PluginProcess:
    """The node's plugin, running, with nothing held; a test that ended it gets it back here."""
    if not plugin_process.running:
        plugin_process.stop()
        plugin_process.start()
    wait_for(plugin_process.everything_offered, 60, "what the test before used is offered again")
    return plugin_process


@pytest.fixture
def workloads(cluster: Cluster, plugin: PluginProcess) -> Iterator[Workloads]:
    """Pods and claims of one test: all are gone, and so is everything made for them, when it ends."""
    own = Workloads(cluster)
    yield own
    own.delete_all()
    if not plugin.running:
        plugin.stop()
        plugin.start()
    own.wait_until_gone()
    assert not plugin.records()
    assert not plugin.cdi_specs()
