"""Checks of what every pod with a GPU needs on the node: at the start and at each scan, not first when a pod waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from driver.errors import HardwareError
from driver.hardware.device_nodes import DeviceNodes
from driver.model.gpu import Gpu
from driver.model.plan import NodeConditionType
from kubelet_plugin.cdi.driver_files import CUDA, DriverFileWatch
from kubelet_plugin.changes import NodeEventSink
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.health.monitor import HealthMonitor
from kubelet_plugin.health.node_conditions import EVENT_REASONS


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
    ) -> None:
        self._nodes, self._driver_files, self._stores, self._health = nodes, driver_files, stores, health
        self._cdi_failure, self._events = cdi_failure, events
        self._outdated: set[str] = set()
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
        self._outdated &= prepared
        if not self._is_compared and files.files.has_cuda:
            self._is_compared = True
            gone = {uid: path for uid in prepared for path in self._stores.cdi.mounted(uid) if not files.exists(path)}
            self._outdated |= gone.keys()
            change = next(iter((*gone.values(), *(path for path in self._used if not files.exists(path)))), None)
            self._used = list(files.files.mounts.values())
            if change is not None:
                self._report_change(f"files of the NVIDIA driver on this node have changed: {change} is gone")
        if not self._outdated:
            conditions.set(NodeConditionType.DRIVER_FILES_CHANGED, None)

    def _report_change(self, change: str) -> None:
        claims = len(self._outdated)
        if not claims:
            self._events.node(EVENT_REASONS[NodeConditionType.DRIVER_FILES_CHANGED][0], change)
            return
        message = f"{change}; pods of {claims} claims have the old files until they are restarted"
        self._health.node_conditions.set(NodeConditionType.DRIVER_FILES_CHANGED, message)
