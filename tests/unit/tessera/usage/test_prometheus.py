"""Answers of Prometheus, also wrong ones, and of what merely has its address."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.errors import EnvironmentFault, FatalError, UsageError
from tessera.usage import http_reader
from tessera.usage.prometheus import ALLOCATED_METRIC, MEASURED_METRIC, USED_METRIC, Prometheus, growth, read_period
from tessera.usage.report import GpuOfNode, GpuSlices, UsageRecord
from tests.support.api_server import Exchange, HttpServer
from tests.support.usage_pages import H100

HOUR = 3600
ON, ELSEWHERE = {"node": "n", "gpu": "gpu-0"}, {"node": "n", "gpu": "gpu-1"}
BY = "sum by (namespace, node, gpu)"
OVERWRITTEN, BEGINNING, CAPACITY = "count({__name__", "count(last_over_time", "sum(sum_over_time"
GPUS, REASONS = "max by (node, gpu, product)", "max by (node, gpu, reason)"
"""How the queries begin."""


def vector(*samples: tuple[dict[str, str], Any]) -> dict[str, Any]:
    result = [{"metric": labels, "value": [1.5, str(value)]} for labels, value in samples]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


class PrometheusApi(HttpServer):
    """Answers queries by how they begin; others have an empty result."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.times: set[str | None] = set()
        self.authorizations: set[str | None] = set()
        super().__init__(self._answer)

    def _answer(self, exchange: Exchange) -> None:
        assert exchange.route == "/api/v1/query"
        query = exchange.query["query"]
        self.asked.append(query)
        self.times.add(exchange.query.get("time"))
        if query == "vector(1)":
            return exchange.send_json(vector(({}, 1)))
        self.authorizations.add(exchange.headers.get("Authorization"))
        return exchange.send_json(
            next((answer for start, answer in self.answers.items() if query.startswith(start)), vector())
        )


@pytest.fixture
def api() -> Iterator[PrometheusApi]:
    with PrometheusApi() as server:
        server.answers = {
            f"{BY} {growth(ALLOCATED_METRIC, HOUR)}": vector(
                ({"namespace": "a", **ON}, 8 * HOUR), ({"namespace": "b", **ELSEWHERE}, HOUR)
            ),
            f"{BY} {growth(MEASURED_METRIC, HOUR)}": vector(({"namespace": "a", **ON}, 7.95 * HOUR)),
            f"{BY} {growth(USED_METRIC, HOUR)}": vector(({"namespace": "a", **ON}, 2 * HOUR)),
            GPUS: vector(({**ON, "product": H100}, 8)),
            REASONS: vector(({**ELSEWHERE, "reason": "no counters"}, 1)),
            CAPACITY: vector(({}, 8 * 300)),
            BEGINNING: vector(({}, 1)),
        }
        yield server


def test_slice_hours_are_read_by_tenant_and_gpu(api: PrometheusApi) -> None:
    reading = read_period(Prometheus(api.url), HOUR, ["namespace"])
    assert reading.devices == [
        UsageRecord(GpuOfNode("n", "gpu-0"), 8, 2, "a"),
        UsageRecord(GpuOfNode("n", "gpu-1"), 1, None, "b"),
    ]
    assert reading.gpus == {GpuOfNode("n", "gpu-0"): GpuSlices(H100, 8)}
    assert reading.reasons == {GpuOfNode("n", "gpu-1"): "no counters"}
    assert reading.capacity == pytest.approx(8 * 300 * 12 / HOUR)
    assert reading.warnings == []
    assert max(map(len, api.asked)) < 6000, "proxies refuse long addresses"


def test_time_in_which_a_gpu_did_not_answer_is_unknown_and_not_idle(api: PrometheusApi) -> None:
    api.answers[f"{BY} {growth(MEASURED_METRIC, HOUR)}"] = vector(({"namespace": "a", **ON}, 5 * HOUR))
    devices = read_period(Prometheus(api.url), HOUR, ["namespace"]).devices
    assert [(each.allocated, each.used) for each in devices if each.namespace == "a"] == [(5, 2), (3, None)]


def test_all_queries_are_as_of_one_moment_by_the_clock_of_prometheus(api: PrometheusApi) -> None:
    read_period(Prometheus(api.url), HOUR, ["namespace"])
    assert api.times == {None, "1.500"}


def test_a_period_that_begins_before_the_data_is_named(api: PrometheusApi) -> None:
    del api.answers[BEGINNING]
    assert (
        "no usage of the beginning of the period" in read_period(Prometheus(api.url), HOUR, ["namespace"]).warnings[0]
    )


def test_warnings_of_prometheus_are_passed_on(api: PrometheusApi) -> None:
    api.answers[CAPACITY]["warnings"] = ["a store did\x1b not answer"]
    assert read_period(Prometheus(api.url), HOUR, []).warnings == ["Prometheus: a store did? not answer"]


def test_overwritten_namespaces_are_refused_with_the_remedy(api: PrometheusApi) -> None:
    api.answers[OVERWRITTEN] = vector(({}, 1))
    with pytest.raises(FatalError, match="honor_labels: true"):
        read_period(Prometheus(api.url), HOUR, ["namespace"])


def test_a_prometheus_without_the_metrics_is_refused(api: PrometheusApi) -> None:
    api.answers.clear()
    with pytest.raises(FatalError, match="does it scrape the node plugins"):
        read_period(Prometheus(api.url), HOUR, ["namespace"])


def sends(body: bytes, status: int = 200, kind: str = "application/json") -> Callable[[Exchange], None]:
    return lambda exchange: exchange.send(status, body, kind)


def redirects(exchange: Exchange) -> None:
    exchange.send_response(302)
    exchange.send_header("Location", "http://elsewhere.invalid/")
    exchange.send_header("Content-Length", "0")
    exchange.end_headers()


def unpacks(exchange: Exchange) -> None:
    body = gzip.compress(b" " * 10_000_000)
    exchange.send_response(200)
    exchange.send_header("Content-Encoding", "gzip")
    exchange.send_header("Content-Length", str(len(body)))
    exchange.end_headers()
    exchange.wfile.write(body)


def as_bytes(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(sends(b"<html>login</html>", 200, "text/html"), "something else than Prometheus", id="no JSON"),
        pytest.param(sends(b"[" * 100_000), "something else than Prometheus", id="deep"),
        pytest.param(sends(b'{"status": 3}'), "something else than Prometheus", id="wrong type"),
        pytest.param(sends(b'{"status": "success"}'), "something else than a vector", id="no data"),
        pytest.param(
            sends(as_bytes({"status": "success", "data": {"resultType": "matrix", "result": []}})),
            "something else than a vector",
            id="matrix",
        ),
        pytest.param(
            sends(as_bytes({"status": "error", "error": "query timed\x1b out"}), 503),
            "refuses a query: query timed? out",
            id="an error of Prometheus",
        ),
        pytest.param(sends(as_bytes(vector(({}, "NaN")))), "no finite number: NaN", id="NaN"),
        pytest.param(sends(as_bytes(vector(({}, "eight")))), "no finite number: eight", id="no number"),
        pytest.param(sends(b"no\nway", 401, "text/plain"), "status 401: no way", id="refused"),
        pytest.param(redirects, "status 302", id="redirected"),
        pytest.param(lambda exchange: exchange.cut(), "no answer", id="cut off"),
        pytest.param(unpacks, "larger than 1 MiB", id="a bomb"),
    ],
)
def test_wrong_answers_are_one_clear_error(
    answer: Callable[[Exchange], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reader, "ANSWER_LIMIT", 1024**2)
    with HttpServer(answer) as server, pytest.raises((FatalError, EnvironmentFault)) as caught:
        list(Prometheus(server.url).query("up"))
    message = str(caught.value)
    assert said in message
    assert message.startswith(f"--prometheus {server.url}: ")
    assert message.isprintable()


def test_a_password_is_sent_and_never_shown(api: PrometheusApi) -> None:
    secret = "p@ss"
    address = api.url.replace("//", "//user:p%40ss@")
    list(Prometheus(address).query("up"))
    assert api.authorizations == {f"Basic {base64.b64encode(f'user:{secret}'.encode()).decode()}"}
    assert secret not in Prometheus(address).name
    assert "p%40ss" not in Prometheus(address).name


def test_a_token_is_sent(api: PrometheusApi, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    list(Prometheus(api.url, tmp_path / "token").query("up"))
    assert api.authorizations == {"Bearer secret"}


@pytest.mark.parametrize("token", ["", "two\nlines", "é"])
def test_a_file_without_a_token_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(UsageError, match="must have one line with a token"):
        Prometheus("http://127.0.0.1:1", tmp_path / "token")


@pytest.mark.parametrize(
    "address", ["", "prometheus:9090", "ftp://x", "http://", "http://x?y=1", "http://[x", "file:///etc/passwd"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is no address such as http://prometheus"):
        Prometheus(address)
