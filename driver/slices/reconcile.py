"""What to write so that the slices at the API server become the desired ones (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from driver.slices.build import UNHEALTHY, Content
from driver.slices.names import Pool

Slices = Mapping[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """What we last sent for a slice and the resource version that came back."""

    version: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """Writes (by name, at one pool generation), deletions, and the objects that exist."""

    generation: int
    count: int
    write: dict[str, Content] = field(default_factory=dict)
    delete: dict[str, dict[str, Any]] = field(default_factory=dict)
    existing: Slices = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.write or self.delete)


def changes(desired: Mapping[str, Content], actual: Slices, sent: Mapping[str, Stored], pool: Pool) -> Changes:
    """The writes and deletions that lead from ``actual`` to ``desired``.

    Slices of one pool generation belong together: while they are rewritten the scheduler skips the whole
    pool. So a change of devices stays in the generation, each slice being complete in itself; the set of
    slices or a counter set changing starts a new one. A slice that nobody changed since we sent it counts
    as what we sent, so that an API server which drops fields is not written to for ever.
    """
    specs = {name: _believed(item, sent.get(name)) for name, item in actual.items()}
    current = max((spec["pool"]["generation"] for spec in specs.values()), default=1)
    todo = _at_generation(current, desired, actual, specs, pool)
    if _needs_new_generation(current, desired, specs):
        todo = _at_generation(current + 1, desired, actual, specs, pool)
    return todo


def _at_generation(
    generation: int, desired: Mapping[str, Content], actual: Slices, specs: Slices, pool: Pool
) -> Changes:
    todo = Changes(generation, len(desired), existing=actual)
    for name, content in desired.items():
        if name not in specs or not _same(specs[name], content, pool, generation, len(desired)):
            todo.write[name] = content
    todo.delete.update((name, item) for name, item in actual.items() if name not in desired)
    return todo


def _needs_new_generation(current: int, desired: Mapping[str, Content], specs: Slices) -> bool:
    """Whether what is there is complete by itself and would stop being so half-way through."""
    there = {name: spec for name, spec in specs.items() if spec["pool"]["generation"] == current}
    complete = there and all(spec["pool"]["resourceSliceCount"] == len(there) for spec in there.values())
    if not complete:
        return False
    counters_differ = any(
        desired[name].get("sharedCounters") != spec.get("sharedCounters")
        for name, spec in there.items()
        if name in desired
    )
    return set(there) != set(desired) or counters_differ


def _believed(item: Mapping[str, Any], sent: Stored | None) -> dict[str, Any]:
    if sent is not None and sent.version == item["metadata"]["resourceVersion"]:
        return dict(sent.spec)
    return _as_sent(item["spec"])


def _as_sent(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without what the API server adds (the times of taints) and with what it drops (an empty list)."""
    devices = spec.get("devices")
    if not devices and "sharedCounters" not in spec:
        return {**spec, "devices": []}
    if not devices or not any("taints" in device for device in devices):
        return dict(spec)
    return {**spec, "devices": [_without_times(device) for device in devices]}


def _without_times(device: Mapping[str, Any]) -> dict[str, Any]:
    if "taints" not in device:
        return dict(device)
    return {**device, "taints": [_without_time(taint) for taint in device["taints"]]}


def _without_time(taint: Mapping[str, Any]) -> dict[str, Any]:
    """Of a fault the time is ours, of anything else the API server's."""
    if taint["key"] == UNHEALTHY:
        return dict(taint)
    return {key: value for key, value in taint.items() if key != "timeAdded"}


def _same(spec: Mapping[str, Any], content: Content, pool: Pool, generation: int, count: int) -> bool:
    ours = {
        "driver": pool.driver,
        "nodeName": pool.node,
        "pool": {"name": pool.name, "generation": generation, "resourceSliceCount": count},
        **content,
    }
    return dict(spec) == ours


def dropped_fields(sent: Any, stored: Any, path: str = "spec") -> Iterator[str]:
    """Paths of what was sent but did not come back, with list indices left out."""
    if sent == stored:
        return
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            if key in stored:
                yield from dropped_fields(value, stored[key], f"{path}.{key}")
            elif value not in ([], {}):
                yield f"{path}.{key}"
    elif isinstance(sent, list) and isinstance(stored, list):
        for ours, theirs in zip(sent, stored, strict=False):
            yield from dropped_fields(ours, theirs, f"{path}[]")
        if len(stored) < len(sent):
            yield f"{path}[{len(stored)}]"
