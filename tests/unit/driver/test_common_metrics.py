"""Scraping: the endpoint over HTTP, the flag, and a real ``tessera node`` and ``tessera controller``."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Counter, Gauge

from driver.common_metrics import METRICS_PATH, RbacRequest, metrics_page, rbac_request
from driver.config.flag_values import ListenAddress, parse_listen_address
from driver.errors import EnvironmentFault
from driver.http import Endpoint
from tessera.cli import main
from tests.harness.waiting import wait_for
from tests.support.metrics import families, fetch, port_in, total
from tests.support.ports import kept_port
from tests.unit.kubelet_plugin.metrics.test_metrics import documented
from tests.unit.tessera.test_cli import KUBECONFIG, START_S

LOCAL = ListenAddress("127.0.0.1", 0)


def metrics_endpoint(registry: CollectorRegistry, address: ListenAddress) -> Endpoint:
    return Endpoint({METRICS_PATH: metrics_page(registry)}, address, "--metrics-address")


@contextmanager
def served(registry: CollectorRegistry, address: ListenAddress = LOCAL) -> Iterator[int]:
    endpoint = metrics_endpoint(registry, address)
    try:
        yield endpoint.address.port
    finally:
        endpoint.close()


def test_a_scrape_gets_the_registry_as_it_is_now() -> None:
    registry = CollectorRegistry()
    counter = Counter("tests_total", "Tests.", registry=registry)
    with served(registry) as port:
        counter.inc()
        assert "tests_total 1.0" in fetch(port)[1]
        counter.inc()
        assert "tests_total 2.0" in fetch(port)[1]


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/metrics/x"), ("POST", "/metrics"), ("PUT", "/")])
def test_anything_but_get_metrics_is_not_found(method: str, path: str) -> None:
    with served(CollectorRegistry()) as port:
        assert fetch(port, path, method) == (404, "only GET /metrics is answered\n")
        assert fetch(port, "/metrics?name[]=x")[0] == 200


def test_a_gauge_that_fails_is_said_to_the_one_who_scrapes_and_ends_nothing() -> None:
    registry = CollectorRegistry()

    def fail() -> float:
        raise KeyError("a defect")

    Gauge("broken", "Broken.", registry=registry).set_function(fail)
    with served(registry) as port:
        for _ in range(2):
            status, body = fetch(port)
            assert status == 500
            assert "internal error, please report it: KeyError" in body


def test_every_address_of_the_machine_means_both_families() -> None:
    with served(CollectorRegistry(), ListenAddress("", 0)) as port:
        assert fetch(port)[0] == 200
        if socket.has_dualstack_ipv6():
            assert fetch(port, host="[::1]")[0] == 200


def test_a_port_is_free_again_after_the_endpoint_was_closed() -> None:
    with kept_port() as port:
        address, taken = ListenAddress("127.0.0.1", port), pytest.raises(EnvironmentFault, match=f":{port}: can't")
        with served(CollectorRegistry(), address), taken:
            metrics_endpoint(CollectorRegistry(), address)
        with served(CollectorRegistry(), address):
            assert fetch(port)[0] == 200


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_said_with_its_flag(host: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"--metrics-address {host}:0: can't listen there"):
        metrics_endpoint(CollectorRegistry(), ListenAddress(host, 0))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9400", ListenAddress("", 9400)),
        ("127.0.0.1:0", ListenAddress("127.0.0.1", 0)),
        ("[::1]:9400", ListenAddress("::1", 9400)),
        ("node-1.example:65535", ListenAddress("node-1.example", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "9400", "host", "host:", ":65536", ":-1", "::1:9400", "[::1]", "a b:1", ":1x"])
@pytest.mark.parametrize("command", [("node", "--node-name", "n"), ("controller",)])
def test_an_address_that_makes_no_sense_is_named_with_what_would(command: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(main, [*command, "--metrics-address", text])
    assert result.exit_code == 2
    assert f"--metrics-address {text}: must be HOST:PORT with a port of 0 to 65535" in result.output


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("GET", "/api/v1/nodes/n1", RbacRequest("get", "nodes")),
        ("GET", "/api/v1/namespaces/default", RbacRequest("get", "namespaces")),
        ("GET", "/apis/resource.k8s.io/v1/resourceslices", RbacRequest("list", "resourceslices")),
        ("POST", "/api/v1/namespaces/default/events", RbacRequest("create", "events")),
        ("PUT", "/apis/resource.k8s.io/v1/resourceslices/a", RbacRequest("update", "resourceslices")),
        ("PATCH", "/apis/g/v1/namespaces/a/resourceclaims/b/status", RbacRequest("patch", "resourceclaims/status")),
        ("DELETE", "/apis/g/v1/resourceslices/b", RbacRequest("delete", "resourceslices")),
        ("GET", "/version", RbacRequest("get", "other")),
    ],
)
def test_a_request_is_named_as_in_a_role(method: str, path: str, asked: RbacRequest) -> None:
    assert rbac_request(method, path) == asked


def test_a_watch_is_no_list() -> None:
    assert rbac_request("GET", "/api/v1/pods", {"watch": "true"}) == RbacRequest("watch", "pods")
    assert rbac_request("GET", "/api/v1/pods", {"limit": "5"}) == RbacRequest("list", "pods")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Shorter than pytest's own: a socket's path has at most 107 characters."""
    with TemporaryDirectory(prefix="tessera-") as directory:
        path = Path(directory)
        (path / "config").write_text(yaml.safe_dump(KUBECONFIG))
        yield path


def node_command(folder: Path) -> list[str]:
    """A node plugin whose API server never answers."""
    flags = {"node-name": "n1", "kubeconfig": folder / "config", "gpus": "sim:h100-1", "sim-latency": "zero"}
    places = {"kubelet-dir": folder / "kubelet", "cdi-dir": folder / "cdi", "host-root": folder / "host"}
    return ["node", *(str(part) for name, value in {**flags, **places}.items() for part in (f"--{name}", value))]


@contextmanager
def scraped(folder: Path, command: list[str]) -> Iterator[int]:
    """The port at which a process of that command serves its metrics."""
    log = folder / "log"
    whole = [str(Path(sys.executable).with_name("tessera")), *command, "--metrics-address", "127.0.0.1:0"]
    with log.open("w") as stream, subprocess.Popen(whole, stderr=stream) as process:
        try:
            yield port_in(log, START_S)
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.long
def test_a_running_node_plugin_exports_what_the_docs_say(folder: Path) -> None:
    with scraped(folder, node_command(folder)) as port:

        def unanswered() -> float:
            return total(families(port), "tessera_api_requests_total", code="error")

        wait_for(unanswered, 60, "a request that nobody answers")
        found = families(port)
        assert {name: family.type for name, family in found.items()} == {n: t for n, (t, _) in documented().items()}
        assert found["tessera_gpus"].samples[0].value == 1
        assert found["process_threads"].samples[0].value > 3


@pytest.mark.long
def test_a_running_controller_exports_its_requests_and_its_process(folder: Path) -> None:
    with scraped(folder, ["controller", "--kubeconfig", str(folder / "config")]) as port:
        found = families(port)
        own = {"tessera_api_requests_total", "tessera_api_request_duration_seconds", *documented("controller")}
        assert found.keys() == own | {name for name in documented() if name.startswith("process_")}


def test_a_port_in_use_ends_the_plugin_with_exit_code_3(folder: Path) -> None:
    with served(CollectorRegistry()) as port:
        result = CliRunner().invoke(main, [*node_command(folder), "--metrics-address", f"127.0.0.1:{port}"])
    assert result.exit_code == 3
    assert f"--metrics-address 127.0.0.1:{port}: can't listen there" in result.output


@pytest.mark.long
def test_the_library_is_loaded_only_where_metrics_are_asked_for() -> None:
    check = "import sys, tessera.cli, kubelet_plugin.app; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
