"""How soon a waiting pod is bound after the last device of the pods that were evicted for it has been deallocated.

The node is filled with notebooks of priority 0, rivals of the contenders' priority wait for full GPUs, and contenders
come one after the other (``KINDS``). Then all go, and the node is filled anew.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.bench.placement.measures import percentile
from tests.bench.preempt.report import Measured, Results
from tests.harness.progress import Progress
from tests.harness.waiting import wait_for
from tests.support.contested_node import (
    FULL,
    HALF,
    INTERVAL_S,
    POLICIES,
    POLICY,
    SERVING,
    SOON_S,
    TEAM,
    TWO,
    ContestedNode,
    contested_node,
    hurried_controller,
)

GPUS = 8
NOTEBOOKS: Mapping[str, int] = {"kept": 1, "spare-one": 2, "plain-a": 2, "plain-b": 2}
"""Pods of each ReplicaSet. Together with ``LEAVER`` they hold all GPUs of the node."""

BUDGETS: Mapping[str, int] = {"kept": 1, "spare-one": 1}
"""Pods that PodDisruptionBudgets want to stay: 1 of ``spare-one`` and 4 of others may be evicted."""

LEAVER = "leaver"
"""A pod without an owner, which is never evicted and ends by itself when ``leaves`` comes."""


@dataclass(frozen=True)
class Kind:
    """A contender's request, and how many pods have to end for it."""

    template: str
    victims: int


KINDS: Mapping[str, Kind] = {
    "one GPU": Kind(FULL, 1),
    "two GPUs": Kind(TWO, 2),
    "a partition": Kind(HALF, 1),
    "a partition that fits": Kind(HALF, 0),
    "a GPU that just became free": Kind(FULL, 0),
}
ORDER = ("one GPU", "one GPU", "two GPUs", "a partition")
FITS, LEAVES = "a partition that fits", "a GPU that just became free"
MEASURED_PER_FILL = len(ORDER)
RIVALS = (0, 1, 4)
"""Of one fill after the other. Without rivals a pod ends by itself, too."""

CROWD, BOUND_S = 200, 60.0
REFUSED = re.compile("Error scheduling pod.*Tessera has reserved")
"""What the fence says to other pods, as the scheduler logs it once for each refusal."""


@dataclass
class Case:
    """``seconds``: from the last deallocation to the binding; None: no pod was evicted. ``others``: pods that were
    bound meanwhile. ``is_bound``: whether the contender was within ``BOUND_S``; if not, times are those until then.
    """

    kind: str
    rivals: int
    evicted: int
    seconds: float | None
    waited_s: float
    others: int
    is_bound: bool


@dataclass
class Outcome:
    cases: list[Case] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    below_budget: int = 0
    refusals: int = 0

    def figures(self, crowd: Sequence[Case]) -> list[Measured]:
        baseline = percentile(sorted(self.baseline), 0.5)
        times, crowded = _times(self.cases), _times(crowd)
        every = [*self.cases, *crowd]
        needless = sum(max(0, case.evicted - KINDS[case.kind].victims) for case in every)
        return [
            Measured("contender bound after the last deallocation, p50", percentile(times, 0.5), "s", 1.0, baseline),
            Measured("... p99", percentile(times, 0.99), "s", 4.0, max(self.baseline, default=None)),
            Measured(f"... with {CROWD} rivals, p50", percentile(crowded, 0.5), "s", None, None),
            Measured("... p99", percentile(crowded, 0.99), "s", 12.0, None),
            Measured("cases", len(every), "", None, None),
            Measured(
                f"contender not bound within {BOUND_S:g} s", sum(not case.is_bound for case in every), "", 0, None
            ),
            Measured("evicted without need", needless, "pods", 0, None),
            Measured("pods below a PodDisruptionBudget", self.below_budget, "pods", 0, None),
            Measured("other pods that got freed devices", sum(case.others for case in every), "pods", 0, None),
            Measured("allocations that the reservation refused", self.refusals, "", None, None),
        ]


def _times(cases: Sequence[Case]) -> list[float]:
    return sorted(case.seconds for case in cases if case.seconds is not None)


@dataclass
class Fill:
    """One fill of the node and the contenders that come."""

    node: ContestedNode
    rng: random.Random
    rivals: int
    cases: list[Case] = field(default_factory=list)
    victims: set[str] = field(default_factory=set)
    """UIDs of the pods that were evicted."""
    bound: set[str] = field(default_factory=set)
    """UIDs of the pods that should have devices."""

    def play(self) -> int:
        """Returns how many pods went although a PodDisruptionBudget forbade it."""
        self.occupy()
        for number, kind in enumerate(self._order()):
            if not self._contend(f"contender-{number}", kind):
                break
        lost = {name: len(self._ending(name)) for name in BUDGETS}
        self.node.clear()
        return sum(max(0, lost[name] - (NOTEBOOKS[name] - kept)) for name, kept in BUDGETS.items())

    def occupy(self) -> None:
        where = self.node
        for name, replicas in NOTEBOOKS.items():
            where.replica_set(name, FULL, replicas)
        where.pod(LEAVER, FULL)
        for name, kept in BUDGETS.items():
            where.budget(name, kept)
        count = sum(NOTEBOOKS.values()) + 1
        where.wait(lambda: len(where.bound(where.present(TEAM))) == count, SOON_S, "the notebooks hold all GPUs")
        wait_until_budgets_count(where)
        where.rivals(self.rivals)
        self.bound = set(where.seen.bound)

    def _order(self) -> list[str]:
        """``FITS`` uses what a partition leaves of its GPU, so it comes right after; ``LEAVES`` comes first.

        Of a crowd the contender that has the least chance comes last: if it is not bound, the fill is over.
        """
        kinds = list(ORDER)
        self.rng.shuffle(kinds)
        if self.rivals == CROWD:
            kinds.sort(key=lambda kind: KINDS[kind].template == TWO)
        kinds.insert(kinds.index("a partition") + 1, FITS)
        return kinds if self.rivals else [LEAVES, *kinds]

    def _ending(self, *names: str) -> set[str]:
        """The pods of these ReplicaSets that end or have ended."""
        seen = self.node.seen
        return {uid for uid in seen.ending if seen.names[uid] in names and uid in self.bound}

    def _contend(self, name: str, kind: str) -> bool:
        """Returns whether the contender was bound."""
        where, seen, wants = self.node, self.node.seen, KINDS[kind]
        if kind == LEAVES:
            where.end(TEAM, LEAVER)
        uid, came = where.pod(name, wants.template, priorityClassName=SERVING), time.monotonic()
        is_bound = where.happens(lambda: uid in seen.bound, BOUND_S)
        bound = seen.bound[uid] if is_bound else time.monotonic()
        victims = self._ending(*NOTEBOOKS) - self.victims
        self.victims |= victims
        freed = [seen.freed[victim] for victim in victims if victim in seen.freed]
        others = len(seen.bound.keys() - self.bound - {uid})
        self.bound |= seen.bound.keys()
        seconds = bound - max(freed) if freed else None
        self.cases.append(Case(kind, self.rivals, len(victims), seconds, bound - came, others, is_bound))
        return is_bound


def wait_until_budgets_count(where: ContestedNode) -> None:
    allowed = {name: NOTEBOOKS[name] - kept for name, kept in BUDGETS.items()}

    def are_counted() -> bool:
        return all(where.allows(name) == count for name, count in allowed.items())

    wait_for(are_counted, SOON_S, "the budgets count their pods")


def baseline(where: ContestedNode, rng: random.Random) -> list[float]:
    """Without a policy and other pods that wait: one waits, and a pod that no controller replaces ends soon after."""
    for number in range(GPUS):
        where.pod(f"holder-{number}", FULL)
    where.wait(lambda: len(where.bound(where.present(TEAM))) == GPUS, SOON_S, "all GPUs are held")
    seconds = list[float]()
    for victim in where.present(TEAM):
        uid = where.pod(f"waiting-{len(seconds)}", FULL, priorityClassName=SERVING)
        where.wait(lambda uid=uid: is_refused(where, uid), SOON_S, "the pod waits")  # type: ignore[misc]
        time.sleep(rng.uniform(0, INTERVAL_S))
        where.end(TEAM, victim.metadata.name)
        where.wait(lambda uid=uid: uid in where.seen.bound, SOON_S, "the pod is bound")  # type: ignore[misc]
        seconds.append(where.seen.bound[uid] - where.seen.freed[victim.metadata.uid])
    where.clear()
    return seconds


def is_refused(where: ContestedNode, uid: str) -> bool:
    return any(pod.lacks_devices for pod in where.present(TEAM) if pod.metadata.uid == uid)


def measure(cases: int, crowded: int, seed: int, results: Results, logs: Path | None) -> None:
    """Keeps the logs of the cluster in the folder ``logs``, if there is one."""
    rng, outcome, crowd, progress = random.Random(seed), Outcome(), list[Case](), Progress()
    with contested_node("bench-preempt", "sim:dgx-h100") as where, hurried_controller(where.cluster):
        with progress.part("baseline: a pod ends by itself", 10):
            outcome.baseline = baseline(where, rng)
        where.api.post(POLICIES, POLICY)
        with progress.part(f"{cases} cases", 4 * cases):
            for number in range(-(-cases // MEASURED_PER_FILL)):
                fill = Fill(where, rng, RIVALS[number % len(RIVALS)], outcome.cases)
                outcome.below_budget += fill.play()
        with progress.part(f"{crowded} cases with {CROWD} rivals", 20 * crowded):
            for _ in range(-(-crowded // MEASURED_PER_FILL)):
                outcome.below_budget += Fill(where, rng, CROWD, crowd).play()
        scheduler = (where.cluster.logs_dir / "kube-scheduler.log").read_text(errors="replace")
        outcome.refusals = sum(bool(REFUSED.search(line)) for line in scheduler.splitlines())
        details = {"cases": list(map(asdict, outcome.cases)), "crowd": list(map(asdict, crowd))}
        results.add("binding", outcome.figures(crowd), {"baseline": outcome.baseline, **details})
        if logs is not None:
            shutil.copytree(where.cluster.logs_dir, logs, dirs_exist_ok=True)
