"""Kubernetes' CEL for device selectors."""

from deviceclasses.cel.device import CelDevice, from_slice_device
from deviceclasses.cel.engine import Program, Verdicts, compile_selector, evaluate, evaluate_all
from deviceclasses.cel.mentions import Mentions

__all__ = [
    "CelDevice",
    "Mentions",
    "Program",
    "Verdicts",
    "compile_selector",
    "evaluate",
    "evaluate_all",
    "from_slice_device",
]
