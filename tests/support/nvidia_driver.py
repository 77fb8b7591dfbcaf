"""NVIDIA's DRA driver as a kubelet and a scheduler meet it: its slices, sockets, checkpoint and CDI specs.

It prepares claims of one 1g.10gb partition on a simulated node, as that driver does where it makes partitions itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from driver.config.flag_values import NVIDIA_DRIVER
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths, boot_id
from driver.model.gpu import Gpu, Placement
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from kubelet_plugin.claims.preparer import PreparedDevice, Preparer
from kubelet_plugin.dra.kubelet_sockets import Registry, SocketServer
from kubelet_plugin.dra.service import DraService
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.settings import node_settings
from tests.support.nvidia_claims import nvidia_checkpoint, nvidia_claim, of_partition, write_checkpoint, write_spec
from tests.support.plugin import SLICES, PluginProcess

PROFILE, START = "1g.10gb", 6
ENVIRONMENT = "PREPARED_BY=gpu.nvidia.com"
"""What its CDI specs give a container."""


def nvidia_class() -> dict[str, Any]:
    """The DeviceClass of its chart for partitions."""
    selector = f"device.driver == '{NVIDIA_DRIVER}' && device.attributes['{NVIDIA_DRIVER}'].type == 'mig'"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "mig.nvidia.com"},
        "spec": {"selectors": [{"cel": {"expression": selector}}]},
    }


class NvidiaDriver:
    """For the node of ``plugin``, which must not run at the same time."""

    def __init__(self, plugin: PluginProcess) -> None:
        self._node, self._cluster = plugin.node, plugin.cluster
        description = load_description("dgx-h100").replaced(serial=self._node.name)  # as the plugin opens it
        simulated = SimulatedNode.open(description, plugin.host_root, latency=ZERO_LATENCY)
        self._paths = HostPaths(simulated.root, simulated.root)
        self._host = Host(simulated.nvml, self._paths, simulated=True)
        self._gpus: Sequence[Gpu] = self._host.discover().gpus
        self._claims: dict[str, dict[str, Any]] = {}
        self._servers: list[SocketServer] = []

    @property
    def device(self) -> str:
        profile = self._gpus[0].profile_named(PROFILE)
        assert profile is not None
        return f"gpu-{self._gpus[0].minor}-mig-1g10gb-{profile.id}-{START}"

    def start(self) -> None:
        for name, content in self._slices().items():
            pool = {"name": self._node.name, "generation": 1, "resourceSliceCount": 2}
            spec = {"driver": NVIDIA_DRIVER, "nodeName": self._node.name, "pool": pool, **content}
            self._cluster.api.post(SLICES, {"metadata": {"name": name}, "spec": spec})
        settings = node_settings(
            node_name=self._node.name, driver_name=NVIDIA_DRIVER, kubelet_dir=str(self._node.kubelet_dir)
        )
        service = DraService(cast("Preparer", self))
        self._servers = [
            SocketServer(settings.plugin_socket, [service.handler()]),
            Registry(settings, lambda _accepted, _why: None),
        ]

    def stop(self) -> None:
        """It leaves its slices, which the kubelet removes after a while."""
        while self._servers:
            self._servers.pop().stop()

    def prepare(self, reference: ClaimReference) -> Sequence[PreparedDevice]:
        gpu, uid = self._gpus[0], reference.uid
        if uid not in self._claims:
            profile = gpu.profile_named(PROFILE)
            assert profile is not None
            self._host.set_mig_mode(gpu, enabled=True)
            partition = self._host.create_gpu_instance(gpu, profile, Placement(START, 1))
            partition = self._host.create_compute_instance(gpu, partition)
            device = of_partition(gpu, partition, uid, self._node.name)
            self._claims[uid] = nvidia_claim(reference.name, self._node.name, device)
            write_spec(self._node.cdi_dir, uid, {self.device: {"env": [ENVIRONMENT]}})
            write_checkpoint(self._node.kubelet_dir, nvidia_checkpoint(self._claims, boot_id(self._paths)))
        ids = (f"k8s.{NVIDIA_DRIVER}/claim={uid}-{self.device}",)
        return [PreparedDevice(("gpu",), self._node.name, self.device, ids)]

    def unprepare(self, reference: ClaimReference) -> None:
        raise AssertionError(f"{reference} outlives this driver in every test")

    def _slices(self) -> dict[str, dict[str, Any]]:
        """Counters in one slice, GPU 0 in another."""
        gpu, sets = self._gpus[0], "gpu-0-counter-set"
        counters = {f"memory-slice-{index}": {"value": "1"} for index in range(gpu.memory_slices)}
        used = {name: counters[name] for name in (f"memory-slice-{START}",)}
        common = {"productName": {"string": gpu.product_name}}
        full = {"type": {"string": "gpu"}, "uuid": {"string": gpu.uuid}, **common}
        part = {
            "type": {"string": "mig"}, "parentUUID": {"string": gpu.uuid}, "profile": {"string": PROFILE}, **common,
        }  # fmt: skip
        devices = [
            _device("gpu-0", full, {"counterSet": sets, "counters": counters}),
            _device(self.device, part, {"counterSet": sets, "counters": used}),
        ]
        name = f"{self._node.name}-{NVIDIA_DRIVER}"
        return {
            f"{name}-counters": {"sharedCounters": [{"name": sets, "counters": counters}]},
            f"{name}-gpu-0": {"devices": devices},
        }


def _device(name: str, attributes: dict[str, Any], consumes: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "attributes": attributes, "consumesCounters": [consumes]}
