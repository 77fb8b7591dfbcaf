"""What a process has used so far, by ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Seconds of CPU, of the user's and the system's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int | str, field: str = "VmRSS") -> float:
    """``VmRSS`` (resident), ``RssAnon`` (of it anonymous) or ``VmHWM`` (the most there was), in MB as the peers'
    figures (10^6 bytes would be 5 % more: MiB it is). ``pid`` may be "self". Raises RuntimeError for one that ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no {field}: it ended")
