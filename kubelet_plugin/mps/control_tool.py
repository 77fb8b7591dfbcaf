"""Runs the driver's ``nvidia-cuda-mps-control`` for the daemon of one GPU.

Options and commands: NVIDIA's MPS manual, release 615. Of texts nothing is read but lists of process ids and CSV.
"""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

from kubelet_plugin.mps.protocol import LOG, PIPE

PROGRAM = "nvidia-cuda-mps-control"
PROGRAMS = b"nvidia-cuda-mps-"
"""In the command line of the daemon and of its servers."""

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
PID_FILE = "nvidia-cuda-mps-control.pid"

RUN_TIMEOUT_SECONDS = 10.0
"""Timeout of one run. A daemon starts within 0.1 s on an H200; the kubelet waits 45 s for a whole pod."""

OUTPUT_LIMIT = 500
"""Most bytes of the program's output in an error message."""


class ControlError(Exception):
    """The program can't be run, failed or gave no answer; the message says what was attempted."""


class ControlTool(NamedTuple):
    """The program at ``program``, for the daemon of ``gpu`` (UUID) in ``directory``.

    ``library`` is libcuda.so.1 where the dynamic linker does not find it, else empty: preloaded as for nvidia-smi.
    """

    gpu: str
    directory: str
    program: str
    library: str

    def run(self, *arguments: str, commands: str = "") -> str:
        """Run the program with ``commands`` on its standard input; return its output. Raises ControlError."""
        what = f"{' '.join([self.program, *arguments])}{f' ({commands.strip()})' if commands else ''}"
        # Not a pipe: a daemon that keeps it open would be waited for.
        output = os.memfd_create(PROGRAM)
        try:
            process = subprocess.Popen(
                [self.program, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,
            )
            try:
                process.communicate(commands.encode(), RUN_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.wait()
                raise ControlError(f"{what}: no answer within {RUN_TIMEOUT_SECONDS:g} s") from error
            said = os.pread(output, os.fstat(output).st_size, 0)
        except OSError as error:
            raise ControlError(f"{what}: {error.strerror or error}") from error
        finally:
            os.close(output)
        text = said.decode(errors="replace").strip()
        if process.returncode:
            shown = " ".join(text.split())[:OUTPUT_LIMIT] or "nothing"
            raise ControlError(f"{what} ended with status {process.returncode} and said: {shown}")
        return text

    def rows(self, *arguments: str) -> list[list[str]]:
        """Run a ``list`` of protocol 3; return its rows. Raises ControlError."""
        output = self.run(*arguments, "--format=csv,noheader")
        return [line.split(",") for line in output.splitlines()]

    def servers(self) -> list[int]:
        """Process ids of the servers of a daemon with protocol 2. Raises ControlError."""
        return [int(word) for word in self.run(commands="get_server_list\n").split() if word.isdecimal()]

    def _environment(self) -> dict[str, str]:
        environment = {
            # The daemon starts its servers by name.
            "PATH": f"{os.path.dirname(self.program)}:/usr/bin:/bin",  # noqa: PTH120
            PIPE_DIRECTORY: f"{self.directory}/{PIPE}",
            "CUDA_MPS_LOG_DIRECTORY": f"{self.directory}/{LOG}",
            "CUDA_VISIBLE_DEVICES": self.gpu,
        }
        return environment | ({"LD_PRELOAD": self.library} if self.library else {})

    def daemon(self) -> int:
        """Process id of the running daemon; 0: none runs."""
        try:
            with open(f"{self.directory}/{PIPE}/{PID_FILE}") as file:  # noqa: PTH123
                pid = int(file.read())
        except (OSError, ValueError):
            return 0
        return pid if self.is_ours(pid) else 0

    def is_ours(self, pid: int, programs: bytes = PROGRAMS) -> bool:
        """Whether the process is the daemon of this directory or a server of it, whose environment the daemon's is."""
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
                command = file.read()
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                variables = file.read().split(b"\0")
        except OSError:
            return False
        return programs in command and f"{PIPE_DIRECTORY}={self.directory}/{PIPE}".encode() in variables

    def processes(self, programs: bytes = PROGRAMS) -> list[int]:
        """Process ids of the daemon and its servers, whether the daemon answers or not."""
        # Twice: one that forks and ends meanwhile, as a daemon does when it starts, is in no list.
        return self._listed(programs) or self._listed(programs)

    def control_processes(self) -> list[int]:
        """Process ids of the daemon, also while it starts, and of commands that somebody sends it now."""
        return self.processes(PROGRAM.encode())

    def _listed(self, programs: bytes) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and self.is_ours(int(name), programs)]  # noqa: PTH208
