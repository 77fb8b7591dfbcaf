"""What every demo has around its story: options, the cluster's life, Ctrl-C, what stays on the machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from driver.errors import FatalError, TesseraError
from tests.demo.screen import Screen
from tests.harness import preflight
from tests.harness.binaries import cached, ensure_binaries
from tests.harness.claim import require_unused
from tests.harness.cluster import Cluster
from tests.harness.layout import BASE
from tests.harness.progress import Progress
from tests.harness.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Play:
    """One demo. ``opening`` needs no cluster; ``story`` gets a running one and whether it is kept afterwards.

    ``name`` is that of the cluster.

    ``usual_places``: Tessera runs in pods, which look for the kubelet where every DaemonSet does.
    """

    name: str
    nodes: int
    opening: Callable[[Screen], None]
    story: Callable[[Screen, Cluster, bool], None]
    usual_places: bool = False


def name_option(default: str) -> Callable[[F], F]:
    """--name: demos whose clusters have different names run side by side on one machine."""
    return click.option("--name", default=default, show_default=True, help="The cluster's name.")


def options(name: str) -> Callable[[F], F]:
    """--name, with this default, --keep and --binaries."""

    def decorate(command: F) -> F:
        for option in (
            click.option(
                "--binaries", type=click.Path(path_type=Path), envvar=["TESSERA_BINARIES", "KUBEBUILDER_ASSETS"]
            ),
            click.option("--keep", is_flag=True, help="Leave the cluster and the plugins running."),
            name_option(name),
        ):
            command = option(command)
        return command

    return decorate


def perform(play: Play, keep: bool, binaries: Path | None) -> None:
    """Play it; whatever ends it, Ctrl-C included, ends what was started. Exits with 130, 1 or an error's own code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    screen = Screen()
    try:
        settings = Settings(
            name=play.name, nodes=play.nodes, binaries=binaries, ephemeral=not keep, usual_places=play.usual_places
        )
        _tell(play, screen, settings)
    except KeyboardInterrupt:
        click.echo("\nstopped; what was started is ended", err=True)
        sys.exit(130)
    except TesseraError as error:
        click.secho(f"{play.name}: {error}", fg="red", err=True)
        sys.exit(error.exit_code if isinstance(error, FatalError) else 1)
    _farewell(screen, settings)


def try_next(screen: Screen, cluster: Cluster, commands: str, example: str = "inference") -> None:
    """What to try on a cluster that is kept; ``example`` is one of deploy/examples whose devices it has."""
    screen.act("Try it yourself")
    screen.show(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.binaries}:$PATH\n{commands}")
    screen.say(
        "A pod of your own: this cluster has no pod network and reaches no registry, so any pod here needs "
        "`hostNetwork: true` and the image `docker.io/tessera/busybox:local`. The README's pod lacks them, those in "
        "deploy/examples have them:"
    )
    screen.show(
        f"sed 's/: {example}$/: mine/' deploy/examples/{example}.yaml | kubectl apply -f -\n"
        "kubectl wait --for=condition=Ready --timeout=2m pod/mine\n"
        "kubectl logs mine"
    )


def _tell(play: Play, screen: Screen, settings: Settings) -> None:
    progress = Progress()
    preflight.prepare(settings, progress)
    require_unused(settings)
    play.opening(screen)
    screen.act("A real Kubernetes cluster on this machine")
    if settings.binaries is None and not cached(settings.release, settings.cache).is_dir():
        screen.say("The first run builds Kubernetes from its Go modules; later runs start in seconds.")
    ensure_binaries(settings.release, progress, settings.binaries, settings.cache)
    screen.say(
        f"etcd, API server, scheduler, controllers, containerd and kubelet, Kubernetes {settings.release.kubernetes}:"
    )
    cluster = Cluster.start(settings, progress)
    try:
        play.story(screen, cluster, not settings.ephemeral)
    except BaseException:
        cluster.stop()
        raise
    if settings.ephemeral:
        with screen.step("end the cluster"):
            cluster.stop()


def _farewell(screen: Screen, settings: Settings) -> None:
    screen.act("What stays on this machine")
    running = "" if settings.ephemeral else f"the running cluster           make cluster-down NAME={settings.name}\n"
    screen.show(
        f"{running}"
        f"built programs, uv            rm -rf {settings.cache}\n"
        "Go's modules and build cache  go clean -modcache -cache   (needed again only for another version)\n"
        "Python packages               make clean\n"
        "Debian packages               apt-get remove runc busybox-static containernetworking-plugins\n"
        f"locks, logs of failed starts  rm -rf {BASE}   (while no cluster runs)"
    )
    screen.end()
