"""What preparing works on: everything the node plugin shares between claims."""

from __future__ import annotations

from dataclasses import dataclass

from driver.hardware.host import Host
from driver.slices.names import Pool
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.driver_files import DriverFiles
from kubelet_plugin.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Node:
    """``boot`` is the machine's boot id: no partition outlives a boot."""

    pool: Pool
    host: Host
    inventory: Inventory
    checkpoint: Checkpoint
    cdi: CdiDirectory
    files: DriverFiles
    boot: str = ""
