"""Uninstalling Tessera from a node: publish no slices, leave no files.

A plugin that ends can't know whether another will start. ``tessera uninstall`` therefore announces itself in an
annotation of the controller's heartbeat Lease, which every plugin watches anyway.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from driver.errors import StateError
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.checkpoint.records import Checkpoint
from kubelet_plugin.plan.instructions import WatchedInstructions

log = logging.getLogger(__name__)

STATE_FILES = (
    "plan.json",
    "node-config.json",
    "node-config.json",
    "gpus.json",
    "driver-files.json",
    "usage.json",
    "health.json",
    "health.json.damaged-*",
    "*.tmp",
    ".*.tmp",
    "lock",
)
"""Files in the state directory; the lock last."""


class Uninstall:
    """What an uninstallation that was announced means for this node."""

    def __init__(
        self, instructions: WatchedInstructions, checkpoint: Checkpoint, cdi: CdiDirectory, state_dir: Path
    ) -> None:
        self._instructions, self._checkpoint, self._cdi, self._state_dir = instructions, checkpoint, cdi, state_dir
        self._logged = False

    def due(self) -> bool:
        """Whether the node publishes no slices any more. Devices of held claims have to stay in them until then."""
        if not self._instructions.uninstalling():
            self._logged = False
            return False
        held = len(self._checkpoint.records()) + len(self._checkpoint.unrecorded)
        if not self._logged:
            self._logged = True
            log.warning("Tessera is being uninstalled; claims that are still held", extra={"count": held})
        return not held

    def finish(self) -> None:
        """Remove Tessera's files from this node if that is due. Call it when nothing writes any more."""
        if not self.due():
            return
        try:
            for uid in self._cdi.claim_uids():
                self._cdi.remove(uid)
            self._cdi.remove_half_written()
        except StateError as error:
            log.error("can't remove CDI specs", extra={"error": str(error)})
        shutil.rmtree(self._state_dir / "claims", ignore_errors=True)
        for pattern in STATE_FILES:
            for path in self._state_dir.glob(pattern):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):  # it is a mount in a pod, or has the sockets of a plugin that still ends
            self._state_dir.rmdir()
        log.info("left nothing on this node", extra={"stateDir": str(self._state_dir)})
