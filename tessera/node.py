"""The node plugin, put together: the only place that knows every part of it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from driver.config.settings import NodeSettings
from driver.hardware.boot import boot_id
from driver.hardware.host import HostPaths
from driver.hardware.nvml_host import NvmlHost
from driver.kube.claims import Claim, read_claim
from driver.kube.events import Recorder
from driver.kube.transport import KubeClient, load_configuration
from driver.model.gpu import Gpu
from driver.slices.names import Pool
from driver.steps import unobserved
from kubelet_plugin.caretaker import Caretaker
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint
from kubelet_plugin.driver_files import find_driver_files
from kubelet_plugin.front import Front
from kubelet_plugin.health import Health
from kubelet_plugin.health_service import HealthService
from kubelet_plugin.listening import Listener
from kubelet_plugin.lull import Lull, LullWork
from kubelet_plugin.meter import Sources
from kubelet_plugin.node import Node
from kubelet_plugin.orphans import Orphans
from kubelet_plugin.preparation import Preparer
from kubelet_plugin.records import ClaimRecord, slices_of_instance
from kubelet_plugin.recovery import hold_recorded, recover
from kubelet_plugin.registration import Registry, SocketServer
from kubelet_plugin.releasing import Listeners
from kubelet_plugin.scan import Scanner
from kubelet_plugin.service import DraService
from kubelet_plugin.steps import Observer, Step, Steps
from kubelet_plugin.telling import Reason, Teller, ToldWork
from tessera.ending import ended
from tessera.hosts import open_host
from tessera.node_health import NodeHealth
from tessera.node_parts import ApiClaims, choice_of, first_look, meter_of, needs_reset, neighbour_watch
from tessera.node_reports import Means, Reports

log = logging.getLogger(__name__)

USER_AGENT = "tessera-node"

SWITCH_INTERVAL_S = 0.0005
"""How long a busy thread may keep the interpreter from one that has an answer to give; Python's own is 5 ms."""


LOOK_WAITS_S = 2.0
"""How long looks at the hardware give way to claims in work."""


class NodePlugin:
    """One node's plugin process. ``run`` returns after ``stop`` was called from another thread or a signal."""

    def __init__(
        self,
        settings: NodeSettings,
        observer: Observer = unobserved,
        stop: threading.Event | None = None,
        front: Front | None = None,
    ) -> None:
        """Discovers and recovers; touches neither the API server nor the kubelet. Raises FatalError.

        ``settings.state_dir`` has to be this process' own (``claim_directory``). ``front`` has the sockets where they
        outlive the plugin; then nothing of it goes on when ``run`` has returned.
        """
        self._settings = settings
        self._front = front
        self._stop = stop or threading.Event()
        self._meter = meter_of(settings)
        self._step = Steps(self._meter.observer(observer))
        self._soundness = NodeHealth(settings, self._stop)
        observe = self._soundness.reach.observer(self._meter.requests)
        self._client = KubeClient(load_configuration(settings.kubeconfig), USER_AGENT, observe)
        self._recorder = Recorder(self._client, USER_AGENT, settings.node_name)
        self._teller = Teller(self._meter.told(self._recorder.event), settings.node_name)
        self._hardware = ExitStack()
        host, paths = self._hardware.enter_context(open_host(settings, lasting=True))
        checkpoint = Checkpoint(settings.state_dir)
        with self._step(Step.LOAD_CHECKPOINT):
            records = checkpoint.load()
        self._lull = Lull()
        self._neighbours = neighbour_watch(
            settings, self._client, self._told, lambda *told: self._teller.node(told[0], told[1], warning=told[2])
        )
        self._scanner = Scanner(
            host,
            choice_of(settings),
            self._lull.within(LOOK_WAITS_S),
            self._neighbours.hands_off,
            lambda gpu: self._teller.node("GpuNeedsReset", needs_reset(gpu)),
        )
        with self._step(Step.DISCOVER):
            inventory = first_look(self._scanner, records, settings)
        pool = Pool(settings.node_name, settings.driver_name)
        cdi = CdiDirectory(settings.cdi_dir, settings.driver_name)
        files = find_driver_files(paths, settings.driver_root)
        self._node = Node(pool, host, inventory, checkpoint, cdi, files, boot_id(paths))
        self._watch_health(host, paths)
        means = Means(settings, self._client, self._step, self._lull, self._meter, self._soundness)
        self._reports = Reports(means, self._node, self._health, self._neighbours.first)
        self._prepare()
        recover(self._node, self._preparer, records, self._step)
        self._scanner.look_at_partitions(inventory, inventory.gpus)
        self._health.look(inventory.gpus)
        self._soundness.hardware(inventory)
        self._soundness.also("neighbours", self._neighbours.look)
        self._neighbours.serve(inventory, lambda: self._scanner.left_out)
        self._scanner.looked = self._looked

    def _watch_health(self, host: NvmlHost, paths: HostPaths) -> None:
        checkpoint, inventory = self._node.checkpoint, self._node.inventory
        self._health = Health(
            inventory,
            self._settings.state_dir,
            host.recovery_action,
            lambda: boot_id(paths) or None,
            lambda gpu, instance: slices_of_instance(checkpoint.records(), gpu, instance),
            self._health_changed,
            lambda reason, message, warning: self._teller.node(reason, message, warning=warning),
        )
        self._health_service = HealthService(
            self._node.pool.name, lambda: self._reports.devices(), self._health.trouble
        )
        self._listener = Listener(host, self._health.heard, lambda _: self._scanner.look_soon())

    def _prepare(self) -> None:
        """What prepares claims, and looks after them."""
        self._locks = self._meter.locks()
        reports = self._reports
        listeners = Listeners(reports.held, reports.let_go, self._repaired, lambda: self._caretaker.notify())
        self._preparer = Preparer(self._node, self._read_claim, listeners, self._step, self._locks)
        claims = ApiClaims(self._client)
        self._orphans = Orphans(self._node, self._preparer, claims, self._teller, self._meter.orphan)
        self._caretaker = Caretaker(self._node, self._preparer, self._teller, self._health.note, self._orphans.look)
        trouble, by_kind = self._health.trouble, self._health.faults_by_kind
        self._meter.read_from(Sources(self._node, reports.device_names, trouble, by_kind))

    def run(self) -> None:
        """Serve until ``stop``. Sockets are gone when this returns; slices stay, for what runs stays held."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        reports, neighbours = self._reports, self._neighbours
        hearing = (neighbours.cache.run, neighbours.run, *reports.hearing, self._listener.run)
        acting = (*reports.writing, self._recorder.run, self._scan, reports.following, self._caretaker.run)
        with ExitStack() as stack:  # the last to start is the first to stop, also where the next can't start
            self._soundness.serve(stack, self._meter.pages)
            start = self._soundness.watchdog.start
            for target in hearing:
                start(target)
            stack.callback(self._wind_up, [start(target) for target in acting])
            stack.callback(self.stop)
            self._serve(stack)
            self._stop.wait()
            log.info("stopping")

    def _wind_up(self, acting: Sequence[threading.Thread]) -> None:
        """Nothing is written any more where another plugin takes over, or where nothing is to be left."""
        if self._front is not None or self._reports.retirement.due():
            ended(acting)
            self._reports.retirement.finish()

    def _serve(self, stack: ExitStack) -> None:
        settings = self._settings
        work = LullWork(ToldWork(self._preparer, self._teller), self._lull)
        service = DraService(self._meter.work(work), self._locks.waits)
        stack.callback(service.close)
        handlers = [*service.handlers(), *self._health_service.handlers(), self._soundness.handler()]
        if self._front is not None:
            stack.callback(self._health_service.close)
            stack.enter_context(self._front.answering(handlers, self._registered))
            return
        with self._step(Step.LISTEN):
            plugin = SocketServer(settings.plugin_socket, handlers)
        stack.callback(plugin.stop)
        stack.callback(self._health_service.close)
        with self._step(Step.OFFER_REGISTRATION):
            registry = Registry(settings, self._registered)
        stack.callback(registry.stop)
        log.info("serving", extra={"driver": settings.driver_name, "socket": str(settings.plugin_socket)})

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stop.set()
        self._told()
        self._reports.claims_told()
        self._caretaker.notify()
        self._recorder.wake()
        self._neighbours.wake()
        self._scanner.look_soon()

    @property
    def retiring(self) -> bool:
        """Whether the node offers nothing any more, and what it has of Tessera goes when this plugin ends."""
        return self._reports.retirement.due()

    @property
    def working(self) -> bool:
        """Whether a claim is being worked on."""
        return self._lull.broken_now

    def _scan(self, stop: threading.Event) -> None:
        self._scanner.run(self._node.inventory, self._hardware_changed, stop)

    # What happened

    def _looked(self, answering: Sequence[Gpu]) -> None:
        self._health.look(answering)
        self._soundness.looked(answering)

    def _hardware_changed(self) -> None:
        hold_recorded(self._node)
        self._caretaker.notify()
        self._told()
        self._health_service.notify()

    def _health_changed(self) -> None:
        self._told()
        self._reports.claims_told()
        self._health_service.notify()

    def _told(self) -> None:
        self._reports.told()

    def _repaired(self, record: ClaimRecord, made: Sequence[str]) -> None:
        self._teller.claim(record.reference, Reason.REPAIRED, "; ".join(made))

    def _registered(self, accepted: bool, reason: str) -> None:
        self._soundness.kubelet.heard(accepted, reason)
        if accepted:
            # The kubelet has just started, and a kubelet that starts deletes the node's slices.
            self._reports.slices_doubtful()

    def _read_claim(self, namespace: str, name: str) -> Claim:
        claim = read_claim(self._client, namespace, name)
        self._teller.met(claim)
        return claim
