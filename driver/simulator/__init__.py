"""A stateful fake of a GPU node: the pynvml functions, sysfs, procfs and device nodes, kept in a directory.

Production code uses ``node.nvml`` in place of the module pynvml and ``node.root`` in place of ``/``.
"""

from __future__ import annotations

from .description import NodeDescription, known_descriptions, load_description
from .machine import DEFAULT_LATENCY, ZERO_LATENCY, Latency, parse_latency
from .node import SimulatedNode

__all__ = [
    "DEFAULT_LATENCY",
    "ZERO_LATENCY",
    "Latency",
    "NodeDescription",
    "SimulatedNode",
    "known_descriptions",
    "load_description",
    "parse_latency",
]
