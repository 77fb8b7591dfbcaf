"""Who else hands out GPUs of this node, and which of them (pure).

Three can be told apart: NVIDIA's device plugin (and any other that has its resource names), NVIDIA's DRA driver, and
the GPU Operator's mig-manager. Only the DRA driver says which GPUs are its own. For the others ``--exclude-gpus``
draws the line: what it leaves out is theirs, the rest ours. Without a line every GPU is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NVIDIA_DRIVER = "gpu.nvidia.com"
WHOLE_GPU, PARTITION = "nvidia.com/gpu", "nvidia.com/mig-"
REPLICAS = "nvidia.com/gpu.replicas"
"""Label of NVIDIA's feature discovery: by how many the device plugin multiplies each GPU."""

OWNED = " owns it"
"""The end of why a GPU is not offered, as the controller and ``tessera status`` are told."""

MIG_CONFIG, MIG_STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"


class Neighbours(StrEnum):
    """What to do about them (``--neighbours``)."""

    REFUSE = "refuse"
    EXCLUDE = "exclude"


@dataclass(frozen=True, slots=True)
class Signs:
    """What is seen of them: of the Node, of the DRA driver's slices (UUIDs of GPUs; None: it has none), of sockets
    that are listened at, by path below the kubelet's directory."""

    allocatable: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    published: frozenset[str] | None = None
    sockets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Neighbour:
    """``sign`` is what gave it away. ``gpus`` are the UUIDs it names; None: it names none. ``count`` is how many whole
    GPUs it has at least."""

    name: str
    sign: str
    gpus: frozenset[str] | None = None
    count: int = 0

    def owns(self, ours: Iterable[str], excluded: int, *, trusting: bool) -> frozenset[str]:
        """Which of ``ours`` (UUIDs) are its own, where ``--exclude-gpus`` leaves it ``excluded`` GPUs.

        Unless ``trusting``, a line that leaves it fewer GPUs than it hands out is none.
        """
        if self.gpus is not None:
            return self.gpus.intersection(ours)
        drawn = excluded > 0 and (trusting or self.count <= excluded)
        return frozenset() if drawn else frozenset(ours)

    def __str__(self) -> str:
        return f"{self.name} ({self.sign})"


def neighbours_of(signs: Signs, driver: str) -> list[Neighbour]:
    """Everybody who is not ``driver``."""
    found = [_device_plugin(signs), _dra_driver(signs) if driver != NVIDIA_DRIVER else None, _mig_manager(signs)]
    return [neighbour for neighbour in found if neighbour is not None]


def _device_plugin(signs: Signs) -> Neighbour | None:
    offered = {
        name: amount
        for name, amount in signs.allocatable.items()
        if (name == WHOLE_GPU or name.startswith((f"{WHOLE_GPU}.", PARTITION))) and amount != "0"
    }
    if offered:
        whole = sum(_number(amount) for name, amount in offered.items() if not name.startswith(PARTITION))
        replicas = max(1, _number(signs.labels.get(REPLICAS, "1")))
        sign = ", ".join(f"{name}: {amount}" for name, amount in sorted(offered.items()))
        return Neighbour("a device plugin", f"{sign} in the Node's status.allocatable", count=-(-whole // replicas))
    sockets = sorted(path for path in signs.sockets if path.startswith("device-plugins/"))
    return Neighbour("a device plugin", f"it listens at {', '.join(sockets)}") if sockets else None


def _dra_driver(signs: Signs) -> Neighbour | None:
    name = f"the DRA driver {NVIDIA_DRIVER}"
    if signs.published is not None:
        return Neighbour(name, f"its ResourceSlices have {len(signs.published)} GPUs of this node", signs.published)
    sockets = sorted(path for path in signs.sockets if path.startswith("plugins_registry/"))
    return Neighbour(name, f"it listens at {', '.join(sockets)}") if sockets else None


def _mig_manager(signs: Signs) -> Neighbour | None:
    labels = {key: signs.labels[key] for key in (MIG_CONFIG, MIG_STATE) if signs.labels.get(key)}
    if not labels:
        return None
    return Neighbour("mig-manager", f"{', '.join(f'{k}={v}' for k, v in labels.items())} on the Node")


def _number(amount: str) -> int:
    """Resources that are counted have whole numbers; anything else is at least one."""
    return int(amount) if amount.isdigit() else 1


def owners(
    neighbours: Iterable[Neighbour], ours: Collection[str], excluded: int, mode: Neighbours
) -> dict[str, Neighbour]:
    """Whose each GPU is, of those that would be ours, by UUID; the first where several want it."""
    found: dict[str, Neighbour] = {}
    for neighbour in neighbours:
        for uuid in neighbour.owns(ours, excluded, trusting=mode is Neighbours.EXCLUDE):
            found.setdefault(uuid, neighbour)
    return found


def advice(neighbour: Neighbour, owned: int, all_gpus: int, mode: Neighbours) -> str:
    """What people read: who it is, what it has of ours, what becomes of that, and the way out."""
    what = f"{neighbour} is on this node"
    if not owned:
        return f"{what}; none of our GPUs is its own"
    share = f"all {all_gpus} GPUs" if owned == all_gpus else f"{owned} of {all_gpus} GPUs"
    named = "" if neighbour.gpus is not None else ", for it does not say which"
    told = f"{what} and owns {share}{named}: nothing of them is offered"
    if mode is Neighbours.EXCLUDE and neighbour.gpus is not None:
        return told
    return f"{told}; remove it from this node, or leave it its GPUs with --exclude-gpus (and nothing else to it)"
