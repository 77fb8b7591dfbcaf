"""The step that shares a GPU by MPS for programs of its own, and tries what their containers could."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from driver.clock import wait_until
from driver.errors import HardwareError
from driver.model.device import Device
from driver.model.gpu import Gpu
from driver.model.gpu_settings import ComputeMode
from driver.model.offer import SHARED, Spot
from driver.model.shared_memory import GIB, SharingStrategy
from kubelet_plugin.acceptance.cuda_program import ProgramReport
from kubelet_plugin.acceptance.tested_gpu import StepSkipped, TestedGpu
from kubelet_plugin.mps.client import CUDA, MpsAccess, control_program, cuda_library, lost_gpus, namespace_of
from kubelet_plugin.mps.control_tool import PIPE_DIRECTORY
from kubelet_plugin.mps.protocol import LEGACY, NAMESPACES, SERVER, DaemonState

CLAIMED_GIB, CLAIMED_THREADS = 2, 50
"""What the step's claim has of the GPU; a context alone takes half a GiB."""

REPORT_TIMEOUT_SECONDS, COMMAND_TIMEOUT_SECONDS = 30.0, 10.0
"""A client waits for another user's to end where the daemon serves one user only."""

END_TIMEOUT_SECONDS, CHECK_INTERVAL_SECONDS = 2.0, 0.1
"""A daemon or server that a command ends may go on for a moment."""

ROOT, NOBODY = 0, 65534

NO_DAEMON = "/nonexistent"
"""A pipe directory that leads to no daemon: CUDA then runs without MPS, unless the compute mode keeps it out."""

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
SHOWN_CHARACTERS = 80
CAN_NOT_RUN = "a program with CUDA can't be run"
REPORT = msgspec.json.Decoder(ProgramReport)


def shared_by_mps(tested: TestedGpu) -> str:
    """What containers of a claim get of the GPU, with its pipe directory, without it, and from the daemon's socket."""
    gpu, mps = tested.gpu, tested.rehearsals.settings.mps
    device = _shared_device(tested)
    share_id = str(uuid.uuid4())
    mode = mps.mode_to_restore(device)
    with tested.recorded(device, share_id=share_id, threads=CLAIMED_THREADS, compute_mode=mode) as record:
        [access] = mps.apply(gpu, record).values()
        if (mode_now := tested.host.compute_mode(gpu)) is not ComputeMode.EXCLUSIVE_PROCESS:
            raise HardwareError(f"the compute mode is {mode_now.name} after it was set to EXCLUSIVE_PROCESS")
        tenant = Tenant(gpu, _cuda(tested), control_program(tested.host.driver_root, gpu.uuid), access)
        daemon = mps.daemon(gpu)
        texts = [f"MPS protocol {daemon.protocol}", *_programs(tenant, daemon)]
        daemon, limits = mps.daemon(gpu), tenant.limits_of_new_servers(daemon.protocol)
        texts.append(f"a container's socket answers {_answers(tenant, daemon, namespace_of(share_id))}")
        try:
            _check_unharmed(tenant, daemon, limits, lambda: mps.daemon(gpu))
        except HardwareError as error:
            raise HardwareError(f"{texts[-1]}: afterwards {error}") from error
    return "; ".join(texts)


def _shared_device(tested: TestedGpu) -> Device:
    """The part of the GPU that the step's claim has. Raises StepSkipped."""
    shared = (device for device in tested.inventory.devices_on(tested.gpu) if device.shared is not None)
    device = next(shared, None)
    if device is None or device.shared is None or device.shared.strategy is not SharingStrategy.MPS:
        raise StepSkipped(f"the node plugin does not share this GPU by MPS (--shared {tested.gpu.uuid}=mps)")
    if tested.host.mig_enabled(tested.gpu):
        raise StepSkipped("MIG mode is on")
    return replace(device, spot=Spot(SHARED, CLAIMED_GIB))


def _cuda(tested: TestedGpu) -> str:
    host = tested.host
    return str(host.paths.root) if host.simulated else cuda_library(host.driver_root) or CUDA


@dataclass(frozen=True, slots=True)
class Tenant:
    """Programs with what a container of the claim gets, started by the plugin.

    ``driver``: libcuda.so.1, or the root directory of a simulated node. ``program``: nvidia-cuda-mps-control, which no
    container gets from Tessera, but may bring along.
    """

    gpu: Gpu
    driver: str
    program: str
    access: MpsAccess

    @contextmanager
    def running(
        self, user: int = ROOT, *, pipe: str = "", variables: Mapping[str, str] | None = None
    ) -> Iterator[ProgramReport]:
        """A program that uses the GPU during the block. ``pipe``, ``variables``: others than its container's.

        Raises HardwareError: it can't be run, or does not report.
        """
        # By its descriptor, for only root can enter the directories above; a container has its own mount of it.
        arguments = [self.driver, self.gpu.uuid, str(CLAIMED_GIB * GIB), str(user)]
        try:
            directory = os.open(self.access.host_path, os.O_RDONLY)
        except OSError as error:
            raise HardwareError(f"{self.access.host_path}: {error.strerror}") from error
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "kubelet_plugin.acceptance.cuda_program", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment(pipe or f"/proc/self/fd/{directory}", variables),
                pass_fds=[directory],
            )
        except OSError as error:
            raise HardwareError(f"{CAN_NOT_RUN}: {error}") from error
        finally:
            os.close(directory)
        try:
            yield _report(process)
        finally:
            try:
                process.communicate(timeout=COMMAND_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def limits_of_new_servers(self, protocol: int) -> str:
        """With protocol 2 the limits that the daemon gives to servers which start later, from its privileged socket."""
        commands = f"get_default_device_pinned_mem_limit {self.gpu.uuid}\nget_default_active_thread_percentage\n"
        return self.command(commands=commands, pipe=self.access.container_path) if protocol == LEGACY else ""

    def command(self, *words: str, commands: str = "", pipe: str = "") -> str:
        """Send a command to the socket in ``pipe``, by default the claim's directory; return the answer.

        Protocol 2 has no other sign of a refusal than its text.
        """
        try:
            process = subprocess.run(
                [self.program, *words],
                input=commands.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(pipe or self.access.host_path),
                check=False,
                timeout=COMMAND_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "no answer"
        except OSError as error:
            raise HardwareError(f"{self.program}: {error}") from error
        text = " ".join(process.stdout.decode(errors="replace").split())[:SHOWN_CHARACTERS] or "no text"
        return f"{text} (status {process.returncode})" if process.returncode else text

    def _environment(self, pipe: str, variables: Mapping[str, str] | None = None) -> Mapping[str, str]:
        library = {} if Path(self.driver).is_dir() else {"LD_PRELOAD": self.driver}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "LD_PRELOAD"))}
        visible = {"CUDA_VISIBLE_DEVICES": self.gpu.uuid}
        limits = self.access.environment if variables is None else variables
        return {**inherited, **library, **visible, **limits, PIPE_DIRECTORY: pipe}


def _report(process: subprocess.Popen[bytes]) -> ProgramReport:
    assert process.stdout is not None  # noqa: S101 - for mypy
    answered, _, _ = select.select([process.stdout], [], [], REPORT_TIMEOUT_SECONDS)
    line = process.stdout.readline() if answered else b""
    try:
        return REPORT.decode(line)
    except msgspec.DecodeError as error:
        process.kill()
        _, complaint = process.communicate()
        why = " ".join((line + complaint).decode(errors="replace").split()[-30:]) if answered else "no answer"
        raise HardwareError(f"{CAN_NOT_RUN}: {why or f'status {process.returncode}'}") from error


def _programs(tenant: Tenant, daemon: DaemonState) -> Sequence[str]:
    """Raises HardwareError: a program of the claim gets too much or nothing, or one without MPS gets anything."""
    with tenant.running() as first:
        _check_limited(first)
        with tenant.running(pipe=NO_DAEMON) as outside:
            if not outside.error:
                raise HardwareError("a program without MPS gets the GPU next to those with it, in EXCLUSIVE_PROCESS")
        other = "one user at a time"
        if daemon.multi_user:
            with tenant.running(NOBODY) as second:
                if second.no_user:
                    other = f"user {NOBODY} was not tried ({second.no_user})"
                else:
                    _check_limited(second)
                    other = f"user {NOBODY} has the same at the same time"
    return (
        f"a program has {first.free >> 20} MiB free of {first.total >> 20}, more is refused ({first.refusal})",
        other,
        f"one without MPS gets nothing ({outside.error})",
    )


def _check_limited(report: ProgramReport) -> None:
    if report.error:
        raise HardwareError(f"a program with MPS gets no context: {report.error}")
    if report.free > CLAIMED_GIB * GIB:
        raise HardwareError(f"a program of a claim of {CLAIMED_GIB} GiB has {report.free >> 20} MiB free")
    if OUT_OF_MEMORY not in report.refusal:
        answer = report.refusal or "granted"
        raise HardwareError(f"a program of a claim of {CLAIMED_GIB} GiB gets as much next to its context: {answer}")


def _answers(tenant: Tenant, daemon: DaemonState, namespace: str) -> str:
    """The answers of the socket that a claim's containers have, to commands that would harm other claims, too."""
    whole_memory = f"{tenant.gpu.memory_bytes >> 20}M"
    commands: dict[str, list[str]] = {}
    if daemon.protocol == NAMESPACES:
        of_server, limit = f"--server={SERVER}", f"--pinned-memory-limit={whole_memory}"
        for words in (
            ("server", "list"),
            ("namespace", "list", of_server),
            ("namespace", "create", "tenant", of_server),
            ("namespace", "set", namespace, of_server, limit),
            ("server", "set", SERVER, limit),
            ("namespace", "delete", namespace, of_server),
            ("server", "delete", SERVER),
            ("-q",),
        ):
            commands.setdefault(tenant.command(*words), []).append(" ".join(words[:2]))
    else:
        for line in (
            "get_server_list",
            f"get_default_device_pinned_mem_limit {tenant.gpu.uuid}",
            *(f"get_client_list {pid}" for pid in daemon.servers),
            f"set_default_device_pinned_mem_limit {tenant.gpu.uuid} {whole_memory}",
            "set_default_active_thread_percentage 100",
            *(f"set_device_pinned_mem_limit {pid} {tenant.gpu.uuid} {whole_memory}" for pid in daemon.servers),
            f"start_server -uid {NOBODY}",
            *(f"shutdown_server {pid} -f" for pid in daemon.servers),
            "quit",
        ):
            commands.setdefault(tenant.command(commands=f"{line}\n"), []).append(line.split()[0])
    return "; ".join(f"{answer!r} to {', '.join(names)}" for answer, names in commands.items())


def _check_unharmed(tenant: Tenant, daemon: DaemonState, limits: str, state: Callable[[], DaemonState]) -> None:
    """Raises HardwareError: since ``daemon`` and ``limits`` were read, something has ended or a limit was raised."""

    def lost() -> str:
        return lost_gpus([daemon], [state()]).get(daemon.gpu, "")

    if wait_until(END_TIMEOUT_SECONDS, lambda: bool(lost()), CHECK_INTERVAL_SECONDS):
        raise HardwareError(lost())
    if (limits_now := tenant.limits_of_new_servers(daemon.protocol)) != limits:
        raise HardwareError(f"new MPS servers have the limits {limits_now}, not {limits}")
    with tenant.running(variables={}) as report:  # as one that drops its container's variables
        _check_limited(report)
