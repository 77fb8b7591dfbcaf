"""``python -m tests.demo.fifty_four``, or ``make demo-54``: 54 workloads on 10 GPUs, each with what it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from tessera.tables_and_drawings import columns
from tests.demo import nodes, pods
from tests.demo.picture import draw, rows
from tests.demo.promises import Group, broken, broken_time_slices, seen_in_words, tally
from tests.demo.screen import Screen
from tests.demo.stage import Play, options, perform, try_next
from tests.demo.svg import svg
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.support.chart import install
from tests.support.plugin import PluginProcess

RUN_USUALLY_S = 30.0
GO_USUALLY_S = 15.0

PROMISE = {
    "gpu": "a GPU of its own",
    "mig": "a MIG partition of its own: memory and compute apart from everybody's",
    "share": f"turns on a GPU with at most {nodes.SHARES - 1} others; no isolation of memory",
    "shared": f"{pods.NOTEBOOK_GIB} GiB of a GPU that others use, too: together never more than it has",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("demo-54")
@click.option(
    "--svg", "image", type=click.Path(path_type=Path), help="Write the picture of the GPUs to this file, too."
)
@click.option(
    "--notebooks",
    type=click.Choice(["shares", "memory"]),
    default="shares",
    show_default=True,
    help="What they ask for: one of ten shares, or memory of a GPU.",
)
def main(name: str, keep: bool, binaries: Path | None, image: Path | None, notebooks: str) -> None:
    """Run 54 workloads on 10 simulated A100 of a real two-node Kubernetes cluster on this machine.

    Four train on a full GPU each, twenty serve models on MIG partitions, thirty notebooks share three GPUs. What every
    container got is checked; exit code 1 if anything is not as promised. Ctrl-C ends everything that was started.

    \b
    Examples:
      make demo-54
      make demo-54 NOTEBOOKS=memory
      make demo-54 KEEP=1
      make demo-54 SVG=demo-54.svg
    """
    groups = pods.BY_MEMORY if notebooks == "memory" else pods.EVERYBODY
    perform(Play(name, len(nodes.PLANS), partial(_opening, groups), partial(_on, image, groups)), keep, binaries)


def _opening(groups: Sequence[Group], screen: Screen) -> None:
    screen.act("54 workloads on 10 GPUs")
    rows = [[str(group.count), f"{group.prefix}-..", group.device_class, PROMISE[group.type]] for group in groups]
    screen.show(columns(["PODS", "NAMES", "CLASS", "PROMISED TO EACH"], rows))


def _on(image: Path | None, groups: Sequence[Group], screen: Screen, cluster: Cluster, keep: bool) -> None:
    with screen.step("install the Helm chart: device classes, policies, RBAC"):
        install(cluster)
    plans = nodes.PLANS_BY_MEMORY if groups is pods.BY_MEMORY else nodes.PLANS
    plugins = nodes.node_plugins(cluster, plans)
    _set_up(screen, plugins, plans)
    before = nodes.offers(plugins)
    _run(screen, cluster, plugins, groups, image)
    _go(screen, cluster, plugins, before)
    if keep:
        smi = "\n".join(f".venv/bin/tessera sim smi --host-root {plugin.host_root}" for plugin in plugins)
        look, use = "kubectl get nodes,deviceclasses,resourceslices", "kubectl apply -f deploy/examples/dev.yaml"
        try_next(screen, cluster, f"{look}\n{use}\n{smi}", example="dev")


def _set_up(screen: Screen, plugins: Sequence[PluginProcess], plans: Sequence[nodes.NodePlan]) -> None:
    screen.act("Two nodes with five A100 80 GB each")
    screen.say("By setting, three of the ten are meant for MIG and three for notebooks; four are given out whole.")
    for plugin in plugins:
        flags = plugin.flags
        sharing = f"--shares {flags.shares}" if flags.shares else f"--shared {flags.shared}"
        layout = f"--layout '{flags.layout}' " if flags.layout else ""
        screen.command(
            f"tessera node --node-name {plugin.node.name} --mig-gpus {flags.mig_gpus} "
            f"{sharing} --shares-only {flags.shares_only} {layout}..."
        )
    with screen.step("start them, register with the kubelets, publish the GPUs"):
        nodes.start(plugins)
    screen.say(
        "They ask the GPUs that are meant for it for MIG mode. An A100 only notes the wish until an admin resets it; "
        "its slices say that it waits (migMode: enabled-after-reset), and it is given out whole until then."
    )
    with screen.step("wait until all three GPUs say so"):
        nodes.wait_for_mode(plugins)
    with screen.step("reset the three GPUs; partitions are offered instead"):
        nodes.reset_for_mig(plugins, plans)
    screen.show(draw(nodes.slices(plugins), []))


def _run(
    screen: Screen,
    cluster: Cluster,
    plugins: Sequence[PluginProcess],
    groups: Sequence[Group],
    image: Path | None,
) -> None:
    total = sum(group.count for group in groups)
    screen.act(f"{total} pods")
    with Progress().part(f"{total} pods: allocate, cut, share, start containers", RUN_USUALLY_S) as part:
        pods.create(cluster, groups)
        pods.wait_running(cluster, total, part.tick)
    screen.act("Who is where")
    slices, held = nodes.slices(plugins), pods.held(cluster, plugins)
    screen.show(draw(slices, held))
    if image is not None:
        image.write_text(svg(rows(slices, held)))
        screen.say(f"The picture is in {image}.")
    screen.say("A MIG bar is eight memory slices of 10 GB; an A100 can give seven of them to 1g.10gb.")
    screen.act("What each container sees")
    with screen.step(f"read what {total} containers found inside, compare with slices and hardware"):
        workloads = pods.look(cluster, plugins, groups)
    screen.show(columns(["POD", "NODE", "DEVICE", "DEVICE NODES", "TOLD"], map(seen_in_words, workloads)))
    pods.require([*broken(workloads), *broken_time_slices(workloads, nodes.time_slices(plugins))])
    screen.say(f"Checked: {tally(workloads)}.")
    screen.say(
        "Each sees the one GPU it was given and no other. A partition's two capability nodes are in no second "
        "container. Each is told the UUID that the hardware has at the place which the scheduler chose. No GPU "
        "serves two kinds of use, and no claims together have more memory than their GPU. GPUs have the time-slice "
        "that is asked for."
    )


def _go(screen: Screen, cluster: Cluster, plugins: Sequence[PluginProcess], before: frozenset[tuple[str, str]]) -> None:
    screen.act("The pods go, and everything is back")
    with Progress().part("delete the pods, remove partitions", GO_USUALLY_S) as part:
        pods.delete(cluster, part.tick)
    pods.require(nodes.left_behind(plugins))
    nodes.wait_offered_again(plugins, before)
    screen.say("Checked: no partition, CDI spec or checkpoint record is left, time-slices are the default ones.")
    screen.show(draw(nodes.slices(plugins), pods.held(cluster, plugins)))


if __name__ == "__main__":
    main()
