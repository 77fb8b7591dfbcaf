"""``tessera sim fault``: make NVML calls of a simulated node fail, and lose, remove, add or reset its GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from driver.config.flags import SIMULATED_NODES
from driver.config.suggestions import meant
from driver.errors import EnvironmentFault, UsageError
from tessera.output import columns

if TYPE_CHECKING:
    from driver.simulator import SimulatedNode

F = TypeVar("F", bound=Callable[..., Any])


def find_roots(base: Path) -> list[Path]:
    """The simulated nodes under ``base``, in order of name.

    :raises EnvironmentFault: no simulated node
    """
    roots = sorted(path.parent.parent for path in base.glob("*/sim/node.json"))
    if not roots:
        raise EnvironmentFault(
            f"no simulated node under {base}: start one as root with"
            " `tessera node --node-name NODE --kubeconfig FILE --gpus sim:NAME`, or name its directory with --host-root"
        )
    return roots


def pass_node(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the simulated node of --host-root to a command: by default the only node.

    :raises UsageError: several nodes, and no --host-root
    :raises EnvironmentFault: no node
    """

    @click.pass_obj
    @wraps(command)
    def with_node(host_root: Path | None, /, **options: Any) -> None:
        from driver.simulator import SimulatedNode

        roots = [host_root] if host_root else find_roots(SIMULATED_NODES)
        if len(roots) > 1:
            raise UsageError(f"several simulated nodes: choose one with --host-root: {', '.join(map(str, roots))}")
        command(SimulatedNode.attach(roots[0]), **options)

    return with_node


def _limits(command: F) -> F:
    """Add --gpu, --device and --times, which limit a fault to some calls."""
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
    """Inject faults into a simulated node; its plugin may be running.

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
    context.obj = host_root


@fault.command()
@click.argument("call", default="*")
@click.option("--code", required=True, help="NVML error by name or number, as GPU_IS_LOST or 15.")
@_limits
@pass_node
def fail(node: SimulatedNode, call: str, code: str, gpu: int | None, device: str | None, times: int | None) -> None:
    """Let calls of a function ("*": of any) fail.

    \b
    Examples:
      tessera sim fault fail nvmlDeviceSetMigMode --code IN_USE --gpu 0 --times 2
      tessera sim fault fail --code UNKNOWN --times 1
      tessera sim fault fail nvidia-smi --code NOT_SUPPORTED --gpu 0
    """
    number = node.faults.fail(call, code=_code(code), gpu=gpu, device=device, times=times)
    click.echo(f"fault {number}")


@fault.command()
@click.argument("call", default="*")
@click.option("--seconds", type=float, required=True, help="How much longer a call takes.")
@_limits
@pass_node
def slow(
    node: SimulatedNode, call: str, seconds: float, gpu: int | None, device: str | None, times: int | None
) -> None:
    """Let calls of a function ("*": of any) take longer.

    \b
    Examples:
      tessera sim fault slow nvmlGpuInstanceDestroy --seconds 10 --times 1
    """
    number = node.faults.slow(seconds, call, gpu=gpu, device=device, times=times)
    click.echo(f"fault {number}")


@fault.command()
@click.argument("device", metavar="MIG-UUID")
@pass_node
def busy(node: SimulatedNode, device: str) -> None:
    """Keep a partition IN_USE: its instances can't be destroyed until cleared.

    \b
    Examples:
      tessera sim fault busy MIG-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c
    """
    states = [node.gpu_state(minor) for minor in range(len(node.gpus))]
    known = [made.uuid for state in states for cut in state.instances for made in cut.compute]
    if device not in known:
        there = f"there are {', '.join(known)}" if known else "the node has none now"
        raise UsageError(f"{device}: no partition has that UUID{meant(device, known)}; {there}")
    click.echo("\n".join(f"fault {number}" for number in node.faults.keep_busy(device)))


@fault.command("list")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@pass_node
def list_faults(node: SimulatedNode, output: str) -> None:
    """List the faults in force.

    \b
    Examples:
      tessera sim fault list
      tessera sim fault list -o json
    """
    rows = _rows(node)
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
@pass_node
def clear(node: SimulatedNode, ids: tuple[int, ...]) -> None:
    """End the faults of these ids, or all; removed GPUs return. Added GPUs stay.

    \b
    Examples:
      tessera sim fault clear 2
      tessera sim fault clear
    """
    node.faults.clear(*ids)


def _rows(node: SimulatedNode) -> list[dict[str, Any]]:
    from driver.simulator.faults import error_names

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
    from driver.simulator.faults import error_names

    names = error_names()
    codes = {name: code for code, name in names.items()}
    wanted = text.removeprefix("NVML_ERROR_").upper()
    if wanted.isdecimal() and int(wanted) in names:
        return int(wanted)
    if wanted not in codes:
        raise UsageError(f"--code: {text!r} is no NVML error; known: {', '.join(codes)}")
    return codes[wanted]


_gpu = click.option("--gpu", type=int, required=True, help="The GPU's minor number, as in /dev/nvidia<minor>.")


@fault.command()
@_gpu
@pass_node
def lose(node: SimulatedNode, gpu: int) -> None:
    """Let a GPU fall off the bus: XID 79, then GPU_IS_LOST from every call.

    \b
    Examples:
      tessera sim fault lose --gpu 3
    """
    click.echo(f"fault {node.faults.lose_gpu(gpu)}")


@fault.command()
@_gpu
@pass_node
def remove(node: SimulatedNode, gpu: int) -> None:
    """Let a GPU disappear from NVML's count and from sysfs.

    \b
    Examples:
      tessera sim fault remove --gpu 3
    """
    node.faults.remove_gpu(gpu)


@fault.command("return")
@_gpu
@pass_node
def return_gpu(node: SimulatedNode, gpu: int) -> None:
    """Bring a lost or removed GPU back, with its partitions.

    \b
    Examples:
      tessera sim fault return --gpu 3
    """
    node.faults.return_gpu(gpu)


@fault.command()
@click.option("--pci-bus-id", required=True, help="Where it sits, as 0000:e5:00.0.")
@click.option("--pcie-root", help="Its root bus, as pci0000:e4.  [default: one bus before the GPU's]")
@click.option("--numa-node", type=int, default=-1, show_default=True, help="Its NUMA node; -1: unknown.")
@pass_node
def add(node: SimulatedNode, pci_bus_id: str, pcie_root: str | None, numa_node: int) -> None:
    """Add a GPU of the node's product. It stays.

    \b
    Examples:
      tessera sim fault add --pci-bus-id 0000:e5:00.0 --numa-node 1
    """
    from driver.simulator.description import parse_gpu

    place = {"pciBusId": pci_bus_id, "numaNode": numa_node} | ({"pcieRoot": pcie_root} if pcie_root else {})
    click.echo(f"GPU {node.faults.add_gpu(parse_gpu(place))}")


@fault.command()
@click.argument("number", type=int)
@click.option("--device", metavar="MIG-UUID", help="MIG device it happened on.  [default: the whole GPU]")
@_gpu
@pass_node
def xid(node: SimulatedNode, number: int, device: str | None, gpu: int) -> None:
    """Report an XID through NVML's event sets.

    \b
    Examples:
      tessera sim fault xid 48 --gpu 0
    """
    node.faults.xid(gpu, number, device)


@fault.command()
@click.argument("name")
@click.option("--data", type=int, default=0, show_default=True, help="The event's data.")
@_gpu
@pass_node
def event(node: SimulatedNode, name: str, data: int, gpu: int) -> None:
    """Report another NVML event by name.

    \b
    Examples:
      tessera sim fault event MigConfigChange --gpu 0
      tessera sim fault event GpuUnavailableError --gpu 0
    """
    from driver.simulator.faults import event_names

    kinds = {known: bit for bit, known in event_names().items()}
    if name not in kinds:
        raise UsageError(f"event: {name!r} is unknown; known: {', '.join(kinds)}")
    node.faults.event(gpu, kinds[name], data)


@fault.command()
@click.argument("action")
@_gpu
@pass_node
def recovery(node: SimulatedNode, action: str, gpu: int) -> None:
    """Set the recovery action that NVML reports for a GPU, by name (GPU_RESET, NODE_REBOOT, ...); NONE: nothing.

    \b
    Examples:
      tessera sim fault recovery GPU_RESET --gpu 0
      tessera sim fault recovery NONE --gpu 0
    """
    from driver.simulator.faults import recovery_names

    actions = {known: number for number, known in recovery_names().items()}
    if action.upper() not in actions:
        raise UsageError(f"action: {action!r} is unknown; known: {', '.join(actions)}")
    node.faults.recovery(gpu, actions[action.upper()])


@fault.command()
@pass_node
def reboot(node: SimulatedNode) -> None:
    """As if the machine had been rebooted: no partition survives, nor Hopper's MIG mode.

    \b
    Examples:
      tessera sim fault reboot
    """
    node.reboot()


@fault.command()
@_gpu
@pass_node
def reset(node: SimulatedNode, gpu: int) -> None:
    """Reset a GPU as nvidia-smi --gpu-reset: partitions go, a pending MIG mode comes into force.

    \b
    Examples:
      tessera sim fault reset --gpu 0
    """
    from pynvml import NVMLError

    try:
        node.reset_gpu(gpu)
    except NVMLError as error:
        raise UsageError(f"gpu: {gpu} can't be reset: a process holds it or a partition on it (IN_USE)") from error
