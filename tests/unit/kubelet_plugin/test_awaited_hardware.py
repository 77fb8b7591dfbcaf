"""A node plugin that starts before the NVIDIA driver is loaded: pods that end are released, none waits for nothing."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml

from driver.errors import HardwareError
from driver.kube.get_and_list import RESOURCE_GROUP
from driver.model.plan import PATH
from driver.simulator.node import SimulatedNode
from driver.slices.slice_names import MONITORS
from kubelet_plugin import app
from kubelet_plugin.settings import node_settings
from tests.harness.waiting import wait_for
from tests.support.api_server import SLICES, ObjectApi
from tests.support.claims import DRIVER, NODE, result
from tests.support.faulty_api import kubeconfig_of
from tests.support.invariants import Facts, read_facts, violations
from tests.support.killable import KillablePlugin, Point, Zygote
from tests.support.kubelet import AnswerError, KnownClaim, Kubelet

FULL, SHARE, PARTITION = "gpu-1", "gpu-2-share-0", "gpu-0-mig-1g10gb-6"
THERE, SERVING = "the NVIDIA driver is there", " serving "
pytestmark = pytest.mark.long

NOT_LOADED = r"NVML says DRIVER_NOT_LOADED \(9, the nvidia kernel module is not loaded\)"


@dataclass
class Site:
    """A node with four GPUs, of which one is shared, its plugin, its kubelet and an API server."""

    root: Path
    api: ObjectApi
    kubelet: Kubelet
    plugin: KillablePlugin
    claims: list[KnownClaim] = field(default_factory=list)

    @property
    def node(self) -> SimulatedNode:
        return SimulatedNode.attach(self.root / "host")

    def claim(self, device: str) -> KnownClaim:
        """A claim with this device."""
        claim = KnownClaim(f"claim-{device}", f"uid-{device}", frozenset({device}))
        path = f"{RESOURCE_GROUP}/namespaces/default/resourceclaims/{claim.name}"
        self.api.store(path, status={"allocation": {"devices": {"results": [result(device)]}}})
        self.api.folder(path)[claim.name]["metadata"].update(uid=claim.uid, namespace="default")
        return claim

    def start(self) -> None:
        """Start the plugin and register it."""
        self.plugin.start()
        self.kubelet.meet()

    def kill(self) -> None:
        self.kubelet.part()
        self.plugin.kill()

    def prepared(self) -> None:
        """Prepare a full GPU, a share and a partition, and kill the plugin."""
        self.start()
        self.kubelet.prepare(self.claims)
        self.kill()

    def reboot(self) -> None:
        """Of the machine; /var/run is empty afterwards."""
        self.node.reboot()
        shutil.rmtree(self.root / "cdi")

    def take_driver(self, call: str = "nvmlInit", code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED) -> None:
        self.node.faults.fail(call, code=code)

    def bring_driver(self) -> None:
        """The driver is loaded; wait until the plugin has changed nothing but its mind."""
        before = self.plugin.log().count(THERE)
        self.node.faults.clear()
        self.kubelet.part()
        wait_for(lambda: self.plugin.log().count(THERE) > before, 60, "the plugin finds the driver")
        # Until then the socket of the plugin that waited may still be there, and cancels calls when it goes.
        wait_for(lambda: SERVING in self.plugin.log().rpartition(THERE)[2], 60, "the plugin serves the kubelet anew")
        self.kubelet.meet()

    def left(self) -> list[str]:
        """Names of the claims' files that are left, and of partitions."""
        state = self.root / "kubelet" / "plugins" / DRIVER / "claims"
        files = [*state.glob("*.json"), *(self.root / "cdi").glob(f"{DRIVER}*.json")]
        places = (place for place, _ in self.facts().partitions())
        return [*(path.name for path in files), *(f"{profile} at {start}" for _, profile, start in places)]

    def facts(self) -> Facts:
        return read_facts(self.root / "host", self.root / "kubelet" / "plugins" / DRIVER, self.root / "cdi")

    def unprepare(self, claim: KnownClaim) -> str:
        """As the pod's end does; returns the error."""
        try:
            self.kubelet.unprepare([claim])
        except AnswerError as error:
            return str(error)
        return ""


@contextmanager
def site_in(parent: Zygote, **settings: object) -> Iterator[Site]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taw-")))
        api = stack.enter_context(ObjectApi())
        api.store(f"/api/v1/nodes/{NODE}")
        (root / "config").write_text(yaml.safe_dump(dict(kubeconfig_of(api.server.url))))
        flags = {
            "node_name": NODE, "kubeconfig": root / "config", "gpus": "sim:h100-pcie-4", "sim_latency": "zero",
            "shares": "2=4", "kubelet_dir": root / "kubelet", "cdi_dir": root / "cdi", "host_root": root / "host",
            **settings,
        }  # fmt: skip
        plugin = KillablePlugin(parent, root / "plugin", flags)
        stack.callback(plugin.close)
        registry = root / "kubelet" / "plugins_registry"
        uid = f"-{settings['pod_uid']}" if "pod_uid" in settings else ""
        socket = root / "kubelet" / "plugins" / DRIVER / f"dra{uid}.sock"
        kubelet = Kubelet(socket, registry / f"{DRIVER}{uid}-reg.sock")
        stack.callback(kubelet.part)
        site = Site(root, api, kubelet, plugin)
        site.claims += [site.claim(device) for device in (FULL, SHARE, PARTITION)]
        yield site


@pytest.fixture
def site(parent: Zygote) -> Iterator[Site]:
    with site_in(parent) as found:
        yield found


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("nvmlInit", "DRIVER_NOT_LOADED"),
        ("nvmlInit", "LIBRARY_NOT_FOUND"),
        ("nvmlInit", "LIB_RM_VERSION_MISMATCH"),
        ("nvmlDeviceGetCount", "UNKNOWN"),
    ],
)
def test_after_a_reboot_every_pod_that_ends_is_released_before_the_driver_is_loaded(
    site: Site, call: str, code: str
) -> None:
    site.prepared()
    site.reboot()
    site.take_driver(call, getattr(pynvml, f"NVML_ERROR_{code}"))
    site.start()
    assert [site.unprepare(claim) for claim in site.claims] == ["", "", ""]
    assert site.left() == []
    assert f"NVML says {code}" in site.plugin.log()
    assert "Traceback" not in site.plugin.log()


def test_without_a_reboot_only_the_partition_waits_for_the_driver_and_says_so(site: Site) -> None:
    site.prepared()
    site.take_driver()
    site.start()
    full, share, partition = site.claims
    assert site.unprepare(full) == site.unprepare(share) == ""
    wrong = site.unprepare(partition)
    assert f"partition {PARTITION} can't be removed before the node's NVIDIA driver can be used: NVML says " in wrong
    assert "DRIVER_NOT_LOADED (9, the nvidia kernel module is not loaded)" in wrong
    assert site.left() == [f"{partition.uid}.json", "1g.10gb at 6"]
    site.bring_driver()
    wait_for(lambda: site.left() == [], 60, "what waited is released without the kubelet")
    assert site.unprepare(partition) == ""


def test_a_pod_that_starts_before_the_driver_is_loaded_is_told_why_it_waits_and_starts_afterwards(site: Site) -> None:
    site.start()
    wait_for(lambda: any(name.endswith(MONITORS) for name in site.api.folder(SLICES)), 60, "the last of its slices")
    site.kill()
    written = len(site.api.requests)
    site.take_driver()
    site.start()
    with pytest.raises(
        AnswerError, match=f"can't be prepared before the node's NVIDIA driver can be used: {NOT_LOADED}"
    ):
        site.kubelet.prepare(site.claims[:1])
    assert site.left() == []
    wait_for(lambda: events(site, "PrepareFailed"), 60, "the Event on the claim")
    assert not [path for _, _, path in site.api.requests[written:] if "resourceslices" in path]
    site.bring_driver()
    site.kubelet.prepare(site.claims)
    assert violations(site.facts()) == []
    assert site.plugin.running


def test_while_the_driver_is_missing_the_node_says_that_it_can_start_no_pod_with_a_gpu(site: Site) -> None:
    def plan_status() -> dict[str, Any]:
        plan = site.api.folder(PATH).get(NODE) or {}
        return dict(plan.get("status") or {})

    site.start()
    wait_for(lambda: plan_status().get("inventory"), 60, "the plan's status")
    site.kill()
    before = plan_status()
    site.take_driver()
    site.start()
    wait_for(lambda: plan_status()["conditions"], 60, "the condition")
    [condition] = plan_status()["conditions"]
    assert condition["type"] == "Unable"
    assert "the node's NVIDIA driver can't be used: NVML says DRIVER_NOT_LOADED" in condition["message"]
    assert {**plan_status(), "conditions": []} == before
    wait_for(lambda: events(site, "NodeUnable"), 60, "the Event on the Node")
    site.bring_driver()
    wait_for(lambda: not plan_status()["conditions"], 60, "the condition has ended")
    wait_for(lambda: events(site, "NodeAble"), 60, "the Event on the Node that it has ended")


def events(site: Site, reason: str) -> list[str]:
    found = site.api.folder("/api/v1/namespaces/default/events").values()
    return [event["message"] for event in found if event["reason"] == reason]


def test_an_instance_of_a_rolling_update_waits_for_the_driver_in_the_same_way(parent: Zygote) -> None:
    with site_in(parent, pod_uid="one") as site:
        site.prepared()
        site.reboot()
        site.take_driver()
        site.start()
        assert [site.unprepare(claim) for claim in site.claims] == ["", "", ""]
        site.node.faults.clear()
        wait_for(lambda: site.plugin.log().count("active on this node") == 2, 60, "the driver is found")
        site.kubelet.prepare(site.claims)
        assert violations(site.facts()) == []


def test_a_claim_whose_record_is_lost_waits_for_the_driver_unless_it_has_a_whole_gpu(site: Site) -> None:
    site.prepared()
    for claim in site.claims:
        (site.root / "kubelet" / "plugins" / DRIVER / "claims" / f"{claim.uid}.json").unlink()
    site.take_driver()
    site.start()
    full, share, partition = site.claims
    assert site.unprepare(full) == site.unprepare(share) == ""
    assert "can't be removed before the node's NVIDIA driver can be used" in site.unprepare(partition)
    assert site.left() == [f"{DRIVER}-claim_{partition.uid}.json", "1g.10gb at 6"]
    site.bring_driver()
    assert site.unprepare(partition) == ""
    assert site.left() == []


def test_waiting_for_the_driver_ends_with_the_process(site: Site) -> None:
    site.start()
    site.kill()
    site.take_driver()
    site.start()
    site.kubelet.part()
    site.plugin.end()
    assert not site.kubelet.plugin_socket.exists()
    assert not site.kubelet.registration_socket.exists()


RELEASING = [
    Point("mark-releasing", "before"),
    Point("mark-releasing", "after", 3),
    Point("remove-cdi-spec", "before", 3),
    Point("remove-cdi-spec", "after"),
    Point("remove-record", "before"),
    Point("remove-record", "after", 3),
]


def test_a_plugin_that_is_killed_while_it_releases_without_the_driver_leaves_nothing(site: Site) -> None:
    old, *new = site.claims[::-1]
    assert old.devices == {PARTITION}
    new.append(site.claim("gpu-3-mig-1g10gb-6"))
    for point in RELEASING:
        site.start()
        site.kubelet.prepare([old])
        site.kill()
        site.reboot()
        site.start()
        site.kubelet.prepare(new)
        site.kill()
        site.take_driver()
        site.plugin.order(point)
        site.start()
        waiting = [site.unprepare(claim) for claim in (old, *new)]
        assert site.plugin.killed(), point
        site.kubelet.part()
        site.start()
        waiting = [site.unprepare(claim) for claim in (old, *new)]
        assert waiting[:3] == ["", "", ""], point
        assert "NVIDIA driver" in waiting[3], point
        assert site.left() == [f"{new[2].uid}.json", "1g.10gb at 6"], point
        site.bring_driver()
        wait_for(lambda: site.left() == [], 60, f"nothing is left after a kill {point}")
        site.kill()


def test_what_a_failed_start_has_built_is_freed_before_the_plugin_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of the process has switched the garbage collector off."""
    built: list[weakref.ref[object]] = []
    held: list[bool] = []

    class FailingPlugin:
        def __init__(self, *_: object) -> None:
            self.cycle = self
            built.append(weakref.ref(self))
            raise HardwareError("counting GPUs: NVML says UNKNOWN (999)")

    class Waiting:
        def __init__(self, *_: object) -> None:
            held.append(built[-1]() is not None)

        def serve(self, stop: threading.Event) -> None:
            if len(built) == 3:
                stop.set()

    monkeypatch.setattr(app, "NodePlugin", FailingPlugin)
    monkeypatch.setattr(app, "AwaitedHardware", Waiting)
    monkeypatch.setattr(app, "store_first_config", lambda *_: None)
    gc.disable()
    try:
        assert app.discovered_plugin(node_settings(node_name=NODE), threading.Event()) is None
    finally:
        gc.enable()
    assert held == [False] * 3
