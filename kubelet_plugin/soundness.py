"""What makes a node plugin ready: the kubelet knows it, its hardware answers, its disk takes what it has to keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from driver.errors import StateError
from driver.model.gpu import Gpu
from kubelet_plugin.files import remove, write_atomically
from kubelet_plugin.inventory import Inventory

LATE_S = 30.0
"""A look at the hardware begins every 5 s and takes milliseconds; one GPU that hangs is left behind after 15 s."""

PROBE = "writable"


class KubeletsWord:
    """What the kubelet said of the registration."""

    def __init__(self) -> None:
        self._reason: str | None = (
            "the kubelet has not called the registration socket yet; is it running, and is --kubelet-dir its directory?"
        )

    def heard(self, accepted: bool, reason: str) -> None:
        """``NotifyRegistrationStatus``."""
        self._reason = None if accepted else f"the kubelet refused the registration: {reason}"

    def look(self) -> str | None:
        return self._reason


class Looks:
    """Whether the hardware is looked at, and answers. One GPU in trouble is no reason: the others serve."""

    def __init__(self, inventory: Inventory, clock: Callable[[], float] = time.monotonic) -> None:
        self._inventory = inventory
        self._clock = clock
        self._ended_at = clock()
        self._answering = True

    def done(self, answering: Sequence[Gpu]) -> None:
        """A look has ended; these GPUs answered."""
        self._answering = bool(answering)
        self._ended_at = self._clock()

    def look(self) -> str | None:
        late = self._clock() - self._ended_at
        if late > LATE_S:
            return f"NVML hangs: the last look at the GPUs that came back did so {late:.0f} s ago"
        gpus = self._inventory.gpus
        if self._answering or not gpus:
            return None
        return f"no GPU answers: {self._inventory.fault(gpus[0]) or 'NVML finds none'}"


def writable(state_dir: Path) -> Callable[[], str | None]:
    """Whether the checkpoint's file system takes a file; tried by writing one."""

    def look() -> str | None:
        path = state_dir / PROBE
        try:
            write_atomically(path, b"", 0o600, durable=False)
            remove(path, durable=False)
        except StateError as error:
            return str(error)
        return None

    return look
