"""Whatever the real scheduler places where everything is offered, it places where a controller chooses the offers.

Each case comes from a seed that a failure names. Some hundred of them:
``TESSERA_SEED=7 TESSERA_CASES=400 pytest tests/e2e/test_curation_is_complete.py -m slow -s``
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.podgen import CLASS, Case, generate, pod_with, selector
from tests.support.twin_fleets import CURATED, OPEN, Outcome, TwinFleets, twin_fleets

pytestmark = [pytest.mark.cluster, pytest.mark.needs("shared counters")]

PATIENCE_S = 10.0
"""How much longer than with everything offered a pod may wait."""

CASES_A_ROUND = 5
"""Cases that are run on one and the same occupancy."""

SUSPECTS = 3
"""Pods of a case that are looked at closely."""

QUICK = 6
RULES = "/apis/resource.k8s.io/v1/devicetaintrules"


@dataclass(frozen=True)
class Compared:
    """``missing``: pods that were placed with everything offered and not with curation, and what was said of them."""

    case: Case
    everything: Outcome
    curated: Outcome
    missing: dict[str, str]

    @property
    def later_s(self) -> float:
        return self.curated.seconds - self.everything.seconds

    def __str__(self) -> str:
        everything, curated = self.everything, self.curated
        told = f" {self.missing} {self.case.claims} {self.case.templates}" if self.missing else ""
        return (
            f"case {self.case.name}: {len(everything.bound)} of {len(self.case.pods)} placed in "
            f"{everything.seconds:.2f} s, curated {len(curated.bound)} in {curated.seconds:.2f} s{told}"
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("curation") as running:
        yield running


@pytest.fixture(scope="module")
def fleets(cluster: Cluster) -> Iterator[TwinFleets]:
    with twin_fleets(cluster) as found:
        yield found


def compare(fleets: TwinFleets, case: Case) -> Compared:
    everything = fleets.run_open(case)
    if not everything.bound:
        fleets.forget(fleets.sides[OPEN])
        return Compared(case, everything, Outcome(), {})

    def enough(found: Outcome) -> bool:
        if case.alike:
            return len(found.bound) >= len(everything.bound)
        return found.bound.keys() >= everything.bound.keys()

    curated = fleets.run_curated(case, enough, everything.seconds + PATIENCE_S)
    fleets.forget(fleets.sides[OPEN])
    missing = {} if enough(curated) else confirmed(fleets, case, curated)
    fleets.forget(fleets.sides[CURATED])
    return Compared(case, everything, curated, missing)


def confirmed(fleets: TwinFleets, case: Case, curated: Outcome) -> dict[str, str]:
    """Pods that the scheduler would place beside what the others of the case have, were everything offered.

    Others may have been given what they lack: that is no fault of curation.
    """
    found = {}
    with fleets.mirrored():
        for pod in [pod for pod in case.pods if pod["metadata"]["name"] not in curated.bound][:SUSPECTS]:
            fleets.mirror_pods()
            if fleets.run_open(case.only(pod)).bound:
                name = pod["metadata"]["name"]
                found[name] = curated.refused.get(name, "no verdict yet")
            fleets.forget(fleets.sides[OPEN])
    return found


def run(fleets: TwinFleets, count: int, seed: str) -> list[Compared]:
    found = []
    for number in range(count):
        case = generate(f"{seed}/{number}", fleets.known)
        if number % CASES_A_ROUND == 0:
            fleets.occupy(Random(case.name))
        fleets.wait_settled()
        found.append(compare(fleets, case))
        print(found[-1], flush=True)
    return found


def report(found: list[Compared]) -> str:
    placed = [each for each in found if each.everything.bound]
    later = sorted(each.later_s for each in placed)
    fewer = sum(each.curated.devices < each.everything.devices for each in placed if not each.missing)
    return (
        f"{len(found)} cases, {len(placed)} with pods placed, {sum(bool(each.missing) for each in found)} differ; "
        f"later by p50 {later[len(later) // 2]:.2f} s, p95 {later[len(later) * 95 // 100]:.2f} s, "
        f"max {later[-1]:.2f} s; fewer devices in {fewer}\n" + "\n".join(str(each) for each in found if each.missing)
    )


@pytest.mark.timeout(300)
def test_whatever_is_placed_with_everything_offered_is_placed_with_curation(fleets: TwinFleets) -> None:
    found = run(fleets, QUICK, "quick")
    assert not [each for each in found if each.missing], report(found)
    assert sum(bool(each.everything.bound) for each in found) > QUICK // 3, "too few cases that can be placed at all"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_so_it_is_in_many_cases(fleets: TwinFleets) -> None:
    found = run(fleets, int(os.environ.get("TESSERA_CASES", "300")), os.environ.get("TESSERA_SEED", "1"))
    print(report(found))
    assert not [each for each in found if each.missing], report(found)


@pytest.mark.timeout(300)
@pytest.mark.needs("device taint rules")
def test_a_pod_gets_another_device_where_an_admin_has_tainted_what_is_offered(fleets: TwinFleets) -> None:
    fleets.free_all()
    fleets.wait_settled()
    rules = [taint_rule(fleets, *each) for each in fleets.offers("gpu")]
    assert rules
    claim: dict[str, Any] = {"metadata": {"name": "full"}, "spec": {"devices": {"requests": [FULL]}}}
    pod = pod_with("pod", [{"name": "full", "resourceClaimName": "full"}], tolerations=[{"operator": "Exists"}])
    found = fleets.run_curated(Case("taint", [pod], [claim]), lambda seen: bool(seen.bound), 60)
    fleets.forget(fleets.sides[CURATED])
    for rule in rules:
        fleets.cluster.api.request("DELETE", f"{RULES}/{rule}")
    assert found.bound, found.refused
    wait_for(lambda: len(fleets.offers("gpu")) == 2, 60, "what was offered more widely is taken back")


FULL = {
    "name": "gpu",
    "exactly": {"deviceClassName": CLASS, "selectors": [{"cel": {"expression": selector('type == "gpu"')}}]},
}


def taint_rule(fleets: TwinFleets, pool: str, device: str) -> str:
    name = f"{device}-of-{pool}"[:60].rstrip(".")
    taint = {"key": "example.org/suspect", "effect": "NoSchedule"}
    spec = {"deviceSelector": {"driver": DRIVER, "pool": pool, "device": device}, "taint": taint}
    fleets.cluster.api.post(RULES, {"metadata": {"name": name}, "spec": spec})
    return name
