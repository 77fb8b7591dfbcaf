"""Claims and pods for the real scheduler alone: what is allocated, without a kubelet that would run anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from driver.errors import ApiError
from driver.model.device import Device, number_gpus, share_index
from driver.model.gpu import Gpu
from driver.model.gpu_settings import UNSHARED, GpuSharing
from driver.model.offer import DeviceKind
from driver.slices.build import slice_object
from driver.slices.slice_names import Pool
from kubelet_plugin.inventory.inventory import ClaimReference, Inventory
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.plugin import SLICES
from tests.support.published import DRIVER, build_slices
from tests.support.workloads import CLAIMS, PODS, is_gone

SCHEDULED_S = 60.0

REFUSAL = "cannot allocate all claims"


@dataclass(frozen=True)
class Given:
    """One device the scheduler gave to a request."""

    request: str
    driver: str
    pool: str
    device: str


def asked(
    device_class: str, *selectors: str, name: str = "gpu", count: int = 1, memory: str | None = None
) -> dict[str, Any]:
    """One request of a claim; ``selectors`` are CEL and must all be true, ``memory`` is the capacity of that name."""
    cel = [{"cel": {"expression": selector}} for selector in selectors]
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count, "selectors": cel}
    if memory is not None:
        exactly["capacity"] = {"requests": {"memory": memory}}
    return {"name": name, "exactly": exactly}


def matching(attribute: str) -> dict[str, str]:
    """The constraint that all devices of a claim have the same value of ``attribute``."""
    return {"matchAttribute": attribute}


@dataclass
class Scheduling:
    """One claim and one pod at a time, so that no test takes a device from another."""

    cluster: Cluster
    name: str
    paths: list[str] = field(default_factory=list)

    def ask(
        self,
        *requests: dict[str, Any],
        constraints: Sequence[dict[str, Any]] = (),
        config: Sequence[dict[str, Any]] = (),
        node: str | None = None,
        **pod_spec: Any,
    ) -> None:
        """A claim, and a pod that needs it, on ``node`` or on any; ``pod_spec`` are more fields of the pod."""
        devices = {"requests": list(requests), "constraints": list(constraints), "config": list(config)}
        pod = busybox_pod(
            self.name,
            node=node,
            container={"resources": {"claims": [{"name": "devices"}]}},
            resourceClaims=[{"name": "devices", "resourceClaimName": self.name}],
            **pod_spec,
        )
        self._create(CLAIMS, {"metadata": {"name": self.name}, "spec": {"devices": devices}})
        self._create(PODS, pod)

    def given(self) -> list[Given]:
        """What the scheduler gave, once it has."""
        return wait_for(self._results_or_reason, SCHEDULED_S, "an allocation")

    def claim(self) -> dict[str, Any]:
        """The claim as the API server has it."""
        return self.cluster.api.get(f"{CLAIMS}/{self.name}")

    def refused(self) -> str:
        """Why the scheduler gave nothing, once it has looked at what there is: its first word may be of another matter,
        a node that it has only just heard of, say."""
        return wait_for(self._reason, SCHEDULED_S, f'the scheduler to say "{REFUSAL}"')

    def forget(self) -> None:
        """Delete pod and claim, and wait until the devices are free again."""
        forget(self)

    def _create(self, folder: str, body: dict[str, Any]) -> None:
        self.cluster.api.post(folder, body)
        self.paths.append(f"{folder}/{self.name}")

    def _results(self) -> list[Given]:
        status = self.claim().get("status", {})
        results = status.get("allocation", {}).get("devices", {}).get("results", [])
        return [Given(each["request"], each["driver"], each["pool"], each["device"]) for each in results]

    def _results_or_reason(self) -> list[Given]:
        """Raises ApiError with what the scheduler says of the pod, which is shown where the wait ends without any."""
        found = self._results()
        if not found:
            raise ApiError(f"pod {self.name}: {self._unscheduled() or 'the scheduler has said nothing of it'}")
        return found

    def _reason(self) -> str:
        assert self._results() == []
        message = self._unscheduled()
        if message and REFUSAL not in message:
            raise ApiError(message)
        return message

    def _unscheduled(self) -> str:
        for condition in self.cluster.api.get(f"{PODS}/{self.name}")["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition["message"])
        return ""


def forget(*asked: Scheduling) -> None:
    """Delete all their pods and claims, and wait until the devices are free again."""
    paths = [(each.cluster, path) for each in asked for path in reversed(each.paths)]
    for cluster, path in paths:
        cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    for cluster, path in paths:
        wait_for(partial(is_gone, cluster, path), SCHEDULED_S, f"{path} gone")
    for each in asked:
        each.paths.clear()


class Offering:
    """What the plugin of a node would publish, by its own parts and without it: what is held, and what still fits.

    The node exists as an object only. ``hold`` stands for a prepare, ``release`` for an unprepare, ``share`` for a
    restart with other settings.
    """

    def __init__(self, cluster: Cluster, node: str, gpus: Iterable[Gpu], sharing: GpuSharing = UNSHARED) -> None:
        self.node = node
        self.pool = Pool(node, DRIVER)
        self._cluster = cluster
        self._gpus = tuple(gpus)
        self._held: dict[str, Device] = {}
        self._published: set[str] = set()
        self.inventory = self._started(sharing)
        cluster.add_node_object(node)
        self._publish()

    def hold(self, *names: str) -> None:
        for name in names:
            device = self.inventory.device(name)
            assert device is not None
            self._held[name] = device
            self.inventory.hold(ClaimReference("default", name, name), [device])
        self._publish()

    def release(self, *names: str) -> None:
        for name in names:
            del self._held[name]
            self.inventory.release(name)
        self._publish()

    def share(self, sharing: GpuSharing) -> None:
        self.inventory = self._started(sharing)
        self._publish()

    def start_again(self, sharing: GpuSharing) -> None:
        """With nothing held."""
        self._held.clear()
        self.share(sharing)

    def devices(self) -> dict[str, dict[str, Any]]:
        """What is published, by name, with the attributes' values alone."""
        built = build_slices(self.pool, self.inventory.published()).values()
        found = [device for content in built for device in content.get("devices", ())]
        return {
            device["name"]: {name: next(iter(value.values())) for name, value in device["attributes"].items()}
            for device in found
        }

    def _started(self, sharing: GpuSharing) -> Inventory:
        held: dict[str, dict[int, int]] = {}
        for device in self._held.values():
            if device.kind is DeviceKind.SHARE:
                held.setdefault(device.gpu.uuid, {})[share_index(device.name)] = device.shares
        inventory = Inventory(self._gpus, number_gpus(self._gpus, {}), sharing, held)
        for name, device in self._held.items():
            inventory.hold(ClaimReference("default", name, name), [device])
        return inventory

    def _publish(self) -> None:
        built = build_slices(self.pool, self.inventory.published())
        if built.keys() == self._published:
            for name, content in built.items():
                self._cluster.api.patch(f"{SLICES}/{name}", {"spec": content})
            return
        for name in self._published:
            self._cluster.api.request("DELETE", f"{SLICES}/{name}")
        for name, content in built.items():
            self._cluster.api.post(SLICES, slice_object(name, content, self.pool, 1, len(built), None))
        self._published = set(built)
