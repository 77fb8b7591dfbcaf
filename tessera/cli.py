"""The command line: flags in, exit codes out (0 good, 1 failure, 2 usage, 3 environment)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Any

import click

from driver.config.log_options import with_logs
from driver.errors import ApiError, EnvironmentFault, FatalError, TesseraError

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the node plugin."""

OF_THEIR_OWN_MODULE = (
    "acceptance", "kueue", "lint", "map", "simulate", "status", "topology", "uninstall", "usage", "web",
)  # fmt: skip
COMMAND_MODULES = {
    **{name: f"tessera.commands.{name}" for name in OF_THEIR_OWN_MODULE},
    "advise": "tessera.commands.usage",
    "controller": "controller.app",
    "cordon": "tessera.commands.maintenance.cordon",
    "drain": "tessera.commands.maintenance.drain",
    "migrate": "tessera.commands.maintenance.migrate",
    "preempt": "tessera.commands.waiting.preempt",
    "sim": "tessera.sim.node_commands",
    "template": "tessera.commands.node_template",
    "uncordon": "tessera.commands.maintenance.cordon",
    "version": "tessera.version",
    "why": "tessera.commands.waiting.why",
}
"""Modules of the commands by name, each loaded only when its command runs: the node plugin must not load them all."""


class Command(click.Group):
    """A group whose errors end the process with one line and the right exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            if all(frame.f_code is not click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
                raise  # it does not come from writing the command's output
            click.secho(f"tessera: the output can't be written: {error.strerror}", fg="red", err=True)
            sys.exit(FatalError.exit_code)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        if os.environ.get("NO_COLOR"):  # https://no-color.org
            options["color"] = False
        return super().make_context(*args, **options)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except TesseraError as error:
            fault = error if isinstance(error, FatalError) else FatalError(str(error))
            if isinstance(error, ApiError) and error.status is None:
                fault = EnvironmentFault(f"the cluster can't be reached: {error}; check --kubeconfig")
            click.secho(f"tessera: {fault}", fg="red", err=True)
            sys.exit(fault.exit_code)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *COMMAND_MODULES])

    def get_command(self, context: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMAND_MODULES.get(cmd_name)
        if module is None:
            return super().get_command(context, cmd_name)
        command: click.Command = getattr(import_module(module), cmd_name)
        return command


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tessera-dra", prog_name="tessera")
def main() -> None:
    """Tessera: NVIDIA GPUs for Kubernetes, partitioned on demand.

    \b
    Examples:
      tessera topology --gpus sim:dgx-h100
      tessera status
      tessera node --node-name n1 --kubeconfig ~/.kube/config --gpus sim:dgx-h100
    """


@main.command()
@click.option("--node-name", envvar="NODE_NAME", required=True, help="Name of this machine's Node object.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: the pod's own ServiceAccount.")
@click.option("--driver-name", help="DRA driver name and attribute domain.  [default: gpu.tessera.dev]")
@click.option("--gpus", help="Source of the GPUs: nvml, sim:NAME or sim:FILE.  [default: nvml]")
@click.option("--kubelet-dir", type=click.Path(path_type=Path), help="Kubelet's root.  [default: /var/lib/kubelet]")
@click.option("--namespace", help="Namespace of the controller's heartbeat.  [default: tessera]")
@click.option("--cdi-dir", type=click.Path(path_type=Path), help="CDI specs.  [default: /var/run/cdi]")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Checkpoint files.  [default: KUBELET_DIR/plugins/DRIVER_NAME]"
)
@click.option("--driver-root", type=click.Path(path_type=Path), help="Root of the host's NVIDIA driver.  [default: /]")
@click.option("--cdi-hook", help="nvidia-cdi-hook on the host, for CDI specs: auto, none or PATH.  [default: auto]")
@click.option("--host-root", type=click.Path(path_type=Path), help="The host's root directory as this process sees it.")
@click.option("--nvml-library", type=click.Path(path_type=Path), help="Path of libnvidia-ml.so.1.  [default: searched]")
@click.option("--include-gpus", help="GPUs to manage: indices, UUIDs, PCI addresses, comma-separated.  [default: all]")
@click.option("--exclude-gpus", help="GPUs not to manage, in the same form.  [default: none]")
@click.option("--mig-gpus", help="Ampere GPUs to run in MIG mode, which takes a reset to change.  [default: none]")
@click.option(
    "--shares",
    help="WHICH=R,...: offer GPUs (all, index, UUID, PCI address, product) as R time-sliced shares.  [default: none]",
)
@click.option(
    "--shared",
    help="WHICH=time-slicing|mps,...: let claims share GPUs by memory (docs/sharing.md).  [default: none]",
)
@click.option("--shares-only", help="GPUs to offer only as shares or by memory.  [default: none]")
@click.option(
    "--compute-instances",
    help="1c.3g.40gb,...: claims share partitions of a profile, each with a compute instance.  [default: none]",
)
@click.option("--memory-hook", help="Hook that limits containers of shared GPUs: auto or none.  [default: auto]")
@click.option(
    "--framework-variables",
    help="jax, pytorch or jax,pytorch: tell them a claim's memory where they see the whole GPU.  [default: none]",
)
@click.option(
    "--publish",
    help="curated or complete: every device that the GPUs can be, at any time; the Node's label "
    "gpu.tessera.dev/publish takes precedence.  [default: curated]",
)
@click.option(
    "--layout",
    help="WHICH=PROFILE,...;...: partitions that GPUs offer where offers are disjoint and no controller plans them "
    "(docs/node-plugin.md).  [default: full GPUs]",
)
@click.option("--existing-partitions", help="Partitions of others: ignore or publish.  [default: ignore]")
@click.option("--neighbours", help="GPUs that other drivers here allocate: refuse or exclude.  [default: refuse]")
@click.option("--sim-latency", help="Duration of simulated GPU operations: default, zero or measured.")
@click.option("--metrics-address", help="HOST:PORT to serve /metrics at; :9400 means every address.  [default: none]")
@click.option(
    "--usage-interval", help="Measure how much of their GPUs claims use, every 15s, for example.  [default: never]"
)
@click.option("--health-address", help="HOST:PORT to serve /livez and /readyz at.  [default: none]")
@click.option("--pod-uid", help="UID of this process' pod; allows two plugins on a node during a rolling update.")
@with_logs()
def node(**flags: Any) -> None:
    """Run the node plugin: publish this node's GPUs and prepare claims.

    Needs root, a kubelet, and the NVIDIA driver (or --gpus sim:...); outside a pod --kubeconfig, too.

    \b
    Examples:
      tessera node --node-name worker-1 --kubeconfig ~/.kube/config --gpus sim:dgx-h100
      tessera node --node-name worker-1 --shares "NVIDIA L4=8,0=4" --shares-only 0
      tessera node --node-name worker-1 --shared "NVIDIA L4=time-slicing"
      tessera node --node-name worker-1 --layout "NVIDIA H100 80GB HBM3=3g.40gb,2g.20gb,1g.10gb,1g.10gb;0=7g.80gb"
    """
    gc.disable()  # it would traverse 200,000 objects several times during a start, and without freeze() again later
    try:
        from driver.process_exit import leave
        from kubelet_plugin.app import node_plugin
        from kubelet_plugin.settings import node_settings

        settings, stop, is_terminated = node_settings(**flags), threading.Event(), threading.Event()

        def terminate(*_: object) -> None:
            is_terminated.set()
            stop.set()

        for number in STOP_SIGNALS:
            signal.signal(number, terminate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        plugin = node_plugin(settings, stop)
        gc.freeze()
    finally:
        gc.enable()
    if plugin is not None:
        plugin.run()
    # A signal during the restart then waits for the new process. As the first of a container, it ignores one without a
    # handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not is_terminated.is_set():  # its configuration has changed: the same process starts again
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - there is no shell
    leave(log)
