"""A cluster as commands read it, written short, for the map; and the example of docs/map.md.

``python -m tests.support.map_cluster`` writes docs/map.svg and prints the text of the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click
import msgspec

from controller.cluster.cache import Snapshot
from controller.cluster.claim_index import ClaimIndex, ClusterState
from controller.cluster.fleet_builder import SHARE, FleetBuilder
from controller.cluster.node_views import NodeViews, PoolPart, PublishedSlice
from controller.cluster.unheld_devices import UnheldDevices
from controller.demand.feasibility import Matching
from controller.demand.pending_claims import Queue
from controller.report.cluster_view import ClusterView
from controller.report.map_model import MapNode, cluster_map
from driver.kube.types import GpuNodePlan
from driver.model.device import is_monitor
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from driver.slices.slice_names import Pool
from tessera.map_drawing import draw_map, draw_summary
from tessera.map_svg import map_as_svg
from tests.support.gpus import H100
from tests.support.queues import DRIVER, Situation, gpu_in, profile, request

DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class MapCluster:
    """Nodes with GPUs, the claims that hold devices of them, and the published devices that are offered."""

    situation: Situation = field(default_factory=lambda: Situation([]))
    reports: dict[str, list[GpuReport]] = field(default_factory=dict)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    offered: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    missing_slices: set[str] = field(default_factory=set)

    def node(self, name: str, plan: dict[str, Any] | None = None, **spec: Any) -> Self:
        """A node without GPUs; ``plan`` are fields of its GpuNodePlan."""
        self.situation.node(name, **spec)
        self.plans[name] = plan or {}
        self.reports.setdefault(name, [])
        return self

    def gpu(
        self, node: str, number: int, product: str = H100, facts: dict[str, Any] | None = None, **report: Any
    ) -> Self:
        if node not in self.plans:
            self.node(node)
        gpu = gpu_in(node, number, product, **(facts or {}))
        self.reports[node].append(GpuReport(gpu, number, **report))
        return self

    def holds(
        self,
        claim: str,
        node: str,
        *devices: str,
        device_class: str = "gpu-inference",
        shares: int = 1,
        gib: int | None = None,
    ) -> Self:
        """``claim`` is ``namespace/name``; ``gib`` what it has of a shared device."""
        part = {} if gib is None else {"shareID": claim, "consumedCapacity": {"memory": f"{gib}Gi"}}
        namespace, name = claim.split("/")
        pool, results = Pool(node, DRIVER), list[dict[str, Any]]()
        for device in devices:
            of_pool = pool.of_monitors if is_monitor(device) else pool
            result = {"request": "gpu", "driver": DRIVER, "pool": of_pool.name, "device": device}
            results.append({**result, **part, "adminAccess": is_monitor(device)})
        status = {"allocation": {"devices": {"results": results}}}
        self.situation.claim(
            name, request(device_class), status=status, metadata={"namespace": namespace, "uid": claim}
        )
        held = (device for device in devices if not is_monitor(device))
        self.held.setdefault(node, {}).update(dict.fromkeys(held, shares))
        return self

    def fails(
        self, claim: str, node: str, cause: str = "GPU", message: str = "NVML: 999", what: str = "unprepared"
    ) -> Self:
        """``node`` reports since midnight that it can not prepare (or release) ``claim``."""
        failed = {"claim": claim, "uid": claim, "since": "2026-11-26T00:00:00Z", "cause": cause, "message": message}
        self.plans[node].setdefault("status", {}).setdefault(what, []).append(failed)
        return self

    def offers(self, node: str, *devices: str) -> Self:
        self.offered.setdefault(node, []).extend(devices)
        return self

    def view(self) -> ClusterView:
        """The cluster as the caches would have it."""
        claims, views, plans = ClaimIndex(DRIVER, self.situation.claims), NodeViews(DRIVER), {}
        for name, reports in self.reports.items():
            raw = {**self.plans[name], "metadata": {"name": name, **self.plans[name].get("metadata", {})}}
            raw["status"] = {
                "mode": "Planned",
                "inventory": encode_inventory(reports) if reports else "",
                **raw.get("status", {}),
            }
            plans[name] = msgspec.convert(raw, GpuNodePlan)
            offered = self.offered.get(name, [])
            shares = {report.number: report.shares for report in reports}
            devices = self.held.get(name, {}) | {each: _shares(each, shares) for each in offered}
            pool = Pool(name, DRIVER).name
            part = PoolPart(pool, 1, 2 if name in self.missing_slices else 1)
            published = [PublishedSlice(name, part, devices, frozenset(offered))]
            node = self.situation.nodes[name]
            held, parts = claims.held(pool), claims.shared(pool)
            views.update(name, node, plans[name], published, held, shared=parts, node_changed=True)
        situation = self.situation
        cluster = ClusterState(
            claims,
            tuple(situation.classes.values()),
            tuple(situation.pods),
            tuple(situation.nodes.values()),
            taint_rules=tuple(situation.taint_rules),
        )
        snapshot = Snapshot(cluster, plans, views.all(), dict(views.incomplete), views.changes())
        fleet, devices_ = FleetBuilder().build(snapshot.views, snapshot.changed), UnheldDevices()
        devices_.update(snapshot.views, snapshot.changed, fleet)
        return ClusterView(snapshot, fleet, devices_, Queue(cluster, fleet, Matching(DRIVER)))

    def map(self) -> tuple[MapNode, ...]:
        view = self.view()
        return tuple(cluster_map(view))


def _shares(device: str, shares: dict[int, int]) -> int:
    found = SHARE.fullmatch(device)
    return shares[int(found["number"])] if found else 1


def example() -> MapCluster:
    """What docs/map.md shows: one of everything."""
    found = MapCluster()
    linked = {"nvlink_clique": "clique-0"}
    fault = "XID 79 (GPU has fallen off the bus)"
    for number in range(4):
        found.gpu("node-1", number, facts=linked, fault=fault if number == 3 else None)
    found.holds("team-a/train", "node-1", "gpu-0", "gpu-1", device_class="gpu-training").offers("node-1", "gpu-2")
    found.gpu("node-2", 0, facts=linked).gpu("node-2", 1, facts=linked)
    found.gpu("node-2", 2, shares=4, shares_only=True).gpu("node-2", 3, foreign=0b11)
    for start in range(7):
        found.holds(
            f"team-b/serve-{start}", "node-2", f"gpu-0-mig-1g10gb-{start}", device_class="gpu-inference-1g-10gb"
        )
    found.holds("team-b/chat", "node-2", "gpu-1-mig-3g40gb-0", device_class="gpu-inference-3g-40gb")
    found.offers("node-2", "gpu-1-mig-3g40gb-4", "gpu-2-share-1", "gpu-3-mig-2g20gb-2")
    found.holds("team-c/notebook", "node-2", "gpu-2-share-0", device_class="gpu-dev", shares=4)
    found.situation.wants(request(selector=profile("2g.20gb")), name="pending")
    return found


def shared_example() -> MapCluster:
    """What docs/map.md shows of a GPU that claims share by memory."""
    by_memory = SharedMemory(SharingStrategy.TIME_SLICING, 23 * GIB)
    found = MapCluster().gpu("node-3", 0, "NVIDIA L4", shared=by_memory).offers("node-3", "gpu-0-shared")
    for claim, gib in (("team-c/embed", 6), ("team-d/notebook", 3), ("team-a/rank", 8)):
        found.holds(claim, "node-3", "gpu-0-shared", device_class="gpu-shared", gib=gib)
    return found


def main() -> None:
    nodes = example().map()
    (DOCS / "map.svg").write_text(map_as_svg(nodes))
    print(example_text(nodes))
    print(draw_map(shared_example().map(), None))


def example_text(nodes: tuple[MapNode, ...]) -> str:
    """The output of ``tessera map``."""
    return click.unstyle(f"{draw_map(nodes, None)}\n\n{draw_summary(nodes)}\n")


if __name__ == "__main__":
    main()
