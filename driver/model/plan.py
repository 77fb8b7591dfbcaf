"""``GpuNodePlan``: the controller's plan for one node, and the node's status (wire types).

``spec`` is the controller's but for what operators write in it, ``status`` the node's. The API group is fixed; it does
not follow the driver name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from driver.clock import read_time, written_time
from driver.model.offer import Offer, parsed_offers

API_VERSION = "gpu.tessera.dev/v1alpha1"
KIND = "GpuNodePlan"
PATH = f"/apis/{API_VERSION}/gpunodeplans"

FENCE = "tessera-fence"
"""Name of the admission policy, its binding, and the ConfigMap with the fenced devices by pool."""

MODE_SPREAD_SECONDS = 60.0
"""Time over which nodes that change their mode spread their slice updates: each update wakes every pending pod."""


class PublishHeld(StrEnum):
    """Whether a node (if disjoint: a GPU) that offers nothing publishes held devices; ``HeldPublication`` decides."""

    ALWAYS = "Always"
    BESIDE_OFFERS = "BesideOffers"


class OfferMode(StrEnum):
    """What keeps a GPU's memory from being allocated twice.

    COUNTERS: offers of one GPU may overlap, and the scheduler subtracts shared counters (KEP-4815). DISJOINT: devices
    have no counters; no two offers of one GPU overlap, and none overlaps a held device.
    """

    COUNTERS = "Counters"
    DISJOINT = "Disjoint"


COUNTERS_FIELD = "consumesCounters"
"""The field of a device without which offers must be disjoint, as ``PlanStatus.dropped`` names it."""

TAINTS_FIELD = "taints"
"""If the API server drops this field of devices, the node leaves out the free devices of a GPU that can't be used."""


class Held(msgspec.Struct, frozen=True):
    """A device that a claim has, prepared or not. ``claim`` is ``namespace/name``.

    ``gib``: what the claim has of a shared device; 0: all of it. Of a shared partition the number of its compute
    instances. It is not written.
    """

    device: str
    claim: str
    gib: int = 0

    def __str__(self) -> str:
        return f"{self.device} {self.claim}"


class ClearedFaults(msgspec.Struct, frozen=True):
    """An operator has dealt with the faults of a GPU up to this stamp (``kubelet_plugin.health.recorded_faults``).

    Written ``GPU-<uuid> 2026-11-21T21:30:00Z``, by the node's own clock.
    """

    gpu: str
    stamp: int

    def __str__(self) -> str:
        return f"{self.gpu} {written_time(self.stamp)}"

    @classmethod
    def parse(cls, text: str) -> ClearedFaults | None:
        """Parse the result of ``str``, ignoring any text after it; None if it is invalid."""
        gpu, _, rest = text.partition(" ")
        stamp = read_time(rest.partition(" ")[0])
        return None if stamp is None else cls(gpu, stamp)


class PlanSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The controller's plan for a node, and the operators' cordons.

    ``epoch`` is the one in the node's status for which the plan was made; the node follows no other. ``held`` and
    ``offers`` are Held and Offer as they are written: one string each costs the API server a third of what objects
    do. ``listed`` are Offers, too: devices to publish whether they are offered or not, next to held devices, too.
    ``withdrawn`` are names of devices that were offered, are fenced, and that no claim holds: the only ones the
    node may take out of its slices. ``publish_held``: see PublishHeld; ``offer_mode``: see OfferMode. ``dedicated_to``
    is the use a label gave the node, ``dedicated_gpus`` are ``GPU-<uuid>=<use>`` of those with a use of their own: both
    for people to see. ``monitors``: the node publishes the monitor devices of its GPUs.

    ``cordoned`` and ``cleared`` are operators' (``tessera cordon``, ``uncordon``), followed whether the node follows
    the plan or not, and never written by the controller: ``GPU-<uuid> <reason>`` of GPUs that no new claim may get,
    and ClearedFaults as they are written.

    ``config_revision`` is the revision of its configuration with which the node plugin may start again
    (``controller.config_rollout``); the writer of plans leaves it alone, too.
    """

    epoch: str = ""
    held: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    publish_held: PublishHeld = PublishHeld.ALWAYS
    offer_mode: OfferMode = OfferMode.COUNTERS
    listed: tuple[str, ...] = ()
    dedicated_to: str | None = None
    dedicated_gpus: tuple[str, ...] = msgspec.field(name="dedicatedGPUs", default=())
    monitors: bool = False
    cordoned: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    config_revision: str = ""

    @property
    def held_devices(self) -> frozenset[str]:
        return frozenset(entry.partition(" ")[0] for entry in self.held)

    @property
    def cordons(self) -> dict[str, str]:
        """The reason of each cordon, by GPU UUID."""
        return {gpu: reason for gpu, _, reason in (text.partition(" ") for text in self.cordoned)}

    @property
    def leaves_out_held(self) -> bool:
        """Whether the node leaves held devices out of its slices while it offers nothing."""
        return self.publish_held is PublishHeld.BESIDE_OFFERS

    @property
    def offered(self) -> frozenset[Offer]:
        """The offers that could be parsed."""
        return parsed_offers(self.offers)


SEPARATE_FIELDS = ("cordoned", "cleared", "configRevision")
"""The fields of a spec that operators and the rollout of configurations write, and decisions never do."""

WITHOUT_SEPARATE_FIELDS: Mapping[str, object] = {"cordoned": (), "cleared": (), "config_revision": ""}
"""These fields as a decision has them."""


class PlanMode(StrEnum):
    """What decides which devices a node publishes.

    PLANNED: the plan. STANDALONE: there is no controller, so the node offers everything that fits. COMPLETE: the label
    ``PUBLISH`` or ``--publish`` asks for every device that the GPUs can be, at any time.
    """

    PLANNED = "Planned"
    STANDALONE = "Alone"
    COMPLETE = "Complete"


PUBLISH = "gpu.tessera.dev/publish"
"""Label of a Node: one of PUBLISH_VALUES. It takes precedence over the node's ``--publish``."""

CURATED, COMPLETE = PUBLISH_VALUES = ("curated", "complete")
"""Publish what is held and what the controller offers; or every device that the GPUs can be."""


class Summary(msgspec.Struct, frozen=True):
    """Counts for display: GPUs, held devices and offered devices."""

    gpus: int = 0
    held: int = 0
    offered: int = 0


class FailureCause(StrEnum):
    """Why a claim could not be prepared.

    GPU: its hardware refused or did not answer. NODE: a directory of the node, or a defect of the plugin. OTHER: the
    claim itself, another claim, or the API server; also what a later version of the node plugin reports.
    """

    GPU = "GPU"
    NODE = "Node"
    OTHER = "Other"

    @classmethod
    def _missing_(cls, value: object) -> FailureCause:
        return cls.OTHER


MOST_UNPREPARED = 32
"""Most claims that a node reports as not prepared."""


class FailedClaim(msgspec.Struct, frozen=True, rename="camel"):
    """A claim with a device of the node that the node could not prepare, or not release, at the last attempt.

    ``claim`` is ``namespace/name``; ``since`` the first failure, by the node's clock; ``message`` the last answer.
    """

    claim: str
    uid: str
    since: str
    cause: FailureCause
    message: str = ""


MOST_IDLE, IDLE_REPORT_SECONDS = 256, 300.0
"""Most idle claims that a node reports, and how often it repeats such a report: it is out of date after twice that."""


class NodeConditionType(StrEnum):
    """What is wrong with a node as a whole.

    UNREGISTERED: the kubelet has not registered the plugin. UNABLE: no pod with a GPU can start.
    DRIVER_FILES_CHANGED: containers that run still have files of the NVIDIA driver that are gone on the host.
    """

    UNREGISTERED = "Unregistered"
    UNABLE = "Unable"
    DRIVER_FILES_CHANGED = "DriverFilesChanged"


class NodeCondition(msgspec.Struct, frozen=True, rename="camel"):
    """Something that is wrong with a node as a whole: ``since`` when by its clock, and why.

    ``type`` is a NodeConditionType, or one that a later version of the node plugin reports.
    """

    type: str
    since: str
    message: str


class ConfigStatus(msgspec.Struct, frozen=True):
    """The configuration of a node: its name (empty: the flags apply), its revision, and what is wrong with the one that
    the node should have instead."""

    name: str = ""
    revision: str = ""
    error: str = ""


class PlanStatus(msgspec.Struct, frozen=True, rename="camel"):
    """``epoch`` changes when the node becomes standalone or complete: no plan asked for what it offers then.

    ``gpus`` has a line for each GPU, for people; ``inventory`` every fact of theirs, for the controller. ``offer_mode``
    is the mode in which the node publishes: after the plan changes its mode, the old one as long as offers of one of
    the node's GPUs overlap. ``dropped`` are the fields of a device that the API server does not keep, such as
    ``consumesCounters``. ``left_out`` are names of free devices that overlap and that would lose their counters if they
    were published again; a claim may just have been allocated one, so the plan has to withdraw them like published
    ones. ``refused`` are offers that are not published, and why. ``faults`` are those that an operator can clear, each
    as ClearedFaults writes it, and what it is. ``unprepared`` are the claims whose pods wait for their devices to be
    prepared, ``unreleased`` those whose pods have ended and whose devices can't be released. ``conditions`` are what is
    wrong with the node as a whole. ``config`` is the node's configuration. ``idle`` are prepared claims that use no
    device, each ``namespace/name`` and since when (RFC 3339), the longest first; ``idle_as_of``: when the node said so.
    """

    observed_generation: int = 0
    epoch: str = ""
    mode: PlanMode = PlanMode.STANDALONE
    summary: Summary = Summary()
    gpus: tuple[str, ...] = ()
    inventory: str = ""
    refused: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    offer_mode: OfferMode = OfferMode.COUNTERS
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unprepared: tuple[FailedClaim, ...] = ()
    unreleased: tuple[FailedClaim, ...] = ()
    conditions: tuple[NodeCondition, ...] = ()
    config: ConfigStatus = ConfigStatus()
    idle: tuple[str, ...] = ()
    idle_as_of: str = ""

    def idle_since(self, now: float) -> dict[str, int]:
        """Since when (seconds since 1970) claims are idle, by name; empty if the report is out of date."""
        as_of, entries = read_time(self.idle_as_of), (entry.partition(" ") for entry in self.idle)
        if as_of is None or abs(now - as_of) > 2 * IDLE_REPORT_SECONDS:  # a clock may have been set back
            return {}
        return {claim: at for claim, _, since in entries if (at := read_time(since)) is not None}
