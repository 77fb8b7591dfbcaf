"""What a node plugin does where Tessera is uninstalled: take the node out of the cluster, leave nothing on its disk.

A plugin that ends can't know whether another comes. So ``tessera uninstall`` says it before, in an annotation of the
controller's heartbeat Lease, which every plugin watches anyway.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from driver.errors import StateError
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint

log = logging.getLogger(__name__)

FILES = ("plan.json", "health.json", "health.json.damaged-*", "*.tmp", ".*.tmp", "lock")
"""Of the state directory; the lock last."""


class Retirement:
    """``leaving``: whether Tessera is being uninstalled, as far as the plugin has heard."""

    def __init__(self, leaving: Callable[[], bool], checkpoint: Checkpoint, cdi: CdiDirectory, state_dir: Path) -> None:
        self._leaving = leaving
        self._checkpoint = checkpoint
        self._cdi = cdi
        self._state_dir = state_dir
        self._said = False

    def due(self) -> bool:
        """Whether the node offers nothing any more. Not while a claim is held: its device has to stay in the slices."""
        if not self._leaving():
            self._said = False
            return False
        held = len(self._checkpoint.records())
        if not self._said:
            self._said = True
            log.warning("Tessera is being uninstalled; claims that are still held", extra={"count": held})
        return not held

    def finish(self) -> None:
        """To be called when nothing writes any more: remove what this node has of Tessera, where that is due."""
        if not self.due():
            return
        try:
            for uid in self._cdi.claim_uids():
                self._cdi.remove(uid)
        except StateError as error:
            log.error("can't remove CDI specs", extra={"error": str(error)})
        shutil.rmtree(self._state_dir / "claims", ignore_errors=True)
        for pattern in FILES:
            for path in self._state_dir.glob(pattern):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):  # it is a mount in a pod, or has the sockets of a plugin that still ends
            self._state_dir.rmdir()
        log.info("left nothing on this node", extra={"stateDir": str(self._state_dir)})
