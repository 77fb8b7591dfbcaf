"""A simulated node with MPS: its control program in short form, and loads that are clients."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from click.testing import CliRunner, Result

from driver.simulator.description import load_description
from driver.simulator.mps.control_daemon import PID_FILE
from driver.simulator.mps.control_program import PROGRAM
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from tessera.sim.node_commands import sim

LEGACY, WITH_PROTOCOL_3 = "580.159.04", "615.71.09"
"""Versions of the driver."""


class MpsNode:
    """One H100. ``pipe`` and ``logs``: the directories of the daemon that ``control`` starts."""

    def __init__(self, folder: Path, driver: str, gpus: int = 1) -> None:
        description = load_description("h100-1" if gpus == 1 else "dgx-h100")
        description = description.replaced(driver_version=driver, gpus=description.gpus[:gpus])
        self.node = SimulatedNode.open(description, folder / "node", latency=ZERO_LATENCY)
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

    def load(self, *arguments: str, pipe: Path | None = None, **environment: str) -> Result:
        """``tessera sim load 0`` as a client of ``pipe`` (default: the daemon's own directory)."""
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe or self.pipe), **environment}
        command = ["load", "0", *arguments, "--host-root", str(self.node.root)]
        return CliRunner(env=variables).invoke(sim, command)

    def clients(self) -> list[int]:
        """Process ids of the GPU's MPS clients, as NVML lists them."""
        nvml = self.node.nvml
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return [process.pid for process in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)]


@contextmanager
def mps_node(driver: str, gpus: int = 1) -> Iterator[MpsNode]:
    """A node in a directory whose path is short enough for sockets; all its daemons end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    try:
        yield MpsNode(folder, driver, gpus)
    finally:
        for path in folder.rglob(PID_FILE):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
