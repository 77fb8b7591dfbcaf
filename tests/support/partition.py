"""A network between a client and the API server that a test can cut or slow: connections stay open and go silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit


class Wire:
    """Forwards TCP connections from ``url`` to ``server``.

    While it is ``cut`` nothing passes either way; while it ``holds`` requests the server's words still pass.
    """

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._target = (parts.hostname or "", parts.port or 443)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._up, self._down = threading.Event(), threading.Event()
        self.mend()
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        self._up.clear()
        self._down.clear()

    def hold(self) -> None:
        self._up.clear()

    def mend(self) -> None:
        self._up.set()
        self._down.set()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.mend()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._start(self._forward, near, far, self._up)
                self._start(self._forward, far, near, self._down)

    def _forward(self, source: socket.socket, sink: socket.socket, passing: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                passing.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
