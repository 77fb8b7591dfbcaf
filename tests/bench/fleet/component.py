"""The controller alone on recorded lists of a big cluster: how long until it has decided, and how much it keeps."""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import run

from controller.app import GC_THRESHOLD
from controller.controller import Controller
from controller.settings import ControllerSettings
from tests.bench.fleet.replaying import Recorded
from tests.bench.usage import memory_mb
from tests.harness.waiting import wait_for

SYNCED_S = 600.0


@dataclass(frozen=True)
class Resync:
    """``seconds`` until all lists are read and the first plans are decided, ``cpu_s`` of it; megabytes in all and at
    most; ``claims`` that are held."""

    nodes: int
    claims: int
    seconds: float
    cpu_s: float
    rss_mb: float
    most_rss_mb: float


def resync(nodes: int) -> Resync:
    """Measured in a process of its own."""
    from tests.bench.fleet.recorded import record

    with tempfile.TemporaryDirectory(prefix="tessera-recorded-") as directory:
        record(nodes, Path(directory))
        command = [sys.executable, "-m", "tests.bench.fleet.component", str(nodes), directory]
        answer = run(command, check=True, capture_output=True, text=True)
    return Resync(**json.loads(answer.stdout))


def measure(nodes: int, directory: Path) -> Resync:
    logging.basicConfig(level=logging.CRITICAL)
    gc.set_threshold(GC_THRESHOLD, 20, 100)
    client = Recorded(directory)
    work = Controller(client, ControllerSettings())  # type: ignore[arg-type]
    began, cpu = time.perf_counter(), time.process_time()
    threading.Thread(target=work.run, args=(threading.Event(),), daemon=True).start()
    wait_for(lambda: work.last_decision is not None, SYNCED_S, "the controller has decided")
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    assert work.last_decision is not None
    held = sum(len(view.held) for view in work.last_decision.snapshot.views)
    return Resync(nodes, held, seconds, cpu_s, memory_mb("self"), memory_mb("self", "VmHWM"))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]), Path(sys.argv[2])))))
