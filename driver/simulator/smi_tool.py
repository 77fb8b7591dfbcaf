"""The ``nvidia-smi`` of a simulated node: what NVML has no function for, and ``-c``.

A program, run by path with ``python -I -S`` by the script in the node's ``usr/bin``. It loads the standard
library only, and of that little, because it runs while a pod waits: 0.03 s, where the simulator's own modules
take ten times that. So it knows the files of :mod:`.machine` by their JSON; a test compares field names.

Texts and exit statuses: nvidia-smi's manual ("Return Value") and a public log; docs/simulator.md names the estimates.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CALL = "nvidia-smi"
"""The name of this program in faults."""

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NVML_NOT_FOUND, GPU_IS_LOST = 2, 3, 4, 6, 15
OTHER_STATUS = 255
STATUSES = frozenset({2, 3, 4, 6, 8, 9, 10, 12, 13, 14, 15})
ERROR_TEXTS = {
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    NVML_NOT_FOUND: "Not Found",
    GPU_IS_LOST: "GPU is lost",
}
TIME_SLICES = ("Default", "Short", "Medium", "Long")
COMPUTE_MODES = {"DEFAULT": 0, "PROHIBITED": 2, "EXCLUSIVE_PROCESS": 3}

Json = dict[str, Any]


class SmiFailure(Exception):
    """An operation failed with an NVML code."""

    def __init__(self, code: int) -> None:
        super().__init__(ERROR_TEXTS.get(code, "Unknown Error"))
        self.status = code if code in STATUSES else OTHER_STATUS


class PresentGpu(NamedTuple):
    """A present GPU: its number (NVML's index), minor and UUID."""

    number: int
    minor: int
    uuid: str


def run(arguments: list[str]) -> tuple[int, str]:
    """``NODE compute-policy [-i ID] --set-timeslice N`` or ``NODE -i ID -c MODE``; exit status and output."""
    node, *rest = arguments
    options = _options(rest)
    gpus = present_gpus(Path(node))
    chosen = _chosen(gpus, options.get("-i"))
    if not chosen:
        return NVML_NOT_FOUND, "No devices were found"
    if "--set-timeslice" in options:
        value = options["--set-timeslice"]
        number = int(value) if value.isdecimal() and int(value) < len(TIME_SLICES) else None
        name = value if number is None else TIME_SLICES[number]
        what, detail = "set timeslice", f" policy with value {name}"
        return _set(Path(node), chosen, "timeSlice", number, what, detail, f"Successfully set timeslice to {name}")
    if "-c" in options:
        value = options["-c"]
        mode = int(value) if value.isdecimal() else COMPUTE_MODES.get(value.upper())
        valid = mode if mode in COMPUTE_MODES.values() else None
        what, done = "set compute mode", f"Set compute mode to {value.upper()}"
        return _set(Path(node), chosen, "computeMode", valid, what, "", done)
    return INVALID_ARGUMENT, f"Invalid combination of input arguments: {' '.join(rest)}"


def _options(arguments: list[str]) -> dict[str, str]:
    """Options with their values; ``--set-timeslice=1`` is the same as two words."""
    words = [part for word in arguments for part in word.split("=", 1)]
    names = {"--id": "-i", "--compute-mode": "-c"}
    return {names.get(word, word): ([*words, ""])[at + 1] for at, word in enumerate(words) if word.startswith("-")}


def present_gpus(node: Path) -> list[PresentGpu]:
    """The GPUs in procfs, which a removed GPU is not."""
    texts = [path.read_text() for path in (node / "proc/driver/nvidia/gpus").glob("*/information")]
    facts = [dict(line.split(":", 1) for line in text.splitlines()) for text in texts]
    numbers = sorted((int(fact["Device Minor"]), fact["GPU UUID"].strip()) for fact in facts)
    return [PresentGpu(number, minor, uuid) for number, (minor, uuid) in enumerate(numbers)]


def _chosen(gpus: list[PresentGpu], ids: str | None) -> list[PresentGpu]:
    """The GPUs of ``-i`` (default: all); none if one of the ids is unknown."""
    if ids is None:
        return gpus
    by_id = {str(gpu.number): gpu for gpu in gpus} | {gpu.uuid: gpu for gpu in gpus}
    names = ids.split(",")
    return [by_id[name] for name in names] if by_id.keys() >= set(names) else []


def _set(
    node: Path, gpus: list[PresentGpu], field: str, value: int | None, what: str, detail: str, done: str
) -> tuple[int, str]:
    """Set a field of each GPU's state; None: the value is not valid. ``what``, ``detail``, ``done``: for the output."""
    lines = []
    for gpu in gpus:
        try:
            if value is None:
                raise SmiFailure(INVALID_ARGUMENT)
            with _changing(node, gpu) as state:
                state[field] = value
        except SmiFailure as failure:
            lines.append(f"Failed to {what}{detail} for GPU {gpu.number} : {failure}")
            return failure.status, "\n".join([*lines, f"Failed to {what} for requested devices : {failure}"])
        lines.append(f"{done} for GPU {gpu.number} {gpu.uuid}")
    return 0, "\n".join(lines)


@contextmanager
def _changing(node: Path, gpu: PresentGpu) -> Iterator[Json]:
    """Lock and yield the GPU's state; changes are stored unless the block raises."""
    # The owner of the directory is root on the simulated machine.
    if os.geteuid() not in (0, (node / "sim").stat().st_uid):
        raise SmiFailure(NO_PERMISSION)
    _strike(node, gpu)
    path = node / "sim" / f"gpu-{gpu.minor}.json"
    with locked(path.with_suffix(".lock")):
        state: Json = json.loads(path.read_text())
        if state.get("migEnabled"):
            raise SmiFailure(NOT_SUPPORTED)
        yield state
        replace_text(path, json.dumps(state))


def _strike(node: Path, gpu: PresentGpu) -> None:
    """Apply the node's faults: raise or wait."""
    path = node / "sim/faults.json"
    for fault in json.loads(path.read_text()).get("faults", ()) if path.exists() else ():
        if fault.get("call", "*") in ("*", CALL) and fault.get("gpu", gpu.minor) == gpu.minor and "device" not in fault:
            _use_up(path, fault)
            time.sleep(fault.get("seconds", 0))
            if fault.get("code"):
                raise SmiFailure(fault["code"])


def _use_up(path: Path, fault: Json) -> None:
    """Count one occurrence of a fault that happens only so often."""
    if "times" not in fault:
        return
    with locked(path.with_suffix(".lock")):
        content: Json = json.loads(path.read_text())
        others = [other for other in content["faults"] if other["id"] != fault["id"]]
        remaining = [{**fault, "times": fault["times"] - 1}] if fault["times"] > 1 else []
        replace_text(path, json.dumps({**content, "faults": [*others, *remaining]}))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    exit_status, output = run(sys.argv[1:])
    print(output)  # noqa: T201 - a program's output
    sys.exit(exit_status)
