"""Claims for parts of shared GPUs at the real API server: stated memory, and not more than their namespace may have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.workloads import wait_default_account

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.needs("consumable capacity")]

Object = dict[str, Any]

SHARED, OWN, OTHER = "gpu-shared", "shared-of-an-admin", "of-an-admin"
LABEL = "gpu.tessera.dev/largest-shared-claim"
STATED, LARGEST = "stated-memory.gpu.tessera.dev", "largest-shared-claim.gpu.tessera.dev"
FREE, SMALL, BROKEN = "default", "small", "broken"
"""Namespaces without a limit, with one of 16Gi, and with one that is no amount."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("policies-shared") as running:
        for name, limit in ((SMALL, "16Gi"), (BROKEN, "large")):
            running.api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": {LABEL: limit}}})
            wait_default_account(running, name)
        install(running, {"admission": {"sharedClasses": [SHARED, OWN]}})
        for policy, namespace, memory in ((STATED, FREE, None), (LARGEST, SMALL, "17Gi")):
            # Not at once for claims and templates.
            in_force = partial(are_refused_by, policy, running, namespace, part(memory))
            wait_for(in_force, 60, f"{policy} is in force")
        yield running


def part(memory: str | int | None, name: str = "gpu", device_class: str = SHARED, **more: Any) -> Object:
    return {"name": name, "exactly": exactly(memory, device_class, **more)}


def exactly(memory: str | int | None, device_class: str = SHARED, **more: Any) -> Object:
    amounts = {} if memory is None else {"capacity": {"requests": {"memory": memory}}}
    return {"deviceClassName": device_class, **amounts, **more}


def either(*alternatives: Object) -> Object:
    return {"name": "either", "firstAvailable": [{"name": f"a{n}", **each} for n, each in enumerate(alternatives)]}


def answers(cluster: Cluster, namespace: str, *requests: Object) -> list[str]:
    """What the API server says against such a claim, and against a template of it; empty where it would take it."""
    folder, devices = f"/apis/resource.k8s.io/v1/namespaces/{namespace}", {"devices": {"requests": list(requests)}}
    texts = []
    for kind, spec in (("resourceclaims", devices), ("resourceclaimtemplates", {"spec": devices})):
        try:
            cluster.api.request("POST", f"{folder}/{kind}?dryRun=All", {"metadata": {"name": "tried"}, "spec": spec})
            texts.append("")
        except ApiError as error:
            texts.append(str(error))
    return texts


def are_refused_by(policy: str, cluster: Cluster, namespace: str, request: Object) -> bool:
    return all(policy in text for text in answers(cluster, namespace, request))


def refusal(cluster: Cluster, namespace: str, *requests: Object) -> str:
    """What the API server says against such a claim; no more and no less than against a template of it."""
    of_claim, of_template = answers(cluster, namespace, *requests)
    assert bool(of_claim) == bool(of_template), (of_claim, of_template)
    return of_claim


@pytest.mark.parametrize(
    ("request_", "names", "hint"),
    [
        (part(None), "request gpu: class gpu-shared", "add capacity: {requests: {memory: 6Gi}}"),
        (part(None, device_class=OWN), f"request gpu: class {OWN}", "add capacity: {requests: {memory: 6Gi}}"),
        (
            {"name": "gpu", "exactly": {**exactly(None), "capacity": {"requests": {"gpu.tessera.dev/memory": "6Gi"}}}},
            "request gpu: class gpu-shared",
            "(memory without a domain: names are compared as written)",
        ),
        (either(exactly("6Gi"), exactly(None)), "request either/a1: class gpu-shared", "add capacity"),
    ],
)
def test_a_request_that_states_no_memory_is_refused_with_the_line_to_add(
    cluster: Cluster, request_: Object, names: str, hint: str
) -> None:
    answer = refusal(cluster, FREE, request_)
    assert STATED in answer
    assert names in answer
    assert hint in answer


@pytest.mark.parametrize(
    "requests",
    [
        [part("6Gi")],
        [part("900Gi")],
        [part("6Gi", "a"), part(6_000_000_000, "b")],
        [either(exactly("6Gi"), exactly(None, OTHER))],
        [part(None, device_class=OTHER)],
    ],
)
def test_a_request_that_states_memory_is_let_through_in_a_namespace_without_a_limit(
    cluster: Cluster, requests: list[Object]
) -> None:
    assert refusal(cluster, FREE, *requests) == ""


@pytest.mark.parametrize(
    ("requests", "gib"),
    [
        ([part("17Gi")], 17),
        ([part("16Gi", "a"), part("1", "b")], 17),
        ([part("17179869185", device_class=OWN)], 17),
        ([part("8.5Gi", count=2)], 18),
        ([part("1m", f"r{number}") for number in range(9)] + [part("7.5Gi", "last")], 17),
        ([part("1073741824500m", f"r{number}") for number in range(9)], 18),
        ([either(exactly("2Gi"), exactly("17Gi"))], 17),
        ([part("-9Gi", "a"), part("16Gi", "b")], 17),
    ],
)
def test_claims_for_more_than_their_namespace_may_have_are_refused_as_the_scheduler_would_count(
    cluster: Cluster, requests: list[Object], gib: int
) -> None:
    answer = refusal(cluster, SMALL, *requests)
    assert LARGEST in answer
    assert f"asks for {gib}Gi of shared GPUs; claims of namespace small can have at most 16Gi" in answer


@pytest.mark.parametrize(
    "requests",
    [
        [part("16Gi")],
        [part("8Gi", count=2)],
        [part("1m", f"r{number}") for number in range(16)],
        [either(exactly("16Gi"), exactly("4Gi"))],
        [part("99Gi", device_class=OTHER)],
    ],
)
def test_claims_for_as_much_as_their_namespace_may_have_are_let_through(
    cluster: Cluster, requests: list[Object]
) -> None:
    assert refusal(cluster, SMALL, *requests) == ""


def test_a_limit_that_is_no_amount_is_named(cluster: Cluster) -> None:
    answer = refusal(cluster, BROKEN, part("1Gi"))
    assert "the label gpu.tessera.dev/largest-shared-claim of namespace broken is large" in answer
    assert "such as 16Gi" in answer
