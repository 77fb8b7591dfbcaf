"""A small real HTTP server in the place of the API server: ResourceSlices with list and watch, and Nodes.

It speaks the wire protocol (pages, chunked watch events, bookmarks, Status objects, 409 for a stale version),
and can be told to misbehave once: see ``SliceApi.once``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes.client.configuration import Configuration

from driver.kube.transport import KubeClient

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
Object = dict[str, Any]
Answer = Callable[["Exchange"], None]
"""What to answer one request with."""


class Exchange(BaseHTTPRequestHandler):
    """One request, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        self.route = parts.path
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.server.answer(self)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815 - http.server's names

    def send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, body: object, status: int = 200) -> None:
        self.send(status, json.dumps(body).encode())

    def refuse(self, status: int, message: str) -> None:
        self.send_json({"kind": "Status", "status": "Failure", "message": message, "code": status}, status)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_line(self, line: bytes) -> None:
        data = line + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Hang up in the middle of things."""
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class HttpServer(ThreadingHTTPServer):
    """Answers every request with ``answer`` until closed; one thread a connection."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.open: set[Any] = set()
        super().__init__(("127.0.0.1", 0), Exchange)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def client(self, token: str = "") -> KubeClient:
        configuration = Configuration(host=self.url)
        configuration.retries = 0
        if token:
            configuration.api_key["BearerToken"] = f"Bearer {token}"
        return KubeClient(configuration, "test")


class SliceApi:
    """ResourceSlices and one Node behind an HttpServer. Thread-safe."""

    def __init__(self, page: int = 500) -> None:
        self.objects: dict[str, Object] = {}
        self.node: Object | None = {"metadata": {"name": "node-a", "uid": "node-uid-1"}}
        self.requests: list[tuple[float, str, str]] = []
        self.writes: list[str] = []
        self.stored_as: Callable[[Object], Object] = lambda item: item
        self._page = page
        self._faults: dict[str, deque[Answer]] = defaultdict(deque)
        self._events: list[tuple[int, bytes]] = []
        self._version, self._oldest = 100, 0
        self._ended, self._hang_up, self._closed = 0, False, False
        self._changed = threading.Condition()
        self.server = HttpServer(self._answer)

    def __enter__(self) -> SliceApi:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
        self.end_watches()
        self.server.__exit__()

    def once(self, kind: str, *answers: Answer) -> None:
        """Answer the next requests of ``kind`` (list, watch, node, POST, PUT, DELETE) with these instead."""
        self._faults[kind].extend(answers)

    def count(self, kind: str) -> int:
        return sum(1 for _, found, _ in self.requests if found == kind)

    def times(self, kind: str) -> list[float]:
        return [when for when, found, _ in self.requests if found == kind]

    def queries(self, kind: str) -> list[str]:
        return [path for _, found, path in self.requests if found == kind]

    def put(self, name: str, **fields: Any) -> Object:
        """Somebody else creates or changes an object."""
        with self._changed:
            return self._store({"metadata": {"name": name}, **fields})

    def remove(self, name: str) -> None:
        with self._changed:
            self._remove(name)

    def bookmark(self) -> int:
        """The version that a bookmark now tells every watch."""
        with self._changed:
            self._version += 1
            event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}}
            self._tell(json.dumps(event).encode())
            return self._version

    def send_raw(self, line: bytes) -> None:
        """Every watch gets this line, once."""
        with self._changed:
            self._version += 1
            self._tell(line)

    def forget_history(self) -> None:
        """Watches from before now get 410 Gone, as after etcd's compaction."""
        with self._changed:
            self._oldest = self._version + 1
            self._version += 1

    def end_watches(self, *, hang_up: bool = False) -> None:
        with self._changed:
            self._ended += 1
            self._hang_up = hang_up
            self._changed.notify_all()

    def _answer(self, exchange: Exchange) -> None:
        kind = self._kind(exchange)
        with self._changed:
            self.requests.append((time.monotonic(), kind, exchange.path))
            fault = self._faults[kind].popleft() if self._faults[kind] else None
        if fault is not None:
            fault(exchange)
        elif kind == "watch":
            self._watch(exchange)
        elif kind == "list":
            self._list(exchange)
        elif kind == "node":
            exchange.refuse(404, "nodes not found") if self.node is None else exchange.send_json(self.node)
        else:
            self._write(exchange)

    def _kind(self, exchange: Exchange) -> str:
        if exchange.route.startswith("/api/v1/nodes/"):
            return "node"
        if exchange.command != "GET":
            return exchange.command
        return "watch" if "watch" in exchange.query else "list"

    def _list(self, exchange: Exchange) -> None:
        with self._changed:
            names, start = sorted(self.objects), int(exchange.query.get("continue", 0))
            end = start + min(self._page, int(exchange.query["limit"]))
            metadata = {"resourceVersion": str(self._version)}
            if end < len(names):
                metadata["continue"] = str(end)
            body = {"metadata": metadata, "items": [self.objects[name] for name in names[start:end]]}
        exchange.send_json(body)

    def _watch(self, exchange: Exchange) -> None:
        seen, ended = int(exchange.query["resourceVersion"]), self._ended
        exchange.begin_stream()
        if seen < self._oldest:
            gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            exchange.send_line(json.dumps(gone).encode())
            return exchange.end_stream()
        sent = 0
        while True:
            with self._changed:
                while len(self._events) == sent and self._ended == ended and not self._closed:
                    self._changed.wait()
                fresh = [line for version, line in self._events[sent:] if version > seen]
                sent = len(self._events)
                over = self._ended > ended or self._closed
            for line in fresh:
                exchange.send_line(line)
            if over:
                return exchange.cut() if self._hang_up else exchange.end_stream()

    def _write(self, exchange: Exchange) -> None:
        name = exchange.route.removeprefix(SLICES).lstrip("/")
        body = json.loads(exchange.body) if exchange.body not in (b"", b"null") else {}
        name = name or body["metadata"]["name"]
        with self._changed:
            known = self.objects.get(name)
            problem = self._problem(exchange.command, known, body)
            if problem is None:
                self.writes.append(f"{exchange.command} {name}")
                stored = self._remove(name) if exchange.command == "DELETE" else self._store(self.stored_as(body))
        if problem is not None:
            return exchange.refuse(problem, f"{name}: {problem}")
        return exchange.send_json(stored, 201 if exchange.command == "POST" else 200)

    def _problem(self, command: str, known: Object | None, body: Object) -> int | None:
        if command == "POST":
            return None if known is None else 409
        if known is None:
            return 404
        if command == "PUT":
            if body["spec"]["pool"]["name"] != known["spec"]["pool"]["name"]:
                return 422
            return None if body["metadata"]["resourceVersion"] == known["metadata"]["resourceVersion"] else 409
        uid = body.get("preconditions", {}).get("uid")
        return None if uid in (None, known["metadata"]["uid"]) else 409

    def _store(self, body: Object) -> Object:
        name = body["metadata"]["name"]
        known = self.objects.get(name)
        self._version += 1
        uid = known["metadata"]["uid"] if known else f"uid-{self._version}"
        item = {**body, "metadata": {**body["metadata"], "uid": uid, "resourceVersion": str(self._version)}}
        self.objects[name] = item
        self._tell(json.dumps({"type": "MODIFIED" if known else "ADDED", "object": item}).encode())
        return item

    def _remove(self, name: str) -> Object:
        self._version += 1
        item = self.objects.pop(name)
        gone = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        self._tell(json.dumps({"type": "DELETED", "object": gone}).encode())
        return gone

    def _tell(self, line: bytes) -> None:
        self._events.append((self._version, line))
        self._changed.notify_all()
