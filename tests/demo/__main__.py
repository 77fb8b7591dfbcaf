"""``python -m tests.demo``, or ``make demo``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from driver.errors import FatalError, TesseraError
from tests.demo import story
from tests.demo.screen import Screen
from tests.harness import preflight
from tests.harness.binaries import cached, ensure_binaries
from tests.harness.cluster import Cluster
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.workloads import install

NAME = "demo"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keep", is_flag=True, help="Leave the cluster and the plugin running.")
@click.option("--binaries", type=click.Path(path_type=Path), envvar=["TESSERA_BINARIES", "KUBEBUILDER_ASSETS"])
def main(keep: bool, binaries: Path | None) -> None:
    """Show the main job on a real Kubernetes cluster on this machine, without a GPU.

    The first run builds Kubernetes from its Go modules (about 15 minutes on 2 cores) and shows meanwhile
    what needs no cluster; later runs take about a minute. Ctrl-C ends everything that was started.

    \b
    Examples:
      make demo
      make demo KEEP=1
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    screen = Screen()
    settings = Settings(name=NAME, binaries=binaries, ephemeral=not keep)
    try:
        _tell(screen, settings)
    except KeyboardInterrupt:
        click.echo("\nstopped; what was started is ended", err=True)
        sys.exit(130)
    except TesseraError as error:
        click.secho(f"demo: {error}", fg="red", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)
    _farewell(screen, settings)


def _tell(screen: Screen, settings: Settings) -> None:
    story.without_cluster(screen)
    screen.act("A real Kubernetes cluster on this machine")
    progress = Progress()
    preflight.prepare(settings, progress)
    if settings.binaries is None and not cached(settings.release, settings.cache).is_dir():
        screen.say("The first run builds Kubernetes from its Go modules; later runs start in seconds.")
    ensure_binaries(settings.release, progress, settings.binaries, settings.cache)
    screen.say(
        f"etcd, API server, scheduler, controllers, containerd and kubelet, Kubernetes {settings.release.kubernetes}:"
    )
    cluster = Cluster.start(settings, progress)
    try:
        _on(screen, cluster, keep=not settings.ephemeral)
    except BaseException:
        cluster.stop()
        raise
    if settings.ephemeral:
        with screen.step("end the cluster"):
            cluster.stop()


def _on(screen: Screen, cluster: Cluster, *, keep: bool) -> None:
    with screen.step("install device classes and RBAC"):
        install(cluster)
    # Operations take as long as on hardware here; tests run them without delay.
    plugin = PluginProcess(cluster, cluster.nodes[0], PluginFlags(sim_latency="default"))
    story.published(screen, plugin)
    story.pods_run(screen, cluster, plugin)
    story.inside(screen, cluster, plugin)
    story.pods_go(screen, cluster, plugin)
    if keep:
        _try_next(screen, cluster, plugin)
    else:
        screen.act("Try it yourself")
        screen.say("`make demo KEEP=1` leaves the cluster and the plugin running and prints what to try next.")


def _try_next(screen: Screen, cluster: Cluster, plugin: PluginProcess) -> None:
    screen.act("Try it yourself")
    screen.show(
        f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.binaries}:$PATH\n"
        "kubectl get deviceclasses,resourceslices\n"
        "kubectl apply -f deploy/examples/inference.yaml\n"
        "kubectl get resourceclaims -o wide\n"
        f".venv/bin/tessera sim smi --host-root {plugin.host_root}\n"
        f"tail -f {plugin.log}"
    )


def _farewell(screen: Screen, settings: Settings) -> None:
    screen.act("What stays on this machine")
    running = "" if settings.ephemeral else f"the running cluster           make cluster-down NAME={NAME}\n"
    screen.show(
        f"{running}"
        f"built programs, uv            rm -rf {settings.cache}\n"
        "Go's modules and build cache  go clean -modcache -cache   (needed again only for another version)\n"
        "Python packages               make clean\n"
        "Debian packages               apt-get remove runc busybox-static containernetworking-plugins"
    )
    screen.end()


if __name__ == "__main__":
    main()
