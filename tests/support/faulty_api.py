"""An API server that fails where a test says, and the whole node plugin in front of it, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from driver.kube.get_and_list import RESOURCE_GROUP
from driver.model.device import is_monitor
from driver.model.plan import PATH
from driver.simulator.node import SimulatedNode
from kubelet_plugin.app import NodePlugin
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.settings import node_settings
from tests.support.api_server import SLICES, Exchange, HttpServer, ObjectApi, Route
from tests.support.claims import DRIVER, NODE, POOL, result
from tests.support.invariants import Facts, read_facts
from tests.support.kubelet import DraClient
from tests.support.ports import keep_port
from tests.support.running import eventually

CLAIMS = f"{RESOURCE_GROUP}/namespaces/default/resourceclaims"
STALE = "00000-stale"
"""A slice of ours that nobody wants any more: it has to be deleted."""


class ApiFault(StrEnum):
    """What may become of a request."""

    HANG_UP = "no answer"
    TIMEOUT = "timeout"
    CONFLICT = "409"
    TOO_MANY = "429"
    BROKEN = "500"
    CUT = "cut off in the middle of the answer"
    NONSENSE = "an answer that is no JSON"

    def __call__(self, exchange: Exchange, released: threading.Event) -> None:
        if self in (ApiFault.CONFLICT, ApiFault.TOO_MANY, ApiFault.BROKEN):
            return exchange.refuse(int(self.value), "simulated")
        if self is ApiFault.NONSENSE:
            return exchange.send(200, b"<html>a proxy that knows better</html>", "text/html")
        if self is ApiFault.TIMEOUT:
            released.wait(60)
        if self is ApiFault.CUT:
            exchange.send_response(200)
            exchange.send_header("Content-Type", "application/json")
            exchange.send_header("Content-Length", "4000")
            exchange.end_headers()
            exchange.wfile.write(b'{"metadata": {"na')
        return exchange.cut()


@dataclass(frozen=True)
class ApiTrouble:
    """The first ``times`` requests of ``kinds`` fail so; no kinds: of each kind there is."""

    fault: ApiFault
    kinds: frozenset[str] = frozenset()
    times: int = 1

    def hits(self, kind: str, number: int) -> bool:
        if self.fault is ApiFault.NONSENSE and kind.startswith("DELETE"):
            return False  # 200 is all that is read of the answer to a deletion
        return number < self.times and (not self.kinds or kind in self.kinds)


class FaultyApi(ObjectApi):
    """``kinds`` counts the requests by what they are about: "PATCH resourceclaims/status"."""

    def __init__(self, trouble: ApiTrouble | None = None) -> None:
        self.kinds: Counter[str] = Counter()
        self._trouble = trouble
        self._released = threading.Event()
        super().__init__()

    def __exit__(self, *arguments: object) -> None:
        self._released.set()
        super().__exit__(*arguments)

    def down(self) -> None:
        """Nobody listens any more: every connection is refused, and those there are end."""
        self.server.shutdown()
        self.server.server_close()
        self._kept = keep_port(self.server.server_address[1])
        for connection in list(self.server.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def up(self) -> None:
        self.server = HttpServer(self._answer, self.server.server_address[1])
        self._kept.close()

    def _answer(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        part = f"/{route.part}" if route.part else ""
        kind = f"{self._kind(exchange)} {route.resource.rsplit('/', 1)[1]}{part}"
        number, trouble = self.kinds[kind], self._trouble
        self.kinds[kind] += 1
        if trouble is not None and trouble.hits(kind, number):
            return trouble.fault(exchange, self._released)
        return super()._answer(exchange)


class PluginOnApi:
    """The node plugin of a node with one H100, its kubelet, and ``api``."""

    def __init__(self, root: Path, api: FaultyApi, **flags: object) -> None:
        self.root, self.api = root, api
        api.store(f"/api/v1/nodes/{NODE}", status={"nodeInfo": {"kubeletVersion": "v1.37.1"}})
        api.store(f"{PATH}/{NODE}", spec={})
        api.store("/api/v1/namespaces/tessera/configmaps/tessera-fence", data={POOL: "gpu-0"})
        pool = {"name": POOL, "generation": 1, "resourceSliceCount": 1}
        api.store(f"{SLICES}/{STALE}", spec={"nodeName": NODE, "driver": DRIVER, "pool": pool, "devices": []})
        kubeconfig = root / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(api.server.url)))
        self._settings = node_settings(
            node_name=NODE,
            kubeconfig=kubeconfig,
            gpus="sim:h100-1",
            kubelet_dir=root / "k",
            cdi_dir=root / "cdi",
            state_dir=root / "state",
            host_root=root / "host",
            sim_latency="zero",
            **flags,
        )

    @contextmanager
    def running(self) -> Iterator[DraClient]:
        others = set(threading.enumerate())
        plugin = NodePlugin(self._settings)
        threading.Thread(target=plugin.run, daemon=True, name="plugin").start()
        kubelet = DraClient(self._settings.plugin_socket)
        try:
            yield kubelet
        finally:
            kubelet.channel.close()
            plugin.stop()
            self._wait_for_end(others)

    def _wait_for_end(self, others: set[threading.Thread]) -> None:
        """Of every thread of the plugin: what it works on is removed next, and its log is the next test's."""
        lasting = ("Thread-", "nvml")  # the server's, and one that waits for questions about GPUs

        def over() -> bool:
            self.api.end_watches()  # again and again: one may be begun by a thread that had just not seen the stop
            return all(each.name.startswith(lasting) for each in set(threading.enumerate()) - others)

        eventually(over, "the plugin's threads have ended")

    def allocate(self, name: str, *devices: str) -> ClaimReference:
        results = [result(device, f"r{index}") for index, device in enumerate(devices)]
        reserved = [{"resource": "pods", "name": "pod", "uid": "pod-uid"}]
        status = {"allocation": {"devices": {"results": results, "config": []}}, "reservedFor": reserved}
        item = self.api.store(f"{CLAIMS}/{name}", status=status)
        return ClaimReference("default", name, item["metadata"]["uid"])

    def published(self) -> frozenset[str]:
        specs = [item["spec"] for item in list(self.api.folder(SLICES).values())]
        names = (device["name"] for spec in specs for device in spec.get("devices") or ())
        return frozenset(name for name in names if not is_monitor(name))

    def told(self, name: str) -> Sequence[Mapping[str, Any]]:
        """What the claim's status says of its devices."""
        return list(self.api.folder(CLAIMS).get(name, {}).get("status", {}).get("devices", ()))

    def facts(self) -> Facts:
        return read_facts(SimulatedNode.attach(self.root / "host"), self.root / "state", self.root / "cdi")


def ask(kubelet: DraClient, verb: str, *claims: ClaimReference) -> dict[str, str]:
    """One call of the kubelet; the error of each claim, empty where there is none."""
    wanted = [(claim.namespace, claim.name, claim.uid) for claim in claims]
    answers = kubelet.call(dra_v1_pb2, verb, wanted)
    assert set(answers) == {claim.uid for claim in claims}, "an answer was lost"
    return {claim.name: answers[claim.uid].error for claim in claims}


def until_well(kubelet: DraClient, verb: str, claim: ClaimReference, deadline_s: float = 60.0) -> list[str]:
    """Ask again as the kubelet does until it is well; the errors on the way."""
    end, errors = time.monotonic() + deadline_s, []
    while error := ask(kubelet, verb, claim)[claim.name]:
        errors.append(error)
        assert time.monotonic() < end, errors
    return errors


def kubeconfig_of(url: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
