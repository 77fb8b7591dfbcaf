"""``tessera sim load``: the activity and the memory use of simulated GPUs, as if programs ran on them."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from driver.config.flag_values import SIMULATED_NODES
from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.simulator.mps.control_program import connect_client
from driver.simulator.mps.limits import CudaError, Refusal
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import LOAD_PID, RATIOS, Phase, SimulatedActivity, constant, duty, steps
from driver.simulator.tree import MACHINE_CGROUPS
from kubelet_plugin.checkpoint.records import ClaimRecord
from tessera.sim.fault import find_roots, only_root, with_host_root

MOST_POINTS = 1000
"""Rows of a file; every NVML call on the GPU reads them again when its state has changed."""

TRAFFIC_COLUMNS = ("nvlink", "pcie")
POINT_COLUMNS = ["second", "sm", "tensor", "dram", "memory"]
"""Columns of a file without a header."""

_BYTES = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?")
BYTES_OF_SUFFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BYTES_OF_SUFFIX |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DUTY = re.compile(r"duty:([0-9.]+)@([0-9.]+)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@click.command()
@click.argument("target")
@click.option("--sm", metavar="RATIO", help="SM activity, 0 to 1.")
@click.option("--occupancy", metavar="RATIO", help="SM occupancy, 0 to 1.")
@click.option("--tensor", metavar="RATIO", help="Tensor activity, 0 to 1.")
@click.option("--dram", metavar="RATIO", help="Memory-bandwidth activity, 0 to 1.")
@click.option("--memory", metavar="BYTES", help="Memory that the process uses, such as 7Gi.")
@click.option("--nvlink", metavar="BYTES", help="Bytes per second through NVLink, both directions together.")
@click.option("--pcie", metavar="BYTES", help="Bytes per second through PCIe, both directions together.")
@click.option(
    "--pattern",
    metavar="duty:FRACTION@PERIOD|FILE",
    help="Active during a fraction of each period, or the rows of a CSV file, repeated.  [default: constant]",
)
@click.option("--pid", type=click.IntRange(1, 0xFFFFFFFF), help="Process id.  [default: one that no process has]")
@click.option(
    "--cgroup",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of the process's cgroup, whose limits it obeys.  [default: that of the process --pid]",
)
@click.option("--clear", is_flag=True, help="End the loads of TARGET; with --pid only that of one process.")
@with_host_root("the node that has TARGET")
def load(
    target: str,
    pattern: str | None,
    pid: int | None,
    cgroup: Path | None,
    clear: bool,
    host_root: Path | None,
    **given: Any,
) -> None:
    """Load TARGET from now on: a claim (NAMESPACE/NAME, or NAME in namespace default), a GPU (index or UUID) or a
    MIG device (UUID).

    NVML's GPM samples, utilization, memory and processes show the load. A new load replaces the one of the same
    process. Columns of a CSV file: second,sm,tensor,dram,memory, or those of its header; a row lasts until the next.
    With CUDA_MPS_PIPE_DIRECTORY in its environment the process is a client of MPS, as a program with CUDA would be.

    \b
    Examples:
      tessera sim load team-a/train --sm 0.8 --tensor 0.5 --dram 0.6 --memory 7Gi
      tessera sim load 3 --sm 0.9 --pattern duty:0.3@60s
      tessera sim load team-a/train --pattern day.csv
      tessera sim load team-a/train --memory 7Gi --pid 4711
      tessera sim load team-a/train --clear
    """
    options = {name: text for name, text in given.items() if text is not None}
    if clear == bool(options or pattern):
        raise UsageError(f"{target}: give either --clear or a load, such as --sm 0.8 or --memory 7Gi")
    phases = () if clear else _phases(options, pattern)
    node, devices, default_pid = _find(target, host_root)
    cgroup = cgroup or (_cgroup_of(pid, node.root) if pid else None)
    for device in devices:
        if clear:
            node.end_load(device, pid)
        else:
            server = _mps_server(node, device, phases)
            node.put_load(device, phases, pid=pid or default_pid, cgroup=cgroup, server=server)
            under = f", client of MPS server {server}" if server else ""
            click.echo(f"{device} loaded by process {pid or default_pid}{under}")


def _mps_server(node: SimulatedNode, device: str, phases: tuple[Phase, ...]) -> int:
    """The MPS server to which this process' environment leads, as it leads a program with CUDA; 0: none answers.

    Raises UsageError: CUDA would fail, or the server leaves the program less.
    """
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if pipe is None:
        return 0
    memory = max(phase.memory for phase in phases)
    try:
        granted = connect_client(Path(pipe), device, memory, os.environ, os.getuid())
    except CudaError as error:
        raise UsageError(f"{device}: {error}") from error
    except Refusal:
        return 0  # without a daemon a program runs outside of MPS, in silence
    sm = max(phase.activity.sm for phase in phases)
    if sm > granted.threads / 100:
        raise UsageError(f"sm: {sm:g} is not accepted; 0 to {granted.threads / 100:g}: the active thread percentage")
    return granted.server


def claim_devices(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The claims of a simulated node ("namespace/name"), each with the UUIDs of its GPUs and MIG devices.

    Read from the node plugin's checkpoint, whose directory is in ``sim/plugin.json``; empty without a plugin.
    """
    try:
        folder = Path(json.loads((root / "sim" / "plugin.json").read_text(encoding="utf-8"))["stateDir"]) / "claims"
    except (OSError, ValueError, KeyError, TypeError):
        return
    for path in sorted(folder.glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ClaimRecord)
        except (OSError, msgspec.MsgspecError):
            # The plugin may be removing it right now; it reports damaged files itself.
            continue
        # A partition without a UUID does not exist yet.
        uuids = (device.uuid or (device.gpu_uuid if device.profile is None else None) for device in record.devices)
        yield str(record), list(dict.fromkeys(uuid for uuid in uuids if uuid is not None))


def _find(target: str, host_root: Path | None) -> tuple[SimulatedNode, list[str], int]:
    """The node of the target, the UUIDs of its devices, and the default process id of its load."""
    if target.isdecimal():
        node = SimulatedNode.attach(only_root(host_root))
        if int(target) >= len(node.present):
            raise UsageError(f"TARGET: GPU {target} is not on this node; accepted: 0 to {len(node.present) - 1}")
        return node, [node.description.gpu_uuid(node.present[int(target)])], LOAD_PID
    claim = target if "/" in target else f"default/{target}"
    targets: list[str] = []
    for root in [host_root] if host_root else find_roots(SIMULATED_NODES):
        node, claims = SimulatedNode.attach(root), dict(claim_devices(root))
        uuids = node.device_uuids()
        if target in uuids:
            return node, [target], LOAD_PID
        if claim in claims:
            if not claims[claim]:
                raise UsageError(f"TARGET: claim {claim} is not prepared yet; accepted: a claim whose devices exist")
            # Several claims may share one GPU, each with a load of its own.
            return node, claims[claim], LOAD_PID + 1 + zlib.crc32(claim.encode()) % 1_000_000
        targets += [*claims, *uuids]
    near = meant(target, [*targets, *(name.partition("/")[2] for name in targets)])
    raise UsageError(f"TARGET: {target!r} is unknown{near}; accepted: the index of a GPU, {', '.join(targets)}")


def _cgroup_of(pid: int, root: Path) -> Path | None:
    """The cgroup v2 directory of a process of this machine; None: no such process or cgroup."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    cgroups = (root / MACHINE_CGROUPS / line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    return next((cgroup for cgroup in cgroups if cgroup.is_dir()), None)


def _phases(options: dict[str, str], pattern: str | None) -> tuple[Phase, ...]:
    activity, memory = _parse(options, "--")
    if pattern is None:
        return constant(activity, memory)
    if not pattern.startswith("duty:"):
        return _points(Path(pattern), options)
    match = _DUTY.fullmatch(pattern)
    fraction, period = (_number(text) or 0.0 for text in match.group(1, 2)) if match else (0.0, 0.0)
    if match is None or not 0 < fraction <= 1 or period * _UNITS[match[3]] < 0.01:
        raise UsageError(
            f"--pattern: {pattern!r} is not accepted; duty:FRACTION@PERIOD with a fraction above 0 up to 1"
            " and a period from 10ms, such as duty:0.3@60s, or the path of a CSV file"
        )
    return duty(activity, memory, fraction, period * _UNITS[match[3]])


def _points(path: Path, options: dict[str, str]) -> tuple[Phase, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--pattern: {path}: {error}; accepted: duty:FRACTION@PERIOD or a CSV file") from error
    columns = lines.pop(0) if lines and lines[0][0] == "second" else POINT_COLUMNS
    unknown = sorted(set(columns) - {*POINT_COLUMNS, *RATIOS, *TRAFFIC_COLUMNS})
    if unknown:
        accepted = ", ".join([*POINT_COLUMNS, "occupancy", *TRAFFIC_COLUMNS])
        raise UsageError(f"{path}: column {unknown[0]!r} is unknown; accepted: {accepted}")
    if not 0 < len(lines) <= MOST_POINTS:
        raise UsageError(f"{path}: {len(lines)} rows are not accepted; 1 to {MOST_POINTS}")
    points: list[tuple[float, SimulatedActivity, int]] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, row {number}: "
        if len(line) != len(columns):
            raise UsageError(f"{where}{len(line)} values are not accepted; {len(columns)}: {','.join(columns)}")
        row = dict(zip(columns, line, strict=True))
        text = row.pop("second")
        second = _number(text)
        if second is None or (second <= points[-1][0] if points else second != 0):
            raise UsageError(f"{where}second: {text!r} is not accepted; 0 in the first row, then ascending")
        points.append((second, *_parse(options | row, where)))
    return steps(points)


def _parse(values: dict[str, str], where: str) -> tuple[SimulatedActivity, int]:
    """Activity and memory. ``where`` precedes the name of a value in messages."""
    amounts: dict[str, float] = {}
    for name, text in values.items():
        is_ratio, match = name in RATIOS, _BYTES.fullmatch(text)
        amount = _number(text) if is_ratio else _number(match[1]) if match else None
        if amount is None or (is_ratio and amount > 1):
            accepted = "a number from 0 to 1, such as 0.8" if is_ratio else "a number of bytes, such as 7Gi or 512Mi"
            raise UsageError(f"{where}{name}: {text!r} is not accepted; {accepted}")
        amounts[name] = amount if is_ratio or match is None else amount * BYTES_OF_SUFFIX[match[2] or ""]
    memory = int(amounts.pop("memory", 0))
    return SimulatedActivity.of(**amounts), memory


def _number(text: str) -> float | None:
    """A finite number from 0; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
