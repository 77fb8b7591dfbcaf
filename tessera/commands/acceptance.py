"""``tessera acceptance``: test a GPU of this node, step by step, through the node plugin that owns it."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import grpc
import msgspec
import yaml

from driver.errors import EnvironmentFault, FatalError, UsageError
from kubelet_plugin.acceptance.protocol import (
    MESSAGE,
    METHOD,
    SERVICE,
    AcceptanceMessage,
    AcceptanceRequest,
    AcceptanceStep,
    StepState,
)
from kubelet_plugin.acceptance.steps import KILLED_PLUGIN, PARTITIONS
from kubelet_plugin.dra.call_proxy import connect
from kubelet_plugin.settings import node_settings
from kubelet_plugin.upgrade.instance_lock import active_socket
from tessera.cluster_options import with_driver_name
from tessera.progress import Progress
from tessera.tables_and_drawings import columns, counted, printable, show, with_output

RESTART_TIMEOUT_SECONDS, RESTART_CHECK_INTERVAL_SECONDS = 180.0, 1.0
"""How long a killed plugin may take until its next process answers; the kubelet waits between two starts."""

STANDARD_OUTPUT = Path("-")

CONTAINER = "container"
PROGRAM_TIMEOUT_SECONDS = 60.0

SIMULATED_PROGRAM = "nvidia-smi: simulated"
"""How the output of the simulator's nvidia-smi begins."""

COLOURS = {StepState.PASSED: "green", StepState.FAILED: "red", StepState.SKIPPED: "yellow"}

WARNING = """\
The test takes {gpu} out of service until it ends, usually within two minutes: no new pod gets it.
It switches the MIG mode, and cuts and removes every partition that the GPU can have.
Claims keep what they have; if any hold the GPU, the test changes nothing."""


@click.command()
@click.argument("gpu", metavar="[GPU]", default="")
@click.option("--read-only", is_flag=True, help="Leave out all steps that change the GPU.")
@click.option("--yes", is_flag=True, help="Do not ask before the GPU is changed.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 86400),
    default=0.0,
    show_default=True,
    help="Seconds to wait for claims that hold the GPU.",
)
@click.option(
    "--kill-plugin",
    is_flag=True,
    help="At the end kill the node plugin while a partition is cut, and check that its next process removes it.",
)
@click.option("--container", is_flag=True, help="Check also that this container has a driver: it must have a claim.")
@click.option(
    "--capture",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write a description of the node, without serial numbers, for --gpus sim:FILE; -: print it at the end.",
)
@click.option("--kubelet-dir", type=click.Path(path_type=Path), help="As of the node plugin.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="As of the node plugin.")
@with_driver_name
@with_output("table", "json")
def acceptance(
    gpu: str,
    *,
    read_only: bool,
    yes: bool,
    wait: float,
    kill_plugin: bool,
    container: bool,
    capture: Path | None,
    output: str,
    **directories: Any,
) -> None:
    """Test a GPU of this node and its driver: what works, and how long it takes.

    Run it as root on the node, or in the pod of its node plugin. GPU is a UUID, or gpu-N with the number in its device
    names; without one the first idle GPU is tested. The node plugin does all the work, and only on a GPU of which no
    claim has anything. Ctrl-C, or a kill, leaves nothing behind.

    Exit code 0: no step failed; 1: one did.

    \b
    Examples:
      tessera acceptance --read-only
      tessera acceptance gpu-3 --yes --capture node.yaml
      kubectl exec -n tessera tessera-node-x7k2p -- tessera acceptance gpu-0 --yes
    """
    if read_only and kill_plugin:
        raise UsageError("--kill-plugin: changes the GPU, so it can't be combined with --read-only")
    if not read_only and not yes:
        if not sys.stdin.isatty():
            raise UsageError("the test changes a GPU: confirm it with --yes, or use --read-only")
        click.echo(WARNING.format(gpu=gpu or "an idle GPU"), err=True)
        click.confirm("Continue?", abort=True, err=True)
    test = RunningTest(directories)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the first process of a container would ignore it
    steps = [_own_container()] if container else []
    try:
        steps += test.run(AcceptanceRequest(gpu, read_only, wait, kill_plugin))
        if kill_plugin and steps[-1].step == KILLED_PLUGIN:
            steps[-1] = test.after_kill(steps)
    except KeyboardInterrupt:
        test.progress.log("stopped: the node plugin removes what the test made, and ends its cordon")
        raise
    if capture is not None and capture != STANDARD_OUTPUT and test.node:
        _write(capture, test.node)
    show(output, [msgspec.to_builtins(step) for step in steps], _table(steps))
    if capture == STANDARD_OUTPUT and test.node:
        click.echo(f"---\n{yaml.safe_dump(test.node, sort_keys=False)}", nl=False)
    if failed := [step.step for step in steps if step.state is StepState.FAILED]:
        raise FatalError(f"{counted(len(failed), 'step')} failed: {', '.join(failed)}")


class RunningTest:
    """A test by the active plugin, with these flags. ``node``: its description; not that of the run after a kill."""

    def __init__(self, directories: dict[str, Any]) -> None:
        self._directories, self.progress, self.node = directories, Progress(), dict[str, Any]()

    def run(self, request: AcceptanceRequest) -> list[AcceptanceStep]:
        """The steps that have ended. Raises EnvironmentFault and FatalError, unless the plugin was asked to die."""
        steps = list[AcceptanceStep]()
        try:
            for message in self._messages(request):
                if message.notice:
                    self.progress.show(message.notice)
                if message.node is not None and not self.node:
                    self.node = message.node
                if (step := message.step) is not None:
                    if steps and steps[-1].state is StepState.RUNNING:
                        steps.pop()
                    steps.append(step)
                    self.progress.show(f"{step.gpu}: {step.step} ...")
        except EnvironmentFault:
            if not (steps and steps[-1].step == KILLED_PLUGIN and steps[-1].state is StepState.RUNNING):
                raise
        finally:
            self.progress.clear()
        return steps

    def after_kill(self, before: Sequence[AcceptanceStep]) -> AcceptanceStep:
        """The result of the step that killed the plugin: whether its next process has left no partition."""
        killed, started = before[-1], time.monotonic()
        if killed.state is not StepState.RUNNING:
            return killed
        self.progress.show("waiting for the next process of the node plugin")
        while True:
            try:
                after = self.run(AcceptanceRequest(killed.gpu))
                break
            except EnvironmentFault as fault:
                if time.monotonic() - started > RESTART_TIMEOUT_SECONDS:
                    return msgspec.structs.replace(killed, state=StepState.FAILED, detail=str(fault))
                time.sleep(RESTART_CHECK_INTERVAL_SECONDS)
        was, now = (next(step for step in steps if step.step == PARTITIONS) for steps in (before, after))
        seconds = round(time.monotonic() - started, 3)
        if (was.state, was.detail) == (now.state, now.detail):
            detail = f"the next process has removed the partition: {now.detail}"
            return msgspec.structs.replace(killed, state=StepState.PASSED, detail=detail, seconds=seconds)
        detail = f"partitions before: {was.detail}; after: {now.detail}"
        return msgspec.structs.replace(killed, state=StepState.FAILED, detail=detail, seconds=seconds)

    def _messages(self, request: AcceptanceRequest) -> Iterator[AcceptanceMessage]:
        socket = _active_socket(self._directories)  # another instance's after a kill during a rolling update
        try:
            with connect(socket) as channel:
                call = channel.unary_stream(f"/{SERVICE}/{METHOD}", msgspec.json.encode, MESSAGE.decode)
                yield from call(request)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise FatalError(error.details()) from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise FatalError(
                    "the node plugin can't test GPUs: it waits for the NVIDIA driver, or is of an earlier version; see "
                    "its log"
                ) from error
            raise EnvironmentFault(f"the node plugin does not answer at {socket}: {error.details()}") from error


def _active_socket(directories: dict[str, Any]) -> Path:
    """The socket of the node's active plugin. Raises UsageError, EnvironmentFault."""
    settings = node_settings(node_name="this-node", **directories)
    socket = active_socket(settings.state_dir, settings.plugin_socket)
    if socket is None:
        raise EnvironmentFault(
            f"no node plugin has run on this node with --state-dir {settings.state_dir}; run this command as root on a "
            "GPU node, or in the pod of its node plugin"
        )
    return socket


def _own_container() -> AcceptanceStep:
    """Whether nvidia-smi and CUDA work in this container, which has a claim."""
    started = time.perf_counter()
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_SECONDS, check=True
        )
        listed, is_simulated = answer.stdout.strip(), answer.stdout.startswith(SIMULATED_PROGRAM)
        code = None if is_simulated else ctypes.CDLL("libcuda.so.1").cuInit(0)
        state = StepState.FAILED if code else StepState.PASSED
        cuda = "; CUDA was not tried: the GPUs are simulated" if is_simulated else f"; cuInit returns {code}"
        detail = f"nvidia-smi -L: {', '.join(listed.splitlines())}{cuda}"
    except (OSError, subprocess.SubprocessError) as error:
        state, detail = StepState.FAILED, f"{program} can't be run: {error}; does this container have a ResourceClaim?"
    return AcceptanceStep("", CONTAINER, state, detail, round(time.perf_counter() - started, 3))


def _write(file: Path, node: dict[str, Any]) -> None:
    try:
        file.write_text(yaml.safe_dump(node, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise FatalError(f"--capture {file}: can't be written: {error.strerror}") from error


def _table(steps: Sequence[AcceptanceStep]) -> str:
    rows = [
        [
            step.gpu or "-",
            step.step,
            click.style(step.state.value, fg=COLOURS.get(step.state)),
            f"{step.seconds:.2f} s",
            printable(step.detail),
        ]
        for step in steps
    ]
    return columns(["GPU", "STEP", "RESULT", "TIME", "DETAIL"], rows)
