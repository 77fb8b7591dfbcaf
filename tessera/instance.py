"""One of the plugins of a node that is updated without a gap: it takes the node over from the one before it.

At most one is at work: the owner of the state directory. The others stand by: what the kubelet asks of them they pass
on to it, and the first to find the directory free is the next. So whoever dies, and wherever, the node is served. A
plugin that starts beside another first makes sure that it could do the work, then asks that one to hand over. See
docs/upgrade.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from driver.checks import Check
from driver.config.settings import NodeSettings
from driver.config.sockets import plugin_socket
from driver.errors import EnvironmentFault, RecoverableError
from driver.steps import StepObserver, observed, unobserved
from kubelet_plugin.front import Front
from kubelet_plugin.handover import Answer, HandOver, Request, Said, ask, handler
from kubelet_plugin.ownership import Ownership, is_listening, others
from tessera import preflight
from tessera.endpoints import health_pages, serve
from tessera.node import NodePlugin
from tessera.waiting import within

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""Between two looks whether the node is free: calls of the kubelet wait."""

FINISH_S, RELEASE_S = 15.0, 20.0
"""How long a plugin that is asked to hand over waits for claims in work, and for what writes."""

UNDISTURBED_S = 30.0
"""How long a plugin that waited for claims in vain goes on before it tries again: no call comes through meanwhile."""

TAKEN_S = 5.0
"""How long a plugin that has handed over leaves the node to whom it did."""

ASK_AGAIN_S = 1.0
"""Each time the newcomer looks at its Node and all GPUs before, and the plugin at work keeps claims waiting."""

SUCCESSOR_S = 5.0
"""How long a plugin that ends waits until the kubelet knows the one that stays."""

QUIET_S = 1.0
"""The kubelet has chosen whom to call some time before the call is here, and lets go of who withdrew once a second."""

BUSY = "claims are still being worked on"
UNINSTALLING = "Tessera is being uninstalled"


class Instance:
    """``run`` returns after ``stop`` was set. Needs ``settings.pod_uid``, which names its sockets."""

    def __init__(
        self, settings: NodeSettings, stop: threading.Event, observer: StepObserver[HandOver] = unobserved
    ) -> None:
        """Takes nothing from anybody. Raises EnvironmentFault where the state directory can't be used."""
        self._settings = settings
        self._stop = stop
        self._observer = observer
        own = settings.plugin_socket
        self._ownership = Ownership(settings.state_dir, own, plugin_socket(own.parent, ""))
        self._asked = threading.Lock()
        self._ended, self._released = threading.Event(), threading.Event()
        self._plugin: NodePlugin | None = None
        self._successor: Path | None = None
        self._undisturbed_until = 0.0
        self._waiting_for = "starting"

    def run(self) -> None:
        """Be the node's plugin, or stand by. Raises FatalError; then whoever else is there takes over."""
        threading.Thread(target=self._heed_stop, daemon=True, name="stop").start()
        with ExitStack() as stack:
            self._front = Front(self._settings, self._ownership, handler(self._hand_over))
            stack.callback(self._front.close)
            self._take_over(stack)
            while not self._stop.is_set():
                self._work()
                if not self._stop.is_set():
                    self._stand_by()
            self._leave()

    def not_ready(self) -> str | None:
        """Why the node can't be left to this process, while another is at work; None where it can."""
        if self._waiting_for:
            return self._waiting_for
        return None if self._front.registered else "the kubelet has not taken the registration yet"

    # Becoming the owner

    @contextmanager
    def _told_of(self) -> Iterator[None]:
        """Answer, inside the block, who asks whether this process lives and is ready; a plugin at work does so itself.

        Where the address is taken, by the other plugin on the host's network, nobody is answered.
        """
        with ExitStack() as stack:
            try:
                ready = [Check("takes over", self.not_ready)]
                serve(stack, [("--health-address", self._settings.health_address, lambda: health_pages([], ready))])
            except EnvironmentFault as error:
                log.warning("tells nobody whether it is ready", extra={"why": str(error)})
            yield

    def _take_over(self, lasting: ExitStack) -> None:
        """Become the owner, however long that takes; returns without when ``stop`` is set."""
        if not self._take():
            with self._told_of():
                self._wait_for_node(lasting)
        self._waiting_for = ""
        self._remove_dead_sockets()

    def _wait_for_node(self, lasting: ExitStack) -> None:
        awake = lasting.enter_context(ExitStack())
        again, warned = 0.0, ""
        while not self._stop.is_set() and not self._take():
            owner = self._ownership.owner()
            if owner is not None and time.monotonic() >= again:
                answer = self._ask(owner, awake)
                again = time.monotonic() + ASK_AGAIN_S
                if answer.said is Said.UNABLE:
                    again = math.inf
                    self._relay(answer.why)
                elif answer.said is not Said.HANDED_OVER and answer.why not in ("", warned):
                    warned = self._waiting_for = answer.why
                    log.warning(
                        "waits for the plugin at work to hand over", extra={"atWork": str(owner), "why": warned}
                    )
            self._stop.wait(LOOK_S)

    def _ask(self, owner: Path, awake: ExitStack) -> Answer:
        try:
            preflight.check(self._settings, awake)
        except RecoverableError as error:
            return Answer(Said.NOT_YET, f"could not do the work itself: {error}")
        with observed(self._observer, HandOver.ASK):
            return ask(owner, self._settings.plugin_socket, version("tessera-dra"))

    def _relay(self, why: str) -> None:
        """Stand between the kubelet and a plugin that keeps the node until it ends.

        That one ends only once this one is ready, where a DaemonSet replaces it; and it is: the node is served.
        """
        log.warning("stands by until the plugin at work ends: it can't hand over", extra={"why": why})
        self._front.offer()
        self._waiting_for = ""

    def _take(self) -> bool:
        with observed(self._observer, HandOver.TAKE):
            return self._ownership.take()

    def _remove_dead_sockets(self) -> None:
        """What plugins left that were killed; the kubelet would try to reach them at each of its starts."""
        settings = self._settings
        found = others(settings.plugin_socket, "dra*.sock")
        found += others(settings.registration_socket, f"{settings.driver_name}*-reg.sock")
        silent = [path for path in found if not is_listening(path)]
        if silent and not self._stop.wait(QUIET_S / 4):  # one that is just being made is there by then
            for path in silent:
                if not is_listening(path):
                    with suppress(OSError):
                        path.unlink()

    # Being the owner

    def _work(self) -> None:
        """Be the plugin at work until it is to end, or another asked for the node."""
        self._ended.clear()
        self._released.clear()
        if self._stop.is_set():
            return
        with observed(self._observer, HandOver.RECOVER):
            plugin = NodePlugin(self._settings, stop=self._ended, front=self._front)
        log.info("at work on this node", extra={"podUID": self._settings.pod_uid})
        self._plugin = plugin
        try:
            plugin.run()
        finally:
            self._plugin = None
        with observed(self._observer, HandOver.RELEASE):
            self._ownership.release()
        self._released.set()

    def _hand_over(self, request: Request) -> Answer:
        """Another plugin asks for the node; answered when it is free."""
        plugin = self._plugin
        if plugin is None or not self._asked.acquire(blocking=False):
            return Answer(Said.NOT_YET, "it is not at work yet, or is handing over already")
        try:
            if plugin.retiring:
                return Answer(Said.NOT_YET, UNINSTALLING)
            if time.monotonic() < self._undisturbed_until:
                return Answer(Said.NOT_YET, BUSY)
            log.info("hands over", extra={"to": request.socket, "version": request.version})
            with observed(self._observer, HandOver.FINISH_CLAIMS):
                finished = self._front.emptied(FINISH_S) and within(FINISH_S, lambda: not plugin.working, LOOK_S)
            if not finished:
                self._front.reopen()
                self._undisturbed_until = time.monotonic() + UNDISTURBED_S
                return Answer(Said.NOT_YET, BUSY)
            self._successor = Path(request.socket)
            with observed(self._observer, HandOver.STOP_WRITING):
                self._ended.set()
                released = self._released.wait(RELEASE_S)
            return Answer(Said.HANDED_OVER) if released else Answer(Said.NOT_YET, "its writers do not end")
        finally:
            self._asked.release()

    # Standing by

    def _stand_by(self) -> None:
        """Leave the node to whom it was handed over, and take it back where that one is gone."""
        within(TAKEN_S, lambda: self._stop.is_set() or self._succeeded(), LOOK_S)
        log.info("stands by", extra={"atWork": str(self._ownership.owner())})
        with self._told_of():
            while not self._stop.wait(LOOK_S):
                if self._take():
                    log.warning("takes the node back: the plugin that it was handed over to is gone")
                    return

    def _succeeded(self) -> bool:
        """Whether the newcomer is the owner, or is gone."""
        successor = self._successor
        return self._ownership.owner() is not None or successor is None or not is_listening(successor)

    def _leave(self) -> None:
        """End without a gap where another plugin is there: once the kubelet knows it, and calls this one no more."""
        with observed(self._observer, HandOver.LEAVE):
            if not any(is_listening(path) for path in others(self._settings.plugin_socket, "dra*.sock")):
                return
            within(SUCCESSOR_S, self._ownership.known_to_kubelet, LOOK_S)
            within(SUCCESSOR_S, lambda: self._front.quiet_s() >= QUIET_S, LOOK_S)
            self._front.withdraw()
            time.sleep(QUIET_S)
            within(SUCCESSOR_S, lambda: self._front.quiet_s() >= QUIET_S, LOOK_S)

    def _heed_stop(self) -> None:
        self._stop.wait()
        self._ended.set()
