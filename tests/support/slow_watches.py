"""Between a client and the API server: answers come at once, but what its watches tell comes late."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

CHUNK = 65536


class SlowWatches:
    """Plain HTTP at ``url``, for one that has a token; watches of ``resources`` are late by ``delay_s`` once it is set.

    What comes meanwhile comes with it, so nothing is later than twice that.
    """

    def __init__(self, server: str, authority: Path, resources: tuple[str, ...]) -> None:
        parts = urlsplit(server)
        self._target = (parts.hostname or "", parts.port or 443)
        self._tls = ssl.create_default_context(cafile=str(authority))
        self._resources = resources
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.delay_s = 0.0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> SlowWatches:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        self._listener.close()

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), self._connected() as far:
            self._forward(near, far)

    def _connected(self) -> ssl.SSLSocket:
        plain = socket.create_connection(self._target)
        return self._tls.wrap_socket(plain, server_hostname=self._target[0])

    def _forward(self, near: socket.socket, far: ssl.SSLSocket) -> None:
        """One thread for both ways: a TLS socket is not to be read and written at once."""
        late = False
        while not self._stop.is_set():
            ready = [far] if far.pending() else select.select([near, far], [], [], 0.2)[0]
            if near in ready:
                if not (data := near.recv(CHUNK)):
                    return
                late = self._is_watch(data)
                far.sendall(data)
            if far in ready:
                if not (data := far.recv(CHUNK)):
                    return
                if late:
                    self._stop.wait(self.delay_s)
                    while far.pending() or select.select([far], [], [], 0)[0]:
                        if not (more := far.recv(CHUNK)):  # a record of TLS at a time
                            break
                        data += more
                near.sendall(data)

    def _is_watch(self, request: bytes) -> bool:
        line = request.split(b"\r\n", 1)[0].decode(errors="replace")
        return "watch=true" in line and any(f"/{resource}?" in line for resource in self._resources)
