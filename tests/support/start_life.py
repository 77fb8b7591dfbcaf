"""A node plugin that starts in trouble: what is wrong with it then and later, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import msgspec

from driver.errors import RecoverableError, TesseraError
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.support.claim_life import SHAPES, SHARES
from tests.support.claims import result
from tests.support.faulty_nvml import FaultyHost, FaultyNvml
from tests.support.invariants import Facts, leftovers, read_facts, violations
from tests.support.node import NodeUnderTest, start_node

OpenFault = Callable[[], AbstractContextManager[object]]


class Found(StrEnum):
    """What the process before left."""

    NOTHING = "nothing"
    PREPARED = "a prepared partition"
    SHARE = "a prepared share"
    PREPARING = "a partition that was being prepared"
    RELEASING = "a partition that was being unprepared"


class Next(StrEnum):
    """What comes after a start in trouble; the trouble is over by then, but nobody has looked at the hardware yet."""

    LOOK = "look"
    UNPREPARE = "unprepare"
    PREPARE = "prepare"
    RESTART = "restart"


class StartLife:
    """One H100, started again and again on what ``found`` says; ``nvml`` is what every start talks to."""

    def __init__(self, folder: Path, found: Found) -> None:
        self._folder = folder
        self._found = found
        self._number = 0
        self.nvml: FaultyNvml
        self._offered = self._published(start_node(self.root, gpus="h100-1", sharing=SHARES))
        self._prepare()

    @property
    def root(self) -> Path:
        return self._folder / str(self._number)

    def problems(self, fault: Callable[[StartLife], AbstractContextManager[object]], then: Next) -> list[str]:
        """Everything that is not as it should be when ``fault`` lasts as long as the start."""
        found = list(self._problems(fault, then))
        if self._found is Found.SHARE and then is Next.UNPREPARE:
            # Nobody waits for the interval of a GPU that does not answer: see Releaser.
            found = [sentence for sentence in found if "time-slice" not in sentence]
            self._number += 1
        if found:
            self._number += 1
        self._prepare()
        return found

    def start(self) -> NodeUnderTest:
        return start_node(self.root, self.api, gpus="h100-1", sharing=SHARES, open_host=self._open_host)

    def _open_host(self, simulated: object) -> FaultyHost:
        return FaultyHost(self._simulated, self.nvml)

    def _prepare(self) -> None:
        """What an earlier process left, made without trouble."""
        node = start_node(self.root, gpus="h100-1", sharing=SHARES, open_host=FaultyHost)
        self.api, self._simulated = node.api, node.simulated
        self.nvml = FaultyNvml(node.simulated.nvml)
        shape = SHAPES["time-sliced share" if self._found is Found.SHARE else "MIG"]
        self.claim = self.api.allocate("claim", result(shape.devices[0]), config=list(shape.config))
        if self._found is Found.NOTHING:
            return
        node.preparer.prepare(self.claim)
        [record] = node.node.checkpoint.records()
        if self._found is Found.PREPARING:
            entries = tuple(
                msgspec.structs.replace(entry, gpu_instance_id=None, compute_instance_id=None, uuid=None)
                for entry in record.devices
            )
            node.node.checkpoint.put(msgspec.structs.replace(record, phase="preparing", devices=entries))
        if self._found is Found.RELEASING:
            node.node.checkpoint.put(msgspec.structs.replace(record, releasing=True))

    def _problems(self, fault: Callable[[StartLife], AbstractContextManager[object]], then: Next) -> Iterator[str]:
        try:
            with fault(self):
                node = self.start()
        except TesseraError:
            node = self.start()
        except Exception as error:  # noqa: BLE001 - what must not happen
            yield f"the start raised {type(error).__name__}: {error}"
            return
        if not self._aside():
            yield from violations(self._facts(), at_rest=False)
        if then is Next.RESTART:
            node = self.start()
        if then in (Next.UNPREPARE, Next.PREPARE):
            call = node.preparer.unprepare if then is Next.UNPREPARE else node.preparer.prepare
            yield from self._at_once(call)
        try:
            yield from self._later(node)
        except TesseraError as error:
            yield f"later, without a fault: {error}"

    def _at_once(self, call: Callable[[ClaimReference], object]) -> Iterator[str]:
        """An answer before anybody has looked again: an error, or right."""
        try:
            call(self.claim)
        except RecoverableError:
            pass
        except Exception as error:  # noqa: BLE001
            yield f"raised {type(error).__name__}: {error}"
        if not self._aside():
            yield from violations(self._facts(), at_rest=False)

    def _later(self, node: NodeUnderTest) -> Iterator[str]:
        """What the scanner, the reconciler and the kubelet make of it."""
        for _ in range(2):  # a GPU that has come back is known after one look, what stands on it after two
            node.scanner.scan(node.node.inventory)
            node.node.hold_all()
        for record in node.node.checkpoint.records():
            if record.needs_release:
                node.cleanup.finish_release(record.uid)
        yield from violations(self._facts())
        if any(gpu.profiles == () for gpu in node.node.inventory.gpus):
            yield "a look later the GPU still has no profiles"
        node.preparer.prepare(self.claim)
        yield from violations(self._facts())
        node.preparer.unprepare(self.claim)
        yield from leftovers(self._facts())
        for settled in (self.root / "state" / "claims").glob("*.*"):
            settled.unlink()
        if (now := self._published(node)) != self._offered and self._found is not Found.SHARE:
            yield f"offers {sorted(now ^ self._offered)} are missing or too many in the end"

    def _aside(self) -> bool:
        """Whether a record could not be read: partition and spec wait for its claim, or for word that it is gone."""
        return any((self.root / "state" / "claims").glob("*.unreadable"))

    @staticmethod
    def _published(node: NodeUnderTest) -> frozenset[str]:
        return frozenset(node.offered() | node.held())

    def _facts(self) -> Facts:
        found = read_facts(self._simulated, self.root / "state", self.root / "cdi")
        return replace(found, temporary=())


def calm(_: StartLife) -> AbstractContextManager[object]:
    return nullcontext()
