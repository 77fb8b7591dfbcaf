"""Plugins of one node as a DaemonSet with ``maxSurge`` has them: each with the uid of its pod, two at a time."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driver.kube.client import KubeClient, load_configuration
from driver.kube.watch_cache import WatchCache
from driver.slices.publisher import Slice
from kubelet_plugin.settings import plugin_socket, registration_socket
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.plugin import DRIVER, READY_S, SLICES, PluginFlags, PluginNode, PluginProcess
from tests.support.workloads import RUNNING_S, Workloads, request

AT_WORK = "active on this node"


class PodPlugin(PluginProcess):
    """``tessera node --pod-uid UID`` beside whatever else runs on the node."""

    def __init__(self, cluster: Cluster, node: PluginNode, uid: str, flags: PluginFlags | None = None) -> None:
        super().__init__(cluster, node, flags)
        self.uid = uid
        self._name = f"tessera-{node.name}-{uid}"
        self.log = cluster.logs_dir / f"{self._name}.log"
        self.socket = plugin_socket(self.state_dir, uid)
        self.registration_socket = registration_socket(node.kubelet_dir / "plugins_registry", DRIVER, uid)

    def command(self, kubeconfig: Path | None = None) -> list[str]:
        return [*super().command(kubeconfig), "--pod-uid", self.uid]

    def says(self, text: str) -> bool:
        """Whether the log of the process started last has it."""
        with self.log.open("rb") as log:
            log.seek(self._mark)
            return text.encode() in log.read()

    def wait_at_work(self) -> None:
        wait_for(lambda: self.says(AT_WORK), READY_S, f"plugin {self.uid} is at work")
        wait_for(self.registered, READY_S, f"the kubelet knows plugin {self.uid}")


class SliceWatch:
    """What happens to the slices of a node: ``flicker`` has a sentence for each that went, or lost its devices.

    ``generations`` are those of each pool: earlier tests may have raised that of one pool.
    """

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.flicker: list[str] = []
        self.generations = defaultdict[str, set[int]](set)
        selector = {"fieldSelector": f"spec.nodeName={node},spec.driver={DRIVER}"}
        client = KubeClient(load_configuration(cluster.kubeconfig), "slice-watch")
        self._cache = WatchCache(client, SLICES, Slice, lambda item: item, self._changed, selector)

    def run(self, stop: threading.Event) -> None:
        threading.Thread(target=self._cache.run, args=(stop,), daemon=True).start()
        wait_for(lambda: self._cache.synced, 60, "the slices are listed")

    def _changed(self, changes: Sequence[Any]) -> None:
        for change in changes:
            if change.new is None:
                self.flicker.append(f"{change.key.name} was deleted")
                continue
            pool = change.new.spec["pool"]
            self.generations[pool["name"]].add(pool["generation"])
            if change.old and change.old.spec.get("devices") and not change.new.spec.get("devices"):
                self.flicker.append(f"{change.key.name} lost its devices")


class Stream:
    """Pods with a claim of their own, one after the other without end. ``served``: how many have run and are gone."""

    def __init__(self, workloads: Workloads, name: str, device_class: str) -> None:
        self._workloads, self._name = workloads, name
        self._template = workloads.template(name, request(device_class))
        self._stop = threading.Event()
        self.served = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def _run(self) -> None:
        while not self._stop.is_set():
            pod = self._workloads.pod(f"{self._name}-{self.served}", template=self._template)
            self._workloads.running(pod)
            self._workloads.delete_pods(pod)
            self.served += 1

    def more(self, pods: int = 2) -> None:
        """Wait until so many more have come and gone, the first of which may have been there before."""
        wanted = self.served + pods
        wait_for(lambda: self.served >= wanted or not self._thread.is_alive(), RUNNING_S, f"{pods} more pods")
        assert self._thread.is_alive(), "the stream of pods broke off"

    @contextmanager
    def flowing(self) -> Iterator[Stream]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(RUNNING_S)


def failed_prepares(cluster: Cluster, prefix: str) -> list[str]:
    """The kubelet's messages about claims that were not prepared or unprepared, for pods of that name.

    Without those of claims that the kubelet could not read yet: the node authorizer lags on a busy machine.
    """
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [
        event["message"]
        for event in events
        if event.get("involvedObject", {}).get("name", "").startswith(prefix)
        and "DynamicResources" in event["reason"]
        and "no relationship found between node" not in event["message"]
    ]
