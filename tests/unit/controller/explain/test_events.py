"""What people find on claims and nodes, as Events of a real HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from controller.cluster.fleet import Fleet
from controller.cluster.node_dedication import DEDICATED_TO
from controller.explain.events import EventReporter, written_events
from controller.explain.pipeline import NOT_EXAMINED
from controller.explain.reason import ClaimReason, ReasonCode
from driver.clock import seconds_time
from driver.kube.events import REPEAT_INTERVAL_SECONDS, Recorder
from tests.support.api_server import Object, ObjectApi
from tests.support.clock import FakeClock
from tests.support.queues import FULL, Situation, node_of, request
from tests.support.reasons import reasons_of, reasons_of_unplaced
from tests.support.recording import recording
from tests.support.running import eventually


class Told:
    """A reporter and what it has reported."""

    def __init__(self, api: ObjectApi, clock: FakeClock, recorder: Recorder) -> None:
        self.api = api
        self.clock = clock
        self.fleet = Fleet.of(node_of("a"))
        self.recorder = recorder
        self.reporter = EventReporter(recorder)

    def labels(self, **labels: str) -> None:
        """Look at a node with two GPUs whose labels these are, ``gpu_1`` for the one of that GPU."""
        there = Situation(node_of("a"))
        there.node("a", {f"{name.replace('_', '-')}.{DEDICATED_TO}": use for name, use in labels.items()})
        self.reporter.report_labels(there.nodes.values(), there.nodes, self.fleet)

    def events(self, namespace: str = "default") -> list[Object]:
        return list(self.api.folder(f"/api/v1/namespaces/{namespace}/events").values())

    def are_of(self, times: list[str]) -> bool:
        return [event["lastTimestamp"] for event in self.events()] == times

    def one(self, name: str, earlier: int) -> str:
        """The reason of the one Event about an object, once it was written again ``earlier`` times."""

        def written() -> list[Object]:
            found = [each for each in self.events() if each["involvedObject"]["name"] == name]
            assert len(found) <= 1
            return [each for each in found if each["count"] == earlier + 1]

        eventually(lambda: bool(written()), f"an Event on {name}")
        return str(written()[0]["reason"])

    def event(self, part: str) -> Object:
        """The one Event, once its message has ``part``."""
        eventually(lambda: [each for each in self.events() if part in each["message"]], f"an Event about {part}")
        [found] = self.events()
        return found


@pytest.fixture
def told() -> Iterator[Told]:
    with ObjectApi() as api, recording(api) as (clock, recorder):
        yield Told(api, clock, recorder)


def test_a_node_is_told_of_its_wrong_labels_all_in_one_event(told: Told) -> None:
    told.labels(gpu_0="traning", gpu_2="dev", gpu_1="dev")
    event = told.event("traning")
    assert "no GPU 2" in event["message"]
    assert "gpu-1" not in event["message"]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Node", "a")
    assert (event["reason"], event["type"]) == ("LabelIgnored", "Warning")


def test_it_is_told_again_only_when_something_else_is_wrong(told: Told) -> None:
    told.labels(gpu_0="traning")
    told.event("traning")
    told.clock.advance(2 * REPEAT_INTERVAL_SECONDS)
    told.labels(gpu_0="traning")
    told.labels(gpu_0="trainings")
    assert told.event("trainings is ignored")["count"] == 2


def test_labels_that_are_right_are_no_news(told: Told) -> None:
    told.labels(gpu_0="training")
    told.labels(gpu_0="traning")
    assert told.event("traning")["count"] == 1


def test_a_reason_lies_on_the_claim_or_on_the_pod_that_has_none_yet(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    there.device_class("gpu-training", FULL, extendedResourceName="nvidia.com/gpu")
    there.pod("old", containers=[{"resources": {"requests": {"nvidia.com/gpu": "1"}}}])
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    eventually(lambda: len(told.events()) == 3, "an Event for each")
    found = {event["involvedObject"]["name"]: event for event in told.events()}
    assert found["claim"]["involvedObject"]["apiVersion"] == "resource.k8s.io/v1"
    assert found["pod-of-claim"]["message"] == f"claim claim: {found['claim']['message']}"
    assert {event["involvedObject"]["kind"] for event in told.events()} == {"Pod", "ResourceClaim"}
    assert {event["reason"] for event in told.events()} == {"AllHeld"}


def test_a_reason_that_lasts_is_counted_once_however_many_decisions_find_it(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    for _ in range(3):
        told.clock.advance(2 * REPEAT_INTERVAL_SECONDS)
        told.reporter.report_claims(reasons_of(there.queue), there.queue)
        times = [seconds_time(told.clock.now())] * 2
        eventually(partial(told.are_of, times), "it is renewed")
    assert [event["count"] for event in told.events()] == [1, 1]


def test_a_pod_that_can_not_run_where_other_pods_of_the_claim_can_is_told_so(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    there.pod("elsewhere", "claim", nodeSelector={"pool": "b"})
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    eventually(lambda: len(told.events()) == 3, "an Event for each")
    reasons = {event["involvedObject"]["name"]: event["reason"] for event in told.events()}
    assert reasons == {"claim": "AllHeld", "pod-of-claim": "AllHeld", "elsewhere": "NoNode"}


def test_an_event_always_has_the_present_reason_until_the_claim_is_allocated(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    seen: list[str] = []
    for gpus in (node_of("a", "full"), node_of("a", fault="Xid 79"), node_of("a")):
        there.gpus = gpus
        told.reporter.report_claims(reasons_of(there.queue), there.queue)
        seen.append(told.one("claim", len(seen)))
    there.claims.clear()
    there.holding("claim", "a", "gpu-1")
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    assert told.one("claim", len(seen)) == "Allocated"
    assert told.one("pod-of-claim", len(seen)) == "Allocated"
    assert seen == ["AllHeld", "GpuFault", "Waits"]
    assert {event["message"] for event in told.events()} == {
        f"{claim}the scheduler has allocated gpu-1 of pool a-gpu.tessera.dev" for claim in ("", "claim claim: ")
    }


def test_what_an_earlier_controller_reported_ends_when_it_no_longer_holds(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    there.wants(request(selector=FULL), name="later").pod("lacking", "nope")
    told.reporter.report_claims([*reasons_of(there.queue), *unplaced(there)], there.queue)
    assert told.one("lacking", 0) == "NoSuchClaim"
    assert (told.one("claim", 0), told.one("pod-of-claim", 0)) == ("AllHeld", "AllHeld")
    there.claims.clear()
    there.pods[2:] = []
    there.claim("later", request(selector=FULL))
    there.holding("claim", "a", "gpu-1")
    later = EventReporter(told.recorder)
    later.adopt(written_events(told.api.server.client()))
    later.report_claims(reasons_of(there.queue), there.queue)
    reasons = {name: told.one(name, 1) for name in ("claim", "pod-of-claim", "lacking")}
    assert reasons == {"claim": "Allocated", "pod-of-claim": "Allocated", "lacking": "Waits"}
    assert told.one("later", 0) == "AllHeld"


def test_events_of_a_claim_that_is_not_examined_yet_stay_and_a_new_one_has_none(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    assert told.one("claim", 0) == "AllHeld"
    there.wants(request(selector=FULL), name="new")
    not_examined = [
        ClaimReason(pending, ReasonCode.WAITS, NOT_EXAMINED, is_examined=False) for pending in there.queue.pending
    ]
    told.clock.advance(2 * REPEAT_INTERVAL_SECONDS)
    told.reporter.report_claims(not_examined, there.queue)
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    assert (told.one("claim", 0), told.one("new", 0)) == ("AllHeld", "AllHeld")


def test_a_claim_that_no_pod_uses_any_more_and_a_pod_that_is_placed_lose_their_reasons(told: Told) -> None:
    there = Situation(node_of("a", "full")).wants(request(selector=FULL))
    there.pod("lacking", "nope")
    told.reporter.report_claims([*reasons_of(there.queue), *unplaced(there)], there.queue)
    there.pods.clear()
    there.pod("lacking", "nope", nodeName="a")
    told.reporter.report_claims(reasons_of(there.queue), there.queue)
    assert (told.one("claim", 1), told.one("lacking", 1)) == ("NotUsed", "Allocated")


def unplaced(there: Situation) -> list[ClaimReason]:
    return reasons_of_unplaced(there.queue)


def test_a_label_is_read_again_when_the_gpus_of_its_node_are_known(told: Told) -> None:
    told.fleet = Fleet()
    told.labels(gpu_2="dev")
    there = Situation(node_of("a"))
    there.node("a", {f"gpu-2.{DEDICATED_TO}": "dev"})
    told.reporter.report_labels(there.nodes.values(), {}, Fleet.of(there.gpus))
    assert told.event("no GPU 2")["count"] == 1
