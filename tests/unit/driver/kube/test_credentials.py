"""Address of the API server and credentials: from a pod's ServiceAccount and from kubeconfigs."""

from __future__ import annotations

import base64
import ssl
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from kubernetes.config import kube_config

from driver.errors import ApiError, EnvironmentFault
from driver.http_client import Connections
from driver.kube import credentials as access
from driver.kube.client import KubeClient
from driver.kube.credentials import (
    TOKEN_INTERVAL_SECONDS,
    Access,
    CredentialsError,
    FileToken,
    KubeconfigToken,
    load_configuration,
)
from driver.kube.kubeconfig import Kubeconfig, read_kubeconfig, read_kubeconfig_in_own_process
from tests.harness.certs import Authority
from tests.support.api_server import Exchange, HttpServer
from tests.support.clock import FakeClock

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
UNUSED = {
    "urllib3",
    "kubernetes",
    "pydantic",
    "requests",
    "prometheus_client",
    "celpy",
    "lark",
    "deviceclasses",
    "controller",
}
"""What the node plugin has no use for: 38 MiB together."""

IN_BOTH_PROCESSES = pytest.mark.parametrize("in_own_process", [False, True], ids=["read here", "read elsewhere"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority(tmp_path_factory.mktemp("ca")).pair.certificate


@pytest.fixture
def account(tmp_path: Path, authority: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kubelet puts into every pod."""
    (tmp_path / "ca.crt").write_bytes(authority.read_bytes())
    (tmp_path / "token").write_text("of-the-pod\n")
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    return tmp_path


def kubeconfig(folder: Path, authority: Path, user: dict[str, Any], **cluster: Any) -> Path:
    data = base64.b64encode(authority.read_bytes()).decode()
    config = {
        "clusters": [
            {"name": "c", "cluster": {"server": "https://h:1/", "certificate-authority-data": data, **cluster}}
        ],
        "users": [{"name": "u", "user": user}, {"name": "other", "user": {"token": "another"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
        "current-context": "x",
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_a_pod_shows_its_service_accounts_token(account: Path, host: str, address: str) -> None:
    found = load_configuration(None, {**POD, "KUBERNETES_SERVICE_HOST": host})
    assert (found.host, found.authorization()) == (address, "Bearer of-the-pod")


@pytest.mark.parametrize("missing", ["ca.crt", "token"])
def test_a_pod_without_its_service_accounts_files_is_told(account: Path, missing: str) -> None:
    (account / missing).unlink()
    with pytest.raises(EnvironmentFault, match="in-cluster configuration can't be used"):
        load_configuration(None, POD)


@IN_BOTH_PROCESSES
def test_the_kubeconfigs_token_is_shown_to_the_server_of_its_context(
    tmp_path: Path, authority: Path, in_own_process: bool
) -> None:
    path = kubeconfig(tmp_path, authority, {"token": "mine"})
    found = load_configuration(path, {}, in_own_process=in_own_process)
    assert (found.host, found.authorization()) == ("https://h:1", "Bearer mine")


def test_a_kubeconfig_may_name_files_beside_it(tmp_path: Path, authority: Path) -> None:
    (tmp_path / "ca").write_bytes(authority.read_bytes())
    (tmp_path / "t").write_text("from-a-file")
    path = kubeconfig(tmp_path, authority, {"tokenFile": "t"})
    config = yaml.safe_load(path.read_text())
    config["clusters"][0]["cluster"] = {"server": "https://h:1", "certificate-authority": "ca"}
    path.write_text(yaml.safe_dump(config))
    assert load_configuration(path, {}).authorization() == "Bearer from-a-file"


@pytest.mark.parametrize(
    ("user", "cluster", "environment"),
    [
        pytest.param({"username": "me", "password": "x"}, {}, {}, id="a user without a token"),
        pytest.param({"token": "mine"}, {"tls-server-name": "other"}, {}, id="another name of the server"),
        pytest.param({"token": "mine"}, {}, {"HTTPS_PROXY": "http://proxy:1"}, id="a proxy"),
    ],
)
def test_other_credentials_server_names_and_proxies_are_used(
    tmp_path: Path, authority: Path, user: dict[str, Any], cluster: dict[str, Any], environment: dict[str, str]
) -> None:
    found = load_configuration(kubeconfig(tmp_path, authority, user, **cluster), environment)
    expected = "Bearer mine" if "token" in user else "Basic bWU6eA=="
    assert (found.host, found.authorization()) == ("https://h:1", expected)


def test_the_token_file_of_a_kubeconfig_is_read_again(
    tmp_path: Path, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").write_text("first")
    monkeypatch.setattr(access, "TOKEN_INTERVAL_SECONDS", 0.0)
    found = load_configuration(kubeconfig(tmp_path, authority, {"tokenFile": "t"}), {})
    (tmp_path / "t").write_text("second")
    assert found.authorization() == "Bearer second"


@pytest.mark.long
@IN_BOTH_PROCESSES
def test_an_exec_plugin_is_run_again_when_its_token_has_expired(
    tmp_path: Path, authority: Path, in_own_process: bool
) -> None:
    credential = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
        '"status": {"token": "\'$(cat count | wc -c)\'", "expirationTimestamp": "2020-01-01T00:00:00Z"}}'
    )
    script = f"cd {tmp_path}; printf x >> count; echo '{credential}'"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    path = kubeconfig(tmp_path, authority, {"exec": {**plugin, "interactiveMode": "Never"}})
    found = load_configuration(path, {}, in_own_process=in_own_process)
    assert (found.authorization(), found.authorization()) == ("Bearer 2", "Bearer 3")


def expiring(token: str | None, expires_at: float) -> Kubeconfig:
    return Kubeconfig("https://h:1", authorization=token, expires_at=expires_at)


def test_a_token_is_renewed_five_minutes_before_it_expires_a_short_one_after_half_of_its_lifetime() -> None:
    clock, read = FakeClock(), list[Kubeconfig]()
    start = clock.monotonic()
    read += [expiring("second", start + 3300 + 60), expiring("third", start + 9999)]
    token = KubeconfigToken(expiring("first", start + 3600), lambda: read.pop(0), clock.monotonic)
    clock.advance(3299)
    assert token() == "first"
    clock.advance(1)
    assert token() == "second"
    clock.advance(29)
    assert token() == "second"
    clock.advance(1)
    assert token() == "third"


def test_the_token_stays_when_the_exec_plugin_fails() -> None:
    clock = FakeClock()
    start = clock.monotonic()
    results = [expiring(None, start), expiring("second", start + 9999)]
    token = KubeconfigToken(expiring("first", start + 100), lambda: results.pop(0), clock.monotonic)
    clock.advance(60)
    assert (token(), token()) == ("first", "second")


def test_credentials_that_cannot_be_renewed_are_an_error_of_the_request(tmp_path: Path, authority: Path) -> None:
    config = Kubeconfig("https://h:1", authorization="Bearer old", expires_at=0.0)
    token = KubeconfigToken(config, partial(read_kubeconfig_in_own_process, tmp_path / "gone"))
    with pytest.raises(CredentialsError, match=r"can't be renewed: No such file or directory: .*gone"):
        token()


def test_what_the_official_client_logs_in_its_own_process_is_logged_here(
    tmp_path: Path, authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", "echo why >&2; exit 3"]}
    path = kubeconfig(tmp_path, authority, {"exec": {**plugin, "interactiveMode": "Never"}})
    assert load_configuration(path, {}, in_own_process=True).authorization() is None
    [record] = caplog.records
    assert vars(record)["error"] == "exec: process returned 3. why"


def test_secrets_of_a_kubeconfig_are_neither_arguments_of_a_process_nor_left_in_files(
    tmp_path: Path, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    commands: list[list[str]] = []

    class Observed(subprocess.Popen[bytes]):
        def __init__(self, args: list[str], **options: Any) -> None:
            commands.append(args)
            super().__init__(args, **options)

    monkeypatch.setattr(subprocess, "Popen", Observed)
    pair = Authority(tmp_path / "ca").issue("me", "me")
    data = {
        "client-certificate-data": base64.b64encode(pair.certificate.read_bytes()).decode(),
        "client-key-data": base64.b64encode(pair.key.read_bytes()).decode(),
    }
    path = kubeconfig(tmp_path, authority, {"token": "of-mine", **data})
    assert load_configuration(path, {}, in_own_process=True).authorization() == "Bearer of-mine"
    [command] = commands
    assert command[-1] == str(path)
    assert "of-mine" not in " ".join(command)
    assert not list(folder.iterdir())


def test_threads_that_read_kubeconfigs_at_the_same_time_get_whole_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path, Authority(tmp_path / "ca").pair.certificate, {"token": "of-mine"})
    read: list[Kubeconfig] = []
    others: list[threading.Thread] = []

    def open_late(file: str, mode: str = "r") -> IO[Any]:
        """While the official client is about to write a certificate, another thread reads, unless it has to wait."""
        if mode == "wb" and not others:
            others.append(threading.Thread(target=lambda: read.append(read_kubeconfig(path))))
            others[0].start()
            others[0].join(0.5)
        return Path(file).open(mode)

    monkeypatch.setattr(kube_config, "open", open_late, raising=False)
    read.append(read_kubeconfig(path))
    [other] = others
    other.join(20)
    assert len(read) == 2
    assert read[0] == read[1]


@IN_BOTH_PROCESSES
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "insecure"])
def test_a_client_certificate_is_shown(tmp_path: Path, verify: bool, in_own_process: bool) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    pair, user = ours.issue("server", "server", addresses=["127.0.0.1"]), ours.issue("me", "me")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    context.load_verify_locations(ours.pair.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    credentials = {"client-certificate": str(user.certificate), "client-key": str(user.key)}
    with HttpServer(lambda exchange: exchange.send_json({"a": "b"})) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        cluster: dict[str, Any] = {"server": server.url.replace("http:", "https:")}
        trusted = ours
        if not verify:
            trusted, cluster = others, {**cluster, "insecure-skip-tls-verify": True}
        path = kubeconfig(tmp_path, trusted.pair.certificate, credentials, **cluster)
        found = load_configuration(path, {}, in_own_process=in_own_process)
        assert KubeClient(found, "test").get_object("/api") == {"a": "b"}


def test_a_renewed_token_is_read_within_a_minute(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "token"
    path.write_text("first")
    token = FileToken(path, clock.monotonic)
    path.write_text("second")
    assert token() == "Bearer first"
    clock.advance(TOKEN_INTERVAL_SECONDS)
    assert token() == "Bearer second"


def test_a_token_that_is_gone_is_an_error_of_the_request(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "token"
    path.write_text("first")
    token = FileToken(path, clock.monotonic)
    path.unlink()
    clock.advance(TOKEN_INTERVAL_SECONDS)
    with HttpServer(lambda exchange: exchange.send_json({})) as server:
        client = KubeClient(Access(server.url, Connections(server.url), token), "test")
        with pytest.raises(ApiError, match=rf"GET /api: the token in {path} can't be read"):
            client.get("/api")


def test_the_token_is_sent_as_it_is_at_the_time_of_the_request(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(exchange: Exchange) -> None:
        seen.append(exchange.headers["Authorization"])
        exchange.send_json({})

    tokens = iter(["Bearer a", "Bearer b"])
    with HttpServer(answer) as server:
        client = KubeClient(Access(server.url, Connections(server.url), lambda: next(tokens)), "test")
        client.get("/api")
        client.get("/api")
    assert seen == ["Bearer a", "Bearer b"]


@pytest.mark.long
@pytest.mark.parametrize("source", ["pod", "kubeconfig"])
def test_the_node_plugin_loads_nothing_that_it_has_no_use_for(account: Path, authority: Path, source: str) -> None:
    path = kubeconfig(account, authority, {"token": "mine"}) if source == "kubeconfig" else None
    script = (
        "import sys; from pathlib import Path; from tessera.cli import main; main.get_command(None, 'node')\n"
        "import kubelet_plugin.app, driver.process_exit, kubelet_plugin.checkpoint.files, driver.simulator.node\n"
        "from driver.kube import credentials\n"
        f"credentials.SERVICE_ACCOUNT = Path({str(account)!r})\n"
        f"path = {str(path)!r} if {path is not None} else None\n"
        f"credentials.load_configuration(path and Path(path), {POD!r}, in_own_process=True)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not UNUSED & set(loaded.stdout.split())


def test_a_server_below_a_path_is_asked_there(tmp_path: Path, authority: Path) -> None:
    found = load_configuration(kubeconfig(tmp_path, authority, {"token": "t"}, server="https://h:1/k8s/c-1/"), {})
    assert (found.host, found.target("/api")) == ("https://h:1/k8s/c-1", "/k8s/c-1/api")
