"""Two nodes of five A100 80 GB each: which GPUs are full, cut and shared, and what is on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tests.demo.picture import Object
from tests.demo.resets import SETTLED_S, in_time, reset, wait_asked
from tests.harness.cluster import Cluster
from tests.support.features import has
from tests.support.plugin import PluginFlags, PluginProcess

SHARES = 10
LAYOUT = ",".join(["1g.10gb"] * 7)


@dataclass(frozen=True)
class NodePlan:
    """Which of a node's five GPUs are meant for MIG and which for notebooks; the others are given out whole.

    ``notebook``: the type of device that a notebook gets, ``share`` or ``shared``.
    """

    mig: tuple[int, ...]
    shared: tuple[int, ...]
    notebook: str = "share"

    def flags(self, gpus: str, sim_latency: str, *, counters: bool) -> PluginFlags:
        """What the node's plugin is told; without counters also how to divide GPUs, since its offers are disjoint."""
        return PluginFlags(
            gpus=gpus,
            sim_latency=sim_latency,
            mig_gpus=",".join(map(str, self.mig)),
            shares="" if self.notebook == "shared" else self._settings(str(SHARES)),
            shared=self._settings("time-slicing") if self.notebook == "shared" else "",
            shares_only=",".join(map(str, self.shared)),
            layout="" if counters else ";".join(f"{number}={LAYOUT}" for number in self.mig),
        )

    def _settings(self, value: str) -> str:
        """This value for each GPU for notebooks, as in the plugin's flags."""
        return ",".join(f"{number}={value}" for number in self.shared)

    @property
    def types(self) -> dict[int, set[str]]:
        """What each GPU is to offer once it is set."""
        return {n: {"mig" if n in self.mig else self.notebook if n in self.shared else "gpu"} for n in range(5)}


PLANS = (NodePlan(mig=(2, 3), shared=(4,)), NodePlan(mig=(2,), shared=(3, 4)))
PLANS_BY_MEMORY = tuple(replace(plan, notebook="shared") for plan in PLANS)


def node_plugins(
    cluster: Cluster, plans: Sequence[NodePlan] = PLANS, sim_latency: str = "default"
) -> list[PluginProcess]:
    """A plugin for each node of the cluster, not started; its node is five A100 80 GB of its own."""
    description = yaml.safe_load(Path(__file__).with_name("five-a100.yaml").read_text())
    plugins = []
    for node, plan in zip(cluster.nodes, plans, strict=True):
        file = cluster.directory / f"gpus-{node.name}.yaml"
        file.write_text(yaml.safe_dump({**description, "name": f"{description['name']}-{node.name}"}))
        flags = plan.flags(f"sim:{file}", sim_latency, counters=has(cluster, "shared counters"))
        plugins.append(PluginProcess(cluster, node, flags))
    return plugins


def start(plugins: Sequence[PluginProcess]) -> None:
    """Start them side by side."""
    for plugin in plugins:
        plugin.spawn()
    for plugin in plugins:
        plugin.wait_ready()


def wait_for_mode(plugins: Iterable[PluginProcess]) -> None:
    """Until they have asked their GPUs for MIG mode, which they do once nobody else is found to own the GPUs."""
    for plugin, plan in zip(plugins, PLANS, strict=True):
        wait_asked(plugin, plan.mig)


def reset_for_mig(plugins: Iterable[PluginProcess], plans: Sequence[NodePlan] = PLANS) -> None:
    """What an admin does on Ampere: reset the GPUs whose MIG mode waits for it. Returns once the slices follow."""
    for plugin, plan in zip(plugins, plans, strict=True):
        reset(plugin, plan.mig, plan.types)


def wait_offered_again(plugins: Sequence[PluginProcess], before: frozenset[tuple[str, str]]) -> None:
    """Until what was offered ``before`` is offered again, and nothing else."""

    def words() -> str:
        now = offers(plugins)
        lacking = [f"{name} of {node} is not offered again" for node, name in sorted(before - now)]
        more = [f"{name} of {node} is offered, which was not before" for node, name in sorted(now - before)]
        return f"{SETTLED_S:g} s after the pods went: {'; '.join([*lacking, *more])}"

    in_time(lambda: offers(plugins) == before, SETTLED_S, words)


def slices(plugins: Iterable[PluginProcess]) -> list[Object]:
    """The slices of all nodes."""
    return [item for plugin in plugins for item in plugin.slices()]


def time_slices(plugins: Iterable[PluginProcess]) -> dict[tuple[str, int], str]:
    """The interval in force on every GPU, by node and number."""
    return {(plugin.node.name, gpu["index"]): gpu["timeSlice"] for plugin in plugins for gpu in plugin.gpus()}


def left_behind(plugins: Iterable[PluginProcess]) -> list[str]:
    """What should be gone with the pods, a sentence for each node's leavings; empty where nothing is left."""
    found = []
    for plugin in plugins:
        gpus = plugin.gpus()
        counts = {
            "partitions": sum(len(gpu["migDevices"]) for gpu in gpus),
            "CDI specs": len(plugin.cdi_specs()),
            "checkpoint records": len(plugin.records()),
            "GPUs with a time-slice of their own": sum(gpu["timeSlice"] != "Default" for gpu in gpus),
            "GPUs with a compute mode of their own": sum(gpu["computeMode"] != "DEFAULT" for gpu in gpus),
        }
        found += [f"{count} {what} on {plugin.node.name}" for what, count in counts.items() if count]
    return found


def offers(plugins: Iterable[PluginProcess]) -> frozenset[tuple[str, str]]:
    """Every published device, by node and name."""
    return frozenset((plugin.node.name, name) for plugin in plugins for name in plugin.devices())
