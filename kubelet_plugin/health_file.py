"""Keeping what is wrong with GPUs over a restart of the plugin: one small file in the state directory."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from driver.errors import StateError
from kubelet_plugin.faults import Record
from kubelet_plugin.files import write_atomically

log = logging.getLogger(__name__)

VERSION = 1
"""Of the file format. A file of another version is set aside, never guessed at."""

NAME = "health.json"


class Kept(msgspec.Struct, frozen=True):
    version: int
    record: Record


KEPT = msgspec.json.Decoder(Kept)


class HealthFile:
    """``<state-dir>/health.json``."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / NAME

    def load(self) -> Record:
        """What was kept; nothing where there is no file, or none that can be read: that one is set aside, loudly."""
        try:
            kept = KEPT.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Record()
        except (OSError, msgspec.MsgspecError) as error:
            self._set_aside(str(error))
            return Record()
        if kept.version != VERSION:
            self._set_aside(f"version {kept.version}, this plugin reads {VERSION}")
            return Record()
        return kept.record

    def save(self, record: Record) -> None:
        """On disk when this returns. What can't be written is logged: what is known in memory counts all the same."""
        try:
            write_atomically(self._path, msgspec.json.encode(Kept(VERSION, record)), 0o600, durable=True)
        except StateError as error:
            log.error("can't keep what is wrong with GPUs; a restart would forget it", extra={"error": str(error)})

    def _set_aside(self, why: str) -> None:
        aside = self._path.with_name(f"{NAME}.damaged-{time.time_ns()}")
        extra = {"path": str(self._path), "keptAs": str(aside), "error": why}
        log.error("can't read what was wrong with GPUs before the restart: it is forgotten", extra=extra)
        try:
            self._path.rename(aside)
        except OSError as error:
            log.error("a damaged file can't be moved", extra={"path": str(self._path), "error": str(error)})
