"""The claims that wait, held against the fleet: what each asks for, where it may go, whether it could be met (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product

from controller.claim_book import ClaimBook
from controller.eligibility import Eligibility
from controller.fleet import Fleet
from controller.matching import Matching
from controller.objects import Claim, DeviceClass, Node, Pod
from controller.search import Outcome
from controller.survey import Found, Nodes, Survey
from controller.waiting import Waiting, claims_of, waiting_claims
from controller.wishes import COMBINATIONS, Refusal, Wish, Wishes, joined
from driver.slices.names import Pool


@dataclass(frozen=True)
class Cluster:
    """What the API server has, as the controller's caches know it."""

    claims: ClaimBook
    classes: tuple[DeviceClass, ...]
    pods: tuple[Pod, ...]
    nodes: tuple[Node, ...]


class Queue:
    """The claims that wait, held against the fleet of one moment."""

    def __init__(
        self, cluster: Cluster, fleet: Fleet, matching: Matching, eligibility: Eligibility | None = None
    ) -> None:
        self.cluster = cluster
        self.survey = Survey(fleet, matching)
        self.waiting = waiting_claims(cluster.claims.unallocated, cluster.classes, cluster.pods)
        self._eligibility = eligibility or Eligibility(cluster.nodes)
        self._wishes = Wishes(matching, cluster.classes, self.survey.selects_any)
        self._read = {each.key: self._wishes.of(each.claim) for each in self.waiting}
        self._claims_of_pod: dict[str, list[Waiting]] = {}
        for each in self.waiting:
            for pod in each.pods:
                self._claims_of_pod.setdefault(pod.metadata.path, []).append(each)

    def wishes(self, waiting: Waiting) -> tuple[Wish, ...] | Refusal:
        """What it asks for, one wish for each combination of alternatives; none if it is not about our devices."""
        return self._read[waiting.key]

    def wishes_of(self, claim: Claim) -> tuple[Wish, ...] | Refusal:
        """The same of any claim, whether it waits or not."""
        return self._wishes.of(claim)

    def nodes_for(self, pod: Pod) -> Nodes:
        """The nodes ``pod`` may run on, given the claims of its that are allocated."""
        allocations = (self.cluster.claims.allocation(key) for key in claims_of(pod))
        selectors = [each.node_selector for each in allocations if each is not None and each.node_selector is not None]
        return self._eligibility.nodes_for(pod, selectors)

    def nodes(self, waiting: Waiting) -> Nodes:
        """The nodes where any of its pods may run."""
        sets = [self.nodes_for(pod) for pod in waiting.pods]
        return sets[0] if len(sets) == 1 else frozenset().union(*sets)

    def found(self, waiting: Waiting, survey: Survey | None = None) -> Found:
        """A node that could meet it, together with the other claims of one of its pods; now, or by another survey."""
        survey = survey or self.survey
        doubt = False
        for pod in waiting.pods:
            nodes = self.nodes_for(pod)
            for wish in self.combinations(pod):
                found = survey.fitting(wish, nodes)
                if found.outcome is Outcome.FITS:
                    return found
                doubt |= found.outcome is Outcome.UNKNOWN
        return Found(Outcome.UNKNOWN if doubt else Outcome.NONE)

    def satisfiable(self, waiting: Waiting) -> bool:
        """Whether free, legal placements would satisfy it; also where the bounded search can't tell.

        Claims for other drivers' devices only are not ours to satisfy: False.
        """
        wishes = self.wishes(waiting)
        if isinstance(wishes, Refusal) or not wishes:
            return False
        return self.found(waiting).outcome is not Outcome.NONE

    def chosen(self, waiting: Waiting) -> Wish | None:
        """The first combination of alternatives that could be met, or else the first; None if it can't be read."""
        wishes = self.wishes(waiting)
        if isinstance(wishes, Refusal) or not wishes:
            return None
        if len(wishes) == 1:
            return wishes[0]
        nodes = self.nodes(waiting)
        fitting = (wish for wish in wishes if self.survey.fitting(wish, nodes).outcome is not Outcome.NONE)
        return next(fitting, wishes[0])

    def companions(self, waiting: Waiting) -> list[Waiting]:
        """The claims that must be met on the same node, itself among them."""
        found = {id(each): each for pod in waiting.pods for each in self.of_pod(pod)}
        return [each for each in found.values() if self.wishes(each)]

    def of_pod(self, pod: Pod) -> list[Waiting]:
        """The claims that ``pod`` waits for."""
        return self._claims_of_pod[pod.metadata.path]

    @cached_property
    def holders(self) -> dict[tuple[str, str], str]:
        """The claim (``namespace/name``) that has a device, by node and name of the device."""
        driver = self.survey.matching.driver
        nodes = {Pool(node, driver).name: node for node in self.survey.fleet.nodes}
        return {
            (nodes[result.pool], result.device): claim.metadata.path
            for claim in self.cluster.claims
            if claim.status.allocation is not None
            for result in claim.status.allocation.devices.results
            if result.driver == driver and result.pool in nodes and not result.admin_access
        }

    def combinations(self, pod: Pod) -> Iterator[Wish]:
        """What a pod's claims ask for together; nothing where one of them can't be read."""
        read = [self.wishes(each) for each in self.of_pod(pod)]
        wishes = [each for each in read if not isinstance(each, Refusal) and each]
        if any(isinstance(each, Refusal) for each in read):
            return iter(())
        return (joined(chosen) for chosen in islice(product(*wishes), COMBINATIONS))
