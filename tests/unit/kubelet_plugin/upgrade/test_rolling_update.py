"""Two plugins of one node take turns while claims are prepared and unprepared, and die wherever they can."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from driver.kube.controller_heartbeat import HEARTBEAT, LEAVING
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.kube.lease import leases
from driver.model.gpu import MigMode
from kubelet_plugin.dra.kubelet_sockets import PluginSockets
from kubelet_plugin.inventory.open_hardware import open_host
from kubelet_plugin.settings import node_settings, plugin_socket
from kubelet_plugin.upgrade import rolling_update
from kubelet_plugin.upgrade.instance_lock import InstanceLock
from kubelet_plugin.upgrade.rolling_update import (
    ASK_INTERVAL_SECONDS,
    UNINSTALLING,
    HandOver,
    HandOverRequest,
    HandOverResult,
    RollingInstance,
)
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, ObjectApi
from tests.support.claims import DRIVER, NODE, result
from tests.support.faulty_api import kubeconfig_of
from tests.support.killable import KillablePlugin, Point, Zygote
from tests.support.kubelet import KnownClaim
from tests.support.plugin import TESSERA, is_of_monitors
from tests.support.ports import kept_port
from tests.support.rolling_kubelet import Cycle, RollingKubelet, rounds

AT_WORK, BACK = "active on this node", "taking the node back"
DEVICES = ("gpu-0-mig-1g10gb-6", "gpu-1", "gpu-2-mig-3g40gb-0", "gpu-3-mig-1g10gb-0")

OLD_DIES = [
    Point(step, moment) for step in ("finish-claims", "stop-writing", "release") for moment in ("before", "after")
]
NEW_DIES = [Point("ask", "before"), Point("ask", "after"), Point("recover", "before"), Point("recover", "after")]
LEAVING_DIES = [Point("leave", "before"), Point("leave", "after")]


@dataclass
class Site:
    """A node with four GPUs, a kubelet, an API server, and as many plugins as a test wants."""

    root: Path
    api: ObjectApi
    kubelet: RollingKubelet
    parent: Zygote
    stack: ExitStack
    cycles: list[Cycle] = field(default_factory=list)

    def plugin(self, uid: str, **more: str) -> KillablePlugin:
        settings = {
            "node_name": NODE,
            "kubeconfig": self.root / "config",
            "gpus": "sim:h100-pcie-4",
            "sim_latency": "zero",
            "kubelet_dir": self.root / "kubelet",
            "cdi_dir": self.root / "cdi",
            "host_root": self.root / "host",
            "pod_uid": uid,
            **more,
        }
        found = KillablePlugin(self.parent, self.root / uid, settings)
        self.stack.callback(found.close)
        return found

    def at_work(self, uid: str) -> KillablePlugin:
        """A plugin that is started, and waited for."""
        found = self.plugin(uid)
        found.start()
        wait_at_work(self, found)
        return found

    def known(self, plugin: KillablePlugin) -> bool:
        """Whether the kubelet calls it."""
        return self.kubelet.knows(plugin_socket(self.root / "kubelet" / "plugins" / DRIVER, plugin.folder.name))

    def work(self) -> None:
        """Prepare and unprepare a claim on every GPU from now on."""
        for number, device in enumerate(DEVICES):
            claim = KnownClaim(f"claim-{number}", f"uid-{number}", frozenset({device}))
            path = f"{RESOURCE_GROUP}/namespaces/default/resourceclaims/{claim.name}"
            status = {"allocation": {"devices": {"results": [result(device)]}}}
            self.api.store(path, status=status)
            stored = self.api.folder(path)[claim.name]
            stored["metadata"].update(uid=claim.uid, namespace="default")
            self.cycles.append(Cycle(self.kubelet, claim))
        for cycle in self.cycles:
            cycle.start()
        self.goes_on()

    def goes_on(self, more: int = 3) -> None:
        """Wait until every claim has been prepared so often again."""
        wanted = rounds(self.cycles) + more
        wait_for(lambda: rounds(self.cycles) >= wanted, 60, "claims are prepared and unprepared")

    def all_well(self) -> None:
        """Every answer was right, and nothing is left of any claim."""
        for cycle in self.cycles:
            cycle.end()
        assert [sentence for cycle in self.cycles for sentence in cycle.wrong] == []
        assert list((self.root / "kubelet" / "plugins" / DRIVER / "claims").iterdir()) == []
        assert list((self.root / "cdi").glob("*.json")) == []

    @property
    def cut(self) -> int:
        """How many calls were cut off."""
        return sum(cycle.cut for cycle in self.cycles)

    def has_a_complete_pool(self) -> bool:
        """With the monitor devices, which are written last."""
        slices = list(self.api.folder(SLICES).values())
        pools = [item["spec"]["pool"] for item in slices if not is_of_monitors(item)]
        return 0 < len(pools) < len(slices) and len(pools) == pools[0]["resourceSliceCount"]

    def written(self) -> list[str]:
        """The requests that changed slices, in order."""
        verbs = ("POST", "PUT", "PATCH", "DELETE")
        return [
            f"{verb} {path}"
            for _, verb, path in self.api.requests
            if verb in verbs and "resourceslices" in path and "dryRun" not in path
        ]


@pytest.fixture
def site(parent: Zygote) -> Iterator[Site]:
    with site_in(parent) as found:
        yield found


@contextmanager
def site_in(parent: Zygote) -> Iterator[Site]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tho-")))
        api = stack.enter_context(ObjectApi())
        api.store(f"/api/v1/nodes/{NODE}")
        (root / "config").write_text(yaml.safe_dump(_kubeconfig(api.server.url)))
        kubelet = RollingKubelet(root / "kubelet" / "plugins_registry")
        kubelet.start()
        stack.callback(kubelet.close)
        yield Site(root, api, kubelet, parent, stack)


def _kubeconfig(server: str) -> dict[str, Any]:
    return {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def page(address: str, name: str) -> tuple[int, str]:
    """Status and text of a health page; 0 while nobody answers."""
    host, _, port = address.partition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    with closing(connection), suppress(OSError):
        connection.request("GET", f"/{name}")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return 0, ""


def wait_at_work(site: Site, plugin: KillablePlugin) -> None:
    wait_for(lambda: AT_WORK in plugin.log(), 60, f"{plugin.folder.name} is at work")
    wait_for(lambda: site.known(plugin), 60, f"the kubelet knows {plugin.folder.name}")


@pytest.mark.long
def test_a_test_that_kills_the_plugin_asks_the_instance_that_takes_the_node_back(site: Site) -> None:
    old = site.at_work("old")
    new = site.at_work("new")
    wait_for(lambda: "standing by" in old.log(), 60, "the old plugin stands by")
    command = [TESSERA, "acceptance", "gpu-0", "--yes", "--kill-plugin", "--kubelet-dir", str(site.root / "kubelet")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "the next process has removed the partition" in answer.stdout
    assert (new.running, BACK in old.log()) == (False, True)
    site.all_well()


@pytest.mark.long
def test_no_call_fails_while_one_plugin_takes_over_from_another(site: Site) -> None:
    old = site.at_work("old")
    site.work()
    new = site.at_work("new")
    site.goes_on()
    old.end()
    assert not site.known(old)
    site.goes_on()
    assert new.running
    assert site.cut == 0
    site.all_well()


@pytest.mark.long
def test_a_plugin_that_takes_over_an_idle_node_writes_no_slice(site: Site) -> None:
    old = site.at_work("old")
    wait_for(site.has_a_complete_pool, 60, "the slices are there")
    before = {name: item["metadata"]["resourceVersion"] for name, item in site.api.folder(SLICES).items()}
    written = site.written()
    new = site.at_work("new")
    old.end()
    wait_for(lambda: "registered with the kubelet" in new.log(), 60, "the newcomer serves alone")
    assert site.written() == written
    assert {name: item["metadata"]["resourceVersion"] for name, item in site.api.folder(SLICES).items()} == before


@pytest.mark.long
def test_a_plugin_that_could_not_do_the_work_takes_nothing_from_one_that_does(site: Site) -> None:
    site.at_work("old")
    site.work()
    claims = site.root / "kubelet" / "plugins" / DRIVER / "claims"
    (claims / "later.json").write_text(
        '{"version": 2, "namespace": "a", "name": "b", "uid": "later", "phase": "prepared", "devices": []}'
    )
    address = f"127.0.0.1:{site.stack.enter_context(kept_port())}"
    new = site.plugin("new", health_address=address)
    new.start()
    wait_for(lambda: "could not serve the node" in new.log(), 60, "the newcomer says why it waits")
    assert "version is 2, this program reads version 1" in new.log()
    assert page(address, "livez")[0] == HTTPStatus.OK
    status, text = page(address, "readyz")
    assert status == HTTPStatus.SERVICE_UNAVAILABLE
    assert "version is 2" in text
    site.goes_on()
    assert not site.known(new)
    (claims / "later.json").unlink()
    wait_at_work(site, new)
    wait_for(lambda: page(address, "readyz")[0] == HTTPStatus.OK, 60, "it is ready")
    assert page(address, "livez")[0] == HTTPStatus.OK
    site.goes_on()
    assert site.cut == 0
    site.all_well()


@pytest.mark.long
def test_a_node_that_is_being_taken_out_does_not_change_hands(site: Site) -> None:
    """What the one at work removes then, its lock among it, is nothing for another to go on with."""
    old = site.at_work("old")
    wait_for(site.has_a_complete_pool, 60, "the slices are there")
    lease = f"{leases('tessera')}/{HEARTBEAT}"
    site.api.store(lease, metadata={"name": HEARTBEAT, "annotations": {LEAVING: "true"}}, spec={})
    wait_for(lambda: "Tessera is being uninstalled" in old.log(), 60, "it has heard of it")
    new = site.plugin("new")
    new.start()
    wait_for(lambda: UNINSTALLING in new.log(), 60, "the newcomer says why it waits")
    assert (site.root / "kubelet" / "plugins" / DRIVER / "lock").exists()
    site.api.store(lease, metadata={"name": HEARTBEAT}, spec={})
    wait_at_work(site, new)


@pytest.mark.long
def test_a_plugin_at_work_that_does_not_answer_is_asked_once_a_second(site: Site) -> None:
    """Each time the newcomer looks at its Node and at all GPUs."""
    folder = site.root / "kubelet" / "plugins" / DRIVER
    owner = InstanceLock(folder, plugin_socket(folder, "silent"), plugin_socket(folder, ""))
    assert owner.take()
    new = site.plugin("new")
    new.start()
    asked = wait_for(lambda: asks(new), 20, "it asks")
    began = time.monotonic()
    wait_for(lambda: asks(new) >= asked + 3, 30, "it asks again")
    assert time.monotonic() - began > 2 * ASK_INTERVAL_SECONDS
    owner.release()
    wait_at_work(site, new)


def test_a_claim_that_hangs_does_not_keep_all_others_waiting_for_a_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes through while the plugin at work waits for what it has begun: after a try in vain it goes on."""
    monkeypatch.setattr("kubelet_plugin.upgrade.rolling_update.CLAIMS_TIMEOUT_SECONDS", 0.05)
    tries: list[str] = []

    def observer(step: HandOver, moment: str) -> None:
        if moment == "before":
            tries.append(step)

    with tempfile.TemporaryDirectory(prefix="tho-") as folder:
        settings = node_settings(node_name=NODE, gpus="sim:h100-pcie-4", kubelet_dir=folder, pod_uid="old")
        old: Any = RollingInstance(settings, threading.Event(), observer)
        with closing(PluginSockets(settings, old._lock)) as old._sockets:
            old._plugin = SimpleNamespace(working=True, uninstalling=False)
            answers = {old._hand_over(HandOverRequest("new")).result for _ in range(3)}
    assert answers == {HandOverResult.NOT_YET}
    assert tries == [HandOver.FINISH_CLAIMS]


def asks(plugin: KillablePlugin) -> int:
    """How often it has asked another for the node."""
    return sum(point.step == HandOver.ASK and point.moment == "before" for point in plugin.seen())


@pytest.mark.long
def test_sockets_of_a_plugin_that_was_killed_are_removed_by_the_next(site: Site) -> None:
    dead = site.at_work("dead")
    dead.kill()
    assert plugin_socket(site.root / "kubelet" / "plugins" / DRIVER, "dead").exists()
    site.at_work("next")
    wait_for(lambda: not site.known(dead), 60, "the kubelet forgets who is dead")
    assert not plugin_socket(site.root / "kubelet" / "plugins" / DRIVER, "dead").exists()


@pytest.mark.long
@pytest.mark.parametrize("point", [OLD_DIES[4]], ids=str)
def test_the_newcomer_goes_on_where_the_old_plugin_dies_handing_over(site: Site, point: Point) -> None:
    old_dies(site, point)


@pytest.mark.long
@pytest.mark.parametrize("point", [NEW_DIES[1]], ids=str)
def test_the_old_plugin_takes_the_node_back_where_the_newcomer_dies(site: Site, point: Point) -> None:
    new_dies(site, point)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_whoever_dies_wherever_in_a_hand_over_nothing_is_lost(parent: Zygote, number: int) -> None:
    for point in OLD_DIES:
        with site_in(parent) as site:
            old_dies(site, point)
    for point in NEW_DIES:
        with site_in(parent) as site:
            new_dies(site, point)
    for point in LEAVING_DIES:
        with site_in(parent) as site:
            leaving_dies(site, point)


def old_dies(site: Site, point: Point) -> None:
    old = site.at_work("old")
    site.work()
    old.order(point)
    new = site.plugin("new")
    new.start()
    assert old.killed()
    wait_at_work(site, new)
    site.goes_on()
    site.all_well()


def new_dies(site: Site, point: Point) -> None:
    old = site.at_work("old")
    site.work()
    new = site.plugin("new")
    new.order(point)
    new.start()
    assert new.killed()
    site.goes_on()
    assert old.running
    new.start()
    wait_for(lambda: old.log().count("handing over") >= 1, 60, "the next try")
    wait_at_work(site, new)
    old.end()
    site.goes_on()
    site.all_well()


def leaving_dies(site: Site, point: Point) -> None:
    old = site.at_work("old")
    site.work()
    site.at_work("new")
    old.order(point)
    old.end()
    site.goes_on()
    site.all_well()


@pytest.mark.long
def test_a_plugin_that_can_not_read_a_claim_takes_over_once_that_has_ended(site: Site) -> None:
    """So does one of a version that knows no shared GPUs."""
    old = site.at_work("old")
    site.work()
    record = site.root / "kubelet" / "plugins" / DRIVER / "claims" / "uid-shared.json"
    content = {"namespace": "default", "name": "shared", "uid": "uid-shared", "phase": "prepared", "devices": []}
    record.write_text(json.dumps({"version": 3, **content}))
    new = site.plugin("new")
    new.start()
    wait_for(lambda: "claim default/shared has version 3" in new.log(), 60, "the new plugin refuses the node")
    site.goes_on()
    assert (site.known(old), site.known(new)) == (True, False)
    record.unlink()
    wait_at_work(site, new)
    site.goes_on()
    site.all_well()


@pytest.mark.long
def test_the_driver_is_open_once_however_often_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays open, so that GPUs stay awake; a newcomer may look for hours."""
    now = most = 0

    @contextmanager
    def counted(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal now, most
        with open_host(*arguments, **options) as found:
            now, most = now + 1, max(most, now + 1)
            try:
                yield found
            finally:
                now -= 1

    monkeypatch.setattr("kubelet_plugin.upgrade.rolling_update.open_host", counted)
    with ObjectApi() as api, ExitStack() as awake:
        api.store(f"/api/v1/nodes/{NODE}")["metadata"]["uid"] = "uid"
        settings = node_settings(
            node_name=NODE, gpus="sim:h100-pcie-4", host_root=tmp_path / "host", sim_latency="zero",
            state_dir=tmp_path / "state", kubeconfig=kubeconfig(tmp_path, api),
        )  # fmt: skip
        for _ in range(4):
            rolling_update.preflight(settings, awake)
            assert now == 1
    assert now == 0
    assert most == 2, "the next is open before the last is closed"


def kubeconfig(folder: Path, api: ObjectApi) -> Path:
    path = folder / "config"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": api.server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_plugin_that_only_asks_for_the_node_requests_no_mig_mode(tmp_path: Path) -> None:
    """Another driver may own the GPU; the new plugin does not know that yet."""
    with ObjectApi() as api:
        api.store(f"/api/v1/nodes/{NODE}")
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(api.server.url)))
        settings = node_settings(
            node_name=NODE,
            kubeconfig=kubeconfig,
            gpus="sim:dgx-a100",
            mig_gpus="0",
            state_dir=tmp_path / "state",
            host_root=tmp_path / "host",
            sim_latency="zero",
        )
        with ExitStack() as awake:
            rolling_update.preflight(settings, awake)
        with open_host(settings, lasting=True) as (host, _):
            assert host.discover().gpus[0].mig_mode is MigMode.DISABLED
