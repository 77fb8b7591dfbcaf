"""Reconciling: from any state of the API server one round leads to the desired one, and a second writes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from driver.slices.build import CORDONED, UNHEALTHY, Content, slice_object
from driver.slices.publisher import Changes, Stored, changes, dropped_fields
from driver.slices.slice_names import Pool

POOL = Pool("node-a", "gpu.tessera.dev")
NAMES = ["00000-counters", "00001-counters", "00100-devices", "00101-devices", "99999-stranger"]

Server = dict[str, dict[str, Any]]
Sent = dict[str, Stored]


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Content]:
    """What some version of the plugin might want published."""
    names = draw(st.lists(st.sampled_from(NAMES[:4]), unique=True))
    made: dict[str, Content] = {}
    for name in sorted(names):
        kind = "sharedCounters" if "counters" in name else "devices"
        own = [{"name": f"{letter}-{name[:5]}"} for letter in "ab"]
        made[name] = {kind: draw(st.lists(st.sampled_from(own), max_size=2))}
    return made


@st.composite
def servers(draw: st.DrawFn) -> Server:
    """Any slices: other contents, other generations and counts, strangers."""
    found: Server = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        kind = draw(st.sampled_from(["sharedCounters", "devices"]))
        content = {kind: draw(st.lists(st.sampled_from([{"name": "a"}, {"name": "c"}]), max_size=2))}
        item = slice_object(name, content, POOL, draw(st.integers(1, 4)), draw(st.integers(1, 5)), None)
        found[name] = stored(item, draw(st.integers(1, 9)))
    return found


def stored(item: dict[str, Any], version: int) -> dict[str, Any]:
    return {**copy.deepcopy(item), "metadata": {**item["metadata"], "resourceVersion": str(version)}}


def apply(todo: Changes, server: Server, sent: Sent, dropping: str = "") -> Server:
    """As the publisher and an API server would, the latter without the field ``dropping``."""
    after = {name: item for name, item in server.items() if name not in todo.delete}
    for name, content in todo.write:
        item = slice_object(name, content, POOL, todo.generation, todo.count, None)
        sent[name] = Stored(str(1000 + todo.generation), copy.deepcopy(item["spec"]))
        item["spec"].pop(dropping, None)
        after[name] = stored(item, 1000 + todo.generation)
    return after


def pool_is(server: Server, desired: dict[str, Content]) -> bool:
    """Whether the scheduler would see a complete pool with exactly the desired contents."""
    generations = {item["spec"]["pool"]["generation"] for item in server.values()}
    counts = {item["spec"]["pool"]["resourceSliceCount"] for item in server.values()}
    keys = ("devices", "sharedCounters")
    seen = {name: {key: item["spec"][key] for key in keys if key in item["spec"]} for name, item in server.items()}
    return seen == desired and len(generations) <= 1 and counts <= {len(desired)}


@given(servers(), contents())
def test_one_round_leads_there_and_the_next_does_nothing(server: Server, desired: dict[str, Content]) -> None:
    sent: Sent = {}
    after = apply(changes(desired, server, sent, POOL), server, sent)
    assert pool_is(after, desired)
    assert not changes(desired, after, sent, POOL)
    assert not changes(desired, after, {}, POOL)  # nor after a restart


@given(servers(), contents(), contents(), st.sampled_from(["devices", "sharedCounters"]))
def test_an_api_server_that_drops_a_field_is_not_written_to_for_ever(
    server: Server, first: dict[str, Content], second: dict[str, Content], dropping: str
) -> None:
    sent: Sent = {}
    for desired in (first, second):
        server = apply(changes(desired, server, sent, POOL), server, sent, dropping)
        assert not changes(desired, server, sent, POOL)


@given(contents(), contents())
def test_a_change_of_devices_alone_stays_in_the_generation(
    before: dict[str, Content], other: dict[str, Content]
) -> None:
    sent: Sent = {}
    server = apply(changes(before, {}, sent, POOL), {}, sent)
    after = {name: other.get(name, content) if "devices" in content else content for name, content in before.items()}
    todo = changes(after, server, sent, POOL)
    assert todo.generation == 1
    assert {name for name, _ in todo.write} == {name for name in before if before[name] != after[name]}


@given(contents(), contents())
def test_a_changed_set_of_slices_is_a_new_generation_of_all(
    before: dict[str, Content], after: dict[str, Content]
) -> None:
    sent: Sent = {}
    server = apply(changes(before, {}, sent, POOL), {}, sent)
    todo = changes(after, server, sent, POOL)
    if before and set(before) != set(after):
        assert todo.generation == 2
        assert dict(todo.write) == after
    assert set(todo.delete) == set(before) - set(after)


def test_changed_counters_of_a_set_that_stays_are_a_new_generation() -> None:
    before: dict[str, Content] = {
        NAMES[0]: {"sharedCounters": [{"name": "a", "counters": {}}]},
        NAMES[2]: {"devices": []},
    }
    after = {**before, NAMES[0]: {"sharedCounters": [{"name": "a", "counters": {"memory-slice-0": {"value": "1"}}}]}}
    sent: Sent = {}
    server = apply(changes(before, {}, sent, POOL), {}, sent)
    todo = changes(after, server, sent, POOL)
    assert (todo.generation, dict(todo.write)) == (2, after)


gpu_numbers = st.frozensets(st.integers(0, 3))


def slices_of(published: frozenset[int]) -> dict[str, Content]:
    """Slices of four GPUs, two in each device slice, of which those of these numbers are published."""
    sets = [{"name": f"gpu-{number}", "counters": {}} for number in sorted(published)]
    found: dict[str, Content] = {NAMES[0]: {"sharedCounters": sets} if sets else {"devices": []}}
    for index, name in enumerate(NAMES[2:4]):
        numbers = sorted(published & {2 * index, 2 * index + 1})
        consumes = ([{"counterSet": f"gpu-{number}", "counters": {}}] for number in numbers)
        found[name] = {"devices": [{"name": each[0]["counterSet"], "consumesCounters": each} for each in consumes]}
    return found


@given(st.lists(gpu_numbers, min_size=2, max_size=4), st.data())
def test_no_device_ever_refers_to_a_counter_set_that_is_missing(
    published: list[frozenset[int]], data: st.DataObject
) -> None:
    """After every single write, also when a round is cut short and the next one wants something else."""
    sent: Sent = {}
    server: Server = {}
    server = apply(changes(slices_of(published[0]), server, sent, POOL), server, sent)
    for wanted in published[1:]:
        todo = changes(slices_of(wanted), server, sent, POOL)
        assert todo.generation == 1
        for write in todo.write[: data.draw(st.integers(0, len(todo.write)))]:
            server = apply(replace(todo, write=[write]), server, sent)
            specs = [item["spec"] for item in server.values()]
            sets = {each["name"] for spec in specs for each in spec.get("sharedCounters", ())}
            assert {device["name"] for spec in specs for device in spec.get("devices", ())} <= sets


def test_devices_that_exchange_their_slices_are_a_new_generation() -> None:
    """In between, each slice is right by itself, and the two are not."""
    before: dict[str, Content] = {NAMES[2]: {"devices": [{"name": "a"}]}, NAMES[3]: {"devices": [{"name": "b"}]}}
    after = {NAMES[2]: before[NAMES[3]], NAMES[3]: before[NAMES[2]]}
    sent: Sent = {}
    server = apply(changes(before, {}, sent, POOL), {}, sent)
    todo = changes(after, server, sent, POOL)
    assert (todo.generation, dict(todo.write)) == (2, after)


@given(contents(), st.data())
def test_half_of_a_wiped_pool_is_completed_in_its_generation(desired: dict[str, Content], data: st.DataObject) -> None:
    sent: Sent = {}
    server = apply(changes(desired, {}, sent, POOL), {}, sent)
    gone = set(data.draw(st.lists(st.sampled_from(sorted(desired)), unique=True))) if desired else set()
    left = {name: item for name, item in server.items() if name not in gone}
    todo = changes(desired, left, sent, POOL)
    assert {name for name, _ in todo.write} == gone
    assert todo.generation == 1


def test_dropped_fields_are_named_without_positions() -> None:
    sent = {"pool": {"name": "p"}, "devices": [{"name": "a", "taints": []}, {"name": "b"}], "sharedCounters": []}
    kept = {"pool": {"name": "p"}, "devices": [{"name": "a"}]}
    assert set(dropped_fields(sent, kept)) == {"spec.devices[1]"}, "an empty list says no more than none"
    assert list(dropped_fields(sent, sent)) == []


def test_the_time_of_a_fault_is_ours_and_of_any_other_taint_the_api_servers() -> None:
    def tainted(*taints: dict[str, str]) -> dict[str, Content]:
        return {NAMES[2]: {"devices": [{"name": "a", "taints": list(taints)}]}}

    fault = {"key": UNHEALTHY, "value": "xid-48", "effect": "NoSchedule"}
    then, later = ({**fault, "timeAdded": f"2026-11-21T21:30:0{second}Z"} for second in (0, 1))
    stored = tainted(then, {**CORDONED, "timeAdded": "2026-11-21T21:31:00Z"})[NAMES[2]]
    item = slice_object(NAMES[2], stored, POOL, 1, 1, None)
    item["metadata"]["resourceVersion"] = "7"
    assert not changes(tainted(then, CORDONED), {NAMES[2]: item}, {}, POOL)
    assert changes(tainted(later, CORDONED), {NAMES[2]: item}, {}, POOL).write[0][0] == NAMES[2]
