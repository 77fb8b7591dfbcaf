"""The controller as a real process, and node plugins for Node objects without a kubelet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from driver.errors import ApiError
from driver.model.plan import PATH
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessRecord, ProcessTable, kill, stop
from tests.support.plugin import REFUSED, STOPPED_S, TESSERA, PluginFlags, PluginProcess, bare_node

COUNTABLE = ("--linger-s", "0.5", "--min-published", "none")
"""Offers go sooner than they need to, so that tests needn't wait; nothing but them and what is held is published."""


@contextmanager
def plugins(cluster: Cluster, names: Sequence[str], flags: PluginFlags) -> Iterator[list[PluginProcess]]:
    """Running node plugins, each for a Node object of its own."""
    found = []
    for name in names:
        plugin = PluginProcess(cluster, bare_node(cluster, name), flags)
        plugin.spawn()
        found.append(plugin)
    for plugin in found:
        plugin.wait_published()
    yield found
    for plugin in found:
        plugin.stop()


class ControllerProcess:
    """``tessera controller`` with its own ServiceAccount. Start, kill, start again."""

    def __init__(self, cluster: Cluster, name: str = "controller", flags: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.log = cluster.logs_dir / f"tessera-{name}.log"
        self._name = f"tessera-{name}"
        self._flags = flags
        self._table = ProcessTable(cluster.directory)

    def start(self) -> None:
        kubeconfig = self.cluster.service_account_kubeconfig("tessera", "tessera-controller")
        command = [TESSERA, "controller", "--kubeconfig", str(kubeconfig), "--settle-s", "0", "--log-level", "debug"]
        self._table.spawn(self._name, [*command, *COUNTABLE, *self._flags], self.log)

    def kill(self) -> None:
        kill(self._records())

    def stop(self) -> None:
        stop(self._records(), STOPPED_S)

    def refused(self) -> list[str]:
        """Lines of its log about a right that it lacks."""
        return [line for line in self.log.read_text().splitlines() if REFUSED in line]

    def plans(self) -> dict[str, dict[str, Any]]:
        """The plans by node, all with a spec; none where the CRD isn't served yet."""
        try:
            return {item["metadata"]["name"]: {"spec": {}, **item} for item in self.cluster.api.get(PATH)["items"]}
        except ApiError as error:
            if error.status == 404:
                return {}
            raise

    def _records(self) -> list[ProcessRecord]:
        record = self._table.get(self._name)
        return [record] if record else []
