"""One node for killing its plugin again and again: simulated GPUs, a plugin that obeys, a kubelet by script.

Everything else is real: the plugin's process, its sockets, the API server, where claims are allocated as the
scheduler would: only devices that the node's slices have at that moment.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from driver.errors import ApiError
from driver.hardware.host import Host
from driver.hardware.host_paths import HostPaths
from driver.model.device import Device, devices_of
from driver.placement.occupancy import overlap
from driver.simulator.node import SimulatedNode
from driver.simulator.state.latency import ZERO_LATENCY
from kubelet_plugin.checkpoint.records import device_key
from kubelet_plugin.mps.protocol import gpu_directory
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.invariants import DRIVER, Facts, allocations, published, read_facts, violations
from tests.support.killable import KillablePlugin, Zygote
from tests.support.kubelet import KnownClaim, Kubelet
from tests.support.memory_limits import make_cgroup
from tests.support.mps import end_daemons, served_gpus
from tests.support.plugin import SLICES
from tests.support.shared_gpus import shared_memory
from tests.support.workloads import CLAIMS, PODS, request

SOON_S = 60.0
POLL_S = 0.03
SHARES = 4
WHOLE = 79
"""GiB of a GPU that claims can have."""

NODE_LABEL = "tests.tessera.dev/node"

TWO_H100 = """\
name: two-h100
summary: two H100 SXM, for killing plugins
product: NVIDIA H100 80GB HBM3
driverVersion: 615.71.09
cudaDriverVersion: "13.4"
gpus:
  - {pciBusId: "0000:1b:00.0", numaNode: 0, cpus: 0-55, pcieRoot: "pci0000:15", bridges: ["0000:15:01.0"]}
  - {pciBusId: "0000:43:00.0", numaNode: 0, cpus: 0-55, pcieRoot: "pci0000:3d", bridges: ["0000:3d:01.0"]}
"""

Object = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A claim to be: the devices it is allocated, and the time-slice interval it asks for.

    ``gib``: what it has of its one device, which is a shared one. ``pod``: which of the node's pods uses it then.
    """

    devices: Sequence[str]
    interval: str = ""
    gib: int = 0
    pod: int = 0


@dataclass(frozen=True)
class Look:
    """What is seen at one moment: facts, and the node's slices and claims as the API server has them."""

    facts: Facts
    slices: Sequence[Object]
    claims: Sequence[Object]

    def statuses(self) -> Iterator[tuple[Object, Object]]:
        """Each claim with each entry of its ``status.devices``."""
        for claim in self.claims:
            for entry in claim["status"].get("devices") or ():
                yield claim, entry


class KillNode:
    """``claims`` are those that exist now. Waiting raises DeadlineError, the kubelet AnswerError.

    Claims may share GPU 0 in time slices, and GPU 1, too, or by MPS if ``mps``, the directory of its daemons, is given.
    """

    def __init__(self, cluster: Cluster, parent: Zygote, name: str, root: Path, mps: Path | None = None) -> None:
        cluster.add_node_object(name)
        self.name = name
        self.root = root / name
        self._mps = mps
        self._api = cluster.api
        self._numbers = itertools.count()
        description = root / "two-h100.yaml"
        description.write_text(TWO_H100)
        self.plugin = KillablePlugin(parent, self.root / "orders", self._settings(cluster, description))
        sockets = (
            self._state_dir / "dra.sock",
            self.root / "kubelet" / "plugins_registry" / f"{DRIVER}-reg.sock",
        )
        self.kubelet = Kubelet(*sockets)
        self.claims: list[KnownClaim] = []
        self._pods: dict[str, str] = {}
        self.stranger = f"99999-{name}"
        self.start()
        self._simulated = SimulatedNode.attach(self._host_root, latency=ZERO_LATENCY)
        paths = HostPaths(self._host_root, self._host_root)
        self._host = Host(self._simulated.nvml, paths, simulated=True)
        self._gpus = self._host.discover().gpus
        self._devices = {
            d.name: d for gpu in self._gpus for d in devices_of(gpu, gpu.minor, SHARES, shared=shared_memory(WHOLE))
        }

    # The plugin

    def start(self) -> None:
        """Start a plugin and wait until the kubelet has registered it: start-up has finished."""
        self.plugin.start()
        self.kubelet.meet()

    def kill(self) -> None:
        self.kubelet.part()
        self.plugin.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    # What happens around it

    def set_mig_mode(self, modes: Iterable[bool]) -> None:
        """By an admin, GPU by GPU; nothing may be held."""
        for gpu, enabled in zip(self._gpus, modes, strict=True):
            self._host.set_mig_mode(gpu, enabled=enabled)

    def reboot(self) -> None:
        """The machine: partitions are gone, and what lies in memory (/var/run) too. The plugin is started again."""
        self.kill()
        self._reboot_hardware()
        shutil.rmtree(self._cdi_dir)
        self.start()

    def lose(self) -> None:
        """What is prepared loses its partitions and CDI specs, as by a reset of the GPUs and a tidy administrator."""
        for gpu in self._gpus:
            for partition in self._host.partitions(gpu):
                self._host.destroy_compute_instance(gpu, partition)
                self._host.destroy_gpu_instance(gpu, partition)
        for spec in self._cdi_dir.iterdir():
            spec.unlink()

    def allocate(self, wanted: Iterable[Wanted]) -> None:
        """New claims with these devices, once the slices have them."""
        wanted = list(wanted)
        names = {name for each in wanted for name in each.devices}
        wait_for(lambda: names <= published(self._slices(), self.name), SOON_S, f"{names} are offered", POLL_S)
        self.claims = [self._allocated(each) for each in wanted]

    def meddle(self) -> None:
        """Somebody adds a slice to the node's pool, which the plugin has to delete."""
        spec = self._slices()[-1]["spec"]
        self._api.post(SLICES, {"metadata": {"name": self.stranger}, "spec": {**spec, "devices": []}})

    def forget_claims(self) -> None:
        """The claims are deleted, as they are once their pod is gone."""
        if self.claims:
            self._api.request("DELETE", self._own_claims)
        self.claims = []
        for name in self._pods:
            self._api.request("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
            shutil.rmtree(make_cgroup(self._simulated, f"kubepods/pod{self._pods[name]}"))
        self._pods = {}

    # What is seen

    def look(self) -> Look:
        # The API server first: what a claim has now must have been in the slices before.
        slices, claims = self._slices(), self._api.get(self._own_claims)["items"] if self.claims else []
        facts = read_facts(
            self._host_root,
            self._state_dir,
            self._cdi_dir,
            allocations=allocations(claims),
            published=published(slices, self.name),
            answered=frozenset(self.kubelet.prepared) - self.kubelet.leaving,
            daemons=served_gpus(self._daemons()),
        )
        return Look(facts, slices, claims)

    def violations(self, look: Look) -> list[str]:
        """What is wrong, with nobody at work."""
        unknown = {record.uid for record in look.facts.records} - self.kubelet.prepared.keys()
        unasked = [f"{uid} is recorded, the kubelet knows nothing of it" for uid in unknown if not self.kubelet.owed]
        return violations(look.facts) + unasked

    def untold(self, look: Look) -> list[str]:
        """What slices and claims should say and don't yet: it follows the answer within moments."""
        held, offered = {device.device for _, device in look.facts.held()}, look.facts.published or frozenset()
        late = [f"{name} is offered beside what is held" for name in offered - held if self._overlaps(name, held)]
        if not held:
            late += [f"{name} is not offered" for name in ("gpu-0", "gpu-1") if name not in offered]
        late += [f"{self.stranger} is there" for each in look.slices if each["metadata"]["name"] == self.stranger]
        said = {(claim["metadata"]["uid"], entry["device"]): entry for claim, entry in look.statuses()}
        for record, device in look.facts.prepared():
            entry = said.get((record.uid, device.device))
            if entry is None or entry["data"]["uuid"] != (device.uuid or device.gpu_uuid):
                late.append(f"{record.name} does not say {device.device} with its UUID, but {entry}")
        return late

    def heal(self) -> None:
        """Wait until nothing is wrong any more."""
        wait_for(self._right, SOON_S, "everything is right", POLL_S)

    def settle(self) -> None:
        """Wait until everything is told."""
        wait_for(self._told, SOON_S, "everything is told", POLL_S)

    def wipe(self) -> None:
        """Make it a new node after a failure, so that the next case starts well."""
        self.kill()
        self.forget_claims()
        for directory in (self._state_dir / "claims", self._cdi_dir):
            shutil.rmtree(directory, ignore_errors=True)
        self._reboot_hardware()
        self.kubelet.prepared.clear()
        self.kubelet.owed = None
        self.start()

    def close(self) -> None:
        self.kubelet.part()
        self.plugin.close()
        self._host.close()

    # Private

    def _daemons(self) -> list[Path]:
        """The folders of MPS daemons, which the daemons of all nodes are below."""
        folders = [Path(gpu_directory(str(self._mps), gpu.uuid)) for gpu in self._gpus if self._mps]
        return [folder for folder in folders if folder.exists()]

    def _reboot_hardware(self) -> None:
        self._simulated.reboot()
        for folder in self._daemons():
            end_daemons(folder)
            shutil.rmtree(folder)

    @property
    def _own_claims(self) -> str:
        return f"{CLAIMS}?labelSelector={NODE_LABEL}%3D{self.name}"

    @property
    def _state_dir(self) -> Path:
        return self.root / "kubelet" / "plugins" / DRIVER

    @property
    def _cdi_dir(self) -> Path:
        return self.root / "cdi"

    @property
    def _host_root(self) -> Path:
        return self.root / "gpus"

    def _settings(self, cluster: Cluster, description: Path) -> Mapping[str, Any]:
        return {
            "node_name": self.name,
            "kubeconfig": cluster.service_account_kubeconfig("tessera", "tessera-node", node=self.name),
            "gpus": f"sim:{description}",
            "kubelet_dir": self.root / "kubelet",
            "cdi_dir": self._cdi_dir,
            "host_root": self._host_root,
            "sim_latency": "zero",
            "shares": f"all={SHARES}",
            "shared": "0=time-slicing,1=mps" if self._mps else "all=time-slicing",
        }

    def _allocated(self, wanted: Wanted) -> KnownClaim:
        name = f"{self.name}-{next(self._numbers)}"
        requests = [request("gpu-inference", f"r{number}") for number in range(len(wanted.devices))]
        metadata = {"name": name, "labels": {NODE_LABEL: self.name}}
        created = self._api.post(CLAIMS, {"metadata": metadata, "spec": {"devices": {"requests": requests}}})
        pool = f"{self.name}-{DRIVER}"
        results: list[Object] = [
            {"request": f"r{number}", "driver": DRIVER, "pool": pool, "device": device}
            for number, device in enumerate(wanted.devices)
        ]
        on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self.name]}]}
        created["status"] = {
            "allocation": {
                "devices": {"results": results, "config": _config(wanted.interval)},
                "nodeSelector": {"nodeSelectorTerms": [on_node]},
            }
        }
        if wanted.gib:
            share: Object = {"shareID": str(uuid4()), "consumedCapacity": {"memory": f"{wanted.gib}Gi"}}
            results[0] |= share
            created["status"]["reservedFor"] = [self._pod(f"{self.name}-pod-{wanted.pod}", name)]
        self._api.request("PUT", f"{CLAIMS}/{name}/status", created)
        keys = (device_key(result["device"], result.get("shareID", "")) for result in results)
        return KnownClaim(name, created["metadata"]["uid"], frozenset(keys))

    def _pod(self, name: str, claim: str) -> Object:
        """A pod on this node with a cgroup, as the user of a claim; ``claim`` is the first that it uses."""
        if name not in self._pods:
            container = {"name": "main", "image": "none"}
            claims = [{"name": "gpu", "resourceClaimName": claim}]
            spec = {"nodeName": self.name, "containers": [container], "resourceClaims": claims}
            created = self._api.post(PODS, {"metadata": {"name": name}, "spec": spec})
            self._pods[name] = created["metadata"]["uid"]
            make_cgroup(self._simulated, f"kubepods/pod{self._pods[name]}")
        return {"resource": "pods", "name": name, "uid": self._pods[name]}

    def _slices(self) -> list[Object]:
        found = self._api.get(f"{SLICES}?fieldSelector=spec.nodeName%3D{self.name}")["items"]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def _overlaps(self, name: str, held: Iterable[str]) -> bool:
        device: Device | None = self._devices.get(name)
        return device is not None and any(overlap(device, self._devices[other]) for other in held)

    def _right(self) -> bool:
        if wrong := self.violations(self.look()):
            raise ApiError("; ".join(wrong))
        return True

    def _told(self) -> bool:
        if late := self.untold(self.look()):
            raise ApiError("; ".join(late))
        return True


def _config(interval: str) -> list[Object]:
    if not interval:
        return []
    sharing = {"strategy": "TimeSlicing", "timeSlicing": {"interval": interval}}
    parameters = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "ShareConfig", "sharing": sharing}
    return [{"source": "FromClaim", "requests": ["r0"], "opaque": {"driver": DRIVER, "parameters": parameters}}]
