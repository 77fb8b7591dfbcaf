"""``make trace-decision``: what the controller's decision about one new claim calls, from the caches to the last Event.

The cluster is recorded: watches are silent, writes are answered, and nodes publish at once what their plans offer. The
claim and its pod are the first of their class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from controller.controller import Controller
from controller.settings import ControllerSettings
from driver.kube.client import Object
from driver.kube.types import Key
from driver.model.device import Device, devices_of
from driver.model.plan import PATH
from driver.model.reported_gpus import decode_inventory
from tests.bench.fleet.recorded import RecordedNode, claim_object, kind_of, record, slices_of
from tests.bench.fleet.replaying import Recorded
from tests.harness.waiting import wait_for
from tests.trace.tracer import Trace, traced

NODES = 60
SETTLED_S = 120.0

CASES: Mapping[str, tuple[str, int]] = {
    "a claim that published offers satisfy": ("gpu-inference-1g-10gb", 1),
    "a claim that needs more offers": ("gpu-training", 4),
}
"""The DeviceClass and the number of devices of a claim."""


def without_offers(index: int) -> str:
    """What the node of that number is: held whole, cut, or free."""
    kind = kind_of(index)
    return "free" if kind == "offering" else kind


class SettledCluster(Recorded):
    """The controller with a recorded cluster in which nothing happens unless ``add`` and ``remove`` are called."""

    def __init__(self, directory: Path, nodes: int, kind: Callable[[int], str] = without_offers) -> None:
        record(nodes, directory, kind)
        super().__init__(directory)
        pages = sorted((directory / PATH.rpartition("/")[2]).iterdir())
        plans = [plan for page in pages for plan in msgspec.json.decode(page.read_bytes())["items"]]
        self._plans: dict[str, Object] = {plan["metadata"]["name"]: plan for plan in plans}
        self._written: set[str] = set()
        self._controller = Controller(self, ControllerSettings())  # type: ignore[arg-type]
        self._cache = self._controller._cache
        self._cache.load()
        wait_for(self._is_settled, SETTLED_S, "all plans are written and published")

    def decide(self) -> None:
        self._controller.decide()

    def add(self, name: str, device_class: str, count: int, priority: int = 0, **status: Any) -> None:
        """Add a pending claim and its pod, with ``status``."""
        claim = claim_object(name, None, (), device_class.removeprefix("gpu-inference-"))
        claim["spec"]["devices"]["requests"][0]["exactly"] |= {"deviceClassName": device_class, "count": count}
        reference = {"name": "gpu", "resourceClaimName": name}
        spec = {"containers": [{"name": "main"}], "resourceClaims": [reference], "priority": priority}
        status = {"phase": "Pending", **status}
        pod = {"metadata": {"name": name, "namespace": "default"}, "spec": spec, "status": status}
        self._cache._claims.observe(self._renewed(claim))
        self._cache._pods.observe(self._renewed(pod))

    def remove(self, name: str) -> None:
        self._cache._claims.forget(Key("default", name))
        self._cache._pods.forget(Key("default", name))

    def patch(self, path: str, body: Object) -> Object:
        stored = super().patch(path, body)
        if not path.startswith(PATH):
            return stored
        name = path.rpartition("/")[2]
        plan = self._plans[name]
        spec = {field: value for field, value in {**plan["spec"], **body["spec"]}.items() if value is not None}
        status = {**plan["status"], "epoch": spec["epoch"]}
        version = {"resourceVersion": stored["metadata"]["resourceVersion"]}
        self._plans[name] = {**plan, "spec": spec, "status": status, "metadata": {**plan["metadata"], **version}}
        self._written.add(name)
        return self._plans[name]

    def _is_settled(self) -> bool:
        self.decide()
        self._publish()
        self.decide()
        return not self._written and self._controller._write.next_s is None

    def _publish(self) -> None:
        """The nodes publish what the plans offer that were written."""
        for name in self._written:
            spec = self._plans[name]["spec"]
            gpus = tuple(state.gpu for state in decode_inventory(self._plans[name]["status"]["inventory"]))
            devices = {device.name: device for gpu in gpus for device in devices_of(gpu, gpu.minor)}
            held: dict[str, tuple[Device, ...]] = {}
            for text in spec.get("held", ()):
                device, _, claim = text.partition(" ")
                held[claim] = (*held.get(claim, ()), devices.pop(device))
            published = {*spec.get("offers", ()), *spec.get("listed", ())}
            offers = tuple(device for device in devices.values() if str(device.offer) in published)
            for item in slices_of(RecordedNode(name, gpus, held, offers)):
                self._cache._slices.observe(self._renewed(item))
        self._written.clear()

    def _renewed(self, item: Object) -> Object:
        metadata = {**item["metadata"], "resourceVersion": self._stored("", {})["metadata"]["resourceVersion"]}
        return {**item, "metadata": {**metadata, "uid": f"uid-{metadata['resourceVersion']}"}}


@dataclass(frozen=True)
class TracedDecision:
    """One decision: what was new, and what it called."""

    what: str
    trace: Trace

    def summary(self) -> str:
        return f"{self.what}: {self.trace.summary()}"


def traced_decisions(nodes: int = NODES) -> Iterator[TracedDecision]:
    """The decision about each of CASES, in a cluster that is settled."""
    for number, (what, (device_class, count)) in enumerate(CASES.items()):
        with TemporaryDirectory() as directory:
            cluster = SettledCluster(Path(directory) / str(number), nodes)
            cluster.add("new", device_class, count)
            with traced() as trace:
                cluster.decide()
            yield TracedDecision(what, trace)


def main(arguments: list[Any]) -> None:
    """Print each decision: its figures, then its functions by module in the order of the first calls."""
    for decision in traced_decisions(*map(int, arguments)):
        print(decision.summary())
        for line in decision.trace.lines():
            print(f"  {line}")
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
