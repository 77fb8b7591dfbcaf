"""Plans: what each node is told, and that nothing is written twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from controller.cluster.claim_index import PoolDevice
from controller.cluster.fleet_builder import FleetBuilder
from controller.cluster.node_dedication import Dedication
from controller.cluster.node_views import NodeView
from controller.cluster.unheld_devices import UnheldDevices
from controller.decision.plan_writer import (
    CONFLICT_RETRY_SECONDS,
    LAZY_WRITE_DELAY_SECONDS,
    MAX_WRITES,
    RETRY_INTERVAL_SECONDS,
    PlanWriter,
)
from controller.decision.write_and_evict import Asked, PlanSpecs
from driver.kube.client import Object
from driver.kube.types import PAUSED, GpuNodePlan, PlanMetadata
from driver.model.offer import Offer
from driver.model.plan import OfferMode, PlanMode, PlanSpec, PlanStatus, PublishHeld
from tests.support.api_server import Exchange, HttpServer
from tests.support.node_views import changes, fleet_of
from tests.unit.controller.cluster.test_fleet_builder import view

POOL = "n1-gpu.tessera.dev"
SMALL, OTHER = "gpu-0-mig-1g10gb-6", "gpu-0-mig-1g10gb-5"


def ignored(_: Object) -> None:
    """Nobody looks at what was stored."""


class Server(HttpServer):
    """The API server as far as writing plans goes; refuses those of the nodes in ``refused``."""

    def __init__(self, *refused: str) -> None:
        super().__init__(self._answer)
        self.bodies: list[Object] = []
        self.refused = refused
        self.status = 500

    def _answer(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        if self.status == 409 or body["metadata"].get("name") in self.refused:
            exchange.refuse(self.status, "not today")
            return
        self.bodies.append(body)
        exchange.send_json(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def offer(name: str) -> Offer:
    [found] = [d.offer for gpu in fleet_of(view()) for d in gpu.devices if d.name == name]
    return found


def spec(*offers: str, withdrawn: tuple[str, ...] = (), held: tuple[str, ...] = ()) -> PlanSpec:
    gone = [PoolDevice(POOL, name) for name in withdrawn]
    return spec_of(view(*held), [offer(name) for name in offers], gone)


def spec_of(
    node: NodeView, offers: Sequence[Offer] = (), withdrawn: Sequence[PoolDevice] = (), listed: Sequence[Offer] = ()
) -> PlanSpec:
    held = {node.name: PublishHeld.ALWAYS}
    return PlanSpecs().update([node], changes([node]), fleet_of(node), asked(offers, withdrawn, listed), held)["n1"]


def asked(offers: Sequence[Offer] = (), withdrawn: Sequence[PoolDevice] = (), listed: Sequence[Offer] = ()) -> Asked:
    return Asked(OfferMode.COUNTERS, frozenset(offers), frozenset(listed), frozenset(withdrawn))


def test_a_listed_device_is_listed_whether_it_is_offered_or_not() -> None:
    """A node withdraws an offer by itself as soon as a claim has what overlaps it."""
    small, other = offer(SMALL), offer(OTHER)
    found = spec_of(view(), [small], listed=[small, other])
    assert (found.offers, found.listed) == ((str(small),), (str(other), str(small)))


def index_of(node: NodeView) -> UnheldDevices:
    devices = UnheldDevices()
    devices.update([node], changes([node]), fleet_of(node))
    return devices


def test_a_plan_names_what_is_offered_held_and_withdrawn_on_its_node() -> None:
    found = spec(SMALL, withdrawn=("gpu-1",), held=("gpu-0-mig-1g10gb-5",))
    assert found.epoch == "e"
    assert list(found.offers) == ["GPU-0/1g.10gb@6"]
    assert found.held == ("gpu-0-mig-1g10gb-5 default/claim",)
    assert found.withdrawn == ("gpu-1",)


def test_a_plan_says_which_gpus_labels_keep_for_which_use() -> None:
    node = view(dedication=Dedication("training", {1: "inference", 7: "dev"}))
    found = spec_of(node)
    assert (found.dedicated_to, found.dedicated_gpus) == ("training", ("GPU-1=inference",))


@dataclass
class Writing:
    """The plan of n1 as the watch brings it, at any time of a clock that stands still."""

    server: Server
    plans: dict[str, GpuNodePlan] = field(default_factory=dict)
    now: float = 100.0
    requested: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self.writer = PlanWriter(self.server.client(), self.stored, lambda: self.now)

    def stored(self, body: Object) -> None:
        self.plans["n1"] = GpuNodePlan(PlanMetadata("n1", uid="u1"), msgspec.convert(body["spec"], PlanSpec))

    def has(self, existing: PlanSpec, **annotations: str) -> Writing:
        self.plans["n1"] = GpuNodePlan(
            PlanMetadata("n1", uid="u1", resource_version="7", annotations=annotations), existing
        )
        return self

    def write(self, wanted: PlanSpec) -> int:
        return self.writer.write({"n1": wanted}, self.plans, {"n1": "node-uid"}, self.requested)


@pytest.fixture
def writing(server: Server) -> Writing:
    return Writing(server)


def test_what_a_node_may_be_taking_away_just_now_is_not_offered_before_it_is_gone() -> None:
    told = {"n1": GpuNodePlan(PlanMetadata("n1", "7"), PlanSpec(withdrawn=(SMALL,)))}
    both = [offer(SMALL), offer(OTHER)]

    def offerable(published: dict[str, int]) -> set[Offer]:
        return index_of(view(published=published)).offerable(both, told)

    assert offerable({SMALL: 1, OTHER: 1}) == {offer(OTHER)}
    assert offerable({OTHER: 1}) == set(both)


@pytest.mark.parametrize(
    ("paused", "mode", "epoch", "follows"),
    [
        pytest.param("", PlanMode.PLANNED, "e", True, id="it does what the plan says"),
        pytest.param("true", PlanMode.PLANNED, "e", False, id="a person does the planning"),
        pytest.param("", PlanMode.STANDALONE, "e", False, id="it stands alone"),
        pytest.param("", PlanMode.PLANNED, "older", False, id="it has stood alone since the plan was written"),
    ],
)
def test_only_a_node_that_does_what_its_plan_says_has_offers_taken_back(
    paused: str, mode: PlanMode, epoch: str, follows: bool
) -> None:
    plan = GpuNodePlan(
        PlanMetadata("n1", annotations={PAUSED: paused}), PlanSpec(epoch="e"), PlanStatus(epoch=epoch, mode=mode)
    )
    assert (plan.followed and not plan.metadata.paused) == follows
    devices = index_of(view(published={SMALL: 1}, follows_plan=follows))
    assert devices.free == {offer(SMALL): PoolDevice(POOL, SMALL)}
    assert devices.managed == (devices.free if follows else {})


def test_a_plan_that_does_not_change_is_not_written(writing: Writing) -> None:
    assert writing.has(spec(SMALL)).write(spec(SMALL)) == 0
    assert writing.has(spec()).write(spec(SMALL)) == 1
    assert writing.write(spec(SMALL)) == 0


def test_that_a_withdrawn_device_has_gone_is_no_reason_to_write(writing: Writing) -> None:
    writing.has(spec(SMALL, withdrawn=("gpu-1",))).write(spec(SMALL))
    assert writing.writer.next_s is None


def test_an_offer_is_written_at_once_and_the_rest_with_it_or_a_moment_later(writing: Writing) -> None:
    writing.has(spec(SMALL))
    for wanted in (spec(held=(SMALL,)), spec(held=(SMALL,), withdrawn=("gpu-1",))):
        assert writing.write(wanted) == 0
    assert writing.writer.next_s == LAZY_WRITE_DELAY_SECONDS
    writing.now += LAZY_WRITE_DELAY_SECONDS
    assert writing.write(wanted) == 1
    assert writing.writer.next_s is None
    assert writing.write(spec(OTHER, held=())) == 1


def test_while_claims_are_pending_offers_that_they_do_not_ask_for_wait_a_moment(writing: Writing) -> None:
    writing.has(spec(SMALL))
    writing.requested = frozenset({"GPU-1/full"})
    assert writing.write(spec(OTHER)) == 0
    writing.requested = frozenset({"GPU-1/full", str(offer(OTHER))})
    assert writing.write(spec(OTHER)) == 1


def test_a_node_that_stood_alone_is_answered_at_once(writing: Writing) -> None:
    writing.has(spec(SMALL))
    assert writing.write(msgspec.structs.replace(spec(SMALL), epoch="another")) == 1


def test_what_a_plan_no_longer_says_goes(server: Server, writing: Writing) -> None:
    writing.has(msgspec.structs.replace(spec(SMALL), dedicated_to="training")).write(spec(OTHER))
    assert server.bodies[0]["spec"]["dedicatedTo"] is None
    assert server.bodies[0]["spec"]["withdrawn"] == []


def test_what_operators_write_is_theirs(server: Server, writing: Writing) -> None:
    cordoned = msgspec.structs.replace(spec(SMALL), cordoned=("GPU-1 fan",), cleared=("GPU-1 2026-11-21T21:30:00Z",))
    assert writing.has(cordoned).write(spec(SMALL)) == 0
    assert writing.write(spec(OTHER)) == 1
    assert not {"cordoned", "cleared"} & server.bodies[0]["spec"].keys()


def test_a_plan_is_written_only_as_it_was_seen(server: Server, writing: Writing) -> None:
    writing.has(spec()).write(spec(SMALL))
    assert server.bodies[0]["metadata"]["resourceVersion"] == "7"


def test_a_plan_that_another_leader_has_written_meanwhile_is_left_for_the_next_decision(
    server: Server, writing: Writing
) -> None:
    server.status = 409
    writing.has(spec()).write(spec(SMALL))
    assert writing.plans["n1"].spec == spec()


def test_a_plan_that_changed_meanwhile_is_written_as_soon_as_its_new_version_is_known(
    server: Server, writing: Writing
) -> None:
    """Soon, because a new version asks for no decision if only numbers of the status changed."""
    writing.has(spec())
    server.status = 409
    assert writing.write(spec(SMALL)) == 0
    assert writing.writer.next_s == pytest.approx(CONFLICT_RETRY_SECONDS)
    server.status = 500
    assert writing.write(spec(SMALL)) == 0  # it would be refused again
    assert writing.has(spec()).write(spec(SMALL)) == 1
    assert writing.writer.next_s is None


def test_a_paused_plan_is_a_persons(writing: Writing) -> None:
    assert writing.has(spec(), **{PAUSED: "true"}).write(spec(SMALL)) == 0


def test_a_plan_belongs_to_its_node(server: Server, writing: Writing) -> None:
    assert writing.write(spec(SMALL)) == 1
    [owner] = server.bodies[0]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", "n1", "node-uid")


def test_a_plan_that_can_not_be_written_keeps_nobody_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    both, owners = {"n1": spec(SMALL), "n2": spec(SMALL)}, {"n1": "a", "n2": "b"}
    with Server("n1") as server:
        writer = PlanWriter(server.client(), ignored, lambda: now)
        assert writer.write(both, {}, owners, None) == 1
        assert [body["metadata"]["name"] for body in server.bodies] == ["n2"]
        assert "not today" in str(caplog.records[-1].__dict__)
        server.refused = ()
        assert writer.write({"n1": both["n1"]}, {}, owners, None) == 0
        assert writer.next_s == RETRY_INTERVAL_SECONDS
        now += RETRY_INTERVAL_SECONDS
        assert writer.write({"n1": both["n1"]}, {}, owners, None) == 1
        assert writer.next_s is None


def test_only_plans_are_looked_at_of_which_something_has_changed_or_that_wait_to_be_written(writing: Writing) -> None:
    writing.has(spec(SMALL))
    lazy, owners = {"n1": spec()}, {"n1": "node-uid"}
    assert writing.writer.write(lazy, writing.plans, owners, None, {"n1"}) == 0
    writing.now += LAZY_WRITE_DELAY_SECONDS
    assert writing.writer.write(lazy, writing.plans, owners, None, ()) == 1
    # That one was written, not seen.
    assert writing.writer.write({"n1": spec(OTHER)}, writing.plans, owners, None, ()) == 1
    assert writing.writer.write({"n1": spec(OTHER)}, writing.plans, owners, None, {"n1"}) == 0
    assert writing.writer.write({"n1": spec(SMALL)}, writing.plans, owners, None, ()) == 0


def test_only_nodes_that_changed_get_another_spec() -> None:
    specs, builder, modes = PlanSpecs(), FleetBuilder(), dict.fromkeys(("n1", "n2"), PublishHeld.ALWAYS)
    nodes = [view(), view(name="n2", pool="n2-gpu.tessera.dev", status=PlanStatus(epoch="e2"))]
    fleet, none = builder.build(nodes, changes(nodes)), changes(())
    first = dict(specs.update(nodes, changes(nodes), fleet, asked([offer(SMALL)]), modes))
    assert specs.changed == {"n1", "n2"}
    specs.changed.clear()
    again = specs.update(nodes, none, fleet, asked([offer(SMALL)]), modes)
    assert all(again[name] is first[name] for name in first)
    assert not specs.changed
    withdrawing = asked(withdrawn=[PoolDevice(POOL, SMALL)])
    assert specs.update(nodes, none, fleet, withdrawing, modes)["n1"] == spec(withdrawn=(SMALL,))
    assert specs.update(nodes, none, fleet, asked(), modes)["n1"] == spec()
    gone = changes(nodes[:1], nodes)
    assert specs.update(nodes[:1], gone, builder.build(nodes[:1], gone), asked(), modes) == {"n1": spec()}


def test_what_somebody_was_given_though_it_was_to_go_is_told_at_once(writing: Writing) -> None:
    writing.has(spec(withdrawn=(SMALL,)))
    assert writing.write(spec(held=(SMALL,))) == 1


def test_no_plan_waits_for_the_writing_of_another() -> None:
    together = threading.Barrier(2, timeout=60)

    class Slow(Server):
        def _answer(self, exchange: Exchange) -> None:
            together.wait()
            super()._answer(exchange)

    with Slow() as slow:
        assert (
            PlanWriter(slow.client(), ignored).write(
                {"n1": spec(SMALL), "n2": spec(SMALL)}, {}, {"n1": "a", "n2": "b"}, ()
            )
            == 2
        )


def test_of_many_plans_those_that_offer_something_are_written_first_and_the_rest_at_once_after_that(
    writing: Writing,
) -> None:
    names = [f"n{number:03}" for number in range(2 * MAX_WRITES)]
    wanted = {name: PlanSpec(epoch="one") for name in names} | {names[-1]: spec(SMALL)}
    uids = dict.fromkeys(names, "uid")
    assert writing.writer.write(wanted, {}, uids, None) == MAX_WRITES
    written = {body["metadata"]["name"] for body in writing.server.bodies}
    assert names[-1] in written
    assert writing.writer.next_s == 0.0
    there = {name: GpuNodePlan(PlanMetadata(name, "1"), wanted[name]) for name in written}
    assert writing.writer.write(wanted, there, uids, None) == MAX_WRITES
    assert writing.writer.next_s is None
