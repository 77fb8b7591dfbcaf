"""The simulated machine behind the NVML calls: its description, its GPUs' states, and the time things take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .capabilities import Capabilities
from .description import NodeDescription
from .latency import Latency
from .state import GpuFile, GpuState

T = TypeVar("T")


class Machine:
    """One node's hardware. ``minor`` and index of a GPU are the same number here."""

    def __init__(
        self, description: NodeDescription, root: Path, latency: Latency, sleep: Callable[[float], None]
    ) -> None:
        self.description = description
        self.product = description.gpu_product
        self.root = root
        self.latency = latency
        self.uuids = [description.gpu_uuid(index) for index in range(len(description.gpus))]
        self._sleep = sleep
        self._files = [GpuFile(root / "sim", minor) for minor in range(len(description.gpus))]
        self._capabilities = Capabilities(root)

    def initialise(self) -> None:
        """Give a state to each GPU that has none yet; what a killed process left half-done is tidied up."""
        for minor, file in enumerate(self._files):
            if not file.path.exists():
                file.write(GpuState())
            self.change(minor, lambda state: (state, None))

    def state(self, minor: int) -> GpuState:
        """The GPU's state now."""
        return self._files[minor].read()

    def change(self, minor: int, rule: Callable[[GpuState], tuple[GpuState, T]], seconds: float = 0.0) -> T:
        """Apply ``rule`` to the GPU's state and keep what it returns; the result is ``rule``'s second value.

        It takes ``seconds``, during which others that change this GPU wait, as they do in the real driver;
        readers, and every other GPU, don't. What ``rule`` raises leaves the GPU as it was, at once.
        """
        with self._files[minor].locked() as state:
            changed, result = rule(state)
            if changed is not state and seconds > 0:
                self._sleep(seconds)
            # In this order nobody ever sees an instance without its capability files.
            self._capabilities.add(minor, changed)
            if changed is not state:
                self._files[minor].write(changed)
            self._capabilities.remove_stale(minor, changed)
        return result
