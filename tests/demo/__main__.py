"""``python -m tests.demo``, or ``make demo``."""

from __future__ import annotations

from pathlib import Path

import click

from tests.demo import story
from tests.demo.screen import Screen
from tests.demo.stage import Play, options, perform, try_next
from tests.harness.cluster import Cluster
from tests.support.chart import install
from tests.support.features import has
from tests.support.plugin import PluginFlags, PluginProcess


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("demo")
def main(name: str, keep: bool, binaries: Path | None) -> None:
    """Show the main job on a real Kubernetes cluster on this machine, without a GPU.

    The first run builds Kubernetes from its Go modules (about 15 minutes on 2 cores) and shows meanwhile
    what needs no cluster; later runs take about a minute. Ctrl-C ends everything that was started.

    \b
    Examples:
      make demo
      make demo KEEP=1
      make demo NAME=mine      a second one on the machine at the same time
    """
    perform(Play(name, 1, story.without_cluster, _on), keep, binaries)


def _on(screen: Screen, cluster: Cluster, keep: bool) -> None:
    with screen.step("install the Helm chart: device classes, policies, RBAC"):
        install(cluster)
    # Operations take as long as on hardware here; tests run them without delay.
    plugin = PluginProcess(cluster, cluster.nodes[0], PluginFlags(sim_latency="default"))
    story.published(screen, plugin)
    if not has(cluster, "shared counters"):
        story.offers_are_disjoint(screen, cluster)
    story.pods_run(screen, cluster, plugin)
    story.inside(screen, cluster, plugin)
    story.pods_go(screen, cluster, plugin)
    if keep:
        try_next(
            screen,
            cluster,
            "kubectl get deviceclasses,resourceslices\n"
            "kubectl apply -f deploy/examples/inference.yaml\n"
            "kubectl get resourceclaims -o wide\n"
            f".venv/bin/tessera sim smi --host-root {plugin.host_root}\n"
            f"tail -f {plugin.log}",
        )
    else:
        screen.act("Try it yourself")
        screen.say("`make demo KEEP=1` leaves the cluster and the plugin running and prints what to try next.")


if __name__ == "__main__":
    main()
