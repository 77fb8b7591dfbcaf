"""Which boot of the machine this is: no MIG instance outlives it, nor does anything in a running container."""

from __future__ import annotations

from driver.hardware.host import HostPaths

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""A random UUID that the kernel makes at each boot (proc(5))."""


def boot_id(paths: HostPaths) -> str:
    """The boot id; empty where it can't be read, and then every boot looks like this one."""
    try:
        return paths.here(BOOT_ID).read_text().strip()
    except OSError:
        return ""
