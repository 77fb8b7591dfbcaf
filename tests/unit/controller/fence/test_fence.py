"""Taking offers back: in every order, and with every failure and kill on the way, nothing is given away twice."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.cache import ClusterCache
from controller.cluster.claim_index import PoolDevice
from controller.fence import fence as module
from controller.fence import fenced_devices as fenced
from controller.fence import withdrawals as withdrawals_module
from controller.fence.fence import Fence, FenceSettings, Withdrawable
from controller.fence.fenced_devices import REREAD_SECONDS
from controller.fence.withdrawals import Withdrawals
from controller.step_names import Step
from driver.errors import ApiError
from driver.step_observer import Moment
from tests.support.api_server import Object, ObjectApi, Route
from tests.support.clock import FakeClock
from tests.support.fence_race import POOL, ClaimsCache, Race, allocate, claims_cache, new_claim, without_fence
from tests.support.running import eventually, in_thread

CONFIG_MAPS = "/api/v1/namespaces/tessera/configmaps"
A, B, C = (PoolDevice(POOL, f"gpu-{number}") for number in range(3))
AT_ONCE = FenceSettings(settle_s=0)
FIVE_MINUTES, HOUR = 300, 3600
OF_THE_FENCE = [step for step in Step if step not in (Step.DECIDE, Step.WRITE_PLAN, Step.WITHDRAW)]


class FencedApi(ObjectApi):
    """With the admission policy, in the words of the chart's ``fence.yaml``; ``policy`` can be taken away.

    ``admits_pods``: whether it is of a version that knows reservations for pods.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.admits_pods = True
        self.admit = self._refuses

    def fenced(self) -> set[PoolDevice]:
        data = self.folder(CONFIG_MAPS).get("tessera-fence", {}).get("data", {})
        return {PoolDevice(pool, name) for pool, names in data.items() for name in names.split(" ")}

    def _refuses(self, route: Route, old: Object, new: Object) -> str | None:
        if not self.policy or route.part != "status" or old.get("status", {}).get("allocation"):
            return None
        results = new.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
        closed = [result for result in results if self._is_closed(PoolDevice(result["pool"], result["device"]), new)]
        return f"ValidatingAdmissionPolicy 'tessera-fence' denied request: {closed}" if closed else None

    def _is_closed(self, device: PoolDevice, claim: Object) -> bool:
        consumers = claim["status"].get("reservedFor", ()) if self.admits_pods else ()
        admitted = {claim["metadata"].get("uid"), *(consumer["uid"] for consumer in consumers)}
        parts = ((entry.pool, *entry.device.split("=")[:2]) for entry in self.fenced() if "=" in entry.device)
        return device in self.fenced() or any(
            pool == device.pool and f"{device.device}-".startswith(f"{gpu}-") and admitted.isdisjoint(uids.split(","))
            for pool, gpu, uids in parts
        )


@pytest.fixture
def api() -> Iterator[FencedApi]:
    with FencedApi() as api:
        yield api


@pytest.fixture
def claims(api: FencedApi) -> Iterator[ClaimsCache]:
    with claims_cache(api.server.client(), api.end_watches) as claims:
        yield claims


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def fence_of(
    api: FencedApi, claims: ClusterCache, clock: FakeClock | None = None, settings: FenceSettings = AT_ONCE
) -> Fence:
    return Fence(api.server.client(), claims, settings, clock)


def give(api: FencedApi, name: str, *devices: PoolDevice) -> Object:
    client = api.server.client()
    return allocate(client, new_claim(client, name), *devices)


def test_what_nobody_holds_may_be_withdrawn_and_can_not_be_allocated_any_more(
    api: FencedApi, claims: ClaimsCache
) -> None:
    fence = fence_of(api, claims)
    assert fence.take_back([A, B]) == Withdrawable(frozenset({A, B}))
    assert api.fenced() == {A, B}
    with pytest.raises(ApiError, match="tessera-fence"):
        give(api, "late", A)
    give(api, "other", C)


def test_a_reserved_gpu_is_only_for_the_claims_that_are_named(api: FencedApi, claims: ClaimsCache) -> None:
    fence, client = fence_of(api, claims), api.server.client()
    mine = new_claim(client, "mine")
    assert fence.reserve([A], [mine["metadata"]["uid"]], FIVE_MINUTES)
    for name, device in (("whole", A), ("part", PoolDevice(POOL, f"{A.device}-mig-1g10gb-0"))):
        with pytest.raises(ApiError, match="tessera-fence"):
            give(api, name, device)
    allocate(client, mine, A)
    [entry] = fence.reservations()
    fence.lift([entry])
    assert fence.reservations() == {}
    give(api, "later", PoolDevice(POOL, f"{A.device}-mig-1g10gb-0"))


def test_a_gpu_that_is_reserved_for_a_pod_is_for_the_claims_that_are_allocated_for_it(
    api: FencedApi, claims: ClaimsCache
) -> None:
    client = api.server.client()
    assert fence_of(api, claims).reserve([A], ["waiting-pod"], FIVE_MINUTES)
    with pytest.raises(ApiError, match="tessera-fence"):
        allocate(client, new_claim(client, "other"), A, pod="other-pod")
    allocate(client, new_claim(client, "made-by-the-scheduler"), A, pod="waiting-pod")


def test_what_is_reserved_for_the_next_pod_of_an_owner_is_for_nobody_until_that_pod_is_entered(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    """There is no moment in between in which others could have it, and it ends when it would have."""
    client, fence = api.server.client(), fence_of(api, claims, clock)
    assert fence.reserve([A], ["owner"], HOUR)
    assert fence.reserve([B], ["other-owner"], HOUR)
    with pytest.raises(ApiError, match="tessera-fence"):
        allocate(client, new_claim(client, "too-early"), A, pod="next-pod")
    writes = len(api.queries("PATCH"))
    clock.advance(HOUR - 1)
    fence.hand_over(frozenset({"owner"}), "next-pod")
    assert len(api.queries("PATCH")) == writes + 1
    next_leader = fence_of(api, claims, clock)
    next_leader.start([])
    assert set(next_leader.reservations().values()) == {
        frozenset({"next-pod"}),
        frozenset({"other-owner"}),
    }
    with pytest.raises(ApiError, match="tessera-fence"):
        allocate(client, new_claim(client, "other"), A, pod="other-pod")
    allocate(client, new_claim(client, "its-claim"), A, pod="next-pod")
    assert not fence.lift_overdue_reservations()
    clock.advance(1)
    assert len(fence.lift_overdue_reservations()) == 2


def test_a_gpu_of_which_the_full_device_is_fenced_can_be_reserved(api: FencedApi, claims: ClaimsCache) -> None:
    """It is offered, and lifted from the fence, once the victims have ended."""
    fence = fence_of(api, claims)
    fence.take_back([A])
    assert fence.reserve([A], ["waiting-pod"], FIVE_MINUTES)


def test_nothing_is_reserved_with_a_policy_of_an_earlier_version_that_would_refuse_the_waiting_pod(
    api: FencedApi, claims: ClaimsCache
) -> None:
    api.admits_pods = False
    settings = FenceSettings(settle_s=0, probe_s=0.01)
    assert not fence_of(api, claims, settings=settings).reserve([A], ["waiting-pod"], FIVE_MINUTES)
    assert api.fenced() - {PoolDevice(POOL, "")} == set()


def test_a_gpu_can_be_reserved_while_an_api_server_still_knows_the_reservation_before(
    api: FencedApi, claims: ClaimsCache
) -> None:
    """It refuses everybody else, and for a moment the waiting pod, too."""
    fence = fence_of(api, claims)
    fence.take_back([B])
    api.once("PUT", *[lambda exchange: exchange.refuse(422, "tessera-fence denied it")] * 2)
    assert fence.reserve([A], ["waiting-pod"], FIVE_MINUTES)


def test_a_new_leader_knows_what_is_reserved_for_whom_and_until_when(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    """Longer than what was withdrawn stays fenced."""
    fence_of(api, claims, clock).reserve([A, B], ["one", "two"], HOUR)
    clock.advance(HOUR - 1)
    fence = fence_of(api, claims, clock)
    fence.start([A, B, C])
    fence.expire()
    assert not fence.lift_overdue_reservations()
    assert set(fence.reservations().values()) == {frozenset({"one", "two"})}
    assert len(fence.reservations()) == 2
    clock.advance(1)
    assert fence.lift_overdue_reservations()
    assert api.fenced() - {PoolDevice(POOL, "")} == set()
    assert not fence.lift_overdue_reservations()


def test_an_old_leader_keeps_a_reservation_for_all_of_its_time(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    fence = fence_of(api, claims, clock)
    fence.reserve([A], ["one"], HOUR)
    clock.advance(HOUR - 1)
    fence.expire()
    assert len(fence.reservations()) == 1


def test_a_reservation_ends_though_the_clock_of_the_api_server_was_set_back_by_a_day(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    fence = fence_of(api, claims, clock)
    fence.reserve([A], ["one"], HOUR)
    clock.advance(-24 * HOUR)
    assert fence.lift_overdue_reservations() == {frozenset({"one"})}


@pytest.mark.parametrize(
    ("gpu", "claim", "is_reserved"),
    [(B, "one", False), (A, "two", False), (B, "two", True)],
    ids=["another GPU for the same claim", "the same GPU", "another GPU for another claim"],
)
def test_of_two_leaders_at_once_the_second_to_reserve_leaves_that_of_the_first_alone(
    gpu: PoolDevice, claim: str, is_reserved: bool, api: FencedApi, claims: ClaimsCache
) -> None:
    one, two = fence_of(api, claims), fence_of(api, claims)
    one.start([])
    two.start([])
    assert one.reserve([A], ["one"], FIVE_MINUTES)
    assert two.reserve([gpu], [claim], FIVE_MINUTES) == is_reserved
    expected = {("gpu-0", "one")} | ({(gpu.device, claim)} if is_reserved else set())
    assert {tuple(entry.device.split("=")[:2]) for entry in api.fenced()} == expected


def test_leaders_that_reserve_in_the_same_moment_do_not_both_evict(api: FencedApi, claims: ClaimsCache) -> None:
    for _ in range(10):
        leaders = fence_of(api, claims), fence_of(api, claims)
        start = threading.Barrier(2)

        def reserve(leader: Fence, gpu: PoolDevice, start: threading.Barrier = start) -> bool:
            leader.start([])
            start.wait(60)
            return leader.reserve([gpu], ["uid"], FIVE_MINUTES)

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(reserve, leaders, (A, B)))
        assert sum(results) <= 1
        assert len(api.fenced() - {PoolDevice(POOL, "")}) == sum(results)
        for leader in leaders:
            leader.fenced.load()
            leader.lift(leader.reservations())


def test_a_leader_whose_term_has_ended_reserves_nothing(api: FencedApi, claims: ClaimsCache) -> None:
    fence = fence_of(api, claims)
    fence.end()
    assert not fence.reserve([A], ["one"], FIVE_MINUTES)
    assert not api.fenced()


def test_a_full_fence_keeps_reservations_and_what_was_just_withdrawn(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fenced, "MAX_ENTRIES", 2)
    fence = fence_of(api, claims, clock)
    fence.take_back([B, C])
    assert not fence.reserve([A], ["one"], HOUR)
    assert api.fenced() == {B, C}
    clock.advance(module.MIN_FENCED_SECONDS)
    assert fence.reserve([A], ["one"], HOUR)
    clock.advance(module.MIN_FENCED_SECONDS)
    devices = [PoolDevice(POOL, f"gpu-{number}") for number in range(7, 10)]
    result = fence.take_back(devices)
    assert (len(result.devices), len(result.undecided)) == (1, 2)
    assert api.fenced() == {*fence.reservations(), *result.devices}
    assert len(fence.reservations()) == 1


def test_nothing_is_reserved_where_the_policy_is_missing(api: FencedApi, claims: ClaimsCache) -> None:
    api.policy = False
    settings = FenceSettings(settle_s=0, probe_s=0.01)
    assert not fence_of(api, claims, settings=settings).reserve([A], ["mine"], FIVE_MINUTES)
    assert api.fenced() - {PoolDevice(POOL, "")} == set()


def test_a_canary_that_a_killed_leader_left_allocated_is_deallocated(api: FencedApi, claims: ClaimsCache) -> None:
    """Else no dry run would show that the fence is in force."""
    fence = fence_of(api, claims)
    fence.wake_parked_pods()
    canary = api.folder("/apis/resource.k8s.io/v1/namespaces/tessera/resourceclaims")["tessera-canary"]
    canary["status"] = {"allocation": {"devices": {"results": [{"pool": "tessera-canary", "device": "x"}]}}}
    assert not fence.take_back([A]).in_force
    fence.start([])
    assert fence.take_back([B]).in_force


def test_to_wake_parked_pods_leaves_the_canary_unallocated(api: FencedApi, claims: ClaimsCache) -> None:
    fence_of(api, claims).wake_parked_pods()
    canary = api.folder("/apis/resource.k8s.io/v1/namespaces/tessera/resourceclaims")["tessera-canary"]
    assert not canary.get("status")
    assert api.count("PUT", "status") == 2


def test_what_somebody_holds_stays_and_is_not_fenced(api: FencedApi, claims: ClaimsCache) -> None:
    give(api, "held", A)
    fence = fence_of(api, claims)
    assert fence.take_back([A, B]) == Withdrawable(frozenset({B}), held=frozenset({A}))
    assert api.fenced() == {B}
    assert A not in fence.fenced.devices


def test_nothing_to_take_back_asks_nobody(api: FencedApi, claims: ClaimsCache) -> None:
    eventually(lambda: api.count("watch"), "the cache of claims asks for nothing more")
    before = len(api.requests)
    fence = fence_of(api, claims)
    assert fence.take_back([]) == Withdrawable()
    fence.lift([A])
    fence.expire()
    assert len(api.requests) == before


def test_the_canary_is_written_only_after_the_fence_is_in_force(api: FencedApi, claims: ClaimsCache) -> None:
    fence_of(api, claims).take_back([A])
    api.requests.clear()
    fence_of(api, claims).take_back([B])
    asked = [(kind, path.split("?")[0].rsplit("/", 1)[-1]) for _, kind, path in api.requests if kind != "get"]
    assert asked == [("PATCH", "tessera-fence"), ("PUT", "status"), ("PATCH", "tessera-canary")]


def test_an_allocation_from_before_the_fence_that_the_cache_learns_late_is_seen(
    api: FencedApi, claims: ClaimsCache
) -> None:
    """What the canary is for: the watch is held up until the fence is in force."""
    wrote = threading.Event()

    def observer(step: Step, moment: Moment) -> None:
        if (step, moment) == (Step.FENCE, "before"):
            api.end_watches(hang_up=True)
            give(api, "early", A)
            wrote.set()

    fence = Fence(api.server.client(), claims, AT_ONCE, observer=observer)
    assert fence.take_back([A]).held == {A}
    assert wrote.is_set()


class Lagging(ClusterCache):
    """A cache of claims that hears nothing."""

    def __init__(self) -> None:
        pass

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return False

    def held(self) -> frozenset[PoolDevice]:
        raise AssertionError("it does not know")


def test_while_the_cache_lags_behind_nothing_is_decided_and_nothing_stays_fenced(api: FencedApi) -> None:
    fence = fence_of(api, Lagging())
    assert fence.take_back([A]) == Withdrawable(undecided=frozenset({A}))
    assert not api.fenced()


def test_several_api_servers_are_given_their_time(api: FencedApi, claims: ClaimsCache, clock: FakeClock) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(fence_of(api, claims, clock, FenceSettings(settle_s=1)).take_back, [A])
        eventually(lambda: clock.waiters, "it settles")
        assert api.fenced() == {A}
        assert api.count("PUT") == 0
        clock.advance(0.9)
        assert not job.done()
        clock.advance(0.1)
        assert job.result(60).devices == {A}


def test_without_the_policy_it_goes_on_and_says_so(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    api.policy = False
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(fence_of(api, claims, clock).take_back, [A])
        clock.run_until(job.done, "it goes on")
        assert job.result() == Withdrawable(frozenset({A}), in_force=False)
    assert "the fence is not in force" in caplog.text


def test_a_right_that_is_missing_counts_as_a_policy_that_is_missing(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    api.once("PUT", *[lambda exchange: exchange.refuse(403, "resourceclaims/status is forbidden")] * 20)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(fence_of(api, claims, clock).take_back, [A])
        clock.run_until(job.done, "it goes on")
        assert not job.result().in_force


# How long


def test_what_was_withdrawn_stays_fenced_for_fifteen_minutes(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    fence = fence_of(api, claims, clock)
    fence.take_back([A])
    clock.advance(600)
    fence.take_back([B])
    clock.advance(299)
    fence.expire()
    assert api.fenced() == {A, B}
    clock.advance(1)
    fence.expire()
    assert api.fenced() == {B}


def test_what_is_offered_again_is_lifted_first_and_can_be_taken_back_again(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    fence = fence_of(api, claims, clock)
    fence.take_back([A, B])
    fence.lift([A, C])
    assert api.fenced() == {B}
    clock.advance(600)
    fence.take_back([A])
    clock.advance(600)
    fence.expire()
    assert api.fenced() == {A}


def test_the_oldest_go_where_there_are_too_many(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fenced, "MAX_ENTRIES", 3)
    fence = fence_of(api, claims, clock)
    for device in (C, A, B):
        fence.take_back([device])
        clock.advance(module.MIN_FENCED_SECONDS)
    many = [PoolDevice(POOL, f"gpu-{number}") for number in (7, 8)]
    fence.take_back(many)
    assert api.fenced() == {B, *many}
    result = fence.take_back([PoolDevice(POOL, f"gpu-{number}") for number in range(10, 15)])
    assert (len(result.devices), len(result.undecided)) == (1, 4)
    assert api.fenced() == {*many, *result.devices}


def test_a_crowd_does_not_push_out_what_was_fenced_a_moment_ago(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fenced, "MAX_ENTRIES", 2)
    fence = fence_of(api, claims, clock)
    fence.take_back([A, B])
    with ThreadPoolExecutor() as pool:
        crowd = pool.submit(fence.take_back, [C])
        eventually(lambda: clock.waiters, "it waits for room")
        with pytest.raises(ApiError, match="tessera-fence"):
            give(api, "late", A)
        clock.advance(module.MIN_FENCED_SECONDS)
        assert crowd.result().devices == {C}
    assert len(api.fenced()) == 2


def test_the_most_there_can_be_fits_into_a_config_map() -> None:
    longest_name = 63
    assert fenced.MAX_ENTRIES * (longest_name + 1) < 2**20 / 3


def test_a_config_map_that_somebody_deleted_is_made_again_with_all_that_is_fenced(
    api: FencedApi, claims: ClaimsCache
) -> None:
    fence = fence_of(api, claims)
    fence.take_back([A])
    api.drop(f"{CONFIG_MAPS}/tessera-fence")
    fence.take_back([B])
    assert api.fenced() == {A, B}


def test_two_leaders_for_a_moment_undo_nothing_of_each_other(api: FencedApi, claims: ClaimsCache) -> None:
    one, two = fence_of(api, claims), fence_of(api, claims)
    one.take_back([A])
    two.take_back([B])
    one.lift([C])
    assert api.fenced() == {A, B}
    two.lift([B])
    assert api.fenced() == {A}


def test_what_a_leader_whose_term_has_ended_fences_late_is_noticed(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    leader, ended = fence_of(api, claims, clock), fence_of(api, claims, clock)
    ended.start([])
    leader.start([])
    ended.take_back([A])
    assert not leader.fenced.reread()
    clock.advance(REREAD_SECONDS)
    assert leader.fenced.reread()
    leader.lift([A])
    assert not api.fenced()


def test_a_config_map_that_is_not_there_when_it_is_read_again_loses_nothing(
    api: FencedApi, claims: ClaimsCache, clock: FakeClock
) -> None:
    fence = fence_of(api, claims, clock)
    fence.take_back([A])
    api.drop(f"{CONFIG_MAPS}/tessera-fence")
    clock.advance(REREAD_SECONDS)
    assert not fence.fenced.reread()
    fence.take_back([B])
    assert api.fenced() == {A, B}


@pytest.mark.long
def test_leaders_that_write_at_once_undo_nothing_of_each_other(api: FencedApi, claims: ClaimsCache) -> None:
    """Each sees what the other has stored since it last looked."""
    one, two = fence_of(api, claims), fence_of(api, claims)
    devices = [PoolDevice(POOL, f"gpu-{number}") for number in range(10, 40)]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fence.take_back, [device]) for device in devices for fence in (one, two)]
        results = [job.result(60) for job in jobs]
    assert all(len(result.devices) == 1 for result in results)
    assert api.fenced() == set(devices)


NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
POOLS = st.lists(NAMES, min_size=1, max_size=6).map(".".join).filter(lambda name: len(name) <= 253)
DEVICES = st.builds(PoolDevice, POOLS, NAMES)


@given(st.sets(DEVICES, min_size=1, max_size=20))
def test_every_device_is_written_so_that_it_can_be_read_again(devices: set[PoolDevice]) -> None:
    data = fenced.written(devices)
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in data)
    assert fenced.read(data) == devices


# Kills and failures


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(("step", "moment"), list(product(OF_THE_FENCE, ("before", "after"))))
def test_after_a_kill_at_any_moment_the_next_leader_lets_go_what_is_offered(
    api: FencedApi, claims: ClaimsCache, step: Step, moment: Moment
) -> None:
    give(api, "held", A)

    def observer(at: Step, when: Moment) -> None:
        if (at, when) == (step, moment):
            raise Killed

    with pytest.raises(Killed):
        Fence(api.server.client(), claims, AT_ONCE, observer=observer).take_back([A, B, C])
    successor = fence_of(api, claims)
    successor.start(offered=[A, B, C])
    assert not api.fenced()
    assert successor.take_back([A, B, C]) == Withdrawable(frozenset({B, C}), held=frozenset({A}))
    assert api.fenced() == {B, C}


def test_what_was_withdrawn_before_a_restart_stays_fenced_for_all_of_its_time_after_it(
    api: FencedApi, claims: ClaimsCache
) -> None:
    fence_of(api, claims, FakeClock(9000.0)).take_back([A, B])
    clock = FakeClock(5.0)
    successor = fence_of(api, claims, clock)
    successor.start(offered=[B])
    assert api.fenced() == {A}
    assert A in successor.fenced.devices
    clock.advance(899)
    successor.expire()
    assert api.fenced() == {A}
    clock.advance(1)
    successor.expire()
    assert not api.fenced()


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize(("kind", "nth"), [("get", 1), ("POST", 1), ("PUT", 1), ("PATCH", 1), ("POST", 2)])
def test_when_a_request_fails_nothing_is_withdrawn_and_nothing_stays_fenced(
    api: FencedApi, claims: ClaimsCache, kind: str, nth: int, lost: bool
) -> None:
    fence = fence_of(api, claims)

    def fails(exchange) -> None:  # type: ignore[no-untyped-def]
        if lost:
            exchange.send = lambda *_: exchange.cut()
            api._write(exchange)
        else:
            exchange.refuse(500, "etcd")

    usual = api._get if kind == "get" else api._write
    attempts = 2 if lost and kind == "PUT" else 1  # it is repeated when an idle connection turns out to be closed
    api.once(kind, *[usual] * (nth - 1), *[fails] * attempts)
    with pytest.raises(ApiError):
        fence.take_back([A, B])
    fence.expire()
    assert not api.fenced()
    assert fence.take_back([A, B]).devices == {A, B}


def test_what_could_not_be_lifted_at_once_is_lifted_later(api: FencedApi, claims: ClaimsCache) -> None:
    fence = fence_of(api, claims)
    fence.take_back([C])
    api.once("PUT", lambda exchange: exchange.refuse(500, "etcd"))
    api.once("PATCH", api._write, lambda exchange: exchange.refuse(500, "etcd"))
    with pytest.raises(ApiError):
        fence.take_back([A])
    assert api.fenced() == {A, C}
    fence.expire()
    assert api.fenced() == {C}


def test_a_leader_whose_term_has_ended_changes_nothing_any_more(api: FencedApi, claims: ClaimsCache) -> None:
    """Its caches have stopped, so that it waits in vain; meanwhile the next leader fences the same devices."""

    def observer(step: Step, moment: Moment) -> None:
        if (step, moment) == (Step.CATCH_UP, "before"):
            old.end()

    old = Fence(api.server.client(), Lagging(), AT_ONCE, observer=observer)
    old.take_back([A, B])
    assert fence_of(api, claims).take_back([A]).devices == {A}
    old.lift([A])
    old.expire()
    assert api.fenced() == {A, B}
    assert old.take_back([C]) == Withdrawable(undecided=frozenset({C}))
    assert C not in api.fenced()


# The race


@pytest.mark.long
@pytest.mark.parametrize("fenced", [True, False])
def test_no_device_is_both_withdrawn_and_allocated(api: FencedApi, claims: ClaimsCache, fenced: bool) -> None:
    client = api.server.client()
    fence = Fence(client, claims, AT_ONCE, observer=lambda step, moment: race.delay())
    take_back = fence.take_back if fenced else without_fence(client, claims)
    race = Race(client, take_back, fence.lift, seed=7, most_delay_s=0.01)
    # Either way until it was close: the fence refused somebody, or the one that is not there would have had to.
    outcome = race.run(5, until=lambda seen: seen.refused or seen.overlaps)
    assert outcome.tried >= 50
    assert outcome.allocated > 30
    assert (outcome.overlaps == 0) == fenced
    assert (outcome.refused > 0) == fenced


@pytest.mark.parametrize("moment", [(Step.PROBE, "before"), (Step.CHECK, "after"), (Step.WITHDRAW, "before")])
def test_an_offer_wanted_again_and_not_again_while_it_is_taken_back_is_withdrawn_only_behind_a_fence(
    api: FencedApi, claims: ClaimsCache, moment: tuple[Step, Moment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(withdrawals_module, "COALESCE_SECONDS", 0.001)
    changed_its_mind = threading.Event()

    def observer(step: Step, when: Moment) -> None:
        if (step, when) == moment and not changed_its_mind.is_set():
            changed_its_mind.set()
            withdrawals.decide([], {A, B}.__contains__)
            fence.lift([A, B])  # offered: somebody may be given it from now on
            withdrawals.decide([A, B], {A, B}.__contains__)

    fence = Fence(api.server.client(), claims, AT_ONCE, observer=observer)
    withdrawals = Withdrawals(fence, lambda: None, 1.0, count().__next__, observer)
    withdrawals.decide([A, B], {A, B}.__contains__)
    with in_thread(withdrawals.loop.run, withdrawals.loop.notify):
        eventually(lambda: withdrawals.decide([A, B], {A, B}.__contains__), "it is withdrawn")
        assert changed_its_mind.is_set()
        assert A in fence.fenced.devices
        assert B in fence.fenced.devices


def test_a_fence_that_is_let_go_while_it_is_probed_is_no_missing_policy(
    api: FencedApi, claims: ClaimsCache, caplog: pytest.LogCaptureFixture
) -> None:
    def observer(step: Step, when: Moment) -> None:
        if (step, when) == (Step.PROBE, "before"):
            fence.lift([A])

    fence = Fence(api.server.client(), claims, AT_ONCE, observer=observer)
    assert fence.take_back([A, B]).in_force
    assert "is the admission policy installed" not in caplog.text
