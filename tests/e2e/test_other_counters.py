"""A node's counter sets get another counter at an upgrade: what is held stays counted, on a real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import plugins
from tests.support.plugin import SLICES, PluginFlags, PluginProcess
from tests.support.scheduling import Scheduling, asked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("other-counters") as running:
        install(running)
        yield running


@pytest.fixture
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    with plugins(cluster, ["node-a"], PluginFlags(gpus="sim:h100-1")) as [found]:
        yield found


def without_memory(content: Any) -> Any:
    """The content of a slice as versions without the counter ``memory`` wrote it."""
    if isinstance(content, list):
        return [without_memory(each) for each in content]
    if not isinstance(content, dict):
        return content
    counters = {name: value for name, value in content.get("counters", {}).items() if name != "memory"}
    changed = {"counters": counters} if "counters" in content else {}
    return {key: without_memory(value) for key, value in (content | changed).items()}


def has_memory(plugin: PluginProcess) -> bool:
    slices = plugin.slices()
    sets = [each["counters"] for item in slices for each in item["spec"].get("sharedCounters") or ()]
    used = [each["consumesCounters"][0]["counters"] for each in plugin.devices().values()]
    return bool(sets and used) and all("memory" in counters for counters in (*sets, *used))


def test_a_pool_of_older_counters_becomes_a_new_generation_that_counts_what_is_held(
    cluster: Cluster, plugin: PluginProcess
) -> None:
    wait_for(lambda: has_memory(plugin), SOON_S, "slices with the counter")
    plugin.stop()
    for item in plugin.slices():
        cluster.api.request("PUT", f"{SLICES}/{item['metadata']['name']}", without_memory(item))
    before = plugin.slices()
    assert not has_memory(plugin)
    part, whole = Scheduling(cluster, "part"), Scheduling(cluster, "whole")
    part.ask(asked("gpu-inference-1g-10gb"))
    [held] = part.given()
    plugin.spawn()
    wait_for(lambda: has_memory(plugin), SOON_S, "slices with the counter again")
    after = plugin.slices()
    pools = [{item["spec"]["pool"]["generation"] for item in items} for items in (before, after)]
    assert pools == [{1}, {2}]
    assert held.device in plugin.devices()
    whole.ask(asked("gpu-training"))
    assert whole.refused()
    part.forget()
    assert [each.device for each in whole.given()] == ["gpu-0"]
    whole.forget()
