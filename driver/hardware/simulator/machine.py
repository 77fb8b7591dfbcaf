"""The simulated machine behind the NVML calls: its GPUs, their states, what is wrong, and the time things take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pynvml

from .capabilities import Capabilities
from .description import GpuDescription, NodeDescription
from .faults import NOTHING, Disturbances, FaultFile
from .latency import Latency
from .state import Event, GpuFile, GpuState

T = TypeVar("T")

RECOVERY_SINCE = 570
"""First driver branch that tells what a GPU needs to recover; an estimate (NVIDIA's XID catalogue says R565)."""


class Machine:
    """One node's hardware. A GPU's number here is its minor; its NVML index differs once a GPU was removed."""

    def __init__(
        self, description: NodeDescription, root: Path, latency: Latency, sleep: Callable[[float], None]
    ) -> None:
        self.description = description
        self.product = description.gpu_product
        self.root = root
        self.latency = latency
        self.faults = FaultFile(root / "sim")
        self._sleep = sleep
        self._capabilities = Capabilities(root)
        self._seen: Disturbances = NOTHING
        self._gpus = description.gpus
        self._present = list(range(len(self._gpus)))
        self._meeting = threading.Lock()
        self._uuids: list[str] = []
        self._files: list[GpuFile] = []
        self._meet_gpus()

    @property
    def gpus(self) -> tuple[GpuDescription, ...]:
        """Every GPU the node has or had, by minor: the description's, then those added."""
        self._look()
        return self._gpus

    @property
    def uuids(self) -> list[str]:
        """UUIDs by minor."""
        self._look()
        return self._uuids

    @property
    def present(self) -> list[int]:
        """Minors of the GPUs that are there, in the order of NVML's indices."""
        self._look()
        return self._present

    @property
    def current_description(self) -> NodeDescription:
        """The description with the GPUs that were added."""
        return self.description.replaced(gpus=self.gpus)

    def initialise(self) -> None:
        """Give a state to each GPU that has none yet; what a killed process left half-done is tidied up."""
        for minor in range(len(self.gpus)):
            self.prepare_gpu(minor)

    def prepare_gpu(self, minor: int) -> None:
        """The same for one GPU, which may be about to be added."""
        file = GpuFile(self.root / "sim", minor)
        if not file.path.exists():
            file.write(GpuState())
        self._change(minor, file, lambda state: (state, None), 0.0, None)

    def uuid(self, minor: int) -> str:
        """UUID of a GPU."""
        return self._uuids[minor]

    def state(self, minor: int) -> GpuState:
        """The GPU's state now."""
        return self._files[minor].read()

    def change(
        self,
        minor: int,
        rule: Callable[[GpuState], tuple[GpuState, T]],
        seconds: float = 0.0,
        *,
        event: Event | None = None,
    ) -> T:
        """Apply ``rule`` to the GPU's state and keep what it returns; the result is ``rule``'s second value.

        It takes ``seconds``, during which others that change this GPU wait, as they do in the real driver;
        readers, and every other GPU, don't. What ``rule`` raises leaves the GPU as it was, at once. ``event``
        happens where MIG mode or instances change.
        """
        return self._change(minor, self._files[minor], rule, seconds, event)

    @property
    def tells_recovery(self) -> bool:
        """Whether the driver says what a GPU needs to recover."""
        return self.description.driver_major >= RECOVERY_SINCE

    def need_recovery(self, minor: int, action: int) -> None:
        """NVML's recovery action of a GPU is this from now on; listeners hear where that is another."""
        event = Event(0, pynvml.nvmlEventTypeGpuRecoveryAction)

        def rule(state: GpuState) -> tuple[GpuState, None]:
            if state.recovery_action == action:
                return state, None
            return msgspec.structs.replace(state, recovery_action=action).with_event(event), None

        self.change(minor, rule)

    def reconfigure(self, minor: int, rule: Callable[[GpuState], tuple[GpuState, T]], seconds: float) -> T:
        """:meth:`change`, told to listeners as a change of the MIG configuration."""
        return self.change(minor, rule, seconds, event=Event(0, pynvml.nvmlEventMigConfigChange))

    def announce(self, minor: int, event: Event) -> None:
        """Let an event happen on a GPU."""
        self.change(minor, lambda state: (state.with_event(event), None))

    def _change(
        self,
        minor: int,
        file: GpuFile,
        rule: Callable[[GpuState], tuple[GpuState, T]],
        seconds: float,
        event: Event | None,
    ) -> T:
        with file.locked() as state:
            changed, result = rule(state)
            if changed is not state and seconds > 0:
                self._sleep(seconds)
            if event is not None and _layout(changed) != _layout(state):
                changed = changed.with_event(event)
            # In this order nobody ever sees an instance without its capability files.
            self._capabilities.add(minor, changed)
            if changed is not state:
                file.write(changed)
            self._capabilities.remove_stale(minor, changed)
        return result

    def _look(self) -> Disturbances:
        now = self.faults.read()
        if now is not self._seen:
            with self._meeting:
                added = tuple(msgspec.convert(gpu, GpuDescription) for gpu in now.added)
                self._gpus = (*self.description.gpus, *added)
                self._meet_gpus()
                self._present = [minor for minor in range(len(self._gpus)) if minor not in now.removed]
                self._seen = now
        return now

    def _meet_gpus(self) -> None:
        for minor in range(len(self._files), len(self._gpus)):
            self._uuids.append(self.description.gpu_uuid(minor))
            self._files.append(GpuFile(self.root / "sim", minor))


def _layout(state: GpuState) -> tuple[object, ...]:
    return state.mig_enabled, state.instances
