"""The HTTP server of the web page, in a thread with an event loop of its own (GET and HEAD only)."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from email.utils import format_datetime
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from controller.report.map_model import Value
from controller.settings import ControllerSettings
from controller.web.access import AccessRefusal, TokenAccess, bearer_token, check_local, is_loopback
from controller.web.feed import Feed, Leader, cluster_views
from controller.web.page_json import unpacked
from driver.config.flag_values import ListenAddress
from driver.errors import ApiError, EnvironmentFault, TesseraError
from driver.kube.client import KubeClient
from driver.kube.get_and_list import RESOURCE_GROUP, read_all
from driver.kube.slice_types import ResourceSlice, newest_generation

log = logging.getLogger(__name__)

MAX_CONNECTIONS, MAX_VIEWERS = 128, 50

MAX_HEAD_BYTES = 16 * 1024
"""Size of a request's head that has not arrived at once; a token takes 1 to 2 KiB."""

REQUEST_TIMEOUT_SECONDS = 10.0
"""Time for a complete request: otherwise clients that send slowly, or nothing, could take all connections."""

MAX_DEVICES = 512
"""Devices of other drivers that are shown of a node."""

REVIEWS_AT_ONCE = 4

TLS_CHECK_INTERVAL_SECONDS = 60
"""Time after which a renewed certificate is in use."""

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    ("Content-Security-Policy", CONTENT_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]

FILES = {"/": "index.html", "/page.js": "page.js", "/drawing.js": "drawing.js", "/style.css": "style.css"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

Handler = Callable[[Request], Awaitable[Response]]


class PcieDevice(Value, frozen=True):
    """A device of another driver with the PCIe root by which claims can join it with a GPU, such as a NIC."""

    driver: str
    device: str
    pcie_root: str
    pci_bus_id: str | None


def serve_page(
    stack: ExitStack, address: ListenAddress, settings: ControllerSettings, client: KubeClient, leader: Leader
) -> None:
    """Serve the page until ``stack`` is unwound. Raises EnvironmentFault if the address or the files can't be used.

    ``leader`` returns the work of this process while it leads: the page then needs no caches of its own.
    """
    listening = stack.enter_context(_listen(address))
    tokens = TokenAccess(client) if not is_loopback(address) else None
    page = WebPage(client, settings, leader, tokens)
    renewal = _TlsFiles(settings.web_tls_cert, settings.web_tls_key)
    config = uvicorn.Config(
        page.application(),
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what clients do wrong is no news
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        headers=HEADERS,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=1,
        callback_notify=renewal.renew,
        timeout_notify=TLS_CHECK_INTERVAL_SECONDS,
        ssl_certfile=settings.web_tls_cert,
        ssl_keyfile=settings.web_tls_key,
    )
    try:
        config.load()
    except OSError as error:  # also ssl.SSLError
        raise EnvironmentFault(f"--web-tls-cert, --web-tls-key: these files can't be used: {error}") from error
    renewal.context = config.ssl
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True, name="web-page")
    thread.start()

    def close() -> None:
        server.should_exit = True
        thread.join()

    stack.callback(close)
    actual = str(ListenAddress(address.host, listening.getsockname()[1]))
    log.info("serving the web page", extra={"address": actual, "paths": ",".join(FILES)})
    if page.tokens is not None and config.ssl is None:
        log.warning("the web page is served without TLS: tokens are sent in the clear unless TLS ends in front of it")


def _listen(address: ListenAddress) -> socket.socket:
    try:
        if not address.host and socket.has_dualstack_ipv6():
            return socket.create_server(("", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except (OSError, UnicodeError) as error:
        raise EnvironmentFault(
            f"--web-address {address}: can't listen there: {error}; "
            "name an address of this machine and a port that nobody uses"
        ) from error


class WebPage:
    """The page and its data. ``tokens`` checks who may see it; None: whoever reaches the loopback address may."""

    def __init__(
        self, client: KubeClient, settings: ControllerSettings, leader: Leader, tokens: TokenAccess | None
    ) -> None:
        self.tokens = tokens
        self.feed = Feed(partial(cluster_views, client, settings, leader))
        self._client, self._driver = client, settings.driver_name
        self._threads = ThreadPoolExecutor(REVIEWS_AT_ONCE, thread_name_prefix="web-request")

    def application(self) -> Starlette:
        data = {"/api/state": self._state, "/api/changes": self._changes, "/api/nodes/{name}/devices": self._devices}
        return Starlette(
            routes=[
                *(Route(path, self._file(name)) for path, name in FILES.items()),
                *(Route(path, self._guarded(handler)) for path, handler in data.items()),
            ]
        )

    def _file(self, name: str) -> Handler:
        """A static file, which shows nothing of the cluster: it needs no token."""
        source = files("controller.web") / "static" / name
        body, kind = source.read_bytes(), TYPES[Path(name).suffix]

        async def answer(request: Request) -> Response:
            refused = check_local(request.headers) if self.tokens is None else None
            return _refused(refused) if refused is not None else Response(body, media_type=kind)

        return answer

    def _guarded(self, handler: Handler) -> Handler:
        """``handler`` for those who may see the page."""

        async def answer(request: Request) -> Response:
            refused = await self._refusal(request)
            if refused is not None:
                return _refused(refused)
            try:
                return await handler(request)
            except TesseraError as error:
                return _refused(AccessRefusal(HTTPStatus.SERVICE_UNAVAILABLE, f"the cluster can't be read: {error}"))

        return answer

    async def _refusal(self, request: Request) -> AccessRefusal | None:
        if self.tokens is None:
            return check_local(request.headers)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokens.check, bearer_token(request.headers))

    async def _state(self, request: Request) -> Response:
        """Everything, and the version after which ``_changes`` continues."""
        published = await self.feed.current()
        now = format_datetime(self._client.clock.now(), usegmt=True)
        headers = {"Vary": "Accept-Encoding", "Date": now}  # the page computes ages with the API server's clock
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._threads, lambda: published.packed)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return StreamingResponse(unpacked(body), headers=headers, media_type="application/json")
        return Response(body, headers={**headers, "Content-Encoding": "gzip"}, media_type="application/json")

    async def _changes(self, request: Request) -> Response:
        """Server-sent events: ``change``, and ``reload`` at the end if the viewer has to begin anew."""
        if self.feed.viewers >= MAX_VIEWERS:
            return _refused(
                AccessRefusal(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_VIEWERS} viewers are connected already")
            )
        await self.feed.current()
        version = request.headers.get("last-event-id", "")
        return _Stream(self._events(request, version), self.feed)

    async def _events(self, request: Request, version: str) -> AsyncIterator[bytes]:
        async for change in self.feed.changes(version):
            if await self._refusal(request) is not None:
                return  # the token has expired, or its account has lost a right
            if change is None:
                yield b": heartbeat\n\n"
            else:
                yield b"event: change\nid: %b\ndata: " % change.version.encode()
                for piece in unpacked(change.packed):
                    yield piece
                yield b"\n\n"
        yield b"event: reload\ndata:\n\n"

    async def _devices(self, request: Request) -> Response:
        """The devices of other drivers on a node, by its PCIe roots."""
        name = request.path_params["name"]
        published = await self.feed.current()
        if name not in published.content.nodes:
            return _refused(AccessRefusal(HTTPStatus.NOT_FOUND, "there is no such node"))
        loop = asyncio.get_running_loop()
        devices = await loop.run_in_executor(self._threads, _pcie_devices, self._client, self._driver, name)
        return Response(msgspec.json.encode(devices), media_type="application/json")


class _Stream(StreamingResponse):
    """A stream of events, whose reader counts as a viewer until the connection ends."""

    def __init__(self, events: AsyncIterator[bytes], feed: Feed) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewer():
            await super().__call__(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that is closed if a request has not arrived completely within ``REQUEST_TIMEOUT_SECONDS``."""

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._timeout = self.loop.call_later(REQUEST_TIMEOUT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_incomplete = self.conn.their_state in {h11.IDLE, h11.SEND_BODY}
        if is_incomplete and self._timeout is None:
            self._timeout = self.loop.call_later(REQUEST_TIMEOUT_SECONDS, self.transport.abort)
        elif not is_incomplete:
            self._cancel_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timeout()
        super().connection_lost(exc)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None


def _refused(refusal: AccessRefusal) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == HTTPStatus.UNAUTHORIZED else None
    body = msgspec.json.encode({"message": refusal.message})
    return Response(body, refusal.status, headers, media_type="application/json")


def _pcie_devices(client: KubeClient, driver: str, node: str) -> list[PcieDevice]:
    """Read the slices of a node. Raises ApiError."""
    path, of_node = f"{RESOURCE_GROUP}/resourceslices", {"fieldSelector": f"spec.nodeName={node}"}
    try:
        slices = list(read_all(client, path, ResourceSlice, of_node))
    except msgspec.MsgspecError as error:
        raise ApiError(f"the slices of node {node} do not parse: {error}") from error
    others = (item.spec for item in slices if item.spec.driver != driver)
    newest = newest_generation(others, lambda spec: ((spec.driver, spec.pool.name), spec.pool.generation))
    devices = []
    for spec in (spec for of_pool in newest.values() for spec in of_pool):
        for device in spec.devices:
            root, bus = device.attributes.pcie_root, device.attributes.pci_bus_id
            if root is not None and root.string:
                devices.append(PcieDevice(spec.driver, device.name, root.string, bus.string if bus else None))
    devices.sort(key=lambda device: (device.driver, device.device))
    return devices[:MAX_DEVICES]


class _TlsFiles:
    """Loads the certificate again when its file has changed: it is renewed every few weeks."""

    def __init__(self, cert: Path | None, key: Path | None) -> None:
        self._cert, self._key = cert, key
        self._loaded = _content(cert)
        self.context: ssl.SSLContext | None = None

    async def renew(self) -> None:
        content = _content(self._cert)
        if self.context is None or self._cert is None or content in {self._loaded, b""}:
            return
        try:
            self.context.load_cert_chain(self._cert, self._key)
        except OSError as error:
            log.warning("a renewed certificate of the web page can't be used", extra={"error": str(error)})
        self._loaded = content


def _content(file: Path | None) -> bytes:
    try:
        return b"" if file is None else file.read_bytes()
    except OSError:
        return b""
