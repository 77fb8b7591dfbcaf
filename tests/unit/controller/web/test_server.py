"""The server of the page over real HTTP: its headers, limits, stream, certificates, and what it refuses."""

from __future__ import annotations

import gzip
import json
import queue
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPMessage, HTTPResponse, HTTPSConnection
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from controller.report.cluster_view import ClusterView
from controller.settings import ControllerSettings, controller_settings
from controller.web import feed, server
from controller.web.server import CONTENT_POLICY, serve_page
from driver.errors import EnvironmentFault, FatalError, RecoverableError, UsageError
from driver.kube.client import KubeClient
from tests.harness.certs import Authority
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, ObjectApi
from tests.support.map_cluster import MapCluster, example
from tests.support.nic_driver import NIC_DRIVER
from tests.support.ports import kept_port

SOON_S = 10.0


@dataclass
class Cluster:
    """Views that a test puts into it, in the place of watches."""

    views: queue.Queue[ClusterView | Exception] = field(default_factory=queue.Queue)
    watches: int = 0

    def put(self, cluster: MapCluster) -> None:
        self.views.put(cluster.view())

    def watch(self, *_: object, **__: object) -> Generator[ClusterView]:
        self.watches += 1
        while True:
            found = self.views.get()
            if isinstance(found, Exception):
                raise found
            yield found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(feed, "watch_cluster", found.watch)
    return found


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    with ObjectApi() as found:
        yield found


@contextmanager
def serving(client: KubeClient, host: str = "127.0.0.1", **flags: Any) -> Iterator[int]:
    """The page at a port of this machine."""
    with kept_port() as port, ExitStack() as stack:
        settings = controller_settings(web_address=f"{host}:{port}", **flags)
        assert settings.web_address is not None
        serve_page(stack, settings.web_address, settings, client, lambda: None)
        yield port


@pytest.fixture
def port(api: ObjectApi, cluster: Cluster) -> Iterator[int]:
    """Of a page for local users that shows the example of docs/map.md."""
    cluster.put(example())
    with serving(api.server.client()) as found:
        yield found


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    headers: HTTPMessage
    body: bytes


@contextmanager
def opened(port: int, path: str, method: str = "GET", **headers: str) -> Iterator[HTTPResponse]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=SOON_S)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        with connection.getresponse() as answer:
            yield answer


def get(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    with opened(port, path, method, **headers) as answer:
        return Answer(answer.status, answer.headers, answer.read())


@contextmanager
def viewing(port: int, version: str) -> Iterator[HTTPResponse]:
    """The stream of changes since ``version``."""
    with opened(port, "/api/changes", Last_Event_ID=version) as answer:
        yield answer


def state(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(port, "/api/state").body)
    return found


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/", "GET", 200),
        ("/page.js", "GET", 200),
        ("/style.css", "HEAD", 200),
        ("/api/state", "GET", 200),
        ("/api/state", "POST", 405),
        ("/api/state", "DELETE", 405),
        ("/", "PUT", 405),
        ("/../settings.py", "GET", 404),
        ("/static/index.html", "GET", 404),
        ("/api/nodes/nobody/devices", "GET", 404),
    ],
)
def test_every_answer_has_the_security_headers_and_none_says_what_serves_it(
    port: int, path: str, method: str, status: int
) -> None:
    answer = get(port, path, method)
    assert answer.status == status
    assert answer.headers["Content-Security-Policy"] == CONTENT_POLICY
    assert "unsafe" not in CONTENT_POLICY
    assert "default-src 'none'" in CONTENT_POLICY
    assert (answer.headers["X-Content-Type-Options"], answer.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert (answer.headers["Referrer-Policy"], answer.headers["Server"]) == ("no-referrer", None)
    assert answer.headers["Access-Control-Allow-Origin"] is None


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_from_texts() -> None:
    for name in ("index.html", "style.css", "page.js", "drawing.js"):
        text = (files("controller.web") / "static" / name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|['\"]//|@import|url\(|<(style|script)>|\son\w+=|\sstyle=", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|DOMParser", text)


def test_the_state_has_the_time_of_the_api_server(api: ObjectApi, cluster: Cluster) -> None:
    api.server.ahead_seconds = 3600
    client = api.server.client()
    client.get(SLICES, {"limit": "1"})
    cluster.put(example())
    with serving(client) as port:
        now = parsedate_to_datetime(get(port, "/api/state").headers["Date"])
    assert abs((now - datetime.now(UTC)).total_seconds() - 3600) < SOON_S


def test_a_browser_gets_the_state_compressed(port: int) -> None:
    answer = get(port, "/api/state", Accept_Encoding="gzip, br")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.body)) == state(port)


@pytest.mark.parametrize(
    ("headers", "status"), [({"Host": "evil.example"}, 421), ({"Sec_Fetch_Site": "cross-site"}, 403)]
)
@pytest.mark.parametrize("path", ["/", "/api/state"])
def test_foreign_pages_are_refused(port: int, path: str, headers: dict[str, str], status: int) -> None:
    assert get(port, path, **headers).status == status


def test_an_endless_request_is_cut_off(port: int) -> None:
    try:
        status = get(port, "/api/state", Authorization="x" * 10_000_000).status
    except ConnectionError:  # it hung up while the client was still sending
        status = 400
    assert status == 400


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /api/state HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n",
    ],
)
def test_a_request_that_arrives_slowly_is_cut_off(port: int, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as connection:
        connection.sendall(start)

        def is_cut_off() -> bool:
            try:
                connection.sendall(b"x" if start else b"")
                return connection.recv(1 << 16) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_for(is_cut_off, 60, "the server hangs up")


def test_a_stream_outlives_the_time_for_a_request(port: int, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.05)
    with viewing(port, state(port)["version"]) as viewer:
        assert [viewer.readline() for _ in range(12)] == [b": heartbeat\n", b"\n"] * 6
        cluster.put(example().node("node-3"))
        assert next_event(viewer)[0] == "change"


def next_event(answer: HTTPResponse) -> tuple[str, dict[str, Any]]:
    """The next event, comments left out."""
    name = ""
    while raw := answer.readline():
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data:"):
            return name, json.loads(line.removeprefix("data:") or "{}")
    raise EOFError("the stream has ended")


def test_all_viewers_hear_of_a_change_and_one_that_was_away_catches_up(port: int, cluster: Cluster) -> None:
    version = state(port)["version"]
    with ExitStack() as stack:
        viewers = [stack.enter_context(viewing(port, version)) for _ in range(3)]
        cluster.put(example().node("node-3"))
        heard = [next_event(viewer) for viewer in viewers]
        late = stack.enter_context(viewing(port, version))
        assert next_event(late) == heard[0]
    changes = [(name, [node["name"] for node in change["nodes"]]) for name, change in heard]
    assert changes == [("change", ["node-3"])] * 3
    assert state(port)["version"] == heard[0][1]["version"]
    assert cluster.watches == 1


def test_one_that_was_away_for_too_long_loads_everything_again(port: int) -> None:
    state(port)
    with viewing(port, "of another controller") as viewer:
        assert next_event(viewer)[0] == "reload"


def test_a_silent_stream_shows_that_it_lives(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.05)
    with viewing(port, state(port)["version"]) as viewer:
        assert viewer.readline() == b": heartbeat\n"


def test_too_many_viewers_are_refused_until_one_has_gone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_VIEWERS", 1)
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.05)
    version = state(port)["version"]

    def status() -> int:
        with viewing(port, version) as another:
            return another.status

    with viewing(port, version) as viewer:
        assert viewer.status == 200
        assert status() == 503
    wait_for(lambda: status() == 200, SOON_S, "a place is free again")


def test_the_cluster_is_watched_only_while_somebody_looks(
    port: int, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.watches == 0
    with viewing(port, state(port)["version"]) as viewer:
        monkeypatch.setattr(feed, "IDLE_SECONDS", 0.0)
        cluster.put(MapCluster().gpu("n", 0))
        assert next_event(viewer)[0] == "change"

    def has_ended() -> bool:
        """The watch ends with its next view."""
        cluster.put(MapCluster().gpu("n", 0))
        return cluster.views.qsize() > 3

    wait_for(has_ended, SOON_S, "nobody takes views any more")
    monkeypatch.setattr(feed, "IDLE_SECONDS", SOON_S)
    state(port)
    assert cluster.watches == 2


def test_why_the_cluster_can_not_be_read_is_said_and_it_is_tried_again(api: ObjectApi, cluster: Cluster) -> None:
    cluster.views.put(FatalError("this account may not read what is needed"))
    with serving(api.server.client()) as port:
        answer = get(port, "/api/state")
        assert (answer.status, "may not read what is needed" in answer.body.decode()) == (503, True)
        cluster.put(example())
        assert len(state(port)["nodes"]) == 2


def test_the_devices_of_other_drivers_are_the_newest_ones_with_a_pcie_root(port: int, api: ObjectApi) -> None:
    def publish(name: str, driver: str, generation: int, node: str, **devices: dict[str, Any]) -> None:
        pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
        listed = [{"name": each, "attributes": attributes} for each, attributes in devices.items()]
        spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": listed}
        api.store(f"{SLICES}/{name}", spec=spec)

    hostile = "<script>"
    root, bus = "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/pciBusID"
    publish("old", NIC_DRIVER, 1, "node-1", gone={root: {"string": "pci0000:00"}})
    publish("new", NIC_DRIVER, 2, "node-1", nic={root: {"string": hostile}, bus: {"string": "0000:01:00.0"}}, other={})
    publish("ours", "gpu.tessera.dev", 1, "node-1", gpu={root: {"string": "pci0000:00"}})
    found = json.loads(get(port, "/api/nodes/node-1/devices").body)
    assert found == [{"driver": NIC_DRIVER, "device": "nic", "pcieRoot": hostile, "pciBusId": "0000:01:00.0"}]


def test_without_a_token_the_page_of_every_address_shows_nothing_of_the_cluster(
    api: ObjectApi, cluster: Cluster
) -> None:
    with serving(api.server.client(), "0.0.0.0") as port:
        assert get(port, "/").status == 200
        for path in ("/api/state", "/api/changes", "/api/nodes/node-1/devices"):
            answer = get(port, path)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert cluster.watches == 0


def is_trusted(authority: Authority, port: int) -> bool:
    """Whether a client that trusts only ``authority`` gets the page."""
    context = ssl.create_default_context(cafile=str(authority.pair.certificate))
    connection = HTTPSConnection("127.0.0.1", port, timeout=SOON_S, context=context)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except ssl.SSLCertVerificationError:
        return False
    finally:
        connection.close()


def test_a_certificate_is_used_and_its_renewal_too(
    api: ObjectApi, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TLS_CHECK_INTERVAL_SECONDS", 0)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")

    def use(authority: Authority) -> None:
        pair = authority.issue("web", "web", addresses=["127.0.0.1"])
        key.write_bytes(pair.key.read_bytes())
        cert.write_bytes(pair.certificate.read_bytes())

    use(old)
    with serving(api.server.client(), web_tls_cert=cert, web_tls_key=key) as port:
        assert is_trusted(old, port)
        assert not is_trusted(new, port)
        use(new)
        wait_for(lambda: is_trusted(new, port), SOON_S, "the new certificate is in use")


def test_what_can_not_be_listened_on_or_read_ends_the_start(api: ObjectApi, tmp_path: Path) -> None:
    with serving(api.server.client()) as port, ExitStack() as stack:
        settings = controller_settings(web_address=f"127.0.0.1:{port}")
        assert settings.web_address is not None
        with pytest.raises(EnvironmentFault, match=r"--web-address 127\.0\.0\.1:.*: can't listen there"):
            serve_page(stack, settings.web_address, settings, api.server.client(), lambda: None)
    missing: dict[str, Any] = {"web_tls_cert": tmp_path / "no.crt", "web_tls_key": tmp_path / "no.key"}
    with (
        pytest.raises(EnvironmentFault, match="--web-tls-cert, --web-tls-key"),
        serving(api.server.client(), **missing),
    ):
        pytest.fail("it is served without a certificate")
    with pytest.raises(UsageError, match="give both or none"):
        controller_settings(web_address=":1", web_tls_cert=tmp_path / "no.crt")


@dataclass
class Leader:
    """Stands for the leader's work."""

    last_decision: ClusterView | None = None

    def failure(self) -> str | None:
        return None if self.last_decision else "the API server does not answer"

    def decide(self, cluster: MapCluster) -> None:
        self.last_decision = cluster.view()


def test_the_leader_shows_what_it_decided_from_and_watches_only_when_it_leads_no_more(
    api: ObjectApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "LEADER_INTERVAL_SECONDS", 0.01)
    leaders = [Leader()]
    leaders[0].decide(MapCluster().gpu("decided", 0))
    client = api.server.client()
    views = feed.cluster_views(client, ControllerSettings(), lambda: next(iter(leaders), None))  # type: ignore[arg-type,return-value]
    with closing(views):
        assert [view.name for view in next(views).snapshot.views] == ["decided"]
        leaders[0].decide(MapCluster().gpu("decided-again", 0))
        assert [view.name for view in next(views).snapshot.views] == ["decided-again"]
        assert cluster.watches == 0
        leaders.clear()
        cluster.put(MapCluster().gpu("watched", 0))
        assert [view.name for view in next(views).snapshot.views] == ["watched"]


def test_a_leader_that_can_not_decide_says_why(api: ObjectApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LEADER_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(feed, "REPEAT_SECONDS", 0.0)
    leader = Leader()
    with pytest.raises(RecoverableError, match="the API server does not answer"):
        next(feed.cluster_views(api.server.client(), ControllerSettings(), lambda: leader))  # type: ignore[arg-type,return-value]


def test_a_controller_without_the_page_loads_none_of_its_libraries() -> None:
    code = "import controller.app, controller.controller, sys; print({'uvicorn', 'starlette'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
