"""A small real HTTP server in the place of the API server: any objects, with list and watch.

It speaks the wire protocol (pages, chunked watch events, bookmarks, Status objects, merge patches, dry runs,
409 for a stale version), and can be told to misbehave: see ``ObjectApi.once``, ``admit`` and ``cut_off``.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from driver.http_client import Connections
from driver.kube.client import KubeClient, RequestObserver
from driver.kube.credentials import Access

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
Object = dict[str, Any]
Answer = Callable[["Exchange"], None]
"""What to answer one request with."""


class Exchange(BaseHTTPRequestHandler):
    """One request, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a client waits 40 ms for each body
    server: HttpServer
    ended = 0
    """How often all watches had been ended when this one began."""

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        self.route = parts.path
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.server.answer(self)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request  # noqa: N815 - http.server's names

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

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((time.time() if timestamp is None else timestamp) + self.server.ahead_seconds)

    def log_message(self, *_: object) -> None:
        pass


class HttpServer(ThreadingHTTPServer):
    """Answers every request with ``answer`` until closed; one thread a connection."""

    daemon_threads = True
    request_queue_size = 128  # of the usual 5 a crowd of clients has some that try again a second later

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.answer = answer
        self.ahead_seconds = 0.0
        """How much its clock is ahead of that of the test."""
        self.open: set[Any] = set()
        super().__init__(("127.0.0.1", port), Exchange)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)  # not by its own thread, which may begin late: whoever closes all must know of it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def client(self, token: str = "", agent: str = "test", observe: RequestObserver | None = None) -> KubeClient:
        access = Access(self.url, Connections(self.url), lambda: f"Bearer {token}" if token else None)
        return KubeClient(access, agent, observe)


ROUTE = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>[^/]+))?"
)


@dataclass(frozen=True)
class Route:
    """What a path names: a resource, perhaps one namespace, one object, one subresource of it."""

    resource: str
    namespace: str
    name: str
    part: str

    @classmethod
    def of(cls, path: str) -> Route:
        found = ROUTE.fullmatch(path)
        assert found, path
        each = {key: value or "" for key, value in found.groupdict().items()}
        return cls(f"{each['group']}/{each['kind']}", each["namespace"], each["name"], each["part"])

    def covers(self, resource: str, namespace: str) -> bool:
        return self.resource == resource and self.namespace in ("", namespace)


@dataclass(frozen=True)
class Happened:
    """One line for the watches of one resource; of all resources where that is empty."""

    version: int
    resource: str
    namespace: str
    name: str
    spec: Mapping[str, Any]
    line: bytes


Admit = Callable[[Route, Object, Object], str | None]
"""Admission: why an update (old, new) is refused, or None."""


class ObjectApi:
    """Objects of any resource behind an HttpServer. Thread-safe."""

    def __init__(self, page: int = 500) -> None:
        self.requests: list[tuple[float, str, str]] = []
        self.writes: list[str] = []
        self.stored_as: Callable[[Object], Object] = lambda item: item
        self.admit: Admit = lambda route, old, new: None
        self.cut_off: set[str] = set()
        """User agents that get no answer: their requests hang until they are taken out."""
        self._folders: dict[tuple[str, str], dict[str, Object]] = defaultdict(dict)
        self._page = page
        self._faults: dict[str, deque[Answer]] = defaultdict(deque)
        self._events: list[Happened] = []
        self._version, self._oldest = 100, 0
        self._ends: list[int] = []  # how many events there were each time that all watches were ended
        self._hang_up, self._closed = False, False
        self._changed = threading.Condition()
        self.server = HttpServer(self._answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
        self.end_watches()
        self.server.__exit__()

    def folder(self, path: str) -> dict[str, Object]:
        """The objects of one resource, in one namespace where it has them, by name."""
        route = Route.of(path)
        return self._folders[route.resource, route.namespace]

    def once(self, kind: str, *answers: Answer) -> None:
        """Answer the next requests of ``kind`` (list, watch, get, POST, PUT, PATCH, DELETE) with these instead."""
        self._faults[kind].extend(answers)

    def as_usual(self) -> None:
        """Forget the answers that ``once`` was given and that no request has had."""
        self._faults.clear()

    def count(self, kind: str, part: str = "") -> int:
        """How many requests of ``kind`` there were whose path has ``part`` in it."""
        return sum(1 for path in self.queries(kind) if part in path)

    def times(self, kind: str) -> list[float]:
        return [when for when, found, _ in self.requests if found == kind]

    def queries(self, kind: str) -> list[str]:
        return [path for _, found, path in self.requests if found == kind]

    def repeated_lists(self) -> list[str]:
        """The lists that were read more than once: path and selectors, without looks whether a resource is served."""
        lists = Counter(
            parts.path + "?" + "&".join(sorted(part for part in parts.query.split("&") if "Selector" in part))
            for parts in map(urlsplit, self.queries("list"))
            if "limit=1" not in parts.query.split("&") and "continue" not in parts.query
        )
        return [path for path, count in lists.items() if count > 1]

    def store(self, path: str, **fields: Any) -> Object:
        """Somebody else creates or changes the object at ``path``."""
        route = Route.of(path)
        with self._changed:
            return self._store(route, {"metadata": {"name": route.name}, **fields})

    def drop(self, path: str) -> None:
        """Somebody else deletes the object at ``path``."""
        with self._changed:
            self._drop(Route.of(path))

    def bookmark(self) -> int:
        """The version that a bookmark now tells every watch."""
        with self._changed:
            self._version += 1
            event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}}
            self._tell_line(Route("", "", "", ""), {}, json.dumps(event).encode())
            return self._version

    def send_raw(self, line: bytes) -> None:
        """Every watch gets this line, once."""
        with self._changed:
            self._version += 1
            self._tell_line(Route("", "", "", ""), {}, line)

    def forget_history(self) -> None:
        """Watches from before now get 410 Gone, as after etcd's compaction."""
        with self._changed:
            self._oldest = self._version + 1
            self._version += 1

    def end_watches(self, *, hang_up: bool = False) -> None:
        """End every watch here and now: what happens after this reaches none of them, however late they wake."""
        with self._changed:
            self._ends.append(len(self._events))
            self._hang_up = hang_up
            self._changed.notify_all()

    def reconnect(self, *agents: str) -> None:
        """End the partition of these clients; what they asked meanwhile is answered with a hang-up."""
        with self._changed:
            self.cut_off -= set(agents)
            self._changed.notify_all()

    def _answer(self, exchange: Exchange) -> None:
        if exchange.route == "/version":
            return exchange.send_json({"major": "1", "minor": "37", "gitVersion": "v1.37.1"})
        kind = self._kind(exchange)
        if self._is_cut_off(exchange):
            return exchange.cut()
        with self._changed:
            self.requests.append((time.monotonic(), kind, exchange.path))
            exchange.ended = len(self._ends)
            fault = self._faults[kind].popleft() if self._faults[kind] else None
        if fault is not None:
            return fault(exchange)
        return {"watch": self._watch, "list": self._list, "get": self._get}.get(kind, self._write)(exchange)

    def _is_cut_off(self, exchange: Exchange) -> bool:
        """Whether it was; then this returns when the client is connected again."""
        agent = exchange.headers["User-Agent"]
        with self._changed:
            if agent not in self.cut_off:
                return False
            self._changed.wait_for(lambda: agent not in self.cut_off or self._closed)
            return True

    def _kind(self, exchange: Exchange) -> str:
        if exchange.command != "GET":
            return exchange.command
        if Route.of(exchange.route).name:
            return "get"
        return "watch" if "watch" in exchange.query else "list"

    def _get(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        with self._changed:
            found = self._folders[route.resource, route.namespace].get(route.name)
        if found is None:
            return exchange.refuse(404, f"{route.name} not found")
        return exchange.send_json(found)

    def _list(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        with self._changed:
            everything = [
                folder[name]
                for (resource, namespace), folder in sorted(self._folders.items())
                if route.covers(resource, namespace)
                for name in sorted(folder)
                if selected(exchange, name, folder[name].get("spec") or {})
            ]
            start = int(exchange.query.get("continue", 0))
            end = start + min(self._page, int(exchange.query["limit"]))
            metadata = {"resourceVersion": str(self._version)}
            if end < len(everything):
                metadata["continue"] = str(end)
            body = {"metadata": metadata, "items": everything[start:end]}
        exchange.send_json(body)

    def _watch(self, exchange: Exchange) -> None:
        route, seen, ended = Route.of(exchange.route), int(exchange.query["resourceVersion"]), exchange.ended
        exchange.begin_stream()
        if seen < self._oldest:
            gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            exchange.send_line(json.dumps(gone).encode())
            return exchange.end_stream()
        sent = 0
        while True:
            with self._changed:
                while len(self._events) == sent and len(self._ends) == ended and not self._closed:
                    self._changed.wait()
                until = [*self._ends, len(self._events)][ended]
                fresh = [event for event in self._events[sent:until] if event.version > seen]
                sent = until
                over = len(self._ends) > ended or self._closed
            for event in fresh:
                mine = route.covers(event.resource, event.namespace) and selected(exchange, event.name, event.spec)
                if mine or not event.resource:
                    exchange.send_line(event.line)
            if over:
                return exchange.cut() if self._hang_up else exchange.end_stream()

    def _write(self, exchange: Exchange) -> None:
        route = Route.of(exchange.route)
        body = json.loads(exchange.body) if exchange.body not in (b"", b"null") else {}
        route = Route(route.resource, route.namespace, route.name or body["metadata"]["name"], route.part)
        with self._changed:
            known = self._folders[route.resource, route.namespace].get(route.name)
            problem = self._problem(exchange.command, known, body)
            wanted = wanted_object(exchange.command, route, known, body)
            refused = self.admit(route, known, wanted) if not problem and known and exchange.command != "DELETE" else ""
            if not problem and not refused:
                stored = self._written(exchange, route, known, wanted)
        if problem:
            return exchange.refuse(problem, f"{route.name}: {problem}")
        if refused:
            return exchange.refuse(422, refused)
        return exchange.send_json(stored, 201 if exchange.command == "POST" else 200)

    def _written(self, exchange: Exchange, route: Route, known: Object | None, wanted: Object) -> Object:
        if "dryRun" in exchange.query:
            return self.stored_as(wanted)
        self.writes.append(f"{exchange.command} {route.name}")
        if exchange.command == "DELETE":
            return self._drop(route)
        if exchange.command == "PATCH" and known == wanted:
            return wanted  # a patch that changes nothing makes no new version
        return self._store(route, self.stored_as(wanted))

    def _problem(self, command: str, known: Object | None, body: Object) -> int | None:
        if command == "POST":
            return None if known is None else 409
        if known is None:
            return 404
        if command == "DELETE":
            uid = body.get("preconditions", {}).get("uid")
            return None if uid in (None, known["metadata"]["uid"]) else 409
        version = body.get("metadata", {}).get("resourceVersion")
        return None if version in (None, known["metadata"]["resourceVersion"]) else 409

    def _store(self, route: Route, body: Object) -> Object:
        folder = self._folders[route.resource, route.namespace]
        known = folder.get(route.name)
        self._version += 1
        own = {"uid": known["metadata"]["uid"] if known else f"uid-{self._version}"}
        if route.namespace:
            own["namespace"] = route.namespace
        item = {**body, "metadata": {**body["metadata"], **own, "resourceVersion": str(self._version)}}
        folder[route.name] = item
        self._tell(route, "MODIFIED" if known else "ADDED", item)
        return item

    def _drop(self, route: Route) -> Object:
        self._version += 1
        item = self._folders[route.resource, route.namespace].pop(route.name)
        gone = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        self._tell(route, "DELETED", gone)
        return gone

    def _tell(self, route: Route, kind: str, item: Object) -> None:
        line = json.dumps({"type": kind, "object": item}).encode()
        self._tell_line(route, item.get("spec") or {}, line)

    def _tell_line(self, route: Route, spec: Mapping[str, Any], line: bytes) -> None:
        self._events.append(Happened(self._version, route.resource, route.namespace, route.name, spec, line))
        self._changed.notify_all()


class SliceApi(ObjectApi):
    """The slices of one node, and its Node object (requests of kind "node")."""

    def __init__(self, page: int = 500) -> None:
        self.node: Object | None = {"metadata": {"name": "node-a", "uid": "node-uid-1"}}
        super().__init__(page)
        self.objects = self.folder(SLICES)

    def put(self, name: str, **fields: Any) -> Object:
        """Somebody else creates or changes a slice."""
        return self.store(f"{SLICES}/{name}", **fields)

    def remove(self, name: str) -> None:
        self.drop(f"{SLICES}/{name}")

    def _kind(self, exchange: Exchange) -> str:
        return "node" if exchange.route.startswith("/api/v1/nodes/") else super()._kind(exchange)

    def _answer(self, exchange: Exchange) -> None:
        if self._kind(exchange) == "node" and not self._faults["node"]:
            return exchange.refuse(404, "nodes not found") if self.node is None else exchange.send_json(self.node)
        return super()._answer(exchange)

    def _problem(self, command: str, known: Object | None, body: Object) -> int | None:
        if command == "PUT" and known and body["spec"]["pool"]["name"] != known["spec"]["pool"]["name"]:
            return 422
        return super()._problem(command, known, body)


def selected(exchange: Exchange, name: str, spec: Mapping[str, Any]) -> bool:
    """Whether the request's field selector means this object, by its name or, of a slice, by its driver and node."""
    fields = {"metadata.name": name}
    if "driver" in spec:
        fields |= {"spec.driver": spec["driver"], "spec.nodeName": spec.get("nodeName", "")}
    for term in exchange.query.get("fieldSelector", "").split(","):
        field, _, value = term.partition("=")
        if field in fields and fields[field] != value:
            return False
        if field.endswith("!") and fields.get(field[:-1]) == value:
            return False
    return True


def wanted_object(command: str, route: Route, known: Object | None, body: Object) -> Object:
    """What a write would make of the object: status and the rest are written apart."""
    if command == "PATCH":
        return merged(known or {}, body)
    if command != "PUT" or known is None:
        return body
    if route.part == "status":
        return {**known, "status": body.get("status", {})}
    return body if "status" not in known else {**body, "status": known["status"]}


def merged(target: Object, patch: Object) -> Object:
    """RFC 7396."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = value
    return result
