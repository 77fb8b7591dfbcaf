"""Kubernetes' CEL for device selectors."""

from deviceclasses.cel.engine import CelDevice, Program, compile_selector, from_slice_device, try_compile

__all__ = [
    "CelDevice",
    "Program",
    "compile_selector",
    "from_slice_device",
    "try_compile",
]
