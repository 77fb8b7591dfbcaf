"""A kubelet by script that knows several plugins of one driver, and calls whom the real one would.

The real one (1.37, pkg/kubelet/cm/dra/plugin): whoever registered last, of those that it is connected to; when a
registration socket goes, it hangs up on that plugin, whatever it still has to answer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kubelet_plugin.dra.call_proxy import connect
from kubelet_plugin.dra.protocol.generated import dra_v1_pb2, registration_v1_pb2
from kubelet_plugin.upgrade.instance_lock import is_listening
from tests.support.kubelet import CUT, DEADLINE_S, PLUGIN, REGISTRATION, KnownClaim

SCAN_S = 0.05
REGISTER_S = 20.0


@dataclass
class Known:
    """A plugin that has registered."""

    socket: Path
    inode: int
    endpoint: Path
    channel: grpc.Channel = field(repr=False)


class RollingKubelet:
    """Looks after ``registry`` from ``start`` to ``close``. Thread-safe."""

    def __init__(self, registry: Path) -> None:
        self._registry = registry
        self._known: list[Known] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rolling-kubelet")
        self.calls = 0

    def start(self) -> None:
        self._registry.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for each in self._known:
            each.channel.close()

    def knows(self, endpoint: Path) -> bool:
        with self._lock:
            return any(each.endpoint == endpoint for each in self._known)

    def ask(self, method: str, claim: KnownClaim) -> Any:
        """The answer for one claim; None where the call was cut off. Raises RpcError."""
        with self._lock:
            channel = next((k.channel for k in reversed(self._known) if is_listening(k.endpoint)), None)
        if channel is None:
            return None
        request = getattr(dra_v1_pb2, f"{method}Request")(claims=[claim.message])
        try:
            answer = _call(channel, PLUGIN, method, dra_v1_pb2, f"{method}Response")(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            if error.code() not in CUT:
                raise
            return None
        except ValueError:  # hung up between the choice and the call
            return None
        self.calls += 1
        return answer.claims[claim.uid]

    def _run(self) -> None:
        while not self._stop.wait(SCAN_S):
            found = self._sockets()
            for known in [k for k in self._known if found.get(k.socket) != k.inode]:
                self._forget(known)
            for path in found.keys() - {known.socket for known in self._known}:
                with suppress(grpc.RpcError, FileNotFoundError):
                    self._register(path, found[path])

    def _sockets(self) -> dict[Path, int]:
        """Those that are there, and their inodes; any may go while they are looked at."""
        found: dict[Path, int] = {}
        for path in self._registry.glob("*.sock"):
            with suppress(FileNotFoundError):
                found[path] = path.stat().st_ino
        return found

    def _forget(self, known: Known) -> None:
        with self._lock:
            self._known.remove(known)
        known.channel.close()

    def _register(self, path: Path, inode: int) -> None:
        with connect(path) as channel:
            info = _call(channel, REGISTRATION, "GetInfo", registration_v1_pb2, "PluginInfo")
            endpoint = Path(info(registration_v1_pb2.InfoRequest(), timeout=REGISTER_S).endpoint)
            with self._lock:
                self._known.append(Known(path, inode, endpoint, connect(endpoint)))
            notify = _call(channel, REGISTRATION, "NotifyRegistrationStatus", registration_v1_pb2, STATUS_RESPONSE)
            notify(registration_v1_pb2.RegistrationStatus(plugin_registered=True), timeout=REGISTER_S)


STATUS_RESPONSE = "RegistrationStatusResponse"


class Cycle:
    """One claim, prepared and unprepared again and again. ``wrong``: answers that no kubelet should get; ``cut``: how
    many calls had to be made again."""

    def __init__(self, kubelet: RollingKubelet, claim: KnownClaim) -> None:
        self._kubelet, self._claim = kubelet, claim
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=claim.name)
        self.rounds = self.cut = 0
        self.wrong: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """After the round that it is in: the claim is unprepared then."""
        self._stop.set()
        self._thread.join(DEADLINE_S * 2)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            prepared = self._until_answered("NodePrepareResources")
            names = {device.device_name for device in prepared.devices}
            if names != self._claim.devices:
                self.wrong.append(f"{self._claim.name}: prepared {names}: {prepared.error}")
            unprepared = self._until_answered("NodeUnprepareResources")
            if unprepared.error:
                self.wrong.append(f"{self._claim.name}: {unprepared.error}")
            self.rounds += 1

    def _until_answered(self, method: str) -> Any:
        while True:
            try:
                answer = self._kubelet.ask(method, self._claim)
            except grpc.RpcError as error:
                self.wrong.append(f"{self._claim.name}: {method}: {error.code()}: {error.details()}")
                answer = None
            if answer is not None:
                return answer
            self.cut += 1
            self._stop.wait(SCAN_S)


def rounds(cycles: Sequence[Cycle]) -> int:
    """Of the claim that has been prepared least often."""
    return min(cycle.rounds for cycle in cycles)


def _call(channel: grpc.Channel, service: str, method: str, messages: Any, answered: str) -> Any:
    return channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(messages, answered).FromString,
    )
