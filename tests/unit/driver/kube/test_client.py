"""Requests to the API server: every failure is one ApiError that says what was asked, and never shows a token."""

from __future__ import annotations

import copy
import logging
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from driver.errors import ApiError, EnvironmentFault
from driver.http_client import Connections
from driver.kube import client as transport
from driver.kube.client import KubeClient, load_configuration
from driver.kube.credentials import Access
from driver.kube.get_and_list import owner_reference, read_claim
from tests.harness.certs import Authority
from tests.support.api_server import Answer, Exchange, HttpServer

TOKEN = "s3cr3t-t0k3n"
PATH = "/apis/resource.k8s.io/v1/resourceslices"


class Script:
    """A server whose next answer a test sets."""

    def __init__(self) -> None:
        self.answer: Answer = lambda exchange: exchange.send_json({})
        self.seen: list[Exchange] = []
        self.server = HttpServer(self._answer)
        self.client = self.server.client(TOKEN)

    def _answer(self, exchange: Exchange) -> None:
        self.seen.append(copy.copy(exchange))  # one object serves all requests of a connection
        self.answer(exchange)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    with script.server:
        yield script


def test_requests_carry_token_agent_query_and_body(script: Script) -> None:
    script.client.get(PATH, {"fieldSelector": "spec.nodeName=a,spec.driver=b", "limit": "5"})
    script.client.create(PATH, {"metadata": {"name": "x"}})
    listed, created = script.seen
    assert listed.headers["Authorization"] == f"Bearer {TOKEN}"
    assert listed.headers["User-Agent"] == "test"
    assert listed.query == {"fieldSelector": "spec.nodeName=a,spec.driver=b", "limit": "5"}
    assert created.headers["Content-Type"] == "application/json"
    assert created.body == b'{"metadata":{"name":"x"}}'


def test_the_clock_is_that_of_the_api_server(script: Script) -> None:
    script.server.ahead_seconds = 3600
    script.client.get(PATH)
    assert abs((script.client.clock.now() - datetime.now(UTC)).total_seconds() - 3600) < 5


def test_an_apply_names_its_manager_and_takes_over_what_others_manage(script: Script) -> None:
    script.answer = lambda exchange: exchange.send_json({"kind": "ResourceClaim"})
    script.client.apply(f"{PATH}/x/status", {"metadata": {"uid": "u"}}, "gpu.tessera.dev")
    (applied,) = script.seen
    assert (applied.command, applied.route) == ("PATCH", f"{PATH}/x/status")
    assert applied.query == {"fieldManager": "gpu.tessera.dev", "force": "true"}
    assert applied.headers["Content-Type"] == "application/apply-patch+yaml"
    assert applied.body == b'{"metadata":{"uid":"u"}}'


def test_a_watch_that_nobody_reads_is_closed(script: Script) -> None:
    ended = threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.send_response(200)
        exchange.end_headers()
        exchange.wfile.flush()
        while exchange.rfile.read(1):  # until the client closes the connection
            pass
        ended.set()

    script.answer = endless
    with script.client.stream(PATH, {"watch": "true"}, 30):
        assert not ended.is_set()
    assert ended.wait(60)


def test_an_object_that_does_not_exist_is_found_as_none(script: Script) -> None:
    assert script.client.find(f"{PATH}/x") == {}
    script.answer = lambda exchange: exchange.refuse(404, "not found")
    assert script.client.find(f"{PATH}/x") is None
    script.answer = lambda exchange: exchange.refuse(403, "forbidden")
    with pytest.raises(ApiError, match="403: forbidden"):
        script.client.find(f"{PATH}/x")


def test_an_object_that_is_gone_may_be_deleted_again(script: Script) -> None:
    script.answer = lambda exchange: exchange.refuse(404, "not found")
    script.client.delete(f"{PATH}/x", missing_ok=True)
    with pytest.raises(ApiError):
        script.client.delete(f"{PATH}/x")
    script.answer = lambda exchange: exchange.refuse(409, "another uid")
    with pytest.raises(ApiError):
        script.client.delete(f"{PATH}/x", "uid-1", missing_ok=True)


def test_an_object_is_patched_or_else_created(script: Script) -> None:
    script.client.create_or_patch(f"{PATH}/x", {"a": 1}, {"b": 2})
    script.answer = lambda e: e.refuse(404, "not found") if e.command == "PATCH" else e.send_json({"created": True})
    assert script.client.create_or_patch(f"{PATH}/x", {"a": 1}, {"b": 2}) == {"created": True}
    assert [(each.command, each.route, each.body) for each in script.seen] == [
        ("PATCH", f"{PATH}/x", b'{"a":1}'),
        ("PATCH", f"{PATH}/x", b'{"a":1}'),
        ("POST", PATH, b'{"b":2}'),
    ]


def test_only_the_object_with_the_given_uid_is_patched(script: Script) -> None:
    script.answer = lambda exchange: exchange.refuse(409, "another uid")
    assert script.client.patch_existing(f"{PATH}/x", {"metadata": {"uid": "u"}}) is None
    with pytest.raises(ApiError):
        script.client.patch_existing(f"{PATH}/x", {"metadata": {"resourceVersion": "1"}})


def test_a_deletion_can_insist_on_one_object(script: Script) -> None:
    script.client.delete(f"{PATH}/x", "uid-1")
    assert script.seen[0].body == b'{"preconditions":{"uid":"uid-1"}}'


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        pytest.param(lambda e: e.refuse(404, 'slices "x" not found'), 404, '404: slices "x" not found', id="Status"),
        pytest.param(lambda e: e.send(502, b"bad gateway"), 502, "502: bad gateway", id="a proxy's text"),
        pytest.param(lambda e: e.send(503, b""), 503, "503: Service Unavailable", id="no body"),
        pytest.param(lambda e: e.send(500, b"[1]"), 500, "500: [1]", id="JSON that is no Status"),
        pytest.param(lambda e: e.send(500, b"\xff\xfe"), 500, "500: ", id="bytes"),
        pytest.param(lambda e: e.send(500, b"x" * 9999), 500, "500: xxx", id="a very long body"),
        pytest.param(lambda e: e.cut(), None, "no answer from http://127.0.0.1", id="hung up"),
    ],
)
def test_a_refusal_says_what_was_asked_and_what_came_back(
    script: Script, answer: Answer, status: int | None, text: str
) -> None:
    script.answer = answer
    with pytest.raises(ApiError) as refused:
        script.client.replace(f"{PATH}/x", {})
    assert refused.value.status == status
    assert str(refused.value).startswith(f"PUT {PATH}/x: ")
    assert text in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'"text"', b"\xff"])
def test_an_answer_that_is_no_object_is_an_error_of_the_request(script: Script, body: bytes) -> None:
    script.answer = lambda exchange: exchange.send(200, body)
    with pytest.raises(ApiError, match=f"POST {PATH}: the answer is no JSON object"):
        script.client.create(PATH, {})
    with pytest.raises(ApiError, match=r"resourceclaims/c: the API server's answer does not parse"):
        read_claim(script.client, "default", "c")


@pytest.mark.parametrize("body", [b"[]", b'{"kind": "Status"}', b'{"metadata": {"name": "node-a"}}'])
def test_an_answer_that_is_no_node_with_a_uid_gives_no_owner_reference(script: Script, body: bytes) -> None:
    script.answer = lambda exchange: exchange.send(200, body)
    with pytest.raises(ApiError, match="--node-name node-a: "):
        owner_reference(script.client, "node-a")


def test_a_body_that_ends_early_is_an_error(script: Script) -> None:
    def half(exchange: Exchange) -> None:
        exchange.send_response(200)
        exchange.send_header("Content-Length", "100")
        exchange.end_headers()
        exchange.wfile.write(b"{")
        exchange.cut()

    script.answer = half
    with pytest.raises(ApiError, match=f"GET {PATH}: the answer was cut off"):
        script.client.get(PATH)


def test_a_redirect_is_not_followed_with_the_token(script: Script) -> None:
    def elsewhere(exchange: Exchange) -> None:
        exchange.send_response(302)
        exchange.send_header("Location", f"{script.server.url}/elsewhere")
        exchange.send_header("Content-Length", "0")
        exchange.end_headers()

    script.answer = elsewhere
    with pytest.raises(ApiError, match="302"):
        script.client.get(PATH)
    assert len(script.seen) == 1


def test_a_silent_server_is_given_up(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    script.answer = lambda _: (done.wait(10), None)[1]
    monkeypatch.setattr(transport, "REQUEST_TIMEOUT_SECONDS", 0.05)
    try:
        with pytest.raises(ApiError, match=rf"GET {PATH}: no answer from {script.server.url}"):
            script.client.get(PATH)
    finally:
        done.set()


def test_a_refused_connection_names_the_server(script: Script) -> None:
    url = script.server.url
    script.server.shutdown()
    script.server.server_close()
    with pytest.raises(ApiError, match=rf"GET {PATH}: no answer from {url}.*refused") as refused:
        script.client.get(PATH)
    assert refused.value.status is None
    assert str(refused.value).endswith(f"no answer from {url}: Connection refused")


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair = theirs.issue("server", "server", addresses=["127.0.0.1"])
    with HttpServer(lambda exchange: exchange.send_json({})) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url, trusted = server.url.replace("http:", "https:"), ssl.create_default_context(cafile=ours.pair.certificate)
        access = Access(url, Connections(url, trusted), lambda: None)
        with pytest.raises(ApiError, match=r"(?i)no answer from https://127\.0\.0\.1.*certificate verify failed"):
            KubeClient(access, "test").get(PATH)


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"{TOKEN}\r\nX: y", f"{TOKEN}\u20ac"], ids=["newline", "header", "€"])
def test_a_token_that_cannot_be_sent_is_an_error_without_the_token(script: Script, token: str) -> None:
    with pytest.raises(ApiError, match="the token can't be sent as an HTTP header") as refused:
        script.server.client(token).get(PATH)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("n\u00e4", "n%C3%A4"),
        ("a b", "a%20b"),
        ("a?b#c", "a%3Fb%23c"),
        ("a\r\nX: y", "a%0D%0AX:%20y"),
        ("\udcff", "%ED%B3%BF"),
        ("http:a~b%2Fc", "http:a~b%2Fc"),
    ],
)
def test_every_name_can_be_asked_for(script: Script, name: str, sent: str) -> None:
    script.client.get(f"{PATH}/{name}", {"fieldSelector": name})
    assert script.seen[0].route == f"{PATH}/{sent}"


def test_an_object_that_cannot_be_sent_is_not_the_fault_of_the_token(script: Script) -> None:
    with pytest.raises(ApiError, match=r"the object can't be sent: .*surrogates"):
        script.client.create(PATH, {"reason": "\udcff"})


def test_no_error_and_no_log_line_shows_the_token(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    script.answer = lambda exchange: exchange.cut()
    texts = []
    for call in (lambda: script.client.get(PATH), lambda: script.client.create(PATH, {})):
        with pytest.raises(ApiError) as refused:
            call()
        texts.append(f"{refused.value}{refused.value.__cause__!r}")
    assert TOKEN not in caplog.text + "".join(texts)


GOOD = {
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": TOKEN}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}

KUBECONFIGS = {
    "empty": "",
    "no YAML": f"users: [token: {TOKEN}\n: : :",
    "a tab": f"users:\n\t- {TOKEN}",
    "text": "hello",
    "a list": "- 1\n- 2",
    "a number": "42",
    "bytes": "\x00\x01",
    "no context": yaml.safe_dump({**GOOD, "current-context": "other"}),
    "no cluster": yaml.safe_dump({**GOOD, "clusters": []}),
    "clusters null": yaml.safe_dump({**GOOD, "clusters": None}),
    "users a text": yaml.safe_dump({**GOOD, "users": "me"}),
    "contexts of nothing": yaml.safe_dump({**GOOD, "contexts": [None]}),
}


@pytest.mark.parametrize("text", KUBECONFIGS.values(), ids=KUBECONFIGS)
def test_a_kubeconfig_that_cannot_be_used_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(
        EnvironmentFault, match=rf"--kubeconfig {path} can't be used: .*a kubeconfig has clusters"
    ) as fault:
        load_configuration(path)
    assert fault.value.exit_code == 3
    assert TOKEN not in str(fault.value)
    assert "\n" not in str(fault.value)
    assert "object" not in str(fault.value).replace("Expected object with name", ""), "these are words for people"


def test_a_kubeconfig_that_is_missing_or_a_directory_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "missing", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(EnvironmentFault, match=rf"--kubeconfig {path} can't be used: {why}: {path}"):
            load_configuration(path)


def test_outside_a_pod_a_kubeconfig_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(EnvironmentFault, match="no kubeconfig: --kubeconfig names none, and this is no pod"):
        load_configuration(None)


def test_a_good_kubeconfig_is_used(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(GOOD))
    assert load_configuration(path).host == "https://127.0.0.1:1"


def test_a_certificate_in_the_kubeconfig_that_is_none_is_an_error_of_the_request(tmp_path: Path) -> None:
    path = tmp_path / "config"
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority-data": "aGVsbG8="}
    path.write_text(yaml.safe_dump({**GOOD, "clusters": [{"name": "c", "cluster": cluster}]}))
    with pytest.raises((ApiError, EnvironmentFault)):
        KubeClient(load_configuration(path), "test").get(PATH)
