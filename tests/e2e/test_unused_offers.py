"""A claim that waits beside a fitting offer, on a real API server: somebody is told before long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.plugin import PluginFlags
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, PODS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 60.0
PATIENCE_S = 2
"""Instead of the minute."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With one node and a controller."""
    with control_plane("unused") as running:
        install(running)
        with plugins(running, ["n1"], PluginFlags()):
            controller = ControllerProcess(running, flags=("--unused-s", str(PATIENCE_S)))
            controller.start()
            yield running
            controller.stop()


def ask(cluster: Cluster, name: str, cpu: str = "1", **spec: Any) -> None:
    """A claim for a small partition, and its pod."""
    devices = {"requests": [asked("gpu-inference-1g-10gb")]}
    cluster.api.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": devices}})
    container = {"resources": {"claims": [{"name": "gpu"}], "requests": {"cpu": cpu}}}
    claims = [{"name": "gpu", "resourceClaimName": name}]
    cluster.api.post(PODS, busybox_pod(name, container=container, resourceClaims=claims, **spec))


def told(cluster: Cluster, name: str) -> dict[str, str]:
    """Messages of the Events on a claim, by reason."""
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    about = [event for event in events if event["involvedObject"].get("name") == name]
    return {event["reason"]: event["message"] for event in about if event["involvedObject"]["kind"] == "ResourceClaim"}


def unused(cluster: Cluster, name: str) -> str:
    """What is said of a claim beside which an offer stands, once it is."""
    return wait_for(lambda: told(cluster, name).get("OfferStandsUnused", ""), SOON_S, f"an Event on claim {name}")


def test_a_pod_that_no_scheduler_looks_at_is_named_with_the_scheduler_it_asks_for(cluster: Cluster) -> None:
    ask(cluster, "forgotten", schedulerName="nobody")
    message = unused(cluster, "forgotten")
    assert "of node n1 would do and has been offered since" in message
    assert "no scheduler has reported on pod forgotten; does a scheduler named nobody run?" in message


def test_what_the_scheduler_misses_instead_is_quoted(cluster: Cluster) -> None:
    ask(cluster, "hungry", cpu="1000")
    wait_for(lambda: "Insufficient cpu" in unused(cluster, "hungry"), SOON_S, "the scheduler's message in the Event")
    assert "the scheduler reports on pod hungry:" in unused(cluster, "hungry")


def test_a_claim_that_is_served_is_not_reported(cluster: Cluster) -> None:
    served = served_in_time(cluster)
    ask(cluster, "later", schedulerName="nobody")
    assert unused(cluster, "later")
    assert told(cluster, served) == {}


def served_in_time(cluster: Cluster) -> str:
    """A claim that was allocated before anybody lost patience; of one for which that took long, somebody is told."""
    for number in range(10):
        name, began = f"served-{number}", time.monotonic()
        ask(cluster, name)
        wait_for(lambda: cluster.api.get(f"{CLAIMS}/{name}").get("status", {}).get("allocation"), SOON_S, name)  # noqa: B023
        if time.monotonic() - began < PATIENCE_S:
            return name
    raise AssertionError(f"no claim was allocated within {PATIENCE_S} s")
