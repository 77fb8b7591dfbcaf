"""Which nodes have not told their GPUs yet: of what they have nothing may be said (pure but for a memory)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controller.picture import NodeView
from controller.shortage import SHOWN

WAIT_S = 30.0
"""How long a node has to tell: a node plugin that starts needs seconds."""


@dataclass(frozen=True)
class Heard:
    """``silent`` are nodes that have told nothing yet; ``waiting``: one of them may still be about to."""

    silent: tuple[str, ...] = ()
    waiting: bool = False

    @property
    def names(self) -> str:
        """The silent nodes: ``a, b and 3 more``."""
        more = len(self.silent) - SHOWN
        return ", ".join(self.silent[:SHOWN]) + (f" and {more} more" if more > 0 else "")


EVERYBODY = Heard()


class Hearing:
    """Remembers since when nodes are silent; a new leader begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        """Since when nobody has told anything."""
        self._silent: dict[str, float] = {}

    def listen(self, views: Iterable[NodeView]) -> Heard:
        now, told = self._clock(), False
        silent: dict[str, float] = {}
        for view in views:
            if view.status.inventory:
                told = True
            else:
                silent[view.name] = self._silent.get(view.name, now)
        self._silent = silent
        self._began = None if told else now if self._began is None else self._began
        times = [*silent.values(), *([self._began] if self._began is not None else [])]
        return Heard(tuple(sorted(silent)), any(now - since < WAIT_S for since in times))
