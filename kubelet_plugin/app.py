"""The node plugin: the composition of its parts. It alone knows all of them, and none of them calls it."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from driver.clock import Clock
from driver.config.node_configs import NO_CONFIG
from driver.errors import DriverMissing, HardwareError, UsageError
from driver.hardware.host_paths import boot_id
from driver.http import Check
from driver.kube.types import Claim
from driver.model.device import number_gpus
from driver.process_exit import join_all
from driver.slices.slice_names import Pool
from driver.step_observer import unobserved
from kubelet_plugin.acceptance.session import AcceptanceService, AcceptanceTest
from kubelet_plugin.api_writers import NODE_USER_AGENT, Publishing, api_access
from kubelet_plugin.awaited_hardware import AwaitedHardware
from kubelet_plugin.cdi.driver_files import DriverFileWatch
from kubelet_plugin.cdi.spec_files import CdiDirectory
from kubelet_plugin.cdi.spec_format import SpecFormat
from kubelet_plugin.changes import ChangeNotifier, NodeChange
from kubelet_plugin.checkpoint.files import probe
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.recorded_gpus import KnownGpus, held_profiles, held_shares, held_strategies
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord
from kubelet_plugin.claims.claim_memory import GpuSettingsOfClaims, LimitProbe
from kubelet_plugin.claims.claim_stores import ClaimStores
from kubelet_plugin.claims.partitions import Partitions
from kubelet_plugin.claims.preparer import ClaimReader, Preparer
from kubelet_plugin.claims.rehearsals import Rehearsals
from kubelet_plugin.coexistence.adopted_claims import adopt_claims
from kubelet_plugin.coexistence.other_drivers import OtherDriverWatch
from kubelet_plugin.dra.health_service import HealthService
from kubelet_plugin.dra.kubelet_sockets import PluginSockets, serve_kubelet
from kubelet_plugin.dra.service import DraService
from kubelet_plugin.health.device_health import HealthMonitor
from kubelet_plugin.health.recorded_faults import HealthFile
from kubelet_plugin.inventory.inventory import Inventory
from kubelet_plugin.inventory.open_hardware import open_host, require_driver_files
from kubelet_plugin.inventory.scan import NvmlEventListener, ScanLoop, Scanner
from kubelet_plugin.inventory.standalone_offers import check_layouts, setting_warnings
from kubelet_plugin.metrics import probes
from kubelet_plugin.metrics.metrics_interface import Measurements
from kubelet_plugin.plan.node_config import store_first_config, store_without_layout, stored_config
from kubelet_plugin.plan.plan_file import PlanFile
from kubelet_plugin.reconcile.background_work import BackgroundWork, ClaimActivity
from kubelet_plugin.reconcile.later_pods import LaterPods
from kubelet_plugin.reconcile.memory_watch import MemoryWatch
from kubelet_plugin.reconcile.mps_watch import MpsWatch
from kubelet_plugin.reconcile.orphans import Orphans
from kubelet_plugin.reconcile.pod_prerequisites import NodeChecks, OutdatedClaims
from kubelet_plugin.reconcile.recovery import ClaimReconciler, recover
from kubelet_plugin.reconcile.trials import Trials
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.events import EventReason
from kubelet_plugin.step_names import NodeStep, Observer, StepRunner
from kubelet_plugin.upgrade.instance_lock import claim_directory

if TYPE_CHECKING:
    from kubelet_plugin.metrics.metrics import Metrics
    from kubelet_plugin.upgrade.rolling_update import RollingInstance
    from kubelet_plugin.usage.sampler import UsageSampler

log = logging.getLogger(__name__)

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long a busy thread may keep the interpreter from a thread that answers a call; Python's default is 5 ms."""

M_ARENA_MAX, MALLOC_ARENAS = -8, 2
"""Parameter of the C library's mallopt (malloc.h), and its value: by default each of 30 threads gets memory of its own,
of which most stays unused. Threads seldom allocate at the same time, because the interpreter runs one of them."""

SCAN_DELAY_SECONDS = 2.0
"""Longest time that a scan of the hardware waits for claims in progress."""


class NodePlugin:
    """One node's plugin process. ``run`` returns after ``stop`` was called from another thread or a signal."""

    def __init__(
        self,
        settings: NodeSettings,
        observer: Observer = unobserved,
        stop: threading.Event | None = None,
        sockets: PluginSockets | None = None,
    ) -> None:
        """Discover the hardware and recover claims, without requests to API server or kubelet.

        Raises DriverMissing and HardwareError while the hardware can't be discovered, else FatalError.

        This process must own ``settings.state_dir`` (``claim_directory``). ``sockets`` are given if they outlive the
        plugin; then no thread of the plugin writes anything after ``run`` has returned.
        """
        settings = settings.configured(stored_config(settings.state_dir) or NO_CONFIG)
        self._settings, self._sockets = settings, sockets
        self._stop, self.needs_restart = stop or threading.Event(), False
        self._changes = ChangeNotifier()
        self._probes = probes.NodeProbes(settings, self._stop)
        self._metrics: Metrics | None = None
        if settings.metrics_address is not None:
            from kubelet_plugin.metrics.metrics import Metrics  # the Prometheus library needs a megabyte

            self._metrics = Metrics()
        measurements = self._metrics or Measurements()
        self._step = StepRunner(observer, measurements.observe_step)
        self._background = BackgroundWork(ClaimActivity(), self._probes, measurements, self._step)
        self._api, self._recorder = api_access(settings, self._changes, self._probes.reach, measurements)
        self._events = self._api.events
        self._hardware = ExitStack()
        self._open_hardware()
        self._publishing = Publishing(
            settings, self._api, self._stores, self._health, self._other_drivers, self._background, self._changes
        )
        self._prepare_claims()
        self._usage = self._usage_sampler()
        self._check_readiness()
        self._subscribe()
        adopt_claims(self._stores, settings, self._host.partitions, self._reader, self._events)
        recover(self._stores, self._preparer.cleanup, self._step)
        inventory = self._stores.inventory
        self._known_gpus.save(inventory.gpus)
        answering = [gpu for gpu in inventory.gpus if inventory.fault(gpu) is None]
        self._scanner.scan_partitions(inventory, answering)
        self._health.handle_scan(answering)
        self._directory_probes.probe()
        self._node_checks.handle_scan(answering)

    def _open_hardware(self) -> None:
        """Open hardware, checkpoint and CDI directory, discover the GPUs, and watch their health."""
        settings, measurements = self._settings, self._background.measurements
        require_driver_files(settings)
        host, paths = self._hardware.enter_context(open_host(settings, lasting=True))
        checkpoint = Checkpoint(settings.state_dir)
        with self._step(NodeStep.LOAD_CHECKPOINT):
            records = checkpoint.load()
        self._scanner = Scanner(host, settings, self._events, held_profiles(records))
        self._known_gpus = KnownGpus(settings.state_dir, boot_id(paths))
        with self._step(NodeStep.DISCOVER), ExitStack() as failed:
            failed.callback(self._hardware.close)
            inventory = _discover(self._scanner, records, settings, self._known_gpus)
            failed.pop_all()
        self._other_drivers = OtherDriverWatch(
            self._api.client, settings, inventory, self._scanner, self._changes, self._events
        )
        self._driver_files = DriverFileWatch(paths, settings.driver_root, settings.cdi_hook, settings.memory_hook)
        specs = SpecFormat(settings.driver_name, self._driver_files.files, settings.framework_variables)
        self._stores = ClaimStores(
            pool=Pool(settings.node_name, settings.driver_name),
            inventory=inventory,
            checkpoint=checkpoint,
            cdi=CdiDirectory(settings.cdi_dir, specs, partial(self._changes.report, NodeChange.CDI_RESTORED)),
            locks=KeyedLocks(waited=measurements.lock_waited),
            boot=boot_id(paths),
        )
        self._host, file = host, HealthFile(settings.state_dir)
        self._health = HealthMonitor(host, inventory, checkpoint, file, self._changes, self._events)
        self._listener = NvmlEventListener(host, self._health.handle_event, lambda _: self._scanner.scan_soon())

    def _prepare_claims(self) -> None:
        """Build what prepares and unprepares claims, and what cleans up and repairs them."""
        stores, host, step, events = self._stores, self._host, self._step, self._events

        def claim_read(claim: Claim) -> None:
            events.remember_pods(claim)
            self._background.measurements.claim_read(claim)

        def repaired(record: ClaimRecord, made: str) -> None:
            events.claim(record.reference, EventReason.REPAIRED, made)

        self._reader = ClaimReader(self._api.client, claim_read)
        partitions = Partitions(
            host, stores.inventory, self._health, step, publishes_existing=self._settings.publish_existing
        )
        gpu_settings = GpuSettingsOfClaims.of(host, stores.checkpoint, step)
        self._preparer = Preparer(self._reader, stores, partitions, gpu_settings, self._changes, repaired, step)
        self._rehearsals = Rehearsals(stores, partitions, self._preparer.cleanup)
        self._trials = Trials(self._rehearsals, self._health)
        orphans = Orphans(stores, self._preparer, self._reader, events, self._background.measurements.count_orphan)
        find, observe = orphans.search_if_due, self._health.failed_preparations.observe
        self._reconciler = ClaimReconciler(stores, self._preparer, events, self._health.set_condition, find, observe)
        self._health_service = HealthService(
            stores.pool.name, self._publishing.devices, self._health.reason_for_holders
        )

    def _usage_sampler(self) -> UsageSampler | None:
        """Register what is computed at each scrape; return what measures the usage of claims, if that is asked for."""
        if self._metrics is None:
            return None
        from kubelet_plugin.metrics.metrics import NodeGauges

        self._metrics.registry.register(NodeGauges(self._stores, self._publishing.device_names, self._health))
        if self._settings.usage_interval is None:
            return None
        from kubelet_plugin.metrics.usage import UsageCollector, usage_sampler

        usage = usage_sampler(self._settings, self._stores, self._host, self._api, self._reader, self._publishing.idle)
        self._metrics.registry.register(UsageCollector(self._stores, usage))
        return usage

    def _check_readiness(self) -> None:
        """Define what ``/livez`` and ``/readyz`` check; probe the directories that a prepare writes to."""
        settings, stores, clock = self._settings, self._stores, Clock()
        hardware = probes.HardwareCheck(stores.inventory)
        write = partial(probe, settings.state_dir / probes.PROBE)
        state = probes.DirectoryProbe(settings.state_dir, write, probes.STATE_REASONS, self._events, clock)
        specs = probes.DirectoryProbe(settings.cdi_dir, stores.cdi.probe, probes.CDI_REASONS, self._events, clock)
        self._directory_probes = probes.DirectoryProbes(state, specs)
        nodes, driver_files = self._host.nodes, self._driver_files
        outdated = OutdatedClaims(settings.state_dir, stores.boot)
        self._node_checks = NodeChecks(nodes, driver_files, stores, self._health, specs.failure, self._events, outdated)
        gpu_settings, report = self._preparer.gpu_settings, self._background.measurements.set_claims_above_memory
        used = self._usage.memory_used if self._usage else None
        later = LaterPods(stores, gpu_settings.memory, self._reader)
        memory = MemoryWatch(stores, gpu_settings.memory, later, self._events, self._changes, used, report)
        mps = MpsWatch(stores, gpu_settings.mps, self._events, self._health.set_condition)
        followers = (self._node_checks, self._reconciler, self._health, hardware, memory, mps)
        give_way = self._background.activity.wait_idle(SCAN_DELAY_SECONDS)
        self._scan_loop = ScanLoop(self._scanner, stores.inventory, followers, self._changes, give_way)
        self._ready = (
            Check("registered", self._publishing.registration.failure),
            Check("slices", self._publishing.not_ready),
            Check("hardware", hardware.failure),
            Check("neighbours", self._other_drivers.not_ready),
            Check("checkpoint", state.failure),
        )
        self._live = (Check("cdi-mount", stores.cdi.detached),)

    def _subscribe(self) -> None:
        """Say which parts act on which change, in which order."""
        publishing, reconciler, health_service = self._publishing, self._reconciler, self._health_service
        subscribe = self._changes.subscribe
        subscribe(NodeChange.KEPT_FIELDS, publishing.notify_slices)
        subscribe(NodeChange.PLAN, publishing.plan_changed)
        subscribe(NodeChange.LABEL, publishing.label_changed)
        subscribe(NodeChange.SETTINGS, self._restart)
        subscribe(NodeChange.MODE, publishing.notify)
        subscribe(NodeChange.PUBLISHED, publishing.notify_plan_status)
        subscribe(NodeChange.RESERVATIONS, publishing.notify)
        hold_again = self._stores.hold_all
        subscribe(NodeChange.HARDWARE, hold_again, reconciler.notify, publishing.notify, health_service.notify)
        subscribe(NodeChange.HARDWARE, lambda: self._known_gpus.save(self._stores.inventory.gpus))
        trials = self._trials.notify
        subscribe(NodeChange.HEALTH, publishing.notify, publishing.notify_claim_status, health_service.notify, trials)
        usage = [self._usage.notify] if self._usage else []
        subscribe(NodeChange.PREPARED, publishing.claim_prepared, *usage)
        subscribe(NodeChange.RELEASED, publishing.claim_released, *usage)
        subscribe(NodeChange.UNPREPARED, publishing.notify_plan_status)
        subscribe(NodeChange.CONDITION, publishing.notify_plan_status)
        subscribe(NodeChange.RELEASE_FAILED, reconciler.notify)
        restored = f"{self._settings.cdi_dir} was missing: it is created again, with the CDI specs of prepared claims"
        tell = partial(self._events.node, EventReason.CDI_RESTORED, restored)
        subscribe(NodeChange.CDI_RESTORED, tell, reconciler.notify)

    def run(self) -> None:
        """Serve until ``stop``. The sockets are gone when this returns; slices stay, because claims stay prepared."""
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        publishing, other_drivers = self._publishing, self._other_drivers
        readers = (other_drivers.cache.run, other_drivers.run, *publishing.readers, self._listener.run)
        writers = (
            *publishing.writers,
            self._recorder.run,
            self._scan_loop.run,
            self._reconciler.run,
            self._trials.run,
            self._directory_probes.run,
            *((self._usage.run,) if self._usage else ()),
        )
        with ExitStack() as stack:  # the last to start is the first to stop, also if the next can't start
            self._probes.serve(stack, self._background.measurements.pages, self._live, self._ready)
            start = self._probes.watchdog.start
            for target in readers:
                start(target)
            stack.callback(self._end_writers, [start(target) for target in writers])
            stack.callback(self.stop)
            self._serve(stack)
            self._stop.wait()
            log.info("stopping")
        self._publishing.check_stored_config()

    def _end_writers(self, writers: Sequence[threading.Thread]) -> None:
        """Wait until nothing is written any more if another plugin takes over, or if Tessera is uninstalled."""
        if self._sockets is not None or self._publishing.uninstall.due():
            join_all(writers)
            self._publishing.uninstall.finish()

    def _serve(self, stack: ExitStack) -> None:
        observers = (
            self._background.measurements.measure,
            self._background.activity.working,
            self._events.report_failure,
            self._health.failed_preparations.observe,
        )
        service = DraService(self._preparer, *observers, waits=self._stores.locks.waits)
        services = service, self._health_service
        acceptance = AcceptanceService(AcceptanceTest(self._rehearsals, self._health, self._publishing))
        serve_kubelet(stack, self._settings, self._sockets, services, self._registered, self._step, acceptance)

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stop.set()
        self._publishing.label_changed()
        self._publishing.notify_claim_status()
        self._reconciler.notify()
        self._trials.notify()
        self._recorder.wake()
        self._other_drivers.wake()
        self._scanner.scan_soon()
        if self._usage:
            self._usage.notify()

    def _restart(self) -> None:
        self.needs_restart = True
        self._stop.set()

    @property
    def uninstalling(self) -> bool:
        """Whether Tessera is being uninstalled and no claim is held: its files on the node go when this plugin ends."""
        return self._publishing.uninstall.due()

    @property
    def working(self) -> bool:
        """Whether a claim is being worked on."""
        return self._background.activity.active

    def _registered(self, accepted: bool, reason: str) -> None:
        self._publishing.registration.set(accepted, reason)
        if accepted:
            self._publishing.notify_slices()  # they wait for it, and a kubelet that has just started deletes them


def node_plugin(settings: NodeSettings, stop: threading.Event) -> NodePlugin | RollingInstance | None:
    """Return the plugin to run. Without a pod's uid, wait for the state directory first; None: ``stop`` was set
    meanwhile. Raises FatalError."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # musl has none
        mallopt(M_ARENA_MAX, MALLOC_ARENAS)
    if settings.pod_uid:
        from kubelet_plugin.upgrade.rolling_update import RollingInstance  # megabytes that only a rolling update needs

        return RollingInstance(settings, stop)
    claim_directory(settings.state_dir, stop)
    return discovered_plugin(settings, stop)


def discovered_plugin(
    settings: NodeSettings,
    stop: threading.Event,
    observer: Observer = unobserved,
    sockets: PluginSockets | None = None,
) -> NodePlugin | None:
    """Return the plugin once the hardware can be discovered; until then AwaitedHardware serves the kubelet.

    This process must own ``settings.state_dir``. None: ``stop`` was set meanwhile. Raises FatalError.
    """
    store_first_config(settings, NODE_USER_AGENT)
    while not stop.is_set():
        try:
            return NodePlugin(settings, observer, stop, sockets)
        except UsageError as error:
            store_without_layout(settings.state_dir, error)
            continue
        except DriverMissing as error:
            missing = error.reason
        except HardwareError as error:
            missing = str(error)
        gc.collect()  # what has failed to start; the start of the process has switched it off
        AwaitedHardware(settings, missing, observer, sockets).serve(stop)
    return None


def _discover(
    scanner: Scanner, records: Iterable[ClaimRecord], settings: NodeSettings, known_gpus: KnownGpus
) -> Inventory:
    """The node's GPUs, also those that do not answer at present; held devices keep the names and the number of shares
    with which they were allocated. Raises HardwareError, UsageError."""
    gpus, reasons = scanner.discover()
    plan = PlanFile(settings.state_dir).now
    kept = plan.held_gpus | {device.gpu_uuid: device.number for record in records for device in record.devices}
    missing = [gpu for gpu in known_gpus.missing(gpus, reasons, kept) if settings.manages(gpu)]
    prepared = held_shares(records)
    shares = {uuid: plan.held_shares.get(uuid, {}) | prepared.get(uuid, {}) for uuid in kept}
    products = ", ".join(sorted({gpu.product_name for gpu in gpus}))
    log.info("discovered GPUs", extra={"count": len(gpus), "products": products})
    check_layouts(settings.layout, settings.shares, gpus)
    for warning in setting_warnings(settings, gpus):
        log.warning(warning)
    numbers, strategies = number_gpus([*gpus, *missing], kept), held_strategies(records)
    sharing = settings.sharing.limited_by(LimitProbe(scanner.host.memory_limits))
    inventory = Inventory([*gpus, *missing], numbers, sharing, shares, strategies)
    inventory.update(gpus, {gpu.uuid: reasons[gpu.index] for gpu in missing if gpu.index in reasons})
    return inventory
