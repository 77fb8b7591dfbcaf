"""Offers of shared devices: the GPUs whose memory claims may share (pure).

A shared device that claims hold is offered as long as it has room: it is published anyway. An unheld one costs the
scheduler a look at it for every pod, and a claim that takes it ends what else its GPU could be. So a GPU that is open
to claims is filled before another is opened: pending claims get the room of open GPUs, those that ask for most first,
and open others only for the rest. Some unheld ones are offered for future claims, while no open GPU has room for the
most memory that any claim or template of the cluster asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from controller.curation.offer_draft import OfferDraft
from controller.curation.ranked_fleet import FleetPlace, RankedFleet
from controller.demand.demand import Demand, Eligible
from driver.model.offer import SHARED, Spot
from driver.placement.occupancy import GpuState


class SharedRoom:
    """What claims can still get of open GPUs: their states, by the place of their shared device.

    ``opened``: the unheld ones that were opened here. ``published``: the places of present offers, which are opened
    first unless others cause much less fragmentation.
    """

    def __init__(self, fleet: RankedFleet, published: Collection[FleetPlace], stickiness: float) -> None:
        self.states: dict[FleetPlace, GpuState] = {}
        self.opened: set[FleetPlace] = set()
        self._fleet, self._stickiness = fleet, stickiness
        unheld = set[str]()
        for uuid, gpu in fleet.fleet.gpus.items() if SHARED in fleet.kinds else ():
            if gpu.state.used and gpu.state.left:
                self.states[self._place(uuid)] = gpu.state
            elif gpu.state.left:
                unheld.add(uuid)
        self._unheld, self._most = frozenset(unheld), max((state.left for state in self.states.values()), default=0)
        self._published = [place for place in published if fleet.uuid(place) in unheld]

    def _place(self, uuid: str) -> FleetPlace:
        return FleetPlace(*self._fleet.position_of[uuid], Spot(SHARED))

    def fullest(self, gib: int, eligible: Eligible) -> FleetPlace | None:
        """The open GPU with the least room that is enough."""
        states = self.states.items()
        able = (place for place, state in states if state.left >= gib and self._fleet.within(place, eligible))
        return min(able, key=lambda place: (self.states[place].left, place), default=None)

    def next_unheld(self, draft: OfferDraft, eligible: Eligible) -> FleetPlace | None:
        """The GPU to open next, which is not in ``draft``; None if there is none."""
        best = draft.best(self._unheld if eligible is None else self._unheld & eligible)
        if best is None:
            return None
        there = [place for place in self._published if draft.admits(place) and self._fleet.within(place, eligible)]
        kept = min(there, key=lambda place: (draft.rank(place), place), default=None)
        if kept is not None and draft.rank(kept).growth <= best.ranked.terms.growth + self._stickiness:
            return kept
        return best.place

    def open(self, place: FleetPlace) -> None:
        """Let claims have the GPU of ``place``; it may be open already."""
        if place not in self.states:
            self.states[place] = self._fleet.cliques[place.clique].gpus[place.position].state
            self.opened.add(place)

    def take(self, place: FleetPlace, gib: int) -> None:
        """Give a claim ``gib`` of an open GPU."""
        self.states[place] = self.states[place].take(Spot(SHARED, gib))

    def needs_spare(self, gib: int) -> bool:
        """Whether to open GPUs for future claims, which ask for at most ``gib`` (0: unknown).

        It does not matter whether pending claims will fill the open GPUs: others are opened once they have done so.
        """
        return not self.opened and self._most < max(1, gib)

    def claims_on(self, gpu: str, gib: int, *, unheld: bool = True) -> int:
        """The claims for ``gib`` that a GPU has room for, if it is open or could be opened (``unheld``)."""
        state = self.states.get(self._place(gpu))
        if state is None and unheld and gpu in self._unheld:
            state = self._fleet.fleet.gpus[gpu].state
        return 0 if state is None else state.parts_left(gib)


class SharedSelection:
    """Selects the shared devices to offer: ``draft.places``, and ``extra`` ones, which are open already.

    ``fixed``: places that are offered in any case. ``spare``: the number of unheld devices to offer while no open GPU
    has ``gib`` left.
    """

    def __init__(
        self,
        draft: OfferDraft,
        demands: Iterable[Demand],
        fixed: Collection[FleetPlace],
        spare: int,
        gib: int,
        stickiness: float,
    ) -> None:
        self.draft = draft
        self.extra: list[FleetPlace] = []
        self.serves_all = True
        self._demands = sorted(demands, key=lambda demand: -demand.gib)
        self._fixed, self._spare, self._gib, self._stickiness = fixed, spare, gib, stickiness

    def choose(self, published: Collection[FleetPlace]) -> None:
        room = SharedRoom(self.draft.fleet, published, self._stickiness)
        for place in sorted(self._fixed):
            self._open(room, place)
        for demand in self._demands:
            if not demand.all_devices:  # of those every device is among the fixed ones
                self.serves_all &= self._serve(room, demand)
        if room.needs_spare(self._gib):
            while len(room.opened) < self._spare and (spare := room.next_unheld(self.draft, None)) is not None:
                self._open(room, spare)
        self.extra = [*room.states]

    def _open(self, room: SharedRoom, place: FleetPlace) -> None:
        room.open(place)
        if place in room.opened - self.draft.places and self.draft.admits(place):
            self.draft.add(place)

    def _serve(self, room: SharedRoom, demand: Demand) -> bool:
        """Find room for the claims of ``demand``; False: there is not enough."""
        gib, missing, eligible = demand.gib, demand.count, demand.eligible
        if demand.together:
            groups = [group for group in demand.together if sum(room.claims_on(gpu, gib) for gpu in group) >= missing]
            if not groups:
                return False
            of_open = {group: sum(room.claims_on(gpu, gib, unheld=False) for gpu in group) for group in groups}
            eligible = min(groups, key=lambda group: (max(0, missing - of_open[group]), sorted(group)))
        while missing > 0:
            place = room.fullest(gib, eligible) or room.next_unheld(self.draft, eligible)
            if place is None:
                return False
            self._open(room, place)
            claims = min(missing, room.states[place].parts_left(gib))
            if not claims:
                return False
            for _ in range(claims):
                room.take(place, gib)
            missing -= claims
        return True
