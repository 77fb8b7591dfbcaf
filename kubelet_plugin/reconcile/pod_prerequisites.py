"""Checks of what every pod with a GPU needs on the node: at the start and at each scan, not first when a pod waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from driver.errors import HardwareError, StateError
from driver.hardware.device_nodes import DeviceNodes
from driver.model.gpu import Gpu
from driver.model.plan import NodeConditionType
from kubelet_plugin.cdi.driver_files import CUDA, DriverFileWatch
from kubelet_plugin.changes import NodeEventSink
from kubelet_plugin.checkpoint.files import write_atomically
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.health.node_problems import EVENT_REASONS

log = logging.getLogger(__name__)


class OutdatedContent(msgspec.Struct, frozen=True):
    """``boot``: the boot in which the containers run; ``gone``: by claim, a driver file that its containers have."""

    boot: str
    gone: dict[str, str]


class OutdatedClaims:
    """The claims whose containers have driver files that are gone, in the file ``driver-files.json`` of the state
    directory: after a restart of the plugin their specs name the present files. A reboot ends all containers."""

    def __init__(self, state_dir: Path, boot: str) -> None:
        """Read the file; one that cannot be read counts as missing."""
        self._path, self._boot = state_dir / "driver-files.json", boot
        self.gone: dict[str, str] = {}
        with suppress(OSError, msgspec.MsgspecError):
            content = msgspec.json.decode(self._path.read_bytes(), type=OutdatedContent)
            self.gone = content.gone if content.boot == boot else {}

    def set(self, gone: dict[str, str]) -> None:
        """Replace ``gone``, and save it for the next start. A failure is logged."""
        if gone == self.gone:
            return
        self.gone = gone
        try:
            write_atomically(self._path, msgspec.json.encode(OutdatedContent(self._boot, gone)), durable=False)
        except StateError as error:
            log.warning("can't save which claims have old driver files", extra={"error": str(error)})


class NodeChecks:
    """``cdi_failure``: why no CDI spec can be written. Specs that differ are written again by ``ClaimReconciler``."""

    def __init__(
        self,
        nodes: DeviceNodes,
        driver_files: DriverFileWatch,
        stores: ClaimStores,
        health: HealthMonitor,
        cdi_failure: Callable[[], str | None],
        events: NodeEventSink,
        outdated: OutdatedClaims,
    ) -> None:
        self._nodes, self._driver_files, self._stores, self._health = nodes, driver_files, stores, health
        self._cdi_failure, self._events = cdi_failure, events
        self._outdated = outdated
        self._used: list[str] = []
        self._is_compared = False

    def handle_scan(self, answering: Sequence[Gpu]) -> None:
        """Check the node again."""
        self._check_driver_files(answering)
        problems = "; ".join(self._problems())
        self._health.set_unable(f"no pod with a GPU can start on this node: {problems}" if problems else None)

    def _problems(self) -> Iterator[str]:
        try:
            self._nodes.make_uvm()
        except HardwareError as error:
            yield str(error)
        if not self._driver_files.files.has_cuda:
            where = self._driver_files.root
            yield f"no {CUDA} below {where}: install the driver's compute libraries, or set --driver-root"
        failure = self._cdi_failure()
        if failure is not None:
            yield failure

    def _check_driver_files(self, answering: Sequence[Gpu]) -> None:
        """Use the present driver files; report the claims whose containers have others, which are gone."""
        files, conditions = self._driver_files, self._health.node_conditions
        if files.refresh(answering[0].driver_version if answering else None):
            self._stores.cdi.specs.use(files.files)
            self._is_compared = False
        prepared = {record.uid for record in self._stores.prepared()}
        outdated = {uid: path for uid, path in self._outdated.gone.items() if uid in prepared}
        if not self._is_compared and files.files.has_cuda:
            self._is_compared = True
            gone = {uid: path for uid in prepared for path in self._stores.cdi.mounted(uid) if not files.exists(path)}
            is_first = not self._used
            changed = [*gone.values(), *(path for path in self._used if not files.exists(path))]
            changed += outdated.values() if is_first else ()
            self._used, outdated = list(files.files.mounts.values()), outdated | gone
            if changed:
                change = f"files of the NVIDIA driver on this node have changed: {changed[0]} is gone"
                self._report_change(change, len(outdated))
        self._outdated.set(outdated)
        if not outdated:
            conditions.set(NodeConditionType.DRIVER_FILES_CHANGED, None)

    def _report_change(self, change: str, claims: int) -> None:
        if not claims:
            self._events.node(EVENT_REASONS[NodeConditionType.DRIVER_FILES_CHANGED][0], change)
            return
        message = f"{change}; pods of {claims} claims have the old files until they are restarted"
        self._health.node_conditions.set(NodeConditionType.DRIVER_FILES_CHANGED, message)
