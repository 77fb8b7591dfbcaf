"""One claim's life on a node in trouble: what is wrong with how prepare, repeat or unprepare went, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from driver.errors import RecoverableError
from driver.model.gpu import Gpu
from driver.model.gpu_settings import GpuSharing
from driver.simulator.description import load_description
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.claims import opaque, result
from tests.support.faulty_nvml import FaultyHost
from tests.support.invariants import Facts, leftovers, read_facts, violations
from tests.support.node import NodeUnderTest, start_node

SHARES = GpuSharing(lambda _: 4)
SHORT = {"strategy": "TimeSlicing", "timeSlicing": {"interval": "Short"}}


@dataclass(frozen=True)
class Shape:
    """What a claim is given, and whether its GPUs are in MIG mode before: so that it has to be switched."""

    devices: Sequence[str]
    mig_before: bool = False
    config: Sequence[Mapping[str, Any]] = ()


SHAPES = {
    "full": Shape(["gpu-0"], mig_before=True),
    "MIG": Shape(["gpu-0-mig-1g10gb-6"]),
    "two devices": Shape(["gpu-0-mig-1g10gb-6", "gpu-1-mig-3g40gb-0"]),
    "time-sliced share": Shape(
        ["gpu-0-share-1"],
        mig_before=True,
        config=[opaque({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "ShareConfig", "sharing": SHORT})],
    ),
}


class Operation(StrEnum):
    PREPARE = "prepare"
    REPEAT = "repeat"
    UNPREPARE = "unprepare"


CASES = [
    pytest.param(shape, operation, id=f"{operation} {shape}".replace(" ", "-"))
    for shape in SHAPES
    for operation in Operation
]
"""Every operation on every shape, for a test of both."""


class Aftermath(StrEnum):
    """What comes after the answer; the fault is gone by then."""

    RETRY = "retry"
    UNPREPARE = "unprepare"
    RESTART = "restart and retry"


class Life:
    """A node with two H100s, used for case after case as long as each leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self.node = self._new()

    @property
    def host(self) -> FaultyHost:
        assert isinstance(self.node.host, FaultyHost)
        return self.node.host

    def problems(
        self,
        shape: Shape,
        operation: Operation,
        fault: AbstractContextManager[object],
        aftermath: Aftermath,
        *,
        once: bool = False,
    ) -> list[str]:
        """Everything that is not as it should be when ``fault`` lasts as long as the operation.

        ``once``: it strikes one call alone, so that what was done before can be undone, and has to be.
        """
        found = list(self._problems(shape, operation, fault, aftermath, once))
        if found:
            self.node = self._new()
        return found

    def _new(self) -> NodeUnderTest:
        self._started += 1
        whole = load_description("dgx-h100")
        return start_node(
            self._folder / str(self._started),
            gpus=whole.replaced(gpus=whole.gpus[:2]),
            sharing=SHARES,
            open_host=FaultyHost,
        )

    def _restart(self) -> None:
        self.node = start_node(
            self.node.root,
            self.node.api,
            gpus=self.node.simulated.description,
            sharing=SHARES,
            open_host=FaultyHost,
        )

    def _problems(
        self,
        shape: Shape,
        operation: Operation,
        fault: AbstractContextManager[object],
        aftermath: Aftermath,
        once: bool,
    ) -> Iterator[str]:
        claim = self._begin(shape, operation)
        before = self.facts()
        error, sentence = self._attempt(operation, claim, fault)
        if sentence:
            yield sentence
            return
        yield from self._after(operation, error, before, shape)
        if error is not None and once and operation is Operation.PREPARE and self.facts().records:
            yield f"a prepare that failed once was not undone: {error}"
        if aftermath is Aftermath.RESTART:
            self._restart()
            yield from (f"after a restart: temporary file {name}" for name in self._read().temporary)
        last = Operation.UNPREPARE if aftermath is Aftermath.UNPREPARE else operation
        for step in (last, Operation.UNPREPARE):
            failed, sentence = self._attempt(step, claim)
            yield from [f"afterwards: {said}" for said in (sentence, str(failed or "")) if said]
            yield from (f"afterwards: {said}" for said in self._wrong(step))

    def _begin(self, shape: Shape, operation: Operation) -> ClaimReference:
        node = self.node
        self.host._compute_profile_ids.clear()  # what the first partition has to ask
        for gpu in node.node.inventory.gpus:
            node.host.set_mig_mode(gpu, enabled=shape.mig_before)
        results = [result(device, f"r{index}") for index, device in enumerate(shape.devices)]
        claim = node.api.allocate("claim", *results, config=list(shape.config))
        if operation is not Operation.PREPARE:
            node.preparer.prepare(claim)
        return claim

    def _attempt(
        self, operation: Operation, claim: ClaimReference, fault: AbstractContextManager[object] | None = None
    ) -> tuple[RecoverableError | None, str]:
        preparer = self.node.preparer
        call: Callable[[ClaimReference], object] = preparer.prepare
        if operation is Operation.UNPREPARE:
            call = preparer.unprepare
        try:
            if fault is None:
                call(claim)
            else:
                with fault:
                    call(claim)
        except RecoverableError as error:
            return error, ""
        except Exception as error:  # noqa: BLE001 - what must not happen
            return None, f"raised {type(error).__name__}: {error}"
        return None, ""

    def _after(
        self, operation: Operation, error: RecoverableError | None, before: Facts, shape: Shape
    ) -> Iterator[str]:
        yield from violations(self.facts(), at_rest=False)
        recorded = {device.device for _, device in self.facts().held()}
        inventory = self.node.node.inventory
        held = {device.name for gpu in inventory.gpus for device in inventory.held_on(gpu)}
        if not recorded <= held:  # a deletion that could not be made durable is still owed
            yield f"recorded is {sorted(recorded)}, held in memory {sorted(held)}"
        if error is None:
            yield from self._wrong(operation)
            return
        if not self._names(error, shape):
            yield f"the error names neither device nor GPU nor file: {error}"
        now = self.facts()
        if operation is Operation.REPEAT and now != before:
            yield f"a repeat that failed changed something: {before} -> {now}"
        if operation is Operation.PREPARE and not now.records:
            yield from leftovers(now)
        if operation is Operation.UNPREPARE and not now.records and leftovers(now):
            yield f"reported as failed, not recorded as owed: {leftovers(now)}"

    def _wrong(self, operation: Operation) -> list[str]:
        return leftovers(self.facts()) if operation is Operation.UNPREPARE else violations(self.facts())

    def _names(self, error: RecoverableError, shape: Shape) -> bool:
        gpus: Sequence[Gpu] = self.node.node.inventory.gpus
        names = [gpu.uuid for gpu in gpus] + [str(self.node.root)]
        return any(name in str(error) for name in (*names, *shape.devices))

    def facts(self) -> Facts:
        """As it is now, but for temporary files, which may stay until the next start."""
        return replace(self._read(), temporary=())

    def _read(self) -> Facts:
        root = self.node.root
        return read_facts(self.node.simulated, root / "state", root / "cdi")


def aftermaths() -> Iterator[Aftermath]:
    """One after the other, for ever: each case gets one; restarts, which take longest, come every fifth time."""
    kinds = Aftermath.RETRY, Aftermath.UNPREPARE
    return cycle((*kinds, *kinds, Aftermath.RESTART))
