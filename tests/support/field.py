"""Small nodes, claims that come and go on them, and what must be true of all that whatever happens to whom."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from controller.cluster.claim_index import PoolDevice
from driver.errors import ApiError
from driver.kube.lease import leases
from driver.model.offer import Offer
from driver.model.plan import PlanSpec
from driver.model.reported_gpus import decode_inventory
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.allocations import Allocations, devices_by_name
from tests.support.controller import plugins
from tests.support.jobs import Jobs, Kubelets
from tests.support.plugin import PluginFlags, PluginProcess
from tests.support.published import DRIVER

HARDWARE = "h100-pcie-4"
"""Four GPUs of 26 devices."""

SMALL, MIDDLE, LARGE, FULL = "gpu-inference-1g-10gb", "gpu-inference-2g-20gb", "gpu-inference-3g-40gb", "gpu-training"

PROMISED_S = 10.0
"""How much longer a pod may wait than without a controller."""

SERVED_S = 30.0
"""When a test gives up: a slow machine may keep nobody's promise, but later nodes would stand alone and serve whom the
controller forgot."""

SOON_S = 60.0

CONFIG_MAP = "/api/v1/namespaces/tessera/configmaps/tessera-fence"
PLANS = "/apis/gpu.tessera.dev/v1alpha1/gpunodeplans"


class Field:
    """``untouched`` is to be asked at the end of every scenario."""

    def __init__(
        self, cluster: Cluster, nodes: list[PluginProcess], allocations: Allocations, kubelets: Kubelets
    ) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.allocations = allocations
        self.kubelets = kubelets
        self.jobs = Jobs(cluster, kubelets)
        self._numbers = itertools.count(1)

    def ask(self, device_class: str, count: int = 1, node: str | None = None) -> list[str]:
        """Pods that want one device each; their names."""
        return [self.jobs.ask(f"job-{next(self._numbers)}", device_class, node) for _ in range(count)]

    def served(self, *names: str, within_s: float = SERVED_S) -> float:
        """Wait until all have devices; seconds since the first was asked for. Fails after ``within_s``."""
        since = min(self.jobs.asked_at[name] for name in names)
        wait_for(
            lambda: all(self.allocations.of(name) for name in names),
            since + within_s - time.monotonic(),
            f"devices for {', '.join(names)}",
        )
        return time.monotonic() - since

    def untouched(self) -> None:
        """Nothing was given out twice, nothing held changed or left the slices while its GPU offered anything."""
        assert self.allocations.overlaps == []
        assert self.allocations.touched == []
        wait_for(lambda: not self.allocations.missing(), SOON_S, "what is held beside offers is in the slices")

    def fenced(self) -> set[PoolDevice]:
        try:
            found = self.cluster.api.get(CONFIG_MAP).get("data") or {}
        except ApiError as error:
            if error.status == 404:
                return set()
            raise
        return {PoolDevice(pool, device) for pool, devices in found.items() for device in devices.split()}

    def offered(self) -> set[PoolDevice]:
        """What the plans offer."""
        found = set()
        for plan in self.cluster.api.get(PLANS)["items"]:
            pool = f"{plan['metadata']['name']}-{DRIVER}"
            inventory = plan.get("status", {}).get("inventory", "")
            numbers = {state.gpu.uuid: state.number for state in decode_inventory(inventory)} if inventory else {}
            for offer in PlanSpec(offers=tuple(plan.get("spec", {}).get("offers", ()))).offered:
                if offer.gpu in numbers:
                    found.add(PoolDevice(pool, _name(numbers[offer.gpu], offer)))
        return found

    def fenced_though_offered(self) -> set[PoolDevice]:
        return self.fenced() & self.offered()

    def offered_on(self, node: str, profile: str) -> list[PoolDevice]:
        """The devices of that profile that are offered on ``node``, and published."""
        pool = f"{node}-{DRIVER}"
        found = [device for device in self.offered() & self.allocations.published() if device.pool == pool]
        return [each for each in found if (p := devices_by_name(HARDWARE)[each.device].profile) and p.name == profile]

    def modes(self) -> list[str]:
        """Whether nodes follow their plans: as they say themselves."""
        return [plan.get("status", {}).get("mode", "") for plan in self.cluster.api.get(PLANS)["items"]]

    def wait_curated(self) -> None:
        """Until the nodes publish what the plans offer and what is held, and nothing else."""
        wait_for(self._curated, 60, "nothing superfluous is offered")

    def end_all(self) -> None:
        self.jobs.end_all()
        wait_for(lambda: not self.allocations.held(), 60, "nothing is held")

    def _curated(self) -> bool:
        held = {device for devices in self.allocations.held().values() for device in devices}
        return self.allocations.published() <= self.offered() | held


def _name(number: int, offer: Offer) -> str:
    """The name of the device that ``offer`` stands for, on the GPU of that number."""
    for device in devices_by_name(HARDWARE).values():
        if device.name.split("-")[1] == str(number) and device.spot == offer.spot:
            return device.name
    return "none"


@contextmanager
def field(cluster: Cluster, names: Sequence[str] = ("n1", "n2")) -> Iterator[Field]:
    """Running nodes whose kubelets prepare what is allocated."""
    stop = threading.Event()
    with plugins(cluster, names, PluginFlags(gpus=f"sim:{HARDWARE}", log_level="info")) as nodes:
        kubelets = Kubelets(nodes)
        allocations = Allocations(cluster, HARDWARE, kubelets.changed)
        allocations.start(stop)
        found = Field(cluster, nodes, allocations, kubelets)
        try:
            yield found
        finally:
            found.jobs.end_all()
            stop.set()
            kubelets.close()


def take_lease(cluster: Cluster) -> None:
    """Take the Lease away from a leader that is dead, so that the next need not wait for its end."""
    cluster.api.request("DELETE", f"{leases('tessera')}/tessera-controller")
