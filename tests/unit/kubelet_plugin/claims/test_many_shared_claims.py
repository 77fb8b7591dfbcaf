"""Ten thousand claims of shared GPUs through the plugin's socket leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from uuid import uuid4

import pytest
import yaml

from driver.kube.get_and_list import RESOURCE_GROUP
from driver.simulator.node import SimulatedNode
from tests.bench.usage import memory_mb
from tests.soak.verdict import RSS_MIB
from tests.support.api_server import ObjectApi
from tests.support.claims import DRIVER, NODE, result
from tests.support.faulty_api import kubeconfig_of
from tests.support.invariants import leftovers, limits_in_force, read_facts, violations
from tests.support.kill_node import TWO_H100
from tests.support.killable import KillablePlugin, zygote_in
from tests.support.kubelet import KnownClaim, Kubelet
from tests.support.memory_limits import make_cgroup

CLAIMS, LOOK_EVERY = 10_000, 250
AT_ONCE, PODS, LARGEST = 12, 5, 12
"""Claims that are prepared at one time, the pods that use them, and the GiB of the largest: 144 at most, of 158."""

PATH = f"{RESOURCE_GROUP}/namespaces/default/resourceclaims"


class SharedNode:
    """Two GPUs that claims share, the plugin's process, and an API server with the claims that exist."""

    def __init__(self, root: Path, api: ObjectApi, plugin: KillablePlugin, kubelet: Kubelet) -> None:
        self.root, self.plugin, self._api, self._kubelet = root, plugin, api, kubelet
        self.state_dir = root / "kubelet" / "plugins" / DRIVER
        self.simulated = SimulatedNode.attach(root / "host")
        for number in range(PODS):
            make_cgroup(self.simulated, f"kubepods/burstable/pod{number}")

    def prepare(self, number: int, gib: int) -> KnownClaim:
        """Of the GPU that odd or even claims have, for one of the pods."""
        name, share, device = f"claim-{number}", str(uuid4()), f"gpu-{number % 2}-shared"
        part = result(device, shareID=share, consumedCapacity={"memory": f"{gib}Gi"})
        users = [{"resource": "pods", "name": "pod", "uid": str(number % PODS)}]
        self._api.store(f"{PATH}/{name}", status={"allocation": {"devices": {"results": [part]}}, "reservedFor": users})
        claim = KnownClaim(name, str(uuid4()), frozenset({f"{device}-{share}"}))
        self._api.folder(f"{PATH}/{name}")[name]["metadata"].update(uid=claim.uid, namespace="default")
        self._kubelet.prepare([claim])
        return claim

    def unprepare(self, claim: KnownClaim) -> None:
        self._kubelet.unprepare([claim])
        self._api.drop(f"{PATH}/{claim.name}")


@contextmanager
def shared_node() -> Iterator[SharedNode]:
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="tms-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, root)
        (root / "run").mkdir()
        api = stack.enter_context(ObjectApi())
        api.store(f"/api/v1/nodes/{NODE}")
        (root / "config").write_text(yaml.safe_dump(dict(kubeconfig_of(api.server.url))))
        (root / "two-h100.yaml").write_text(TWO_H100)
        settings = {
            "node_name": NODE,
            "kubeconfig": root / "config",
            "gpus": f"sim:{root / 'two-h100.yaml'}",
            "sim_latency": "zero",
            "kubelet_dir": root / "kubelet",
            "cdi_dir": root / "cdi",
            "host_root": root / "host",
            "shared": "all=time-slicing",
        }
        plugin = KillablePlugin(stack.enter_context(zygote_in(root, root)), root / "plugin", settings)
        stack.callback(plugin.close)
        sockets = root / "kubelet" / "plugins" / DRIVER / "dra.sock", root / "kubelet/plugins_registry"
        kubelet = Kubelet(sockets[0], sockets[1] / f"{DRIVER}-reg.sock")
        stack.callback(kubelet.part)
        plugin.start()
        kubelet.meet()
        yield SharedNode(root, api, plugin, kubelet)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_shared_claims_leave_nothing_behind(record_property: Callable[[str, object], None]) -> None:
    random, resident = Random(7), list[float]()
    with shared_node() as node:
        prepared: deque[KnownClaim] = deque()
        for number in range(CLAIMS):
            if len(prepared) == AT_ONCE:
                node.unprepare(prepared.popleft())
            prepared.append(node.prepare(number, random.randint(1, LARGEST)))
            if number % LOOK_EVERY == LOOK_EVERY - 1:
                facts = read_facts(node.simulated, node.state_dir, node.root / "cdi")
                assert violations(facts) == []
                assert len(limits_in_force(node.simulated)) == 2 * PODS
                resident.append(memory_mb(node.plugin.pid))
        for claim in prepared:
            node.unprepare(claim)
        assert leftovers(read_facts(node.simulated, node.state_dir, node.root / "cdi")) == []
    third = len(resident) // 3
    grown = median(resident[-third:]) - median(resident[third:-third])
    record_property("said in the end", f"{CLAIMS} shared claims: {resident[-1]:.1f} MiB, {grown:.1f} more than halfway")
    assert grown < RSS_MIB, resident
