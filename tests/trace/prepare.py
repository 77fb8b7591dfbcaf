"""``make trace-prepare``: what one prepare of a claim calls, from the kubelet's request to the answer.

The node is simulated, and the claim is read from memory. Everything else is the plugin's own code, without observers
(Events, metrics, activity), which look at a call and are not part of its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from driver.hardware.host import Host
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import H200_CALLS
from kubelet_plugin.claims.preparer import Preparer
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2 as messages
from kubelet_plugin.dra.service import SERVICE, DraService
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.claims import opaque
from tests.support.node import paths_of, start_node
from tests.trace.tracer import Trace, traced

FIRMWARE_SECONDS = 150e-6
"""A call that reaches the GPU's firmware takes at least this long on an H200."""

CASES = (("a full GPU", "gpu-0", "GpuConfig"), ("a partition", "gpu-1-mig-1g10gb-0", "MigDeviceConfig"))
"""What is prepared: the device, and the kind of the claim's parameters. MIG mode is off before."""


@dataclass(frozen=True)
class TracedPrepare:
    """One call: what it was, what it called, and how often it asked the firmware, by NVML function."""

    what: str
    trace: Trace
    firmware: Counter[str]

    def summary(self) -> str:
        asked = ", ".join(f"{call} ({count})" for call, count in self.firmware.items()) or "none"
        return f"{self.what}: {self.trace.summary()}; NVML calls that reach the firmware: {asked}"


class CountedNvml:
    """The simulated NVML functions; counts calls that reach the firmware."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._nvml, name)
        if H200_CALLS.get(name, 0.0) < FIRMWARE_SECONDS:
            return function

        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return counted


def traced_prepares() -> Iterator[TracedPrepare]:
    """The prepare of each of CASES on an idle node, and its repeat."""
    with TemporaryDirectory() as directory:
        counted: list[CountedNvml] = []

        def open_host(simulated: SimulatedNode) -> Host:
            counted.append(CountedNvml(simulated.nvml))
            return Host(counted[0], paths_of(simulated), simulated=True)

        node = start_node(Path(directory), open_host=open_host)
        for what, device, kind in CASES:
            parameters = opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": kind})
            claim = node.api.allocate(what.replace(" ", "-").lower(), device, config=[parameters])
            for call in (f"prepare of {what}", f"repeat of {what}"):
                counted[0].calls.clear()
                trace = _prepared(node.preparer, claim)
                yield TracedPrepare(call, trace, Counter(counted[0].calls))


def _prepared(preparer: Preparer, claim: ClaimReference) -> Trace:
    service = DraService(preparer)  # with no thread yet, so that its thread is traced
    method = SimpleNamespace(method=f"/{SERVICE}/NodePrepareResources")
    call: Callable[[Any, None], Any] = service.handler().service(method).unary_unary
    reference = messages.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid)
    request = messages.NodePrepareResourcesRequest(claims=[reference])
    with traced() as trace:
        response = call(request, None)
    service.close()
    if response.claims[claim.uid].error:
        raise RuntimeError(response.claims[claim.uid].error)
    return trace


def main() -> None:
    """Print each prepare: its figures, then its functions by module in the order of the first calls."""
    for prepare in traced_prepares():
        print(prepare.summary())
        for line in prepare.trace.lines():
            print(f"  {line}")
        print()


if __name__ == "__main__":
    main()
