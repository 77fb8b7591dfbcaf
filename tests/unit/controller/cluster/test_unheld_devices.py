"""Which devices are taken back at once."""

from __future__ import annotations

from controller.cluster.claim_index import PoolDevice
from controller.cluster.node_views import NodeView
from controller.cluster.unheld_devices import UnheldDevices
from driver.model.plan import PlanStatus
from tests.support.node_views import changes, fleet_of


def test_devices_of_a_node_that_can_start_no_pod_are_taken_back_at_once() -> None:
    waiting, working = (
        NodeView(name, name, name, PlanStatus(), {}, frozenset(), {}, unable=unable)
        for name, unable in (("waiting", "the driver is missing"), ("working", None))
    )
    devices = [PoolDevice(pool, "gpu-0") for pool in ("waiting", "working", "gone")]
    index, views = UnheldDevices(), [waiting, working]
    index.update(views, changes(views), fleet_of(*views))
    assert index.on_unable_nodes(devices) == {devices[0]}
