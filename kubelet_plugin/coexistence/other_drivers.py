"""Rules that find other GPU drivers on the node and the GPUs that are reserved for them (pure).

Three are detected: NVIDIA's device plugin (and others with its resource names), NVIDIA's DRA driver, and the GPU
Operator's mig-manager. Only the DRA driver publishes which GPUs it owns. For the others ``--exclude-gpus`` decides:
excluded GPUs are theirs, the rest is ours. Without excluded GPUs every GPU is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NVIDIA_DRIVER = "gpu.nvidia.com"
WHOLE_GPU, PARTITION = "nvidia.com/gpu", "nvidia.com/mig-"
REPLICAS = "nvidia.com/gpu.replicas"
"""Label of NVIDIA's GPU feature discovery: as how many GPUs the device plugin advertises each GPU."""

OWNED = " owns it"
"""Suffix of the reason of a reserved GPU in the plan's status, which the controller and ``tessera status`` read."""

MIG_CONFIG, MIG_STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"


class OtherDriverPolicy(StrEnum):
    """How to treat other drivers (``--neighbours``)."""

    REFUSE = "refuse"
    EXCLUDE = "exclude"


@dataclass(frozen=True, slots=True)
class NodeSigns:
    """Observations of other drivers: the Node object, the GPU UUIDs in the slices of NVIDIA's DRA driver (None: it has
    no slices), and sockets with a listener, relative to the kubelet's directory."""

    allocatable: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    published: frozenset[str] | None = None
    sockets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OtherDriver:
    """Another driver. ``sign`` is how it was detected. ``gpus`` are the UUIDs it publishes; None: it publishes none.
    ``count`` is the minimum number of GPUs that it offers."""

    name: str
    sign: str
    gpus: frozenset[str] | None = None
    count: int = 0

    def owns(self, ours: Iterable[str], excluded: int, *, trusting: bool) -> frozenset[str]:
        """The UUIDs among ``ours`` that it owns, given the number of GPUs that ``--exclude-gpus`` leaves to it.

        Unless ``trusting``, ``--exclude-gpus`` is ignored if it leaves fewer GPUs than the driver offers.
        """
        if self.gpus is not None:
            return self.gpus.intersection(ours)
        separated = excluded > 0 and (trusting or self.count <= excluded)
        return frozenset() if separated else frozenset(ours)

    def __str__(self) -> str:
        return f"{self.name} ({self.sign})"


def find_other_drivers(signs: NodeSigns, driver: str) -> list[OtherDriver]:
    """Every detected driver other than ``driver``."""
    found = [_device_plugin(signs), _dra_driver(signs) if driver != NVIDIA_DRIVER else None, _mig_manager(signs)]
    return [each for each in found if each is not None]


def _device_plugin(signs: NodeSigns) -> OtherDriver | None:
    offered = {
        name: amount
        for name, amount in signs.allocatable.items()
        if (name == WHOLE_GPU or name.startswith((f"{WHOLE_GPU}.", PARTITION))) and amount != "0"
    }
    if offered:
        whole = sum(_number(amount) for name, amount in offered.items() if not name.startswith(PARTITION))
        replicas = max(1, _number(signs.labels.get(REPLICAS, "1")))
        sign = ", ".join(f"{name}: {amount}" for name, amount in sorted(offered.items()))
        return OtherDriver("a device plugin", f"{sign} in the Node's status.allocatable", count=-(-whole // replicas))
    sockets = sorted(path for path in signs.sockets if path.startswith("device-plugins/"))
    return OtherDriver("a device plugin", f"it listens at {', '.join(sockets)}") if sockets else None


def _dra_driver(signs: NodeSigns) -> OtherDriver | None:
    name = f"the DRA driver {NVIDIA_DRIVER}"
    if signs.published is not None:
        return OtherDriver(name, f"its ResourceSlices have {len(signs.published)} GPUs of this node", signs.published)
    sockets = sorted(path for path in signs.sockets if path.startswith("plugins_registry/"))
    return OtherDriver(name, f"it listens at {', '.join(sockets)}") if sockets else None


def _mig_manager(signs: NodeSigns) -> OtherDriver | None:
    labels = {key: signs.labels[key] for key in (MIG_CONFIG, MIG_STATE) if signs.labels.get(key)}
    if not labels:
        return None
    return OtherDriver("mig-manager", f"{', '.join(f'{k}={v}' for k, v in labels.items())} on the Node")


def _number(amount: str) -> int:
    """Extended resources are whole numbers; any other text counts as one."""
    return int(amount) if amount.isdigit() else 1


def owners_of(
    drivers: Iterable[OtherDriver], ours: Collection[str], excluded: int, mode: OtherDriverPolicy
) -> dict[str, OtherDriver]:
    """The owner of each GPU in ``ours`` that belongs to another driver, by UUID; the first if there are several."""
    found: dict[str, OtherDriver] = {}
    for driver in drivers:
        for uuid in driver.owns(ours, excluded, trusting=mode is OtherDriverPolicy.EXCLUDE):
            found.setdefault(uuid, driver)
    return found


def advice(other: OtherDriver, owned: int, all_gpus: int, mode: OtherDriverPolicy) -> str:
    """The Event message: the driver, the GPUs it owns, the consequence, and the remedy."""
    found = f"{other} is on this node"
    if not owned:
        return f"{found}; it owns none of the GPUs of Tessera"
    share = f"all {all_gpus} GPUs" if owned == all_gpus else f"{owned} of {all_gpus} GPUs"
    reason = "" if other.gpus is not None else " because it does not publish which"
    message = f"{found} and owns {share}{reason}: nothing of them is offered"
    if mode is OtherDriverPolicy.EXCLUDE and other.gpus is not None:
        return message
    return f"{message}; remove it from this node, or leave exactly its GPUs to it with --exclude-gpus"
