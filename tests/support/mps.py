"""A simulated node with MPS: its control program in short form, and loads that are clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from click.testing import CliRunner, Result

from driver.simulator.description import load_description
from driver.simulator.mps.control_daemon import PID_FILE
from driver.simulator.mps.control_program import PROGRAM
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from kubelet_plugin.mps.client import MpsAccess, MpsClient
from kubelet_plugin.mps.protocol import DIRECTORY, PIPE, RECORD
from tessera.sim.node_commands import sim
from tests.harness.waiting import wait_for

LEGACY, WITH_PROTOCOL_3 = "580.159.04", "615.71.09"
"""Versions of the driver."""


def running(root: Path) -> list[str]:
    """Command lines of the daemons and servers of a simulated node."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if f"{root}/usr/bin/nvidia-cuda-mps" in line:
            lines.append(line)
    return lines


def serving(directory: Path) -> list[str]:
    """The command of the process of the MPS daemons."""
    return [sys.executable, "-m", "kubelet_plugin.mps", str(directory), "text"]


def with_daemons_in(directory: Path, command: Sequence[str]) -> list[str]:
    """``command`` as a process that finds this directory in the place where a node has its MPS daemons."""
    script = f'mkdir -p {DIRECTORY} && mount --bind "$0" {DIRECTORY} && exec "$@"'
    unshare = ["/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script]
    return [*unshare, str(directory), *command]


def served_gpus(folders: Iterable[Path]) -> frozenset[str]:
    """UUIDs of the GPUs whose daemon runs in one of these folders of the MPS process; other folders by their names."""
    served = set()
    for folder in folders:
        try:
            os.kill(int((folder / PIPE / PID_FILE).read_text()), 0)
            served.add(str(json.loads((folder / RECORD).read_text())["gpu"]))
        except (OSError, ValueError):
            served.add(folder.name)
    return frozenset(served)


def end_daemons(folder: Path) -> None:
    """Kill all daemons below; their servers end with them."""
    for path in folder.rglob(PID_FILE):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


class MpsNode:
    """One H100, also that of a node plugin in ``folder``. ``pipe`` and ``logs``: the directories of the daemon that
    ``control`` starts."""

    def __init__(self, folder: Path, driver: str, gpus: int = 1) -> None:
        description = load_description("h100-1" if gpus == 1 else "dgx-h100")
        description = description.replaced(driver_version=driver, gpus=description.gpus[:gpus])
        self.node = SimulatedNode.open(description, folder / "host", latency=ZERO_LATENCY)
        self.program = self.node.root / PROGRAM
        self.pipe, self.logs = folder / "pipe", folder / "log"
        self.pipe.mkdir()
        self.logs.mkdir()

    @property
    def gpu(self) -> str:
        return self.node.description.gpu_uuid(0)

    def control(self, *arguments: str, stdin: str = "", user: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run nvidia-cuda-mps-control; ``stdin`` are commands of protocol 2."""
        directories = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.logs)}
        environment = {**os.environ, **directories, "CUDA_VISIBLE_DEVICES": self.gpu}
        return subprocess.run(
            [self.program, *arguments],
            input=stdin, env=environment, capture_output=True, text=True, check=False, timeout=30, user=user,
        )  # fmt: skip

    def commands(self, *lines: str) -> str:
        """Run commands of protocol 2; return what they print."""
        answer = self.control(stdin="\n".join(lines))
        assert answer.returncode == 0, answer.stdout
        return answer.stdout

    def module(self, *words: str) -> str:
        """Run a command of protocol 3; return what it prints."""
        answer = self.control(*words)
        assert answer.returncode == 0, answer.stdout
        return answer.stdout

    def servers(self) -> list[int]:
        return [int(pid) for pid in self.commands("get_server_list").split()]

    def load(self, *arguments: str, pipe: Path | str | None = None, memory: str = "", threads: str = "") -> Result:
        """``tessera sim load 0`` as a client of ``pipe`` (default: the daemon's own directory).

        ``memory``, ``threads``: the limits in its environment.
        """
        limits = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": memory, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": threads}
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe or self.pipe)} | {k: v for k, v in limits.items() if v}
        command = ["load", "0", *arguments, "--host-root", str(self.node.root)]
        return CliRunner(env=variables).invoke(sim, command)

    def clients(self) -> list[int]:
        """Process ids of the GPU's MPS clients, as NVML lists them."""
        nvml = self.node.nvml
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return [process.pid for process in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)]


class MpsProcess:
    """The process of the MPS daemons and a client of it; ``kill`` ends it as SIGKILL does."""

    def __init__(self, node: MpsNode, directory: Path) -> None:
        self.mps, self.directory = node, directory
        self.client = MpsClient(directory, node.node.root, needs_library=False)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(serving(self.directory), stderr=subprocess.DEVNULL)
        wait_for(self.answers, 30, "the process answers")

    def answers(self) -> bool:
        """Raises MpsError: it does not."""
        self.client.daemons()
        return True

    @property
    def pid(self) -> int:
        """The supervisor's."""
        assert self._process is not None
        return self._process.pid

    @property
    def worker(self) -> int:
        """The process that serves."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def kill(self) -> None:
        """Kill both processes; daemons go on."""
        for pid in (self.pid, self.worker):
            if pid:
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(30)

    def load(self, access: MpsAccess, *arguments: str) -> Result:
        """A load in a container that has ``access``."""
        given = access.environment
        memory = given.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")
        threads = given.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
        return self.mps.load(*arguments, pipe=access.host_path, memory=memory, threads=threads)


@contextmanager
def mps_process(driver: str) -> Iterator[MpsProcess]:
    """A node, and the process that runs its daemons."""
    with mps_node(driver) as node:
        process = MpsProcess(node, node.pipe.parent / "mps")
        process.start()
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                process.wait()


@contextmanager
def mps_node(driver: str, gpus: int = 1) -> Iterator[MpsNode]:
    """A node in a directory whose path is short enough for sockets; all its daemons end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    try:
        yield MpsNode(folder, driver, gpus)
    finally:
        end_daemons(folder)
        shutil.rmtree(folder, ignore_errors=True)
