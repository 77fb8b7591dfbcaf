"""``tessera web`` with the real kubectl, kubelet and two pods in the place of controllers, which serve their names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from urllib3 import PoolManager
from urllib3.exceptions import HTTPError

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.plugin import COMMAND_S, TESSERA
from tests.support.ports import kept_port
from tests.support.workloads import wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAMESPACE = "web-command"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LABELS = {"app.kubernetes.io/name": "tessera", "app.kubernetes.io/component": "controller"}
SOON_S = 60.0


def controller(name: str, port: int | None) -> dict[str, Any]:
    """A pod that answers at 127.0.0.1 with its name, like a controller with a web page for local users."""
    serve = f"mkdir /tmp/page; echo {name} > /tmp/page/index.html; exec httpd -f -p 127.0.0.1:{port} -h /tmp/page"
    ports = [] if port is None else [{"name": "web", "containerPort": port, "protocol": "TCP"}]
    command = ["sh", "-c", serve if port is not None else "exec sleep 1000"]
    pod = busybox_pod(name, command, namespace=NAMESPACE, container={"ports": ports})
    pod["metadata"]["labels"] = LABELS
    return pod


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster with a namespace of its own."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    wait_default_account(cluster, NAMESPACE)
    yield cluster
    cluster.api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


@pytest.fixture
def pods(place: Cluster) -> Iterator[list[str]]:
    """Names of pods, all gone after the test."""
    names: list[str] = []
    yield names
    for name in names:
        remove(place, name)


def run_pod(cluster: Cluster, pods: list[str], name: str, port: int | None) -> None:
    cluster.api.post(PODS, controller(name, port))
    pods.append(name)

    def is_ready() -> bool:
        conditions = cluster.api.get(f"{PODS}/{name}")["status"].get("conditions", ())
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    wait_for(is_ready, SOON_S, f"pod {name} is ready")


def remove(cluster: Cluster, name: str) -> None:
    try:
        cluster.api.request("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
    except ApiError as error:
        if error.status != 404:
            raise
    cluster.wait_pod_gone(name, NAMESPACE)


def command(cluster: Cluster, *flags: str) -> list[str]:
    return [TESSERA, "web", "--namespace", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig), *flags]


def environment(cluster: Cluster, browser: str = "") -> dict[str, str]:
    programs = Path(cluster._state.program("kubectl")).parent
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "BROWSER": browser}


@contextmanager
def running(cluster: Cluster, *flags: str, browser: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``tessera web`` and the address that it printed."""
    process = subprocess.Popen(
        command(cluster, *flags), stdout=subprocess.PIPE, text=True, env=environment(cluster, browser)
    )
    with process:
        try:
            line = process.stdout.readline()  # type: ignore[union-attr]
            found = re.fullmatch(r"The web page is at (http://127\.0\.0\.1:\d+/) until Ctrl-C\.\n", line)
            assert found is not None, line
            yield process, found[1]
        finally:
            process.send_signal(signal.SIGTERM)


def served(url: str) -> str:
    """Whose page it is; nobody's while nothing answers."""
    with PoolManager(retries=False, timeout=COMMAND_S) as pool:
        try:
            return pool.request("GET", url).data.decode().strip()
        except HTTPError:
            return ""


def test_it_opens_the_page_of_the_leader_and_goes_on_with_another_pod(
    place: Cluster, pods: list[str], tmp_path: Path
) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.new; mv {opened}.new {opened}\n')
    browser.chmod(0o700)
    with kept_port() as one, kept_port() as other:
        run_pod(place, pods, "another", one)
        run_pod(place, pods, "leader", other)
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        place.api.post(leases, {"metadata": {"name": "tessera-controller"}, "spec": {"holderIdentity": "leader"}})
        with running(place, browser=str(browser)) as (process, url):
            wait_for(opened.exists, SOON_S, "a browser is started")
            assert opened.read_text().strip() == url
            wait_for(lambda: served(url), SOON_S, "the pod, which was ready before its server listened, answers")
            assert served(url) == "leader"
            remove(place, "leader")
            wait_for(lambda: served(url) == "another", SOON_S, "the page of the other pod, at the same address")
            process.send_signal(signal.SIGINT)
            assert process.wait(SOON_S) == 0
        assert served(url) == "", "kubectl still forwards"


def test_what_is_missing_is_said(place: Cluster, pods: list[str]) -> None:
    def failure(**env: str) -> tuple[int, str]:
        variables = {**environment(place), **env}
        done = subprocess.run(
            command(place, "--no-browser"),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            env=variables,
        )
        return done.returncode, done.stderr

    code, message = failure()
    assert (code, f"namespace {NAMESPACE} has no controller of Tessera" in message) == (1, True), message
    run_pod(place, pods, "without-page", None)
    code, message = failure()
    assert (code, "--set controller.webAddress=127.0.0.1:8082" in message) == (1, True), message
    code, message = failure(PATH="/nowhere")
    assert (code, "kubectl is not in $PATH" in message) == (3, True), message
