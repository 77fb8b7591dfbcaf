"""Kubernetes' CEL for device selectors."""

from deviceclasses.cel.engine import CelDevice, Program, compile_selector, from_slice_device, try_compile
from deviceclasses.cel.referenced_attributes import ReferencedAttributes

__all__ = [
    "CelDevice",
    "Program",
    "ReferencedAttributes",
    "compile_selector",
    "from_slice_device",
    "try_compile",
]
