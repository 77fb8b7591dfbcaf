"""The plan's status shows what the slices show, and the slices name the partitions that monitoring looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.model.plan import PATH
from driver.slices import publisher
from driver.slices.build import SliceBuilder
from kubelet_plugin.api_writers import with_mig_uuids
from kubelet_plugin.inventory.published_devices import OFFER_EVERYTHING, PublishPolicy
from kubelet_plugin.plan import plan_status
from tests.harness.waiting import wait_for
from tests.support.claims import NODE
from tests.support.faulty_api import FaultyApi, PluginOnApi
from tests.support.node import start_node

SMALL = "gpu-0-mig-1g10gb-0"


@pytest.mark.long
def test_a_status_written_before_the_slices_is_corrected_after_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_status, "STATUS_COALESCE_SECONDS", 0.0)
    monkeypatch.setattr(plan_status, "STATUS_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(publisher, "COALESCE_INTERVAL_SECONDS", 1.0)
    with FaultyApi() as api:
        plugin = PluginOnApi(root, api)

        def offered() -> int:
            status = api.folder(PATH)[NODE].get("status", {})
            return int(status.get("summary", {}).get("offered", 0))

        with plugin.running():
            wait_for(plugin.published, 60, "the first slices")
            wait_for(lambda: offered() == len(plugin.published()), 60, "the status counts the offers in the slices")


def test_a_held_partition_carries_its_uuid_unless_slices_must_not_show_what_is_held(tmp_path: Path) -> None:
    node = start_node(tmp_path)
    claim = node.api.allocate("one", SMALL)
    node.preparer.prepare(claim)

    def uuids(policy: PublishPolicy) -> dict[str, str]:
        records = node.node.checkpoint.records()
        content = SliceBuilder(node.node.pool).build(with_mig_uuids(node.node.inventory.published(policy), records))
        devices = (device for each in content.values() for device in each.get("devices", ()))
        named = ((device["name"], device["attributes"].get("uuid", {}).get("string", "")) for device in devices)
        return {name: uuid for name, uuid in named if uuid.startswith("MIG-")}

    assert uuids(OFFER_EVERYTHING) == {SMALL: node.partitions()[0].uuid}
    assert uuids(PublishPolicy(complete=True)) == {}
    node.preparer.unprepare(claim)
    assert uuids(OFFER_EVERYTHING) == {}
