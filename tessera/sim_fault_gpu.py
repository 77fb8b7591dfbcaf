"""``tessera sim fault``: what happens to a simulated node's GPUs - lost, removed, added, reset, and their events."""

from __future__ import annotations

import click

from driver.errors import UsageError
from tessera.sim_fault import Root, fault, pass_root

__all__ = ["fault"]

_gpu = click.option("--gpu", type=int, required=True, help="The GPU's minor number, as in /dev/nvidia<minor>.")


@fault.command()
@_gpu
@pass_root
def lose(root: Root, gpu: int) -> None:
    """Let a GPU fall off the bus: XID 79, then GPU_IS_LOST from every call.

    \b
    Examples:
      tessera sim fault lose --gpu 3
    """
    click.echo(f"fault {root.node().faults.lose_gpu(gpu)}")


@fault.command()
@_gpu
@pass_root
def remove(root: Root, gpu: int) -> None:
    """Let a GPU disappear from NVML's count and from sysfs.

    \b
    Examples:
      tessera sim fault remove --gpu 3
    """
    root.node().faults.remove_gpu(gpu)


@fault.command("return")
@_gpu
@pass_root
def return_gpu(root: Root, gpu: int) -> None:
    """Bring a lost or removed GPU back, with what it held.

    \b
    Examples:
      tessera sim fault return --gpu 3
    """
    root.node().faults.return_gpu(gpu)


@fault.command()
@click.option("--pci-bus-id", required=True, help="Where it sits, as 0000:e5:00.0.")
@click.option("--pcie-root", help="Its root bus, as pci0000:e4.  [default: one bus before the GPU's]")
@click.option("--numa-node", type=int, default=-1, show_default=True, help="Its NUMA node; -1: unknown.")
@pass_root
def add(root: Root, pci_bus_id: str, pcie_root: str | None, numa_node: int) -> None:
    """Add a GPU of the node's product. It stays.

    \b
    Examples:
      tessera sim fault add --pci-bus-id 0000:e5:00.0 --numa-node 1
    """
    from driver.hardware.simulator.description import parse_gpu

    place = {"pciBusId": pci_bus_id, "numaNode": numa_node} | ({"pcieRoot": pcie_root} if pcie_root else {})
    click.echo(f"GPU {root.node().faults.add_gpu(parse_gpu(place))}")


@fault.command()
@click.argument("number", type=int)
@click.option("--device", metavar="MIG-UUID", help="MIG device it happened on.  [default: the whole GPU]")
@_gpu
@pass_root
def xid(root: Root, number: int, device: str | None, gpu: int) -> None:
    """Report an XID through NVML's event sets.

    \b
    Examples:
      tessera sim fault xid 48 --gpu 0
    """
    root.node().faults.xid(gpu, number, device)


@fault.command()
@click.argument("name")
@click.option("--data", type=int, default=0, show_default=True, help="The event's data.")
@_gpu
@pass_root
def event(root: Root, name: str, data: int, gpu: int) -> None:
    """Report another NVML event by name.

    \b
    Examples:
      tessera sim fault event MigConfigChange --gpu 0
      tessera sim fault event GpuUnavailableError --gpu 0
    """
    from driver.hardware.simulator.fault_control import event_names

    kinds = {known: bit for bit, known in event_names().items()}
    if name not in kinds:
        raise UsageError(f"event: {name!r} is unknown; known: {', '.join(kinds)}")
    root.node().faults.event(gpu, kinds[name], data)


@fault.command()
@click.argument("action")
@_gpu
@pass_root
def recovery(root: Root, action: str, gpu: int) -> None:
    """Let NVML say what a GPU needs to recover, by name (GPU_RESET, NODE_REBOOT, ...); NONE: nothing.

    \b
    Examples:
      tessera sim fault recovery GPU_RESET --gpu 0
      tessera sim fault recovery NONE --gpu 0
    """
    from driver.hardware.simulator.fault_control import recovery_names

    actions = {known: number for number, known in recovery_names().items()}
    if action.upper() not in actions:
        raise UsageError(f"action: {action!r} is unknown; known: {', '.join(actions)}")
    root.node().faults.recovery(gpu, actions[action.upper()])


@fault.command()
@pass_root
def reboot(root: Root) -> None:
    """As if the machine had been rebooted: no partition survives, nor Hopper's MIG mode.

    \b
    Examples:
      tessera sim fault reboot
    """
    root.node().reboot()


@fault.command()
@_gpu
@pass_root
def reset(root: Root, gpu: int) -> None:
    """Reset a GPU as nvidia-smi --gpu-reset: partitions go, a pending MIG mode comes into force.

    \b
    Examples:
      tessera sim fault reset --gpu 0
    """
    from pynvml import NVMLError

    try:
        root.node().reset_gpu(gpu)
    except NVMLError as error:
        raise UsageError(f"gpu: {gpu} can't be reset: a process holds it or a partition on it (IN_USE)") from error
