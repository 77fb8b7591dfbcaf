"""The cluster of the tests of ``tessera why``: two nodes, and what a test does there before a claim waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from click.testing import Result

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod, ready_status
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.command import run_tessera
from tests.support.controller import ControllerProcess
from tests.support.plugin import SLICES, PluginProcess
from tests.support.scheduling import asked
from tests.support.workloads import CLAIMS, PODS, is_gone

SOON_S = 60.0
NODES = {"one": "sim:h100-1", "plain": "sim:l40s-8"}
H100 = 'device.attributes["gpu.tessera.dev"].productName.startsWith("NVIDIA H100")'
L40S = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA L40S"'
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"
NO_PROFILE = 'device.attributes["gpu.tessera.dev"].profile == "9g.90gb"'
SMALL = "gpu-inference-1g-10gb"
TAINT = {"key": "repair", "effect": "NoSchedule"}
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


@dataclass
class Place:
    """A cluster with two nodes and a controller; what a test creates is gone after it."""

    cluster: Cluster
    controller: ControllerProcess
    plugin: PluginProcess
    paths: list[str] = field(default_factory=list)

    def post(self, folder: str, body: dict[str, Any]) -> None:
        self.cluster.api.post(folder, body)
        self.paths.append(f"{folder}/{body['metadata']['name']}")

    def ask(self, name: str, *requests: dict[str, Any], cpu: str = "1m", claim: str | None = None, **spec: Any) -> None:
        """A claim and its pod; ``claim`` only names one."""
        if claim is None:
            self.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests)}}})
        container = {"resources": {"claims": [{"name": "gpu"}], "requests": {"cpu": cpu}}}
        claims = [{"name": "gpu", "resourceClaimName": claim or name}]
        self.post(PODS, busybox_pod(name, container=container, resourceClaims=claims, **spec))

    def hold(self, name: str, *requests: dict[str, Any]) -> None:
        self.ask(name, *requests)
        self.wait_allocated(name)

    def is_allocated(self, name: str) -> bool:
        return bool(self.cluster.api.get(f"{CLAIMS}/{name}").get("status", {}).get("allocation"))

    def wait_allocated(self, name: str) -> None:
        wait_for(lambda: self.is_allocated(name), SOON_S, f"claim {name} is allocated")

    def end(self, *names: str) -> None:
        """End these pods and their claims."""
        self.delete(*(f"{folder}/{name}" for folder in (PODS, CLAIMS) for name in names))

    def clean(self) -> None:
        """Undo what a test did."""
        cordon_node(self, unschedulable=False)
        self.tessera("uncordon", "one/gpu-0")
        self.tessera("uncordon", "plain/gpu-7")
        self.delete(*reversed(self.paths))

    def delete(self, *paths: str) -> None:
        for path in paths:
            self.paths.remove(path)
            self.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        for path in paths:
            wait_for(partial(is_gone, self.cluster, path), SOON_S, f"{path} is gone")

    def tessera(self, command: str, *arguments: str) -> Result:
        return run_tessera(self.cluster, command, *arguments)

    def why(self, name: str) -> dict[str, Any]:
        answer = self.tessera("why", name, "-o", "json")
        assert answer.stdout, answer.stderr
        found, *_ = json.loads(answer.stdout)
        return dict(found)

    def reason(
        self, name: str, code: str, part: str = "", change: str = "", prepare: Callable[[], object] = lambda: None
    ) -> dict[str, Any]:
        """The explanation, once it has this code, ``part`` in its message and a change that starts with ``change``.

        Parts of a message come from objects that the scheduler and the plugins write after the code is known.
        ``prepare`` is called before each try.
        """
        found: list[dict[str, Any]] = []

        def is_explained() -> bool:
            prepare()
            found.append(self.why(name))
            return (
                found[-1]["reason"] == code
                and part in found[-1]["message"]
                and any(offered["text"].startswith(change) for offered in found[-1]["changes"] or [{"text": ""}])
            )

        try:
            wait_for(is_explained, SOON_S, f"{name}: {code} with {part!r} and {change!r}")
        except DeadlineError as error:
            raise DeadlineError(f"{error}: {found[-1]}") from error
        return found[-1]

    def reason_of_wanted(
        self, code: str, *requests: dict[str, Any], part: str = "", change: str = "", **pod: Any
    ) -> dict[str, Any]:
        """The explanation of a new claim ``wanted`` that cannot be allocated; ``part`` and ``change`` as in ``reason``.

        The scheduler may place the pod before its watches bring it what the test has just done. Such a pod is deleted
        and created again.
        """
        kept = list(self.paths)
        self.ask("wanted", *requests, **pod)

        def ask_again_if_placed() -> None:
            if is_placed(self.cluster.api.get(f"{PODS}/wanted")):
                self.delete(*(path for path in reversed(self.paths) if path not in kept))
                self.ask("wanted", *requests, **pod)

        return self.reason("pod/wanted", code, part, change, ask_again_if_placed)

    def named_in_change(self, name: str) -> list[str]:
        """The claims whose end is said to help."""
        [release] = [each for each in self.why(name)["changes"] if each["kind"] == "release"]
        return [claim.partition("/")[2] for claim in release["claims"]]

    def event(self, kind: str, name: str) -> dict[str, Any]:
        """The one Event of the controller about an object."""
        uid = self.cluster.api.get(f"{PODS if kind == 'Pod' else CLAIMS}/{name}")["metadata"]["uid"]
        events = self.cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = [each for each in events if each.get("reportingComponent") == "tessera-controller"]
        found = [each for each in about if each["involvedObject"]["uid"] == uid]
        assert len(found) <= 1
        return found[0] if found else {}


def cordon_node(place: Place, *, unschedulable: bool) -> None:
    place.cluster.api.patch("/api/v1/nodes/one", {"spec": {"unschedulable": unschedulable}})


def share_on_cordoned_node(place: Place) -> None:
    place.hold("holder", asked("gpu-training", H100))
    cordon_node(place, unschedulable=True)


def hold_l40s(place: Place, *names: str) -> None:
    for name in names:
        place.hold(name, asked("gpu-training", L40S))


def allow_admin_access(place: Place) -> None:
    labels = {"resource.kubernetes.io/admin-access": "true"}
    place.cluster.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": labels}})


def cordon_gpu(place: Place) -> None:
    place.tessera("cordon", "one/gpu-0")

    def is_withdrawn() -> bool:
        slices = [item["spec"] for item in place.cluster.api.get(SLICES)["items"]]
        return not any(spec.get("devices") for spec in slices if spec["nodeName"] == "one")

    wait_for(is_withdrawn, SOON_S, "nothing of the GPU is published")


def report_ready(place: Place, status: str) -> None:
    """As the kubelet of node one, or the node lifecycle controller in its place."""
    ready = ready_status()
    ready["status"]["conditions"][0]["status"] = status
    place.cluster.api.patch("/api/v1/nodes/one/status", ready)
    wait_for(lambda: bool(is_tainted(place)) == (status != "True"), SOON_S, "the node lifecycle controller has seen it")


def is_placed(pod: dict[str, Any]) -> bool:
    """Whether the scheduler has bound it: a pod that is created with a node name has no such condition."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == ("PodScheduled", "True") for each in conditions)


def is_tainted(place: Place) -> bool:
    return bool(place.cluster.api.get("/api/v1/nodes/one")["spec"].get("taints"))


def fragment(place: Place) -> None:
    """Seven small partitions of a GPU, of which those two stay that keep the halves of its memory apart."""
    names = [f"small-{number}" for number in range(7)]
    for name in names:
        place.hold(name, asked(SMALL))
    at = {
        place.cluster.api.get(f"{CLAIMS}/{name}")["status"]["allocation"]["devices"]["results"][0]["device"]: name
        for name in names
    }
    stay = [next(at[device] for device in sorted(at) if int(device[-1]) // 4 == half) for half in (0, 1)]
    place.end(*(name for name in names if name not in stay))


def taint_rule(place: Place) -> None:
    spec = {"deviceSelector": {"pool": "one-gpu.tessera.dev"}, "taint": TAINT}
    place.post(RULES, {"metadata": {"name": "repair"}, "spec": spec})


def hold_beside_taint(place: Place) -> None:
    spec = {"deviceSelector": {"pool": "plain-gpu.tessera.dev", "device": "gpu-7"}, "taint": TAINT}
    place.post(RULES, {"metadata": {"name": "repair"}, "spec": spec})
    place.hold("holder", asked("gpu-training", L40S))


def end_taint_and_holder(place: Place) -> None:
    place.delete(f"{RULES}/repair")
    place.end("holder")


def hold_beside_cordon(place: Place) -> None:
    place.hold("holder", asked("gpu-training", L40S))
    place.tessera("cordon", "plain/gpu-7")


def mistaken_class(place: Place) -> None:
    selectors = [{"cel": {"expression": f"{L40S} && {NO_PROFILE}"}}]
    place.post(CLASSES, {"metadata": {"name": "mistaken"}, "spec": {"selectors": selectors}})


def kill_plugin(place: Place) -> None:
    """Once it offers small partitions, as it always does while one fits: afterwards it offers nothing new."""

    def is_offered() -> bool:
        devices = place.plugin.devices()
        return any("1g10gb-" in name and not device.get("taints") for name, device in devices.items())

    wait_for(is_offered, SOON_S, "small partitions are offered")
    place.plugin.kill()
