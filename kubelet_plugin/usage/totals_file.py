"""The totals of claims, kept in a file so that they go on after a restart of the plugin."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from driver.errors import StateError
from driver.model.usage import UsageTotals
from kubelet_plugin.checkpoint.files import write_atomically

log = logging.getLogger(__name__)

Totals = Mapping[tuple[str, str], UsageTotals]
"""By uid of the claim and name of the device."""


class _Content(msgspec.Struct, frozen=True):
    boot: str
    claims: dict[str, dict[str, UsageTotals]]


CONTENT = msgspec.json.Decoder(_Content)


class TotalsFile:
    """``usage.json`` in the state directory. ``boot`` is the id of this boot: the clock of another one started anew."""

    def __init__(self, state_dir: Path, boot: str) -> None:
        self._path = state_dir / "usage.json"
        self._boot = boot
        self._failed = False

    def load(self, now: float) -> dict[tuple[str, str], UsageTotals]:
        """The saved totals; none if there is no file, or an unreadable one, which costs history but no claim."""
        try:
            content = CONTENT.decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.error("usage totals start over", extra={"path": str(self._path), "error": str(error)})
            return {}
        is_same_boot = self._boot and content.boot == self._boot
        return {
            (uid, device): totals if is_same_boot else totals.resumed(now)
            for uid, devices in content.claims.items()
            for device, totals in devices.items()
        }

    def save(self, totals: Totals) -> None:
        """Write ``totals``, not durably; a failure is logged once until a write succeeds again."""
        claims: dict[str, dict[str, UsageTotals]] = {}
        for (uid, device), device_totals in totals.items():
            claims.setdefault(uid, {})[device] = device_totals
        try:
            write_atomically(self._path, msgspec.json.encode(_Content(self._boot, claims)), durable=False)
        except StateError as error:
            if not self._failed:
                log.error("usage totals are not saved", extra={"error": str(error)})
            self._failed = True
        else:
            self._failed = False
