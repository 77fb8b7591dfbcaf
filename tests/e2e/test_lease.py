"""What the controller is built on, against the real API server: election, heartbeat, events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from driver.kube.client import KubeClient, load_configuration
from driver.kube.controller_heartbeat import Heartbeat, HeartbeatWatch
from driver.kube.events import Recorder
from driver.kube.lease import LeaderElector, leases
from driver.kube.types import Reference
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.partition import Wire
from tests.support.running import in_thread
from tests.support.workloads import CLAIMS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("lease") as running:
        install(running)
        yield running


def client(cluster: Cluster, account: str) -> KubeClient:
    """With the rights that the chart gives the ServiceAccount."""
    return KubeClient(load_configuration(cluster.service_account_kubeconfig("tessera", account)), "test")


class Candidate:
    """An elector with a connection of its own; ``terms`` are the times it led from and to."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.wire = Wire(cluster.server)
        direct = cluster.service_account_kubeconfig("tessera", "tessera-controller")
        kubeconfig = folder / name
        kubeconfig.write_text(direct.read_text().replace(cluster.server, self.wire.url))
        client = KubeClient(load_configuration(kubeconfig), name)
        self.elector = LeaderElector(client, "tessera", "tessera-controller", name)
        self.leads = False
        self.terms: list[tuple[float, float]] = []

    def run(self, stop: threading.Event) -> None:
        self.elector.run(stop, self.lead)

    def lead(self, lost: threading.Event) -> None:
        began, self.leads = time.monotonic(), True
        lost.wait()
        self.leads = False
        self.terms.append((began, time.monotonic()))


def test_a_leader_that_is_stopped_hands_over_and_one_that_is_cut_off_stops_first(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, two, three = (Candidate(cluster, name, tmp_path) for name in ("one", "two", "three"))
    with one.wire, two.wire, three.wire, ExitStack() as everything, ExitStack() as first:
        first.enter_context(in_thread(one.run))
        wait_for(lambda: one.leads, 60, "the first leads")
        for candidate in (two, three):
            everything.enter_context(in_thread(candidate.run))
        first.close()
        stopped = time.monotonic()
        wait_for(lambda: two.leads or three.leads, 12, "a second leads before the Lease of 15 s has run out")
        print(f"taken over {time.monotonic() - stopped:.1f} s after the leader was stopped")
        second, last = (two, three) if two.leads else (three, two)
        second.wire.cut()
        cut = time.monotonic()
        wait_for(lambda: last.leads, 60, "the last leads")
        print(f"taken over {time.monotonic() - cut:.1f} s after the leader was cut off")
        assert not second.leads
        second.wire.mend()
    terms = sorted(one.terms + two.terms + three.terms)
    assert len(terms) == 3
    assert all(before[1] < after[0] for before, after in pairwise(terms))
    lease = cluster.api.get(f"{leases('tessera')}/tessera-controller")
    assert lease["spec"]["leaseTransitions"] == 2
    assert "holderIdentity" not in lease["spec"]


def test_a_node_sees_the_controllers_heart_beat_with_the_right_to_that_lease_alone(cluster: Cluster) -> None:
    watch = HeartbeatWatch(client(cluster, "tessera-node"), "tessera")
    heart = Heartbeat(client(cluster, "tessera-controller"), "tessera", "one")
    heart.beat()
    with in_thread(watch.run, heart.beat):
        wait_for(lambda: watch._cache.synced, 60, "the list")
        assert not watch.alive()
        heart.beat()
        wait_for(watch.alive, 60, "alive")
        lease = cluster.api.get(f"{leases('tessera')}/tessera-controller-heartbeat")
        assert watch._cache.wait_for_version(int(lease["metadata"]["resourceVersion"]), 60)


def events_of(cluster: Cluster, name: str) -> list[dict[str, object]]:
    found = json.loads(cluster.kubectl("events", "--for", f"resourceclaim/{name}", "-o", "json"))
    items: list[dict[str, object]] = found["items"]
    return items


def test_kubectl_shows_the_last_message_of_an_event_and_how_often_it_came(cluster: Cluster) -> None:
    device = {"name": "gpu", "exactly": {"deviceClassName": "gpu-training"}}
    claim = cluster.api.post(CLAIMS, {"metadata": {"name": "told"}, "spec": {"devices": {"requests": [device]}}})
    about = Reference("ResourceClaim", "told", "default", claim["metadata"]["uid"], "resource.k8s.io/v1")
    recorder = Recorder(client(cluster, "tessera-controller"), "tessera-controller", "controller-0")
    with in_thread(recorder.run, recorder.wake):
        for message in ("no GPU has 141 GB", "no free GPU has 141 GB"):
            recorder.event(about, "NothingFits", message, "Warning")
            wait_for(lambda message=message: message in str(events_of(cluster, "told")), 60, message)  # type: ignore[misc]
        recorder.event(Reference("Node", "node-x"), "StandsAlone", "ü" * 2000)
        wait_for(lambda: "StandsAlone" in cluster.kubectl("get", "events"), 60, "an event of a node")
    described = cluster.kubectl("describe", "resourceclaim", "told")
    assert "(x2 over" in described
    assert "tessera-controller  no free GPU has 141 GB" in described
    assert len(events_of(cluster, "told")) == 1
