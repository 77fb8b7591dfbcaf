"""``tessera sim fault``: make NVML calls of a simulated node fail, and lose, remove, add or reset its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec.structs import asdict
from pynvml import NVMLError

from driver.config.flag_values import SIMULATED_NODES
from driver.config.suggestions import meant
from driver.errors import EnvironmentFault, UsageError
from driver.simulator.description import parse_gpu
from driver.simulator.faults import ERROR_NAMES, EVENT_NAMES, RECOVERY_NAMES
from driver.simulator.machine import InjectedFault
from driver.simulator.node import SimulatedNode
from tessera.tables_and_drawings import columns, show, with_output

F = TypeVar("F", bound=Callable[..., Any])


def find_roots(base: Path) -> list[Path]:
    """The simulated nodes under ``base``, in order of name. Raises EnvironmentFault if there are none."""
    roots = sorted(path.parent.parent for path in base.glob("*/sim/node.json"))
    if not roots:
        raise EnvironmentFault(
            f"no simulated node under {base}: start one as root with"
            " `tessera node --node-name NODE --kubeconfig FILE --gpus sim:NAME`, or name its directory with --host-root"
        )
    return roots


def only_root(host_root: Path | None) -> Path:
    """``host_root``, by default the only simulated node; UsageError if there are several."""
    roots = [host_root] if host_root else find_roots(SIMULATED_NODES)
    if len(roots) > 1:
        raise UsageError(f"several simulated nodes: choose one with --host-root: {', '.join(map(str, roots))}")
    return roots[0]


def with_host_root(default: str) -> Callable[[F], F]:
    """The option --host-root; ``default`` says what it stands for without a value."""
    text = f"The simulated node's directory.  [default: {default}]"
    return click.option("--host-root", type=click.Path(path_type=Path, file_okay=False), help=text)


@click.group()
@with_host_root("the only node")
@click.pass_context
def fault(context: click.Context, host_root: Path | None) -> None:
    """Inject faults into a simulated node; its plugin may be running.

    \b
    Examples:
      tessera sim fault lose --gpu 3
      tessera sim fault fail nvmlDeviceCreateGpuInstanceWithPlacement --code UNKNOWN --times 1
    """
    context.obj = host_root


def _command(name: str, *examples: str) -> Callable[[Callable[..., str | None]], click.Command]:
    """Make a function a command of ``fault``: it gets the simulated node and returns what the command prints.

    The node is that of :func:`only_root`.
    """
    shown = [f"  tessera sim fault {name} {example}".rstrip() for example in examples]

    def register(act: Callable[..., str | None]) -> click.Command:
        @click.pass_obj
        @wraps(act)
        def run(host_root: Path | None, /, **options: Any) -> None:
            text = act(SimulatedNode.attach(only_root(host_root)), **options)
            if text is not None:
                click.echo(text)

        return fault.command(name, help="\n".join([f"{act.__doc__}\n\n\b\nExamples:", *shown]))(run)

    return register


def _limits(command: F) -> F:
    """Add --gpu, --device and --times, which limit a fault to some calls."""
    for option in (
        click.option("--times", type=int, help="Number of calls.  [default: until cleared]"),
        click.option("--device", metavar="MIG-UUID", help="Only calls that concern this MIG device."),
        click.option("--gpu", type=int, help="Only calls that concern the GPU of this minor number."),
    ):
        command = option(command)
    return command


_gpu = click.option("--gpu", type=int, required=True, help="The GPU's minor number, as in /dev/nvidia<minor>.")


def _number(what: str, text: str, names: Mapping[int, str]) -> int:
    """The number with this name in any case, or written as a number. Raises UsageError."""
    numbers = {name.upper(): number for number, name in names.items()} | {str(number): number for number in names}
    number = numbers.get(text.upper().removeprefix("NVML_ERROR_"))
    if number is None:
        raise UsageError(f"{what}: {text!r} is unknown; known: {', '.join(names.values())}")
    return number


@_command("fail", "nvmlDeviceSetMigMode --code IN_USE --gpu 0 --times 2", "nvidia-smi --code NOT_SUPPORTED --gpu 0")
@click.argument("call", default="*")
@click.option("--code", required=True, help="NVML error by name or number, such as GPU_IS_LOST or 15.")
@_limits
def fail(node: SimulatedNode, call: str, code: str, **limits: Any) -> str:
    """Make calls of a function fail; without one, or with "*", calls of all functions."""
    return f"fault {node.faults.fail(call, code=_number('--code', code, ERROR_NAMES), **limits)}"


@_command("slow", "nvmlGpuInstanceDestroy --seconds 10 --times 1")
@click.argument("call", default="*")
@click.option("--seconds", type=float, required=True, help="Additional seconds that a call takes.")
@_limits
def slow(node: SimulatedNode, call: str, seconds: float, **limits: Any) -> str:
    """Make calls of a function slower; without one, or with "*", calls of all functions."""
    return f"fault {node.faults.slow(seconds, call, **limits)}"


@_command("busy", "MIG-0f3c9d1e-7a41-4b8e-9c60-1d2e3f4a5b6c")
@click.argument("device", metavar="MIG-UUID")
def busy(node: SimulatedNode, device: str) -> str:
    """Keep a partition IN_USE: its instances can't be destroyed until cleared."""
    states = [node.gpu_state(minor) for minor in range(len(node.gpus))]
    uuids = [compute.uuid for state in states for instance in state.instances for compute in instance.compute]
    if device not in uuids:
        present = f"there are {', '.join(uuids)}" if uuids else "the node has none now"
        raise UsageError(f"{device}: no partition has that UUID{meant(device, uuids)}; {present}")
    return "\n".join(f"fault {number}" for number in node.faults.keep_busy(device))


@_command("list", "", "-o json")
@with_output("table", "json")
def list_faults(node: SimulatedNode, output: str) -> None:
    """List the current faults and the removed GPUs."""
    now, names = node.faults.current(), ERROR_NAMES
    faults = [*now.faults, *(InjectedFault(0, "(removed)", gpu=gpu) for gpu in now.removed)]
    rows = [
        asdict(fault) | {"id": fault.id or None, "code": names.get(fault.code), "seconds": fault.seconds or None}
        for fault in faults
    ]
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    show(output, rows, columns([key.upper() for key in rows[0]], cells) if rows else "No faults.")


@_command("clear", "2", "")
@click.argument("ids", type=int, nargs=-1, metavar="[ID]...")
def clear(node: SimulatedNode, ids: tuple[int, ...]) -> None:
    """End the faults with these ids, by default all; then removed GPUs return. Added GPUs stay."""
    node.faults.clear(*ids)


@_command("lose", "--gpu 3")
@_gpu
def lose(node: SimulatedNode, gpu: int) -> str:
    """Make a GPU fall off the bus: XID 79, then GPU_IS_LOST from every call."""
    return f"fault {node.faults.lose_gpu(gpu)}"


@_command("remove", "--gpu 3")
@_gpu
def remove(node: SimulatedNode, gpu: int) -> None:
    """Remove a GPU from NVML's count and from sysfs."""
    node.faults.remove_gpu(gpu)


@_command("return", "--gpu 3")
@_gpu
def return_gpu(node: SimulatedNode, gpu: int) -> None:
    """Bring a lost or removed GPU back, with its partitions."""
    node.faults.return_gpu(gpu)


@_command("add", "--pci-bus-id 0000:e5:00.0 --numa-node 1")
@click.option("--pci-bus-id", required=True, help="PCI address, such as 0000:e5:00.0.")
@click.option("--pcie-root", help="PCIe root, such as pci0000:e4.  [default: one bus before the GPU's]")
@click.option("--numa-node", type=int, default=-1, show_default=True, help="NUMA node; -1: unknown.")
def add(node: SimulatedNode, pci_bus_id: str, pcie_root: str | None, numa_node: int) -> str:
    """Add a GPU of the node's product. It stays."""
    place = {"pciBusId": pci_bus_id, "numaNode": numa_node} | ({"pcieRoot": pcie_root} if pcie_root else {})
    return f"GPU {node.faults.add_gpu(parse_gpu(place))}"


@_command("xid", "48 --gpu 0")
@click.argument("number", type=int)
@click.option("--device", metavar="MIG-UUID", help="MIG device of the XID.  [default: the whole GPU]")
@_gpu
def xid(node: SimulatedNode, number: int, device: str | None, gpu: int) -> None:
    """Report an XID through NVML's event sets."""
    node.faults.xid(gpu, number, device)


@_command("event", "MigConfigChange --gpu 0", "GpuUnavailableError --gpu 0")
@click.argument("name")
@click.option("--data", type=int, default=0, show_default=True, help="The event's data.")
@_gpu
def event(node: SimulatedNode, name: str, data: int, gpu: int) -> None:
    """Report another NVML event by name."""
    node.faults.event(gpu, _number("event", name, EVENT_NAMES), data)


@_command("recovery", "GPU_RESET --gpu 0", "NONE --gpu 0")
@click.argument("action")
@_gpu
def recovery(node: SimulatedNode, action: str, gpu: int) -> None:
    """Set the recovery action that NVML reports for a GPU, by name (GPU_RESET, NODE_REBOOT, ...); NONE: nothing."""
    node.faults.recovery(gpu, _number("action", action, RECOVERY_NAMES))


@_command("reboot", "")
def reboot(node: SimulatedNode) -> None:
    """Simulate a reboot of the node: partitions are lost, and on Hopper the MIG mode, too."""
    node.reboot()


@_command("reload", "")
def reload_driver(node: SimulatedNode) -> None:
    """Simulate that the driver is unloaded and loaded again, as at an upgrade: limits on GPU memory and partitions are
    lost; containers keep running."""
    node.reload_driver()


@_command("reset", "--gpu 0")
@_gpu
def reset(node: SimulatedNode, gpu: int) -> None:
    """Reset a GPU like nvidia-smi --gpu-reset: removes partitions, applies a pending MIG mode."""
    try:
        node.reset_gpu(gpu)
    except NVMLError as error:
        raise UsageError(f"gpu: {gpu} can't be reset: a process holds it or a partition on it (IN_USE)") from error
