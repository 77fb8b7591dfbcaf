"""The node plugin as a process: how soon its slices are published, and how much memory it takes.

Python's bytecode lies there, as in an image: a start before those that are measured sees to it. The process finds its
credentials as in a pod; one more start reads a kubeconfig.
"""

from __future__ import annotations

import base64
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from driver.kube.types import Key, ObjectMeta
from tests.bench.kubelet import Kubelet, allocated_claim
from tests.bench.results import Figure
from tests.bench.usage import memory_mb
from tests.bench.watching import Watched, watched
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessRecord, ProcessTable, kill
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for
from tests.support.plugin import SLICES, PluginFlags, PluginProcess, bare_node

GPUS = 8
STARTS = 5
CYCLES = 1000
CLAIMS = 50

PUBLISHED_S = 30.0
QUIET_S = 2.0
"""So long the memory has to stay as it is to count as that of an idle process."""
IDLE_S = 20.0


class Slice(msgspec.Struct, frozen=True):
    """A ResourceSlice."""

    metadata: ObjectMeta
    spec: dict[str, Any]


def figures(cluster: Cluster, progress: Progress, where: str) -> list[Figure]:
    """Start and memory of the plugin for a Node without a kubelet, as shipped but for the simulator's delay."""
    plugin = PluginProcess(cluster, bare_node(cluster, "bench-start"), PluginFlags(log_level="info"))
    with watched(cluster, SLICES, Slice, fieldSelector=f"spec.nodeName={plugin.node.name}") as slices:
        with progress.part(f"starting the node plugin {STARTS + 1} times", 25):
            _started(plugin, slices, _resident)
            runs = [_started(plugin, slices, lambda pid: (*_resident(pid),)) for _ in range(STARTS)]
        with progress.part("starting it with a kubeconfig", 10):
            of_kubeconfig = _started(plugin, slices, _resident, in_a_pod=False)
        with progress.part(f"memory after {CYCLES} prepared and unprepared claims", 40):
            grown = _started(plugin, slices, lambda pid: (_growth(plugin, pid),))[1]
    seconds, resident, anonymous = (statistics.median(values) for values in zip(*runs, strict=True))
    return [
        Figure("node.start_to_published_s", seconds, "s", 0.7, 1.04, where),
        Figure("node.rss_mb", resident, "MiB", 60, 74, where),
        Figure("node.anon_mb", anonymous, "MiB", 35, 13, where),
        Figure("node.kubeconfig.start_to_published_s", of_kubeconfig[0], "s", 1.2, None, where),
        Figure("node.kubeconfig.rss_mb", of_kubeconfig[1], "MiB", 60, None, where),
        Figure("node.rss_growth_mb", grown, "MiB", 3, 4, where),
    ]


def _started(plugin: PluginProcess, slices: Watched[Slice], look: Any, *, in_a_pod: bool = True) -> tuple[float, ...]:
    """Seconds from the start of the process until its slices are complete, and what ``look`` says of it then."""
    for key in slices.cache.snapshot():
        plugin.cluster.api.request("DELETE", f"{SLICES}/{key.name}")
    slices.wait("no slices", lambda found: not found, PUBLISHED_S)
    with _process(plugin, in_a_pod=in_a_pod) as (began, process):
        published = slices.wait(f"slices of {plugin.node.name}", complete, PUBLISHED_S)
        return published - began, *look(process.pid)


@contextmanager
def _process(plugin: PluginProcess, *, in_a_pod: bool) -> Iterator[tuple[float, ProcessRecord]]:
    """The plugin's process, and the ``time.perf_counter`` of its start: nothing else is done then."""
    cluster = plugin.cluster
    kubeconfig = cluster.service_account_kubeconfig("tessera", "tessera-node", node=plugin.node.name)
    command = plugin.command(kubeconfig)
    if in_a_pod:
        command = _as_in_a_pod(plugin.command(), kubeconfig, cluster.directory / "bench-account")
    began = time.perf_counter()
    process = ProcessTable(cluster.directory).spawn("bench-start", command, plugin.log)
    try:
        yield began, process
    finally:
        kill([process])


AS_IN_A_POD = """
import sys
from pathlib import Path
from driver.kube import credentials
credentials.SERVICE_ACCOUNT = Path(sys.argv.pop(1))
from tessera.cli import main
main()
"""


def _as_in_a_pod(command: list[str], kubeconfig: Path, account: Path) -> list[str]:
    """``command`` with the credentials of ``kubeconfig`` laid out in the folder ``account`` as the kubelet does."""
    found = yaml.safe_load(kubeconfig.read_text())
    cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
    account.mkdir(mode=0o700, exist_ok=True)
    (account / "ca.crt").write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    (account / "token").write_text(user["token"])
    server = urlsplit(cluster["server"])
    environment = [f"KUBERNETES_SERVICE_HOST={server.hostname}", f"KUBERNETES_SERVICE_PORT={server.port or 443}"]
    return ["/usr/bin/env", *environment, sys.executable, "-c", AS_IN_A_POD, str(account), *command[1:]]


def complete(slices: Mapping[Key, Slice]) -> bool:
    """Whether every slice of the newest generation is there, and every GPU in them."""
    pools = [item.spec["pool"] for item in slices.values()]
    newest = max((pool["generation"] for pool in pools), default=0)
    current = [item.spec for item in slices.values() if item.spec["pool"]["generation"] == newest]
    names = {device["name"] for spec in current for device in spec.get("devices") or ()}
    whole = bool(current) and len(current) == current[0]["pool"]["resourceSliceCount"]
    return whole and {f"gpu-{number}" for number in range(GPUS)} <= names


def _resident(pid: int) -> tuple[float, float]:
    """MiB of resident and of anonymous memory, once they stay as they are."""
    seen: list[tuple[float, float]] = []

    def quiet() -> bool:
        seen.append(memory(pid))
        return len(seen) > QUIET_S / interval and len(set(seen[-int(QUIET_S / interval) :])) == 1

    interval = 0.25
    wait_for(quiet, IDLE_S, "memory of an idle process", interval)
    return seen[-1]


def memory(pid: int) -> tuple[float, float]:
    """Resident and anonymous memory, in MiB."""
    return memory_mb(pid), memory_mb(pid, "RssAnon")


def _growth(plugin: PluginProcess, pid: int) -> float:
    """MiB of resident memory that a process has more after CYCLES claims, half of them partitions."""
    before, _ = _resident(pid)
    kubelet = Kubelet(plugin.socket).connect()
    devices = [f"gpu-{i % GPUS}" if i % 2 else f"gpu-{i % GPUS}-mig-1g10gb-{i // GPUS}" for i in range(CLAIMS)]
    cluster, node = plugin.cluster, plugin.node.name
    claims = [allocated_claim(cluster, f"grow-{i}", node, device) for i, device in enumerate(devices)]
    for cycle in range(CYCLES):
        kubelet.prepare(claims[cycle % CLAIMS])
        kubelet.unprepare(claims[cycle % CLAIMS])
    kubelet.close()
    return _resident(pid)[0] - before
