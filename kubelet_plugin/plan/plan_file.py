"""What a node remembers about its plan over restarts: the file ``plan.json``."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import msgspec

from driver.errors import StateError
from driver.model.plan import OfferMode, PlanMode
from kubelet_plugin.checkpoint.files import write_atomically

log = logging.getLogger(__name__)


class PlanMemory(msgspec.Struct, frozen=True):
    """The content of ``plan.json``.

    ``published``: devices that may have been allocated: those in the slices, which may get deleted meanwhile, and those
    of ``unpublished`` GPUs (UUIDs), which return with the next offer of their node (disjoint offers: of the GPU).
    ``offer_mode``: that of the last plan. ``held_gpus``: the numbers of the GPUs of which something is held, by UUID;
    ``held_shares``: by UUID of the GPU and number of a held share, into how many shares the GPU was divided.
    """

    epoch: str
    mode: PlanMode
    published: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    offer_mode: OfferMode = OfferMode.COUNTERS
    held_gpus: dict[str, int] = {}
    held_shares: dict[str, dict[int, int]] = {}


PLAN_FILE = msgspec.json.Decoder(PlanMemory)


class RememberedPlan:
    """The present memory of this process; a subclass saves it for the next one.

    ``is_new``: there was no readable memory of an earlier process.
    """

    def __init__(self, saved: PlanMemory | None) -> None:
        self.is_new = saved is None
        self.now = saved or PlanMemory(new_epoch(), PlanMode.STANDALONE)
        self._is_saved = True

    def change(self, *, durable: bool, **fields: Any) -> None:
        """Change and save these fields. A failure is logged, and the next call saves them although nothing differs."""
        changed = msgspec.structs.replace(self.now, **fields)
        if changed == self.now and self._is_saved:
            return
        self.now, self._is_saved = changed, False
        try:
            self.save(changed, durable=durable)
            self._is_saved = True
        except StateError as error:
            log.error("can't save the plan mode for the next start", extra={"error": str(error)})

    def save(self, memory: PlanMemory, *, durable: bool) -> None:
        """Save ``memory`` for the next process. Raises StateError."""


class PlanFile(RememberedPlan):
    """The memory in ``plan.json`` in the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "plan.json"
        saved: PlanMemory | None = None
        try:
            saved = PLAN_FILE.decode(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("can't read the plan mode of the last start", extra={"error": f"{self._path}: {error}"})
        super().__init__(saved)

    def save(self, memory: PlanMemory, *, durable: bool) -> None:
        write_atomically(self._path, msgspec.json.encode(memory), durable=durable)


def new_epoch() -> str:
    return uuid.uuid4().hex[:12]
