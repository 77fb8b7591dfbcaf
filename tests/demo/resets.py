"""The reset that brings Ampere's MIG mode into force: when an admin can do it, and what came of it, in words.

A reset that comes before the node plugin has asked for the mode changes nothing, and the GPU then waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from driver.model.gpu import MigMode
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.plugin import PluginNode

ASKED_S = 180.0
"""An A100 takes 6.5 s to note the mode, the plugin asks one GPU after the other and looks again every 5 s."""
SETTLED_S = 60.0
LOOK_S = 0.25

KINDS = {"gpu": "full GPUs", "mig": "partitions", "share": "shares"}

Types = Mapping[int, set[str]]
"""The types of devices that each GPU offers, by its number."""


class Resettable(Protocol):
    """What is needed of a node plugin: its slices, its log, and the hardware under it."""

    @property
    def node(self) -> PluginNode: ...

    @property
    def log(self) -> Path: ...

    def devices(self) -> Mapping[str, Mapping[str, Any]]: ...

    def gpus(self) -> list[dict[str, Any]]: ...

    def fault(self, *arguments: str) -> None: ...


def in_time(done: Callable[[], bool], deadline_s: float, words: Callable[[], str]) -> None:
    """Wait until ``done``; raises DeadlineError with ``words`` alone, which are made when time has run out."""
    try:
        wait_for(done, deadline_s, "", interval_s=LOOK_S)
    except DeadlineError as error:
        raise DeadlineError(words()) from error


def wait_asked(plugin: Resettable, numbers: Iterable[int], deadline_s: float = ASKED_S) -> None:
    """Until the slices say of these GPUs that they wait for a reset to be in MIG mode."""
    wanted = set(numbers)

    def words() -> str:
        missing = (_gpu(number, plugin.gpus()) for number in sorted(wanted - waiting(plugin)))
        return _sentence(plugin, f"{deadline_s:g} s after the start not yet waiting for a reset", missing)

    in_time(lambda: wanted <= waiting(plugin), deadline_s, words)


def reset(plugin: Resettable, numbers: Iterable[int], types: Types, deadline_s: float = SETTLED_S) -> None:
    """What an admin does: reset these GPUs once they wait for it. Returns when all GPUs of the node offer ``types``."""
    numbers = tuple(numbers)
    wait_asked(plugin, numbers)
    for number in numbers:
        plugin.fault("reset", "--gpu", str(number))

    def words() -> str:
        return _sentence(plugin, f"{deadline_s:g} s after the reset", _others(plugin, types))

    in_time(lambda: offered_types(plugin) == types, deadline_s, words)


def waiting(plugin: Resettable) -> set[int]:
    """The GPUs of which the slices say that a reset puts them into MIG mode."""
    modes = (
        (int(name.split("-")[1]), device["attributes"].get("migMode", {}).get("string"))
        for name, device in plugin.devices().items()
    )
    return {number for number, mode in modes if mode == MigMode.RESET_TO_ENABLE}


def offered_types(plugin: Resettable) -> dict[int, set[str]]:
    """The types of devices in the slices, by number of the GPU."""
    found: dict[int, set[str]] = {}
    for name, device in plugin.devices().items():
        found.setdefault(int(name.split("-")[1]), set()).add(device["attributes"]["type"]["string"])
    return found


def _others(plugin: Resettable, types: Types) -> list[str]:
    """A clause for each GPU that offers something else."""
    offered, gpus = offered_types(plugin), plugin.gpus()
    return [
        f"{_gpu(number, gpus)} offers {_kinds(offered.get(number, set()))} instead of {_kinds(wanted)}"
        for number, wanted in types.items()
        if offered.get(number, set()) != wanted
    ]


def _kinds(types: set[str]) -> str:
    return " and ".join(KINDS[each] for each in sorted(types)) or "nothing"


def _gpu(number: int, gpus: Iterable[Mapping[str, Any]]) -> str:
    """A GPU with the MIG mode that the hardware has."""
    [gpu] = (gpu for gpu in gpus if gpu["index"] == number)
    now, then = gpu["migMode"], gpu["migModePending"]
    return f"gpu-{number} (MIG mode {now}{'' if now == then else f', {then} after another reset'})"


def _sentence(plugin: Resettable, what: str, clauses: Iterable[str]) -> str:
    return f"{plugin.node.name}, {what}: {'; '.join(clauses)}. Log: {plugin.log}"
