"""``tessera sim fault``: making calls of a simulated node go wrong while its plugin runs; what is wrong now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from driver.config.names import meant
from driver.errors import UsageError
from tessera.output import columns

if TYPE_CHECKING:
    from driver.hardware.simulator import SimulatedNode

F = TypeVar("F", bound=Callable[..., Any])


class Root:
    """The node a command works on, found when it is needed."""

    def __init__(self, host_root: Path | None) -> None:
        self._host_root = host_root

    def node(self) -> SimulatedNode:
        """The node of --host-root, or the only one there is.

        :raises UsageError: several nodes, none named
        :raises EnvironmentFault: no node
        """
        from driver.hardware.simulator import SimulatedNode
        from tessera.sim import SIMULATED_NODES, find_roots

        roots = [self._host_root] if self._host_root else find_roots(SIMULATED_NODES)
        if len(roots) > 1:
            raise UsageError(f"several simulated nodes: choose one with --host-root: {', '.join(map(str, roots))}")
        return SimulatedNode.attach(roots[0])


pass_root = click.make_pass_decorator(Root)


def _limits(command: F) -> F:
    """--gpu, --device and --times: which calls, and how often."""
    for option in (
        click.option("--times", type=int, help="How often it happens.  [default: until cleared]"),
        click.option("--device", metavar="MIG-UUID", help="Only calls about this MIG device."),
        click.option("--gpu", type=int, help="Only calls about the GPU of this minor number."),
    ):
        command = option(command)
    return command


@click.group()
@click.option(
    "--host-root",
    type=click.Path(path_type=Path, file_okay=False),
    help="The simulated node's directory.  [default: the only node there is]",
)
@click.pass_context
def fault(context: click.Context, host_root: Path | None) -> None:
    """Make things go wrong on a simulated node; its plugin may be running.

    \b
    Examples:
      tessera sim fault fail nvmlDeviceCreateGpuInstanceWithPlacement --code UNKNOWN --times 1
      tessera sim fault slow nvmlDeviceGetMemoryInfo --seconds 5 --gpu 2
      tessera sim fault busy MIG-...                 this partition can't be destroyed
      tessera sim fault lose --gpu 3                 XID 79, then GPU_IS_LOST
      tessera sim fault remove --gpu 3               the GPU leaves the count; `return` brings it back
      tessera sim fault add --pci-bus-id 0000:e5:00.0
      tessera sim fault xid 48 --gpu 0
      tessera sim fault reboot
      tessera sim fault list
      tessera sim fault clear
    """
    context.obj = Root(host_root)


@fault.command()
@click.argument("call", default="*")
@click.option("--code", required=True, help="NVML error by name or number, as GPU_IS_LOST or 15.")
@_limits
@pass_root
def fail(root: Root, call: str, code: str, gpu: int | None, device: str | None, times: int | None) -> None:
    """Let calls of a function ("*": of any) fail.

    \b
    Examples:
      tessera sim fault fail nvmlDeviceSetMigMode --code IN_USE --gpu 0 --times 2
      tessera sim fault fail --code UNKNOWN --times 1
      tessera sim fault fail nvidia-smi --code NOT_SUPPORTED --gpu 0
    """
    number = root.node().faults.fail(call, code=_code(code), gpu=gpu, device=device, times=times)
    click.echo(f"fault {number}")


@fault.command()
@click.argument("call", default="*")
@click.option("--seconds", type=float, required=True, help="How much longer a call takes.")
@_limits
@pass_root
def slow(root: Root, call: str, seconds: float, gpu: int | None, device: str | None, times: int | None) -> None:
    """Let calls of a function ("*": of any) take longer.

    \b
    Examples:
      tessera sim fault slow nvmlGpuInstanceDestroy --seconds 10 --times 1
    """
    number = root.node().faults.slow(seconds, call, gpu=gpu, device=device, times=times)
    click.echo(f"fault {number}")


@fault.command()
@click.argument("device", metavar="MIG-UUID")
@pass_root
def busy(root: Root, device: str) -> None:
    """Keep a partition IN_USE: its instances can't be destroyed until cleared.

    \b
    Examples:
      tessera sim fault busy MIG-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c
    """
    node = root.node()
    states = [node.gpu_state(minor) for minor in range(len(node.gpus))]
    known = [made.uuid for state in states for cut in state.instances for made in cut.compute]
    if device not in known:
        there = f"there are {', '.join(known)}" if known else "the node has none now"
        raise UsageError(f"{device}: no partition has that UUID{meant(device, known)}; {there}")
    click.echo("\n".join(f"fault {number}" for number in node.faults.keep_busy(device)))


@fault.command("list")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@pass_root
def list_faults(root: Root, output: str) -> None:
    """List what is wrong now.

    \b
    Examples:
      tessera sim fault list
      tessera sim fault list -o json
    """
    rows = _rows(root.node())
    if output == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("No faults.")
        return
    header = ["id", "call", "code", "seconds", "gpu", "device", "times"]
    cells = [["-" if row[key] is None else str(row[key]) for key in header] for row in rows]
    click.echo(columns([key.upper() for key in header], cells))


@fault.command()
@click.argument("ids", type=int, nargs=-1, metavar="[ID]...")
@pass_root
def clear(root: Root, ids: tuple[int, ...]) -> None:
    """End the faults of these ids, or all; removed GPUs return. Added GPUs stay.

    \b
    Examples:
      tessera sim fault clear 2
      tessera sim fault clear
    """
    root.node().faults.clear(*ids)


def _rows(node: SimulatedNode) -> list[dict[str, Any]]:
    from driver.hardware.simulator.fault_control import error_names

    now, names = node.faults.current(), error_names()
    rows = [
        {
            "id": fault.id,
            "call": fault.call,
            "code": names[fault.code] if fault.code else None,
            "seconds": fault.seconds or None,
            "gpu": fault.gpu,
            "device": fault.device,
            "times": fault.times,
        }
        for fault in now.faults
    ]
    blank = dict.fromkeys(("id", "code", "seconds", "device", "times"))
    return rows + [blank | {"call": "(removed)", "gpu": gpu} for gpu in now.removed]


def _code(text: str) -> int:
    from driver.hardware.simulator.fault_control import error_names

    names = error_names()
    codes = {name: code for code, name in names.items()}
    wanted = text.removeprefix("NVML_ERROR_").upper()
    if wanted.isdecimal() and int(wanted) in names:
        return int(wanted)
    if wanted not in codes:
        raise UsageError(f"--code: {text!r} is no NVML error; known: {', '.join(codes)}")
    return codes[wanted]
