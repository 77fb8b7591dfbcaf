"""The node plugin before its hardware can be discovered: after a reboot the NVIDIA driver may be loaded late.

Nothing is published but the node's condition in its plan, so that the controller offers nothing there; a prepare fails
with the reason. An unprepare takes the usual way (``Preparer.unprepare``):
what an earlier boot has left, full GPUs and shares need no hardware; only partitions of this boot wait for it.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from driver.errors import HardwareError
from driver.hardware.host import Host, MissingNvml
from driver.hardware.host_paths import boot_id
from driver.http import Check, health_pages, serve
from driver.kube.client import ApiReach
from driver.model.gpu import Gpu
from driver.model.plan import NodeConditionType
from driver.slices.slice_names import Pool
from kubelet_plugin.api_writers import api_access
from kubelet_plugin.cdi.driver_files import DriverFiles
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.cdi.spec_format import SpecFormat
from kubelet_plugin.changes import ChangeNotifier, GpuChange, HardwareOutcomes, NodeChange
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.records import Checkpoint
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.claims.preparer import ClaimReader, Preparer
from kubelet_plugin.dra.health_service import HealthService
from kubelet_plugin.dra.kubelet_sockets import PluginSockets, serve_kubelet
from kubelet_plugin.dra.service import DraService
from kubelet_plugin.health.node_problems import NodeConditions
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from kubelet_plugin.inventory.open_hardware import host_paths, missing_hardware
from kubelet_plugin.metrics.metrics_interface import Measurements
from kubelet_plugin.plan.plan_status import ConditionsWriter
from kubelet_plugin.reconcile.recovery import tidy_specs
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.step_names import NodeStep, Observer, StepRunner

log = logging.getLogger(__name__)

HARDWARE_CHECK_INTERVAL_SECONDS = 2.0

NO_FILES = DriverFiles({}, (), None)


class UnchangedHardware(HardwareOutcomes):
    """Hardware that is missing is not changed, so that nothing is received."""

    def change_failed(self, gpu: Gpu, change: GpuChange, error: HardwareError) -> None:
        """Receive nothing."""

    def change_succeeded(self, gpu: Gpu, change: GpuChange) -> None:
        """Receive nothing."""


class AwaitedHardware:
    """Serves the kubelet instead of a NodePlugin, which reads all claims from disk again once it can start."""

    def __init__(
        self, settings: NodeSettings, missing: str, observer: Observer, sockets: PluginSockets | None = None
    ) -> None:
        """``missing``: why the hardware can't be discovered. This process must own ``settings.state_dir``.

        Raises FatalError.
        """
        self._settings, self._missing, self._sockets = settings, missing, sockets
        self._step = step = StepRunner(observer)
        self._changes, paths = ChangeNotifier(), host_paths(settings)
        self._api, self._recorder = api_access(settings, self._changes, ApiReach(), Measurements())
        checkpoint = Checkpoint(settings.state_dir)
        with step(NodeStep.LOAD_CHECKPOINT):
            checkpoint.load()
        host = Host(MissingNvml(), paths, simulated=settings.simulated is not None, driver_root=settings.driver_root)
        self._stores = stores = ClaimStores(
            pool=Pool(settings.node_name, settings.driver_name),
            inventory=Inventory((), {}),
            checkpoint=checkpoint,
            cdi=CdiDirectory(settings.cdi_dir, SpecFormat(settings.driver_name, NO_FILES)),
            locks=KeyedLocks(),
            boot=boot_id(paths),
            missing_driver=lambda: self._missing,
        )
        partitions = Partitions(
            host, stores.inventory, UnchangedHardware(), step, publishes_existing=settings.publish_existing
        )
        reader = ClaimReader(self._api.client, self._api.events.remember_pods)
        gpu_settings = GpuSettingsOfClaims.of(host, checkpoint, step)
        self._conditions = NodeConditions(self._changes, self._api.events)
        self._conditions_writer = ConditionsWriter(self._api.client, settings.node_name, self._conditions)
        self._changes.subscribe(NodeChange.CONDITION, self._conditions_writer.notify)
        self._preparer = Preparer(reader, stores, partitions, gpu_settings, self._changes, lambda *_: None, step)
        with step(NodeStep.TIDY_CDI_SPECS):
            tidy_specs(stores)

    def serve(self, stop: threading.Event) -> None:
        """Serve until the hardware can be discovered, or ``stop`` is set. Raises FatalError."""
        log.warning("waits for the NVIDIA driver", extra={"missing": self._missing})
        settings, stores, events = self._settings, self._stores, self._api.events
        service = DraService(self._preparer, events.report_failure, self._refuse_prepare, waits=stores.locks.waits)
        health_service = HealthService(stores.pool.name, list, lambda _: None)
        ready = [Check("driver", lambda: self._missing)]
        with ExitStack() as stack:
            serve(stack, [("--health-address", settings.health_address, lambda: health_pages([], ready))])
            ended = threading.Event()
            stack.callback(self._recorder.wake)
            stack.callback(ended.set)
            threading.Thread(target=self._recorder.run, args=(ended,), daemon=True, name="events").start()
            stack.enter_context(self._writing_conditions())
            self._set_condition()
            serve_kubelet(stack, settings, self._sockets, (service, health_service), lambda *_: None, self._step)
            while not stop.wait(HARDWARE_CHECK_INTERVAL_SECONDS):
                missing = missing_hardware(settings)
                if missing is None:
                    log.info("the NVIDIA driver is there", extra={"driverRoot": str(settings.driver_root)})
                    self._conditions.set(NodeConditionType.UNABLE, None)
                    return
                if missing != self._missing:
                    log.warning("waits for the NVIDIA driver", extra={"missing": missing})
                self._missing = missing
                self._set_condition()
                gc.collect(0)  # the start of the process has switched it off

    @contextmanager
    def _writing_conditions(self) -> Iterator[None]:
        """Afterwards no write is on its way: it could follow that of the NodePlugin, which has other conditions."""
        ended, writer = threading.Event(), self._conditions_writer
        thread = threading.Thread(target=writer.run, args=(ended,), daemon=True, name="conditions")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            writer.notify()
            thread.join()

    def _set_condition(self) -> None:
        self._conditions.set(NodeConditionType.UNABLE, f"the node's NVIDIA driver can't be used: {self._missing}")

    @contextmanager
    def _refuse_prepare(self, verb: str, claim: ClaimReference) -> Iterator[None]:
        if verb == "prepare":
            self._stores.require_driver(f"claim {claim} can't be prepared")
        yield
