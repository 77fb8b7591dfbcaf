"""``tessera uninstall`` where it comes to no end: nodes must not go on offering nothing because somebody once tried."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING
from driver.kube.lease import leases
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, Answer, Exchange, ObjectApi
from tests.support.plugin import DRIVER, TESSERA
from tests.support.running import in_thread

LEASE = f"{leases('tessera')}/{HEARTBEAT}"
SLICE = f"{SLICES}/00001-node-a"
SOON_S = 60.0


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    """Of a cluster with a node that does not withdraw its slice."""
    with ObjectApi() as found:
        found.store(LEASE, spec={})
        found.store(SLICE, spec={"driver": DRIVER, "nodeName": "node-a"})
        yield found


def told_to_leave(api: ObjectApi) -> bool:
    return LEAVING in api.folder(LEASE)[HEARTBEAT]["metadata"].get("annotations", {})


@contextmanager
def waiting_for_nodes(api: ObjectApi, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, from when it has told the nodes."""
    config = {
        "clusters": [{"name": "c", "cluster": {"server": api.server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "config").write_text(yaml.safe_dump(config))
    command = [TESSERA, "uninstall", "--kubeconfig", str(folder / "config"), "--timeout", str(SOON_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: told_to_leave(api), SOON_S, "it has told the nodes")
            yield process
        finally:
            process.kill()


def refuse(status: int) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.refuse(status, "not now")

    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_where_it_is_ended_the_nodes_offer_again(api: ObjectApi, tmp_path: Path, number: signal.Signals) -> None:
    """A Job's deadline, a drain of its node, a person."""
    with waiting_for_nodes(api, tmp_path) as process:
        process.send_signal(number)
        assert process.wait(SOON_S) != 0
    assert not told_to_leave(api)
    assert SLICE.rpartition("/")[2] in api.folder(SLICES)


def test_where_it_may_not_go_on_the_nodes_offer_again(api: ObjectApi, tmp_path: Path) -> None:
    with waiting_for_nodes(api, tmp_path) as process:
        api.once("list", refuse(403))
        assert process.wait(SOON_S) == 1
    assert not told_to_leave(api)


@pytest.mark.long
def test_an_api_server_that_does_not_answer_once_is_asked_again(api: ObjectApi, tmp_path: Path) -> None:
    with waiting_for_nodes(api, tmp_path) as process:
        api.once("list", refuse(503), refuse(429), lambda exchange: exchange.cut())
        wait_for(lambda: api.count("list", "resourceslices") >= 5, SOON_S, "it asks again")
        api.drop(SLICE)
        assert process.wait(SOON_S) == 0, process.communicate()
    assert HEARTBEAT not in api.folder(LEASE)


@pytest.mark.long
def test_where_it_can_not_take_its_word_back_it_says_how_to(api: ObjectApi, tmp_path: Path) -> None:
    with waiting_for_nodes(api, tmp_path) as process:
        api.once("PATCH", refuse(503))
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=SOON_S)
    assert f"kubectl -n tessera annotate lease {HEARTBEAT} {LEAVING}-" in said


@pytest.mark.long
def test_a_controller_outside_of_pods_is_named_and_keeps_nodes_from_offering_again(
    api: ObjectApi, tmp_path: Path
) -> None:
    api.store(LEASE, spec={"holderIdentity": "host-1", "renewTime": "2026-11-22T12:00:00Z"})
    with waiting_for_nodes(api, tmp_path) as process:
        api.drop(SLICE)
        with in_thread(partial(renew, api)):
            _, said = process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    assert "the controller host-1 still runs outside of pods" in said
    assert told_to_leave(api)


def renew(api: ObjectApi, stop: threading.Event) -> None:
    """Renew the heartbeat as a controller does, much more often."""
    for second in range(10, 60):
        if stop.wait(0.2):
            return
        spec = {"holderIdentity": "host-1", "renewTime": f"2026-11-22T12:00:{second}Z"}
        api.store(LEASE, spec=spec, metadata=api.folder(LEASE)[HEARTBEAT]["metadata"])


@pytest.mark.long
def test_a_node_plugin_outside_of_pods_is_named(api: ObjectApi, tmp_path: Path) -> None:
    with waiting_for_nodes(api, tmp_path) as process:
        api.drop(SLICE)
        said, _ = process.communicate(timeout=SOON_S)
    assert process.returncode == 0
    assert "node plugins outside of pods still run: node-a" in said
    assert "nothing is left" not in said
