"""The command ``python -m tests.harness``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from driver.errors import FatalError, TesseraError
from tests.harness import cleanup, preflight
from tests.harness.addresses import MAX_NODES
from tests.harness.binaries import ensure_binaries
from tests.harness.cluster import Cluster
from tests.harness.layout import BASE
from tests.harness.processes import MARKER, ProcessTable
from tests.harness.progress import Progress
from tests.harness.settings import Settings, check_name
from tests.harness.state import cluster_directories, read_state
from tests.harness.versions import REFERENCE, default_release, release

DEFAULT_CACHE = Path.home() / ".cache" / "tessera"
WITHOUT_PODS = r"nodePlugin: {enabled: false}\ncontroller: {enabled: false}\n"

_name = click.option("--name", default="tessera", show_default=True, help="The cluster's name.")
_cache = click.option(
    "--cache",
    type=click.Path(path_type=Path),
    default=DEFAULT_CACHE,
    show_default=True,
    help="Where programs are kept.",
)
_kubernetes = click.option(
    "--kubernetes",
    default=lambda: default_release().kubernetes,
    show_default=f"KUBE, otherwise {REFERENCE.kubernetes}",
    metavar="VERSION",
    help="The Kubernetes version.",
)
_binaries = click.option(
    "--binaries",
    type=click.Path(path_type=Path),
    envvar=["TESSERA_BINARIES", "KUBEBUILDER_ASSETS"],
    metavar="DIR",
    help="A folder with all programs, instead of the cache. [env: TESSERA_BINARIES, KUBEBUILDER_ASSETS]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Run a real Kubernetes cluster on this machine (Linux, root), without Docker and without an image registry.

    \b
    Examples:
      python -m tests.harness up                    start a cluster with one node; prints its KUBECONFIG
      eval "$(python -m tests.harness up)"          the same, and use it in this shell
      python -m tests.harness up --name b --nodes 2 a second cluster beside it, with two nodes
      python -m tests.harness down --all            end every cluster, also what crashed ones left
    """


@main.command()
@_name
@click.option(
    "--nodes",
    default=1,
    show_default=True,
    help=f"Real nodes, each with a containerd and a kubelet; at most {MAX_NODES}.",
)
@_kubernetes
@_binaries
@_cache
def up(name: str, nodes: int, kubernetes: str, binaries: Path | None, cache: Path) -> None:
    """Start a cluster that stays until it is ended with "down".

    Prints shell commands that select it and, as comments, its nodes and how to run a node plugin on each. The first
    time on a machine it builds Kubernetes, which takes about 15 minutes on 2 cores.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    settings = Settings(
        name=name, nodes=nodes, release=release(kubernetes), binaries=binaries, cache=cache, ephemeral=False
    )
    cluster = Cluster.start(settings, Progress())
    click.echo("\n".join(_how_to_use(cluster)))
    cluster.api.close()


def _how_to_use(cluster: Cluster) -> Iterator[str]:
    """Lines for a shell: no folder in them is another cluster's, and what they start ends with the cluster."""
    yield f"export KUBECONFIG={cluster.kubeconfig}"
    yield f"export PATH={cluster.binaries}:$PATH"
    yield f"# cluster {cluster.name}, Kubernetes {cluster.release.kubernetes}, {cluster.server}"
    for node in cluster.nodes:
        yield f"# {node.name}  Ready  kubelet {node.kubelet_dir}  CDI {node.cdi_dir}"
    yield "# To install device classes, policies and rights, without pods (more: docs/local-cluster.md):"
    yield f"#   printf '{WITHOUT_PODS}' | make -s manifests VALUES=/dev/stdin | kubectl apply -f -"
    for node in cluster.nodes:
        yield f"# To run a node plugin with simulated GPUs on {node.name}, until it or the cluster is ended:"
        yield (
            f"#   {MARKER}={cluster.directory} .venv/bin/tessera node --node-name {node.name} "
            f"--kubeconfig {cluster.kubeconfig} --gpus sim:dgx-h100 --kubelet-dir {node.kubelet_dir} "
            f"--cdi-dir {node.cdi_dir} --host-root {cluster.directory}/gpus-{node.name}"
        )


@main.command()
@_name
@click.option("--all", "everything", is_flag=True, help="Every cluster.")
@click.option("--if-there", is_flag=True, help="It is fine if there is none of that name.")
def down(name: str, everything: bool, if_there: bool) -> None:
    """End a cluster, running or crashed, and remove everything it made on this machine.

    Exit code 1 if there is none of that name.
    """
    check_name(name)
    folders = cluster_directories(BASE) if everything else [BASE / name]
    if not everything and not cleanup.left_something(BASE / name):
        click.echo(f"no cluster {name} is here; {_there_are()}", err=True)
        sys.exit(0 if if_there else 1)
    for folder in folders:
        cleanup.destroy(folder)
        click.echo(f"cluster {folder.name}: ended", err=True)


def _there_are() -> str:
    names = [folder.name for folder in cluster_directories(BASE)]
    return f"there are: {', '.join(names)} (make cluster-down NAME={names[0]})" if names else "there is none at all"


@main.command()
def status() -> None:
    """List the clusters on this machine and their processes."""
    for folder in cluster_directories(BASE):
        state = read_state(folder)
        alive = [record for record in ProcessTable(folder).all() if record.alive]
        word = "running" if cleanup.in_use(folder) else f"left by a crash: `make cluster-down NAME={folder.name}`"
        version = state.release.kubernetes if state else "unknown version"
        owner = f", of process {state.owner.pid}" if state and state.owner else ""
        click.echo(f"{folder.name}: {word}, Kubernetes {version}{owner}")
        for record in alive:
            click.echo(f"  {record.pid:>8}  {record.name}")


@main.command()
@_kubernetes
@_cache
def build(kubernetes: str, cache: Path) -> None:
    """Build all programs into the cache, if they are not there, and print their folder."""
    signal.signal(signal.SIGTERM, _interrupt)
    click.echo(ensure_binaries(release(kubernetes), Progress(), cache=cache))


@main.command("preflight")
@_kubernetes
@_binaries
@_cache
@click.option("--mend", is_flag=True, help="Mend what can be mended first: install packages, load a module (root).")
def preflight_(kubernetes: str, binaries: Path | None, cache: Path, mend: bool) -> None:
    """Say what this machine lacks for a cluster, a line each with its remedy. Changes nothing without --mend."""
    settings = Settings(release=release(kubernetes), binaries=binaries, cache=cache)
    if mend:
        preflight.prepare(settings, Progress())
    found = preflight.failures(preflight.Machine.here(), settings)
    for failure in found:
        click.echo(failure)
    if found:
        sys.exit(1)
    click.echo("this machine can run a cluster")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends us as Ctrl-C does: by an exception that takes down on its way what was started."""
    raise KeyboardInterrupt


def run() -> None:
    """``main``, with errors as people want them: the message alone, and the exit code of its kind."""
    try:
        main.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: what was started is stopped", err=True)
        sys.exit(130)
    except TesseraError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)


if __name__ == "__main__":
    run()
