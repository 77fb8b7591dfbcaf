"""Signs that a machine has NVIDIA GPUs, read without NVML: beside them nothing is simulated."""

from __future__ import annotations

from pathlib import Path

NVIDIA_VENDOR = "0x10de"
DISPLAY = "0x03"
"""Base class of display controllers: VGA (0x0300..) and 3D (0x0302..)."""

SHOWN = 3


def real_gpus(root: Path) -> list[str]:
    """What shows a GPU below ``root``, the machine's own root directory; empty where nothing does."""
    found = [path for path in (root / "dev").glob("nvidia[0-9]*") if not path.is_dir()]
    found += (root / "proc/driver/nvidia/gpus").glob("*")
    found += (path for path in (root / "sys/bus/pci/devices").glob("*") if _is_gpu(path))
    return [f"/{path.relative_to(root)}" for path in sorted(found)]


def told(signs: list[str]) -> str:
    """The first few of them."""
    more = len(signs) - SHOWN
    return ", ".join(signs[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY)
