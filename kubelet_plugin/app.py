"""The node plugin: the composition of its parts. It alone knows all of them, and none of them calls it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from driver.hardware.host_paths import boot_id
from driver.http import Check
from driver.kube.client import KubeClient, load_configuration
from driver.kube.clock import Clock
from driver.kube.events import Recorder
from driver.model.device import number_gpus
from driver.model.gpu import Gpu
from driver.process_exit import join_all
from driver.slices.kept_fields import KeptFields
from driver.slices.pool_names import Pool
from driver.steps import unobserved
from kubelet_plugin.cdi.spec import CdiDirectory, find_driver_files
from kubelet_plugin.checkpoint.files import probe
from kubelet_plugin.checkpoint.gpu_and_claim_locks import KeyedLocks
from kubelet_plugin.checkpoint.records import Checkpoint, ClaimRecord, held_shares
from kubelet_plugin.claims.cleanup import ClaimCleanup, ClaimListeners, ignore
from kubelet_plugin.claims.context import PluginContext
from kubelet_plugin.claims.partitions import Partitions, TimeSlices
from kubelet_plugin.claims.preparer import ClaimReader, Preparer
from kubelet_plugin.claims.steps import Observer, Step, Steps
from kubelet_plugin.coexistence.other_drivers import OtherDriverWatch
from kubelet_plugin.dra.health_service import HealthService
from kubelet_plugin.dra.service import ClaimObserver, DraService
from kubelet_plugin.dra.sockets import PluginSockets, Registry, SocketServer
from kubelet_plugin.health.monitor import HealthMonitor, NvmlEventListener
from kubelet_plugin.inventory.inventory import GpuSharing, Inventory
from kubelet_plugin.inventory.layouts import check_layouts, layout_warnings
from kubelet_plugin.inventory.open_hardware import open_host, wait_for_driver
from kubelet_plugin.inventory.scan import Scanner, mig_warnings, names_of, share_warnings
from kubelet_plugin.metrics.probes import (
    CDI_REASONS,
    PROBE,
    STATE_REASONS,
    DirectoryProbe,
    HardwareCheck,
    NodeProbes,
    run_probes,
)
from kubelet_plugin.publishing import Publishing
from kubelet_plugin.reconcile.claim_activity import ClaimActivity
from kubelet_plugin.reconcile.recovery import Orphans, hold_recorded, recover
from kubelet_plugin.reconcile.retry import ClaimReconciler
from kubelet_plugin.settings import NodeSettings
from kubelet_plugin.status.events import EventReporter, Reason
from kubelet_plugin.upgrade.instance_lock import claim_directory

if TYPE_CHECKING:
    from kubelet_plugin.metrics.metrics import Metrics
    from kubelet_plugin.upgrade.rolling_update import RollingInstance
    from kubelet_plugin.usage.sampler import UsageSampler

log = logging.getLogger(__name__)

USER_AGENT = "tessera-node"

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long a busy thread may keep the interpreter from a thread that answers a call; Python's default is 5 ms."""

SCAN_DELAY_SECONDS = 2.0
"""Longest time that a scan of the hardware waits for claims in progress."""


class Signal(list[Callable[..., object]]):
    """Receivers to call in order, added when all parts exist, so that no part calls the composition."""

    def __call__(self, *arguments: object) -> None:
        for receiver in self:
            receiver(*arguments)


class NodePlugin:
    """One node's plugin process. ``run`` returns after ``stop`` was called from another thread or a signal."""

    def __init__(
        self,
        settings: NodeSettings,
        observer: Observer = unobserved,
        stop: threading.Event | None = None,
        sockets: PluginSockets | None = None,
    ) -> None:
        """Discover the hardware and recover claims, without requests to API server or kubelet. Raises FatalError.

        This process must own ``settings.state_dir`` (``claim_directory``). ``sockets`` are given if they outlive the
        plugin; then no thread of the plugin writes anything after ``run`` has returned.
        """
        self._settings = settings
        self._sockets = sockets
        self._stop = stop or threading.Event()
        self._metrics = metrics = _metrics(settings)
        self._node_probes = NodeProbes(settings, self._stop)
        kept_fields = KeptFields()
        observe = kept_fields.observer(self._node_probes.reach.observer(metrics.requests if metrics else None))
        self._client = KubeClient(load_configuration(settings.kubeconfig, in_own_process=True), USER_AGENT, observe)
        self._recorder = Recorder(self._client, USER_AGENT, settings.node_name)
        count_event = metrics.count_event if metrics else ignore
        self._events = EventReporter(self._recorder.event, settings.node_name, count_event)
        self._activity = ClaimActivity()
        self._offers_changed, self._hardware_changed, self._health_changed = Signal(), Signal(), Signal()
        self._cdi_restored, self._release_failed = Signal(), Signal()
        self._claim_prepared, self._claim_released = Signal(), Signal()
        self._hardware = ExitStack()
        self._open(Steps(observer, metrics.observe_step if metrics else ignore))
        self._monitor_health()
        self._publishing = Publishing(
            settings,
            self._client,
            self._context,
            self._health,
            self._activity,
            metrics.slices_written if metrics else ignore,
            self._node_probes,
            self._other_drivers.wait_until_known,
            kept_fields,
        )
        self._prepare_claims()
        self._connect()
        recover(self._context, self._cleanup)
        inventory = self._context.inventory
        self._scanner.scan_partitions(inventory, inventory.gpus)
        self._health.handle_scan(inventory.gpus)
        self._check_readiness()

    def _open(self, step: Steps) -> None:
        """Open hardware, checkpoint and CDI directory, and discover the GPUs."""
        settings = self._settings
        host, self._paths = self._hardware.enter_context(open_host(settings, lasting=True))
        checkpoint = Checkpoint(settings.state_dir)
        with step(Step.LOAD_CHECKPOINT):
            records = checkpoint.load()
        self._other_drivers = OtherDriverWatch(self._client, settings, self._offers_changed, self._events.node)
        self._scanner = Scanner(
            host,
            settings,
            self._activity.wait_idle(SCAN_DELAY_SECONDS),
            self._other_drivers.is_reserved,
            lambda gpu: self._events.node("GpuNeedsReset", _needs_reset(gpu)),
        )
        with step(Step.DISCOVER):
            inventory = _discover(self._scanner, records, settings)
        self._context = PluginContext(
            pool=Pool(settings.node_name, settings.driver_name),
            host=host,
            inventory=inventory,
            checkpoint=checkpoint,
            cdi=CdiDirectory(settings.cdi_dir, settings.driver_name, self._cdi_restored),
            files=find_driver_files(self._paths, settings.driver_root),
            partitions=Partitions(host, inventory, step),
            time_slices=TimeSlices(host, checkpoint, step),
            step=step,
            locks=KeyedLocks(waited=self._metrics.lock_waited if self._metrics else ignore),
            boot=boot_id(self._paths),
            existing_published=settings.publish_existing,
        )

    def _monitor_health(self) -> None:
        context = self._context
        self._health = HealthMonitor(
            context,
            self._settings.state_dir,
            lambda: boot_id(self._paths) or None,
            self._health_changed,
            self._events.node,
        )
        self._listener = NvmlEventListener(context.host, self._health.handle_event, lambda _: self._scanner.scan_soon())

    def _prepare_claims(self) -> None:
        """Build what prepares and unprepares claims, and what cleans up and repairs them."""
        context, publishing = self._context, self._publishing
        listeners = ClaimListeners(
            self._claim_prepared,
            self._claim_released,
            lambda record, made: self._events.claim(record.reference, Reason.REPAIRED, "; ".join(made)),
            self._release_failed,
        )
        claim_read = Signal([self._events.remember_pods, *([self._metrics.claim_read] if self._metrics else [])])
        reader = ClaimReader(self._client, claim_read)
        self._usage = self._usage_sampler(reader)
        self._cleanup = ClaimCleanup(context, listeners)
        self._preparer = Preparer(context, reader, self._cleanup, listeners)
        count_orphan = self._metrics.count_orphan if self._metrics else ignore
        orphans = Orphans(context, self._preparer, self._cleanup, reader, self._events, count_orphan)
        self._reconciler = ClaimReconciler(
            context, self._preparer, self._cleanup, self._events, self._health.set_condition, orphans.search_if_due
        )
        self._health_service = HealthService(context.pool.name, publishing.devices, self._health.unhealthy_reason)
        if self._metrics:
            from kubelet_plugin.metrics.metrics import NodeGauges

            health = self._health
            gauges = NodeGauges(context, publishing.device_names, health.unhealthy_reason, health.faults_by_kind)
            self._metrics.registry.register(gauges)

    def _usage_sampler(self, reader: ClaimReader) -> UsageSampler | None:
        """What measures the usage of claims, if that is asked for."""
        if self._settings.usage_interval is None or self._metrics is None:
            return None
        from kubelet_plugin.metrics.usage import UsageCollector, usage_sampler

        sampler = usage_sampler(self._settings, self._context, self._client, reader, self._events)
        self._metrics.registry.register(UsageCollector(self._context, sampler))
        return sampler

    def _connect(self) -> None:
        """Connect each change with the parts that have to act on it."""
        publishing, reconcile = self._publishing, self._reconciler.notify
        self._offers_changed += [publishing.notify]
        self._hardware_changed += [
            partial(hold_recorded, self._context),
            reconcile,
            publishing.notify,
            self._health_service.notify,
        ]
        self._health_changed += [publishing.notify, publishing.notify_status, self._health_service.notify]
        self._release_failed += [reconcile]
        usage = [self._usage.notify] if self._usage else []
        self._claim_prepared += [publishing.claim_prepared, *usage]
        self._claim_released += [publishing.claim_released, *usage]
        restored = f"{self._settings.cdi_dir} was missing: it is created again, with the CDI specs of prepared claims"
        self._cdi_restored += [lambda: self._events.node(Reason.CDI_RESTORED, restored), reconcile]

    def _check_readiness(self) -> None:
        """Define what ``/livez`` and ``/readyz`` check; probe the directories that a prepare writes to."""
        settings, context, probes = self._settings, self._context, self._node_probes
        self._hardware_check = HardwareCheck(context.inventory)
        self._other_drivers.serve(context.inventory, lambda: self._scanner.excluded_count)
        self._scanner.on_scan = self._scanned
        clock, write = Clock(), partial(probe, settings.state_dir / PROBE)
        state = DirectoryProbe(settings.state_dir, write, STATE_REASONS, self._events.node, clock)
        specs = DirectoryProbe(settings.cdi_dir, context.cdi.probe, CDI_REASONS, self._events.node, clock)
        self._probes = (state, specs)
        probes.ready += [
            Check("hardware", self._hardware_check.failure),
            Check("neighbours", self._other_drivers.not_ready),
            Check("checkpoint", state.failure),
            Check("cdi", specs.failure),
        ]
        probes.live.append(Check("cdi-mount", context.cdi.detached))

    def run(self) -> None:
        """Serve until ``stop``. The sockets are gone when this returns; slices stay, because claims stay prepared."""
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        publishing, other_drivers = self._publishing, self._other_drivers
        readers = (other_drivers.cache.run, other_drivers.run, *publishing.readers, self._listener.run)
        writers = (
            *publishing.writers,
            self._recorder.run,
            self._scan,
            publishing.follow,
            self._reconciler.run,
            self._probe,
            *((self._usage.run,) if self._usage else ()),
        )
        with ExitStack() as stack:  # the last to start is the first to stop, also if the next can't start
            self._node_probes.serve(stack, self._metrics.pages if self._metrics else dict)
            start = self._node_probes.watchdog.start
            for target in readers:
                start(target)
            stack.callback(self._end_writers, [start(target) for target in writers])
            stack.callback(self.stop)
            self._serve(stack)
            self._stop.wait()
            log.info("stopping")

    def _end_writers(self, writers: Sequence[threading.Thread]) -> None:
        """Wait until nothing is written any more if another plugin takes over, or if Tessera is uninstalled."""
        if self._sockets is not None or self._publishing.uninstall.due():
            join_all(writers)
            self._publishing.uninstall.finish()

    def _serve(self, stack: ExitStack) -> None:
        settings = self._settings
        observers: list[ClaimObserver] = [self._activity.working, self._events.report_failure]
        if self._metrics:
            observers.insert(0, self._metrics.measure)
        service = DraService(self._preparer, *observers, waits=self._context.locks.waits)
        stack.callback(service.close)
        handlers = [service.handler(), *self._health_service.handlers()]
        if self._sockets is not None:
            stack.callback(self._health_service.close)
            stack.enter_context(self._sockets.serving(handlers, self._registered))
            return
        with self._context.step(Step.LISTEN):
            plugin = SocketServer(settings.plugin_socket, handlers)
        stack.callback(plugin.stop)
        stack.callback(self._health_service.close)
        with self._context.step(Step.OFFER_REGISTRATION):
            registry = Registry(settings, self._registered)
        stack.callback(registry.stop)
        log.info("serving", extra={"driver": settings.driver_name, "socket": str(settings.plugin_socket)})

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stop.set()
        self._publishing.notify()
        self._publishing.notify_status()
        self._reconciler.notify()
        self._recorder.wake()
        self._other_drivers.wake()
        self._scanner.scan_soon()
        if self._usage:
            self._usage.notify()

    @property
    def uninstalling(self) -> bool:
        """Whether Tessera is being uninstalled and no claim is held: its files on the node go when this plugin ends."""
        return self._publishing.uninstall.due()

    @property
    def working(self) -> bool:
        """Whether a claim is being worked on."""
        return self._activity.active

    def _scan(self, stop: threading.Event) -> None:
        self._scanner.run(self._context.inventory, self._hardware_changed, stop)

    def _probe(self, stop: threading.Event) -> None:
        run_probes(self._probes, stop)

    def _scanned(self, answering: Sequence[Gpu]) -> None:
        self._reconciler.check_specs()
        self._health.handle_scan(answering)
        self._hardware_check.handle_scan(answering)

    def _registered(self, accepted: bool, reason: str) -> None:
        self._node_probes.set_registered(accepted, reason)
        if accepted:
            # The kubelet has just started, and a kubelet that starts deletes the node's slices.
            self._publishing.notify_slices()


def node_plugin(settings: NodeSettings, stop: threading.Event) -> NodePlugin | RollingInstance | None:
    """Return the plugin to run. Without a pod's uid, wait for the state directory first; None: ``stop`` was set
    meanwhile. Raises FatalError."""
    if settings.pod_uid:
        from kubelet_plugin.upgrade.rolling_update import RollingInstance  # megabytes that only a rolling update needs

        wait_for_driver(settings, stop)
        return RollingInstance(settings, stop)
    claim_directory(settings.state_dir, stop)
    wait_for_driver(settings, stop)
    return None if stop.is_set() else NodePlugin(settings, stop=stop)


def _metrics(settings: NodeSettings) -> Metrics | None:
    if settings.metrics_address is None:
        return None
    from kubelet_plugin.metrics.metrics import Metrics  # the Prometheus library needs a megabyte

    return Metrics()


def _discover(scanner: Scanner, records: Iterable[ClaimRecord], settings: NodeSettings) -> Inventory:
    """The node's GPUs; held devices keep the names by which they were allocated. Raises HardwareError, UsageError."""
    gpus, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    products = ", ".join(sorted({gpu.product_name for gpu in gpus}))
    log.info("discovered GPUs", extra={"count": len(gpus), "products": products})
    check_layouts(settings.layout, settings.shares, gpus)
    warnings = [*mig_warnings(settings.mig_gpus, gpus), *share_warnings(settings.shares, settings.shares_only, gpus)]
    for warning in (*warnings, *layout_warnings(settings.layout, gpus, names_of(gpus))):
        log.warning(warning)
    sharing = GpuSharing(settings.shares.of, settings.shares_only)
    return Inventory(gpus, number_gpus(gpus, kept), sharing, held_shares(records))


def _needs_reset(gpu: Gpu) -> str:
    return (
        f"GPU {gpu.index} ({gpu.uuid}) changes its MIG mode with the next reset, and offers until then what it did "
        f"before. With nothing running on it: nvidia-smi --gpu-reset -i {gpu.index}"
    )
