"""One of several plugin instances on a node: a rolling update without a gap.

At most one instance is active: the owner of the state directory. The others stand by and forward calls of the kubelet
to it; the first that finds the directory free becomes active. So the node is served whichever instance dies. A new
instance first checks that it could do the work and then asks the active one, over its socket, to hand over the node.
Only root can open the socket. A plugin whose version lacks the RPC keeps the node until it ends. See docs/upgrade.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import grpc
import msgspec

from driver.clock import wait_until
from driver.errors import DriverMissing, EnvironmentFault, RecoverableError, StateError
from driver.http import Check, health_pages, serve
from driver.kube.client import KubeClient, load_configuration
from driver.kube.get_and_list import owner_reference
from driver.step_observer import StepObserver, observed, unobserved
from kubelet_plugin.api_writers import NODE_USER_AGENT
from kubelet_plugin.app import NodePlugin, discovered_plugin
from kubelet_plugin.checkpoint.records import decode_record
from kubelet_plugin.dra.call_proxy import connect
from kubelet_plugin.dra.kubelet_sockets import PluginSockets
from kubelet_plugin.inventory.open_hardware import open_host, require_driver_files
from kubelet_plugin.settings import NodeSettings, plugin_socket
from kubelet_plugin.upgrade.instance_lock import InstanceLock, is_listening, sibling_sockets

log = logging.getLogger(__name__)

HAND_OVER_SERVICE, HAND_OVER_METHOD = "tessera.node.HandOver", "Ask"

HAND_OVER_TIMEOUT_SECONDS = 40.0
"""Covers the end of the claims in progress and then of the writers."""

HAND_OVER_POLL_INTERVAL_SECONDS = 0.02
"""Short, because calls of the kubelet wait during a hand-over."""

CLAIMS_TIMEOUT_SECONDS, RELEASE_TIMEOUT_SECONDS = 15.0, 20.0
"""How long the active instance waits for claims in progress, and for its writers, before it hands over."""

BUSY_RETRY_SECONDS = 30.0
"""How long the active instance serves again after a failed hand-over, during which it accepted no calls."""

SUCCESSOR_START_TIMEOUT_SECONDS = 5.0
"""How long an instance that has handed over leaves the node to its successor."""

ASK_INTERVAL_SECONDS = 1.0
"""Before each request the new instance reads its Node and all GPUs, and the active one keeps claims waiting."""

SUCCESSOR_TIMEOUT_SECONDS = 5.0
"""How long an instance that ends waits until the kubelet knows its successor."""

WITHDRAWN_QUIET_SECONDS = 1.0
"""The kubelet may still call a withdrawn instance: it drops withdrawn sockets once a second."""

BUSY = "claims are still in progress"
UNINSTALLING = "Tessera is being uninstalled"


class HandOver(StrEnum):
    """The steps of a hand-over in order: those of the new plugin and, in between, those of the active one."""

    ASK = "ask"
    FINISH_CLAIMS = "finish-claims"
    STOP_WRITING = "stop-writing"
    RELEASE = "release"
    TAKE = "take"
    RECOVER = "recover"
    LEAVE = "leave"


class HandOverResult(StrEnum):
    """``HANDED_OVER``: the node is free. ``NOT_YET``: ask again. ``UNABLE``: only once the active plugin ends.

    ``SILENT``: no answer.
    """

    HANDED_OVER = "handed-over"
    NOT_YET = "not-yet"
    UNABLE = "unable"
    SILENT = "silent"


class HandOverRequest(msgspec.Struct, frozen=True):
    """Socket and version of the new plugin. Unknown fields of other versions are ignored."""

    socket: str
    version: str = ""


class HandOverAnswer(msgspec.Struct, frozen=True):
    """``why`` is a reason for people."""

    result: HandOverResult = msgspec.field(name="said")
    why: str = ""


HAND_OVER_REQUEST, HAND_OVER_ANSWER = msgspec.json.Decoder(HandOverRequest), msgspec.json.Decoder(HandOverAnswer)


def handler(hand_over: Callable[[HandOverRequest], HandOverAnswer]) -> grpc.GenericRpcHandler:
    """The server side of ``ask``."""

    def answer(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return msgspec.json.encode(hand_over(HAND_OVER_REQUEST.decode(request)))

    return grpc.method_handlers_generic_handler(
        HAND_OVER_SERVICE, {HAND_OVER_METHOD: grpc.unary_unary_rpc_method_handler(answer)}
    )


def ask(owner: Path, own: Path, version: str) -> HandOverAnswer:
    """Ask the plugin at the socket ``owner`` to hand over to the plugin at the socket ``own``."""
    try:
        with connect(owner) as channel:
            request = msgspec.json.encode(HandOverRequest(str(own), version))
            return HAND_OVER_ANSWER.decode(
                channel.unary_unary(f"/{HAND_OVER_SERVICE}/{HAND_OVER_METHOD}")(
                    request, timeout=HAND_OVER_TIMEOUT_SECONDS
                )
            )
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return HandOverAnswer(HandOverResult.UNABLE, "its version or its settings do not support it")
        return HandOverAnswer(HandOverResult.SILENT, f"{error.code().name}: {error.details()}")
    except msgspec.MsgspecError as error:
        return HandOverAnswer(HandOverResult.UNABLE, f"this version can't read its answer: {error}")


class RollingInstance:
    """``run`` returns after ``stop`` was set. Needs ``settings.pod_uid``, which names its sockets."""

    def __init__(
        self, settings: NodeSettings, stop: threading.Event, observer: StepObserver[HandOver] = unobserved
    ) -> None:
        """Takes no lock yet. Raises EnvironmentFault if the state directory can't be used."""
        self._settings, self._stop, self._observer = settings, stop, observer
        socket = settings.plugin_socket
        self._lock = InstanceLock(settings.state_dir, socket, plugin_socket(socket.parent, ""))
        self._asked = threading.Lock()
        self._ended, self._released = threading.Event(), threading.Event()
        self._plugin: NodePlugin | None = None
        self._successor: Path | None = None
        self._busy_until = 0.0
        self._waiting_for = "starting"

    def run(self) -> None:
        """Be the active instance, or stand by. Raises FatalError; another instance then takes over."""
        threading.Thread(target=self._wait_for_stop, daemon=True, name="stop").start()
        with ExitStack() as stack:
            self._sockets = PluginSockets(self._settings, self._lock, handler(self._hand_over))
            stack.callback(self._sockets.close)
            if not self._take():
                with self._standby_probes():
                    self._wait_for_node(stack)
            self._waiting_for = ""
            self._remove_dead_sockets()
            while not self._stop.is_set():
                self._work()
                if not self._stop.is_set():
                    self._stand_by()
            self._leave()

    def not_ready(self) -> str | None:
        """Why this instance can't serve the node while another one is active, or None."""
        if self._waiting_for:
            return self._waiting_for
        return None if self._sockets.registered else "the kubelet has not taken the registration yet"

    # Becoming the owner

    @contextmanager
    def _standby_probes(self) -> Iterator[None]:
        """Serve the health probes inside the block; an active instance serves them itself.

        If the address is in use, by the other instance on the host network, no probes are served.
        """
        with ExitStack() as stack:
            try:
                ready = [Check("takes over", self.not_ready)]
                serve(stack, [("--health-address", self._settings.health_address, lambda: health_pages([], ready))])
            except EnvironmentFault as error:
                log.warning("can't serve health probes", extra={"why": str(error)})
            yield

    def _wait_for_node(self, lasting: ExitStack) -> None:
        awake = lasting.enter_context(ExitStack())
        again, warned = 0.0, ""
        while not self._stop.is_set() and not self._take():
            owner = self._lock.owner()
            if owner is not None and time.monotonic() >= again:
                answer = self._ask(owner, awake)
                again = time.monotonic() + ASK_INTERVAL_SECONDS
                if answer.result is HandOverResult.UNABLE:
                    again = math.inf
                    self._relay(answer.why)
                elif answer.result is not HandOverResult.HANDED_OVER and answer.why not in ("", warned):
                    warned = self._waiting_for = answer.why
                    log.warning(
                        "waiting for the active plugin to hand over", extra={"atWork": str(owner), "why": warned}
                    )
            self._stop.wait(HAND_OVER_POLL_INTERVAL_SECONDS)

    def _ask(self, owner: Path, awake: ExitStack) -> HandOverAnswer:
        try:
            preflight(self._settings, awake)
        except (RecoverableError, DriverMissing) as error:
            return HandOverAnswer(HandOverResult.NOT_YET, f"the new plugin could not serve the node: {error}")
        with observed(self._observer, HandOver.ASK):
            return ask(owner, self._settings.plugin_socket, version("tessera-dra"))

    def _relay(self, why: str) -> None:
        """Forward calls to an active plugin that keeps the node until it ends.

        A DaemonSet ends that plugin only once this one is ready, so it is ready: the node is served.
        """
        log.warning("standing by until the active plugin ends: it can't hand over", extra={"why": why})
        self._sockets.offer()
        self._waiting_for = ""

    def _take(self) -> bool:
        with observed(self._observer, HandOver.TAKE):
            return self._lock.take()

    def _remove_dead_sockets(self) -> None:
        """Remove sockets of killed plugins; the kubelet would try to connect to them at each of its starts."""
        settings = self._settings
        sockets = sibling_sockets(settings.plugin_socket, "dra*.sock")
        sockets += sibling_sockets(settings.registration_socket, f"{settings.driver_name}*-reg.sock")
        silent = [path for path in sockets if not is_listening(path)]
        # A socket that is being created is served after a moment.
        if silent and not self._stop.wait(WITHDRAWN_QUIET_SECONDS / 4):
            for path in silent:
                if not is_listening(path):
                    with suppress(OSError):
                        path.unlink()

    # Being the owner

    def _work(self) -> None:
        """Run the plugin until it has to end or another instance has asked for the node."""
        self._ended.clear()
        self._released.clear()
        if self._stop.is_set():
            return
        with observed(self._observer, HandOver.RECOVER):
            plugin = discovered_plugin(self._settings, self._ended, sockets=self._sockets)
        if plugin is not None:
            log.info("active on this node", extra={"podUID": self._settings.pod_uid})
            self._plugin = plugin
            try:
                plugin.run()
            finally:
                self._plugin = None
            if plugin.needs_restart:
                self._stop.set()
        with observed(self._observer, HandOver.RELEASE):
            self._lock.release()
        self._released.set()

    def _hand_over(self, request: HandOverRequest) -> HandOverAnswer:
        """Handle the request of another instance; returns when the node is free."""
        plugin = self._plugin
        if plugin is None or not self._asked.acquire(blocking=False):
            return HandOverAnswer(HandOverResult.NOT_YET, "it is not active yet, or is already handing over")
        try:
            if plugin.uninstalling:
                return HandOverAnswer(HandOverResult.NOT_YET, UNINSTALLING)
            if time.monotonic() < self._busy_until:
                return HandOverAnswer(HandOverResult.NOT_YET, BUSY)
            log.info("handing over", extra={"to": request.socket, "version": request.version})
            with observed(self._observer, HandOver.FINISH_CLAIMS):
                finished = self._sockets.drain(CLAIMS_TIMEOUT_SECONDS) and wait_until(
                    CLAIMS_TIMEOUT_SECONDS, lambda: not plugin.working, HAND_OVER_POLL_INTERVAL_SECONDS
                )
            if not finished:
                self._sockets.reopen()
                self._busy_until = time.monotonic() + BUSY_RETRY_SECONDS
                return HandOverAnswer(HandOverResult.NOT_YET, BUSY)
            self._successor = Path(request.socket)
            with observed(self._observer, HandOver.STOP_WRITING):
                self._ended.set()
                released = self._released.wait(RELEASE_TIMEOUT_SECONDS)
            if not released:
                return HandOverAnswer(HandOverResult.NOT_YET, "its writers do not end")
            return HandOverAnswer(HandOverResult.HANDED_OVER)
        finally:
            self._asked.release()

    # Standing by

    def _stand_by(self) -> None:
        """Leave the node to the successor, and take it back if the successor is gone."""

        def succeeded() -> bool:
            """Whether the successor is the owner, or is gone; or this instance is to end."""
            successor, has_owner = self._successor, self._lock.owner() is not None
            return self._stop.is_set() or has_owner or successor is None or not is_listening(successor)

        wait_until(SUCCESSOR_START_TIMEOUT_SECONDS, succeeded, HAND_OVER_POLL_INTERVAL_SECONDS)
        log.info("standing by", extra={"atWork": str(self._lock.owner())})
        with self._standby_probes():
            while not self._stop.wait(HAND_OVER_POLL_INTERVAL_SECONDS):
                if self._take():
                    log.warning("taking the node back: its new plugin is gone")
                    return

    def _leave(self) -> None:
        """If there is another instance, wait until the kubelet knows it and no longer calls this one."""
        with observed(self._observer, HandOver.LEAVE):
            if not any(is_listening(path) for path in sibling_sockets(self._settings.plugin_socket, "dra*.sock")):
                return
            wait_until(SUCCESSOR_TIMEOUT_SECONDS, self._lock.known_to_kubelet, HAND_OVER_POLL_INTERVAL_SECONDS)
            wait_until(SUCCESSOR_TIMEOUT_SECONDS, self._quiet, HAND_OVER_POLL_INTERVAL_SECONDS)
            self._sockets.withdraw()
            time.sleep(WITHDRAWN_QUIET_SECONDS)
            wait_until(SUCCESSOR_TIMEOUT_SECONDS, self._quiet, HAND_OVER_POLL_INTERVAL_SECONDS)

    def _quiet(self) -> bool:
        return self._sockets.quiet_seconds() >= WITHDRAWN_QUIET_SECONDS

    def _wait_for_stop(self) -> None:
        self._stop.wait()
        self._ended.set()


def preflight(settings: NodeSettings, awake: ExitStack) -> None:
    """Check that this process could serve the node, before it asks for the node; only reads.

    Raises RecoverableError and DriverMissing for transient failures, FatalError for permanent ones. The driver's
    library stays open in ``awake`` until the next check: idle GPUs take seconds to initialize.
    """
    check_readable(settings.state_dir)
    access = load_configuration(settings.kubeconfig, in_own_process=True)
    owner_reference(KubeClient(access, NODE_USER_AGENT), settings.node_name)
    require_driver_files(settings)
    with ExitStack() as stack:
        host, _ = stack.enter_context(open_host(settings, lasting=True))
        host.discover()
        awake.close()
        awake.push(stack.pop_all())


def check_readable(state_dir: Path) -> None:
    """Raise StateError for the first record that this version can't read: of another version, or damaged.

    Only reads, while another instance is active.
    """
    try:
        for path in sorted((state_dir / "claims").glob("[!.]*.json")):
            with suppress(FileNotFoundError):  # released meanwhile
                decode_record(path.read_bytes(), path)
    except OSError as error:
        raise StateError(f"can't read the checkpoint in {state_dir}: {error.strerror}") from error
