"""Limits of MPS clients: what commands set, and what a client's environment makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Variables in the environment of a client."""

EVERY_GPU = "*"
NAME = re.compile(r"[a-z0-9_]{1,64}")
SIZE = re.compile(r"(\d+)([GMK])B?")
UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


class Refusal(Exception):
    """The daemon refuses a command."""


class CudaError(Exception):
    """A client gets this error from CUDA."""


class ClientLimits:
    """Of each client. ``memory``: bytes by GPU, as commands name it, or EVERY_GPU; a missing GPU has no limit."""

    def __init__(self, threads: float = 100.0) -> None:
        self.threads = threads
        self.memory: dict[str, int] = {}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> ClientLimits:
        """Limits in a configuration file. Raises Refusal."""
        limits = cls()
        if "active_thread_percentage" in values:
            limits.threads = percentage(str(values["active_thread_percentage"]))
        if "pinned_memory_limit" in values:
            limits.memory[EVERY_GPU] = size(str(values["pinned_memory_limit"]))
        return limits

    def set_memory(self, gpu: str, text: str) -> None:
        """The limit that is set last counts if a GPU has two names. Raises Refusal."""
        self.memory.pop(gpu, None)
        self.memory[gpu] = size(text)

    def memory_of(self, gpu: str) -> int | None:
        return self.memory.get(gpu, self.memory.get(EVERY_GPU))


def check_name(name: str) -> None:
    """Raises Refusal: no name of a server or namespace."""
    if not NAME.fullmatch(name):
        raise Refusal(f"Invalid name: {name}: lowercase letters, digits and underscores, at most 64")


def size(text: str) -> int:
    """``10G``, ``512M``. Raises Refusal."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise Refusal(f"Invalid memory limit: {text}")
    return int(match[1]) * UNITS[match[2]]


def percentage(text: str) -> float:
    """A percentage above 0, at most 100. Raises Refusal."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise Refusal(f"Invalid active thread percentage: {text}")
    return value


def gpu_named(name: str, gpus: Sequence[str]) -> str | None:
    """The GPU of an ordinal or a UUID, which may be cut short; None: there is none."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name.startswith("GPU-") and gpu.startswith(name)), None)


def granted(limits: ClientLimits, gpu: str, environment: Mapping[str, str]) -> tuple[int | None, float]:
    """Memory (None: no limit) and percentage of threads of a client that sees ``gpu`` only.

    The environment lowers both and raises neither; but if it limits a GPU that the client does not see, the client has
    no limit on memory at all.
    """
    memory, threads = limits.memory_of(gpu), limits.threads
    if THREAD_PERCENTAGE in environment:
        threads = min(threads, percentage(environment[THREAD_PERCENTAGE]))
    for part in environment.get(MEMORY_LIMIT, "").split(","):
        name, equals, value = part.partition("=")
        if equals:
            if gpu_named(name, [gpu]) is None:
                return None, threads
            memory = min(size(value), size(value) if memory is None else memory)
    return memory, threads
