"""What a node that follows plans has to know after a restart."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Protocol

import msgspec

from driver.model.plan import PlanMode
from kubelet_plugin.files import write_atomically


class Memory(msgspec.Struct, frozen=True):
    """``published``: the devices in the slices, which may get lost meanwhile."""

    epoch: str
    mode: PlanMode
    published: tuple[str, ...] = ()


MEMORY = msgspec.json.Decoder(Memory)


class Keeper(Protocol):
    """Where it is kept."""

    def load(self) -> Memory | None:
        """What was kept last; None where there is nothing that can be read."""
        ...

    def keep(self, memory: Memory, *, durable: bool) -> None:
        """Keep it; ``durable``: through a power cut, too. Raises StateError."""
        ...


class MemoryFile:
    """``plan.json`` in the plugin's own directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "plan.json"

    def load(self) -> Memory | None:
        try:
            return MEMORY.decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def keep(self, memory: Memory, *, durable: bool) -> None:
        write_atomically(self._path, msgspec.json.encode(memory), 0o600, durable=durable)


class Unkept:
    """Begins with ``memory`` and forgets with its process: for nodes that have no disk."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = memory

    def load(self) -> Memory | None:
        return self._memory

    def keep(self, memory: Memory, *, durable: bool) -> None:
        self._memory = memory


def new_epoch() -> str:
    return uuid.uuid4().hex[:12]
