"""Tessera as people run it: the chart's pods on a real cluster, from the project's own image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.node import NodeError
from tests.harness.waiting import wait_for
from tests.image.build import Built, ensure_image
from tests.support.chart import CHART, RELEASE, rendered
from tests.support.helm import helm
from tests.support.plugin import SLICES, is_of_monitors

IMAGE = "docker.io/library/tessera:test"
CACHE = Path.home() / ".cache" / "tessera"
HERE = "tessera"
PODS = f"/api/v1/namespaces/{HERE}/pods"
READY_S = 90.0
GONE_S = 60.0

_NO_PORTS = {"hostNetwork": True, "metricsPort": 0, "healthPort": 0}
"""All nodes of a local cluster are one machine with one network: the same port would be taken for the second pod."""


def image() -> Built:
    """The image of this checkout, as IMAGE."""
    return ensure_image(CACHE, [IMAGE])


def values(gpus: str, parts: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Of a release on a local cluster with these simulated GPUs on every node; ``parts`` are more for each process."""
    more = parts or {}
    repository, _, tag = IMAGE.rpartition(":")
    return {
        "gpus": gpus,
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "nodePlugin": {**_NO_PORTS, **more.get("nodePlugin", {})},
        "controller": {**_NO_PORTS, **more.get("controller", {})},
    }


class Release:
    """The chart, installed on a cluster whose nodes are in their usual places and have the image.

    It is the chart of this checkout with its image, or ``package``, a file or an address of a chart that names its own.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpus: str,
        parts: Mapping[str, Mapping[str, Any]] | None = None,
        package: str | None = None,
    ) -> None:
        self.cluster = cluster
        self._chart = package or str(CHART)
        self._values = values(gpus, parts)
        if package:
            del self._values["image"]

    def import_image(self, built: Built) -> None:
        """Make the image known to every node."""
        for node in self.cluster.nodes:
            node.import_image(built.archive)

    def helm_command(self) -> str:
        """What ``install`` is for people who have the program helm."""
        values = (f" \\\n  --set-json '{key}={json.dumps(value)}'" for key, value in self._values.items())
        return f"helm install {RELEASE} deploy/{CHART.name} -n {HERE} --create-namespace{''.join(values)}"

    def install(self, **options: object) -> None:
        """``helm install``, and wait until its pods run and have published the GPUs."""
        helm(self.cluster, HERE, "install", self._chart, RELEASE, self._values, create_namespace=True, **options)
        wait_for(self._all_ready, READY_S, "all of Tessera's pods ready")
        for node in self.cluster.nodes:
            wait_for(lambda name=node.name: self.slices(name), READY_S, f"slices of {node.name}")  # type: ignore[misc]

    def uninstall(self) -> None:
        """``helm uninstall``, and wait until its pods are gone."""
        helm(self.cluster, HERE, "uninstall", RELEASE)
        wait_for(lambda: not self.pods(), GONE_S, "Tessera's pods gone")

    def run_acceptance_job(self, acceptance: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The Job of the chart with these values, once it has ended, and its log."""
        objects = rendered({**self._values, "acceptance": acceptance}, HERE)
        created = [item for item in objects if item["metadata"]["name"].startswith("tessera-acceptance")]
        self.cluster.apply(created)
        [name] = [item["metadata"]["name"] for item in created if item["kind"] == "Job"]
        path = f"/apis/batch/v1/namespaces/{HERE}/jobs/{name}"
        ended = ("succeeded", "failed")
        wait_for(lambda: set(self.cluster.api.get(path)["status"]) & set(ended), READY_S, "the Job has ended")
        return self.cluster.api.get(path), self.cluster.kubectl("logs", "-n", HERE, f"job/{name}")

    def pods(self, component: str = "") -> list[dict[str, Any]]:
        """Its pods: all, those of ``node`` plugins or those of the ``controller``."""
        selector = "app.kubernetes.io/name=tessera" + (f",app.kubernetes.io/component={component}" if component else "")
        items: list[dict[str, Any]] = self.cluster.api.get(f"{PODS}?labelSelector={selector}")["items"]
        return items

    def plugin_on(self, node: str) -> dict[str, Any]:
        """The pod of the node's plugin."""
        [pod] = (pod for pod in self.pods("node") if pod["spec"]["nodeName"] == node)
        return pod

    def runs_again(self, node: str) -> bool:
        """Whether the container of the node's plugin was started anew and is ready."""
        [status] = self.plugin_on(node)["status"]["containerStatuses"]
        return status["restartCount"] > 0 and bool(status["ready"])

    def run(self, pod: dict[str, Any], *command: str) -> str:
        """What the command prints in the pod's container; raises NodeError if it fails."""
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node is None:
            raise NodeError(f"pod {name} has no node yet")
        return self.cluster.node(node).exec(HERE, name, command)

    def gpus(self, node: str) -> list[dict[str, Any]]:
        """The node's simulated GPUs as they are now, as ``tessera sim smi -o json`` tells it in the plugin's pod."""
        folder = f"/var/lib/tessera/sim/{node}"
        found: list[dict[str, Any]] = json.loads(
            self.run(self.plugin_on(node), "/usr/bin/tessera", "sim", "smi", "--host-root", folder, "-o", "json")
        )
        return found

    def partitions(self, node: str) -> list[dict[str, Any]]:
        """The partitions that exist on the node's simulated GPUs."""
        return [partition for gpu in self.gpus(node) for partition in gpu["migDevices"]]

    def slices(self, node: str) -> list[dict[str, Any]]:
        """The node's slices; empty while the pool is incomplete."""
        of_node = (item for item in self.cluster.api.get(SLICES)["items"] if item["spec"].get("nodeName") == node)
        mine = [item for item in of_node if not is_of_monitors(item)]
        return mine if mine and len(mine) == mine[0]["spec"]["pool"]["resourceSliceCount"] else []

    def _all_ready(self) -> bool:
        apps = f"/apis/apps/v1/namespaces/{HERE}"
        plugins = self.cluster.api.get(f"{apps}/daemonsets/tessera-node")["status"]
        controllers = self.cluster.api.get(f"{apps}/deployments/tessera-controller")
        ready = controllers["status"].get("readyReplicas", 0)
        if plugins.get("numberReady") != len(self.cluster.nodes) or ready != controllers["spec"]["replicas"]:
            raise ApiError("; ".join(self._states()))
        return True

    def _states(self) -> Iterator[str]:
        for pod in self.pods():
            states = [each.get("state") for each in pod["status"].get("containerStatuses", ())]
            yield f"{pod['metadata']['name']} {pod['status'].get('phase')}: {states or pod['status'].get('conditions')}"
