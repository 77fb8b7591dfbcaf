"""Two GPUs of which small partitions keep both from being whole, on a real API server and scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.controller import plugins
from tests.support.plugin import PluginFlags
from tests.support.waiting_pod import (
    APPS,
    CORE,
    DRA,
    FULL,
    SOON_S,
    end,
    is_refused,
    notebooks,
    pods,
    requesting,
    running_controller,
)

SMALL = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu-inference-1g-10gb"}}]}}
TEMPLATES = {"full": FULL, "small": SMALL}
MOST = 7
"""Partitions 1g.10gb of a GPU."""


@contextmanager
def scattered_nodes(name: str, small: int = 1, owners: str = "replicasets") -> Iterator[Cluster]:
    """A cluster of this name, with a controller and two nodes with an H100 each.

    A notebook of such an owner has a partition of one GPU, ``small`` pods of their own those of the other; ``train``
    waits.
    """
    with control_plane(name) as running:
        install(running, ANY_SIZE)
        with plugins(running, ["one", "two"], PluginFlags(gpus="sim:h100-1")), running_controller(running):
            _scatter(running, small, owners)
            yield running


def _scatter(cluster: Cluster, small: int, owners: str) -> None:
    api = cluster.api
    for name, devices in TEMPLATES.items():
        api.post(f"{DRA}/resourceclaimtemplates", {"metadata": {"name": name}, "spec": {"spec": devices}})
    api.post(f"{CORE}/pods", busybox_pod("filler", **requesting("full")))
    bound(cluster, "filler")
    names = [f"small-{number}" for number in range(MOST)]
    for name in names:
        api.post(f"{CORE}/pods", busybox_pod(name, **requesting("small")))
    bound(cluster, *names)
    end(cluster, "filler")
    api.post(f"{APPS}/{owners}", notebooks("small"))
    wait_for(lambda: notebook(cluster), SOON_S, "the notebook is bound")
    for name in names[small:]:
        end(cluster, name)
    wait_for(lambda: len(api.get(f"{DRA}/resourceclaims")["items"]) == 1 + small, SOON_S, "the other claims are gone")
    api.post(f"{CORE}/pods", busybox_pod("train", **requesting("full")))
    wait_for(lambda: is_refused(cluster), SOON_S, "the scheduler has refused the pod")


def bound(cluster: Cluster, *names: str) -> None:
    def are_bound() -> bool:
        return all(cluster.api.get(f"{CORE}/pods/{name}")["spec"].get("nodeName") for name in names)

    wait_for(are_bound, SOON_S, f"{', '.join(names)} are bound")


def notebook(cluster: Cluster) -> dict[str, Any] | None:
    """The last pod of the notebook's ReplicaSet that is bound."""
    of_node = [pod for pod in pods(cluster, "notebook") if pod["spec"].get("nodeName")]
    return max(of_node, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)
