"""The kubelet's probes of Tessera's pods, on a real cluster of one node: there no two pods want the same port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.in_pods import READY_S, Release, image
from tests.support.ports import kept_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    settings = Settings(name="probes", nodes=1, usual_places=True)
    # Pods have the network of this machine, on which others may run, too.
    with kept_port() as plugin, kept_port() as controller, Cluster.start(settings, Progress()) as cluster:
        probed = {"nodePlugin": {"healthPort": plugin}, "controller": {"healthPort": controller, "replicas": 1}}
        installed = Release(cluster, "sim:h100-1", probed)
        installed.import_image(image())
        installed.install()
        yield installed


def status(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["status"]["containerStatuses"][0]
    return found


def fault(release: Release, *what: str) -> None:
    node = release.cluster.nodes[0].name
    place = ("--host-root", f"/var/lib/tessera/sim/{node}")
    release.run(release.plugin_on(node), "/usr/bin/tessera", "sim", "fault", *place, *what)


def test_the_kubelet_finds_both_processes_started_and_ready(release: Release) -> None:
    pods = release.pods()
    assert len(pods) == 2
    for pod in pods:
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= pod["spec"]["containers"][0].keys()
        assert (status(pod)["started"], status(pod)["ready"], status(pod)["restartCount"]) == (True, True, 0)


def test_a_plugin_without_a_gpu_that_answers_is_not_ready_and_not_restarted(release: Release) -> None:
    node = release.cluster.nodes[0].name
    fault(release, "lose", "--gpu", "0")
    wait_for(lambda: not status(release.plugin_on(node))["ready"], READY_S, "the plugin's pod is not ready")
    fault(release, "clear")
    wait_for(lambda: status(release.plugin_on(node))["ready"], READY_S, "the plugin's pod is ready again")
    assert status(release.plugin_on(node))["restartCount"] == 0
