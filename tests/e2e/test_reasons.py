"""The reasons on claims that wait, on a real API server: one that lasts, and steps that lead on where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import EVENTS_OF_ALL_CLAIMS, EVENTS_OF_ONE_CLAIM, install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess
from tests.support.plugin import PluginFlags, PluginProcess, bare_node
from tests.support.scheduling import asked, matching
from tests.support.workloads import CLAIMS, PODS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 60.0
NODES = {"ampere": "sim:a30-4", "plain": "sim:l40s-8"}
"""Cards whose MIG mode changes with a reset only, and cards without MIG; neither has NVSwitches."""
L40S = 'device.attributes["gpu.tessera.dev"].productName == "NVIDIA L40S"'


class Place:
    """A cluster whose controller has heard of no node yet, with one claim that waits for a share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.plugins = {
            name: PluginProcess(cluster, bare_node(cluster, name), PluginFlags(gpus=gpus))
            for name, gpus in NODES.items()
        }

    def ask(self, name: str, *requests: dict[str, Any], constraints: Any = ()) -> None:
        """A claim and its pod."""
        devices = {"requests": list(requests), "constraints": list(constraints)}
        self.cluster.api.post(CLAIMS, {"metadata": {"name": name}, "spec": {"devices": devices}})
        container = {"resources": {"claims": [{"name": "gpu"}]}}
        claims = [{"name": "gpu", "resourceClaimName": name}]
        self.cluster.api.post(PODS, busybox_pod(name, container=container, resourceClaims=claims))

    def told(self, name: str) -> dict[str, str]:
        """Messages of the Events on a claim, by reason."""
        events = self.cluster.api.get("/api/v1/namespaces/default/events")["items"]
        about = [event for event in events if event["involvedObject"].get("name") == name]
        return {each["reason"]: each["message"] for each in about if each["involvedObject"]["kind"] == "ResourceClaim"}

    def reason(self, name: str, code: str, part: str = "") -> str:
        """The message of that reason on a claim, once it has ``part``."""
        return wait_for(
            lambda: message if part in (message := self.told(name).get(code, "")) else "",
            SOON_S,
            f"an Event {code} on claim {name} with {part!r}",
        )

    def allocated(self, name: str) -> bool:
        wait_for(lambda: self.cluster.api.get(f"{CLAIMS}/{name}").get("status", {}).get("allocation"), SOON_S, name)
        return True


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with control_plane("reasons") as cluster:
        install(cluster)
        there = Place(cluster)
        there.ask("a-share", asked("gpu-dev"))
        there.ask("b-nobody", asked("no-such-class"))
        controller = ControllerProcess(cluster)
        controller.start()
        yield there
        controller.stop()
        for plugin in there.plugins.values():
            plugin.stop()


@pytest.fixture(scope="module")
def silence(place: Place) -> dict[str, str]:
    """What was said of the share before any node had told its GPUs."""
    place.reason("b-nobody", "NoSuchClass")
    before = place.told("a-share")
    for plugin in place.plugins.values():
        plugin.spawn()
    for plugin in place.plugins.values():
        plugin.wait_published()
    return before


def test_before_any_node_has_told_its_gpus_nothing_is_said_of_what_they_lack(
    place: Place, silence: dict[str, str]
) -> None:
    assert silence == {}
    assert "no GPU is divided into shares" in place.reason("a-share", "NothingMatches")
    assert set(place.told("a-share")) == {"NothingMatches"}


@pytest.mark.usefixtures("silence")
def test_the_commands_that_the_docs_name_show_the_reasons(place: Place) -> None:
    reasons = {
        name: place.reason(name, code) for name, code in (("a-share", "NothingMatches"), ("b-nobody", "NoSuchClass"))
    }
    for name, message in reasons.items():
        one = EVENTS_OF_ONE_CLAIM.replace("NAMESPACE", "default").replace("NAME", name)
        assert message in place.cluster.kubectl(*one.split()[1:])
    of_all = place.cluster.kubectl(*EVENTS_OF_ALL_CLAIMS.split()[1:])
    assert all(message in of_all for message in reasons.values())


@pytest.mark.usefixtures("silence")
def test_a_clique_that_is_nowhere_keeps_its_reason_while_all_gpus_are_held(place: Place) -> None:
    same = [matching("gpu.tessera.dev/nvlinkClique")]
    place.ask("clique", asked("gpu-training", L40S, count=4), constraints=same)
    place.reason("clique", "ConstraintNotMet", "even if nothing were held")
    place.ask("holder", asked("gpu-training", L40S, count=8))
    assert place.allocated("holder")
    place.ask("late", asked("gpu-training", L40S), asked("gpu-training", L40S, name="other"))
    place.reason("late", "AllHeld")
    place.ask("clique-later", asked("gpu-training", L40S, count=4), constraints=same)
    place.reason("clique-later", "ConstraintNotMet", "even if nothing were held")
    assert set(place.told("clique")) == set(place.told("clique-later")) == {"ConstraintNotMet"}


@pytest.mark.usefixtures("silence")
def test_who_follows_the_steps_to_a_reset_gets_the_partition(place: Place) -> None:
    place.ask("small", asked("gpu-inference-1g-6gb"))
    plugin = place.plugins["ampere"]
    uuid = plugin.gpus()[0]["uuid"]
    place.reason("small", "GpuNeedsReset", f"nodePlugin.extraArgs={{--mig-gpus={uuid}}}")
    plugin.stop()
    plugin.flags.mig_gpus = uuid
    plugin.spawn()
    message = place.reason("small", "GpuNeedsReset", "the new mode is set already")
    assert message.endswith(f"nvidia-smi --gpu-reset -i {uuid}")
    plugin.fault("reset", "--gpu", "0")
    assert place.allocated("small")
