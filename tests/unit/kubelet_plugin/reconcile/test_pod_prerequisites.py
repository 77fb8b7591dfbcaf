"""A driver that is replaced on the host: new containers get its files, and people hear which pods have old ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.model.plan import PATH
from kubelet_plugin.inventory import scan
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.reconcile.pod_prerequisites import OutdatedClaims
from tests.harness.waiting import wait_for
from tests.support.claims import DRIVER, NODE
from tests.support.faulty_api import FaultyApi, PluginOnApi, ask

SMALL = "gpu-0-mig-1g10gb-0"
EVENTS = "/api/v1/namespaces/default/events"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SCAN_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(scan, "MIN_SCAN_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(scan, "EVENT_TIMEOUT_SECONDS", 0.3)


class Node:
    """A node with one prepared claim, and what it tells."""

    def __init__(self, root: Path, api: FaultyApi) -> None:
        self.root, self.api = root, api
        self.plugin = PluginOnApi(root, api)
        self.claim = self.plugin.allocate("one", SMALL)

    def spec_file(self, claim: ClaimReference | None = None) -> Path:
        return self.root / "cdi" / f"{DRIVER}-claim_{(claim or self.claim).uid}.json"

    def mounts(self) -> list[str]:
        spec: dict[str, Any] = json.loads(self.spec_file().read_text())
        return [mount["hostPath"] for mount in spec["containerEdits"]["mounts"]]

    def conditions(self) -> list[str]:
        status = self.api.folder(PATH)[NODE].get("status", {})
        return [f"{condition['type']}: {condition['message']}" for condition in status.get("conditions", ())]

    def events(self, reason: str) -> list[str]:
        events = list(self.api.folder(EVENTS).values())
        return [event["message"] for event in events if event["reason"] == reason]

    def replace_driver(self) -> tuple[Path, Path]:
        """Another version of the driver takes the place of the present one; the library of each."""
        [link] = (self.root / "host").rglob("libcuda.so.1")
        old, new = link.resolve(), link.with_name("libcuda.so.999.1")
        old.unlink()
        link.unlink()
        new.write_text("libcuda of another version\n")
        link.symlink_to(new.name)
        return old, new


@pytest.fixture
def node(root: Path) -> Iterator[Node]:
    with FaultyApi() as api:
        yield Node(root, api)


@pytest.mark.long
def test_specs_name_the_files_of_the_new_driver_and_the_finding_lasts_as_long_as_the_claim(node: Node) -> None:
    with node.plugin.running() as kubelet:
        assert ask(kubelet, "Prepare", node.claim) == {"one": ""}
        old, new = node.replace_driver()
        wait_for(lambda: str(new) in node.mounts(), 60, "the spec names the new file")
        assert str(old) not in node.mounts()
        changed = f"files of the NVIDIA driver on this node have changed: {old} is gone"
        wait_for(lambda: any(changed in condition for condition in node.conditions()), 60, "the plan's status")
        wait_for(lambda: any(changed in event for event in node.events("DriverFilesChanged")), 60, "the Event")
        later = node.plugin.allocate("two", "gpu-0-mig-1g10gb-1")
        assert ask(kubelet, "Prepare", later) == {"two": ""}
        assert str(new) in node.spec_file(later).read_text()
        assert ask(kubelet, "Unprepare", node.claim) == {"one": ""}
        wait_for(lambda: not node.conditions(), 60, "no container has the old files any more")
        assert not node.events("DeviceRepaired")


@pytest.mark.long
def test_the_finding_survives_a_restart_of_the_plugin_but_no_reboot(node: Node) -> None:
    with node.plugin.running() as kubelet:
        assert ask(kubelet, "Prepare", node.claim) == {"one": ""}
        old, new = node.replace_driver()
        wait_for(lambda: str(new) in node.mounts() and node.conditions(), 60, "the new file, and the finding")
    [condition] = node.conditions()
    node.api.store(f"{PATH}/{NODE}", spec={}, status={})
    with node.plugin.running() as kubelet:
        wait_for(lambda: node.conditions() == [condition], 60, "the finding is there again")
        assert str(old) in condition
        assert ask(kubelet, "Unprepare", node.claim) == {"one": ""}
        wait_for(lambda: not node.conditions(), 60, "no container has the old files any more")
    [kept] = node.root.rglob("driver-files.json")
    assert OutdatedClaims(kept.parent, "another boot").gone == {}


@pytest.mark.long
def test_a_node_without_claims_only_says_once_that_its_driver_has_changed(node: Node) -> None:
    with node.plugin.running() as kubelet:
        assert ask(kubelet, "Prepare", node.claim) == {"one": ""}
        assert ask(kubelet, "Unprepare", node.claim) == {"one": ""}
        node.replace_driver()
        wait_for(lambda: len(node.events("DriverFilesChanged")) == 1, 60, "the Event")
        assert not node.conditions()


@pytest.mark.long
def test_a_driver_that_changed_while_no_plugin_ran_is_found_by_the_specs_of_prepared_claims(node: Node) -> None:
    with node.plugin.running() as kubelet:
        assert ask(kubelet, "Prepare", node.claim) == {"one": ""}
    wanted = node.spec_file().read_text()
    gone = str(next((node.root / "host").rglob("libcuda.so.1")).with_name("libcuda.so.111.1"))
    node.spec_file().write_text(wanted.replace(node.mounts()[0], gone))
    with node.plugin.running():
        wait_for(lambda: node.spec_file().read_text() == wanted, 60, "the spec is as it should be")
        wait_for(lambda: any(f"{gone} is gone" in condition for condition in node.conditions()), 60, "the condition")
        assert not node.events("DeviceRepaired")


@pytest.mark.long
def test_what_an_earlier_version_of_the_plugin_wrote_differently_is_written_again_in_silence(node: Node) -> None:
    with node.plugin.running() as kubelet:
        assert ask(kubelet, "Prepare", node.claim) == {"one": ""}
    wanted = node.spec_file().read_text()
    node.spec_file().write_text(wanted.replace("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=none"))
    with node.plugin.running():
        wait_for(lambda: node.spec_file().read_text() == wanted, 60, "the spec is as it should be")
        assert not node.conditions()
        node.spec_file().write_text(wanted.replace("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=none"))
        wait_for(lambda: node.events("DeviceRepaired"), 60, "what somebody else changed is told")
    assert node.spec_file().read_text() == wanted
    assert not node.events("DriverFilesChanged")
