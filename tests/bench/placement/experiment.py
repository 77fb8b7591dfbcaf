"""Every policy on every mix: what the simulation is run for, and what the reference found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from driver.model.gpu import Gpu
from driver.placement.measure import CLIQUE_CLASS
from tests.bench.placement.policies import BestFirst, Curated, LowestStart, Policy, curated
from tests.bench.placement.simulation import Outcome, Simulation, pooled
from tests.bench.placement.trace import MIXES, WITH_TRAINING, Mix, Request, Scenario
from tests.support.gpus import gpu_of

PRODUCT = "NVIDIA H100 80GB HBM3"

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "everything, lowest start first": LowestStart,
    "everything, FGD order": BestFirst,
    **{f"curated, K={offers}": partial(curated, offers) for offers in (8, 4, 2, 1)},
}
NO_NODE_TERM = "curated, K=2, no node term"
"""Whole nodes count for nothing in the measure; only compared where somebody asks for them."""

POOLED = "no fragmentation (slices pooled)"

REFERENCE: Mapping[str, Sequence[float | None]] = {
    "everything, lowest start first": (0.912, 0.941, 0.875),
    "everything, FGD order": (0.930, 0.948, 0.910),
    "curated, K=8": (0.946, 0.956, 0.928),
    "curated, K=4": (0.952, 0.958, 0.930),
    "curated, K=2": (0.954, 0.960, 0.940),
    "curated, K=1": (0.958, 0.963, 0.934),
    POOLED: (0.950, None, None),
}
"""Acceptance by mix, in the order of MIXES: placement.md, "Curated supply"; other seeds, and a ranking of its own."""


@dataclass(frozen=True)
class Result:
    """One policy on one mix over all seeds. ``exchanged`` and ``updates`` are per admission, None without curation."""

    policy: str
    mix: str
    acceptance: float
    by_seed: tuple[float, ...]
    by_request: Mapping[str, float]
    admitted: Mapping[str, int]
    held: float
    exchanged: float | None = None
    updates: float | None = None

    @property
    def deviation(self) -> float:
        """Standard error of the acceptance over the seeds."""
        seeds = len(self.by_seed)
        spread = sum((value - self.acceptance) ** 2 for value in self.by_seed)
        return float((spread / max(seeds - 1, 1) / seeds) ** 0.5)


def plain_gpu() -> Gpu:
    """A GPU of PRODUCT with the profiles of the reference: those without media extensions."""
    gpu = gpu_of(PRODUCT)
    return replace(gpu, profiles=tuple(profile for profile in gpu.profiles if "+" not in profile.name))


def scenarios(arrivals: int, seeds: int) -> list[Scenario]:
    """The first quarter of the arrivals warms up; the profiles are the six of the reference."""
    base = Scenario(MIXES[0], plain_gpu(), arrivals=arrivals, warm_up=arrivals // 4)
    return [replace(base, mix=mix, seed=seed + 1) for mix in (*MIXES, WITH_TRAINING) for seed in range(seeds)]


def run(arrivals: int, seeds: int, processes: int) -> Iterator[Result]:
    """Results as they come, policy by policy on each mix."""
    groups = _by_mix(scenarios(arrivals, seeds))
    plan = [(name, group) for group in groups for name in (*POLICIES, POOLED)]
    plan += [(NO_NODE_TERM, group) for group in groups if group[0].mix == WITH_TRAINING]
    with ProcessPoolExecutor(processes) as pool:
        pending = [(name, group, [pool.submit(simulate, name, scenario) for scenario in group]) for name, group in plan]
        for name, group, futures in pending:
            yield _result(name, group[0].mix, [future.result() for future in futures])


def simulate(name: str, scenario: Scenario) -> tuple[Outcome, int, int]:
    """The outcome, offers exchanged, slice updates."""
    if name == POOLED:
        return pooled(scenario), 0, 0
    policy = _policy(name)
    outcome = Simulation(scenario, policy).run()
    return (outcome, policy.exchanged, policy.updates) if isinstance(policy, Curated) else (outcome, 0, 0)


def simulated_acceptance(name: str, scenario: Scenario) -> float | None:
    """The acceptance of one scenario; None if there is no such policy."""
    return simulate(name, scenario)[0].acceptance if name in POLICIES else None


def _policy(name: str) -> Policy:
    return curated(2, {CLIQUE_CLASS: 0.0}) if name == NO_NODE_TERM else POLICIES[name]()


def _by_mix(all_scenarios: Sequence[Scenario]) -> list[list[Scenario]]:
    mixes: dict[str, list[Scenario]] = {}
    for scenario in all_scenarios:
        mixes.setdefault(scenario.mix.name, []).append(scenario)
    return list(mixes.values())


def _result(name: str, mix: Mix, runs: Sequence[tuple[Outcome, int, int]]) -> Result:
    arrived, admitted = Counter[Request](), Counter[Request]()
    for outcome, _, _ in runs:
        arrived.update(outcome.arrived)
        admitted.update(outcome.admitted)
    curation = name.startswith("curated")
    served = sum(outcome.served for outcome, _, _ in runs)
    return Result(
        name,
        mix.name,
        sum(outcome.acceptance for outcome, _, _ in runs) / len(runs),
        tuple(outcome.acceptance for outcome, _, _ in runs),
        {str(request): admitted[request] / max(arrived[request], 1) for request in mix.weights},
        {str(request): admitted[request] for request in mix.weights},
        sum(outcome.held for outcome, _, _ in runs) / len(runs),
        sum(exchanged for _, exchanged, _ in runs) / served if curation else None,
        sum(updates for _, _, updates in runs) / served if curation else None,
    )
