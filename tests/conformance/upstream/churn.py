"""Pods of four profiles that come and go while node plugins and the controller are killed."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from random import Random
from typing import Self

from driver.model.device import Device
from driver.placement.occupancy import GpuState
from tests.harness.progress import Part
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.allocations import devices_by_name
from tests.support.faults import Circumstances, FaultyController
from tests.support.field import FULL, HARDWARE, LARGE, MIDDLE, SMALL, Field, take_lease
from tests.support.published import DRIVER

PROFILES = {SMALL: "1g.10gb", MIDDLE: "2g.20gb", LARGE: "3g.40gb", FULL: ""}
WEIGHTS = (8, 4, 3, 2)
BATCH = 40
"""Pods that come at once. The nodes can hold some 95; after each batch a third of those that were served ends, so that
in the end more are there than fit."""

SERVED_S = 120.0
"""Longest time until no pending pod has room anywhere; processes restart within it."""


class Churn:
    """``there`` are the nodes; the controller is this one's. Nodes that offer nothing publish nothing."""

    def __init__(self, there: Field, seed: int) -> None:
        self._there = there
        self._random = Random(seed)
        self._controller = FaultyController(there.cluster, "upstream", Circumstances())
        self._classes: dict[str, str] = {}
        """Of every pod that is not ended."""
        self._bound: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()
        self._most_waited = 0
        self._stuck: list[str] = []

    def __enter__(self) -> Self:
        self._controller.start()
        wait_for(self._controller.leads, SERVED_S, "the controller leads")
        self._there.wait_curated()
        return self

    def __exit__(self, *_: object) -> None:
        self._there.jobs.end_all()
        self._controller.kill()

    def run(self, pods: int, part: Part) -> None:
        """Let pods come until there were so many, then until each has had its device."""
        asked = 0
        while asked < pods or self._classes:
            for _ in range(min(BATCH, pods - asked)):
                [device_class] = self._random.choices([*PROFILES], WEIGHTS)
                [name] = self._there.ask(device_class)
                self._classes[name] = device_class
                asked += 1
            self._kill()
            try:
                wait_for(
                    lambda: not self._could_be_served(),
                    SERVED_S,
                    "no pending pod has room, and all that is allocated is prepared",
                )
            except DeadlineError as error:
                self._stuck = [f"{error}: {', '.join(sorted(self._could_be_served()))}"]
                return
            self._end_some(everybody=asked == pods and len(self._classes) <= BATCH)
            part.tick(f"{self._bound.total()} of {pods} were bound, {self._kills.total()} kills")

    def problems(self) -> list[str]:
        problems = self._stuck + self._there.allocations.overlaps + self._there.allocations.touched
        problems += [f"{name} was refused: {why}" for name, why in self._there.kubelets.refused.items()]
        if not self._there.allocations.unpublished or not self._most_waited:
            problems.append("no GPU with held devices left its slices, or nobody ever waited: nothing was tried")
        return problems

    def summary(self) -> str:
        bound = ", ".join(f"{count} {name}" for name, count in self._bound.most_common())
        kills = ", ".join(f"{count} of {who}" for who, count in self._kills.items())
        seen = self._there.allocations
        return (
            f"{self._bound.total()} pods were bound ({bound}), up to {self._most_waited} waited; kills: {kills}; GPUs "
            f"with held devices left the slices {seen.unpublished} times and came back {seen.republished} times"
        )

    def _kill(self) -> None:
        if self._kills.total() % 2:
            self._kills["the controller"] += 1
            self._controller.kill()
            take_lease(self._there.cluster)
            self._controller.start()
        else:
            self._kills["node plugins"] += 1
            plugin = self._random.choice(self._there.nodes)
            plugin.kill()
            plugin.spawn()

    def _waiting(self) -> list[str]:
        return [name for name in self._classes if not self._there.allocations.of(name)]

    def _could_be_served(self) -> list[str]:
        """The pending pods whose device would fit beside all held ones, and the pods whose device is not prepared."""
        waiting, ready = set(self._waiting()), self._there.kubelets.settled
        fitting = {device_class for device_class in PROFILES if self._fits(device_class)}
        return [
            name
            for name, device_class in self._classes.items()
            if (device_class in fitting if name in waiting else not ready(name))
        ]

    def _fits(self, device_class: str) -> bool:
        """Whether a GPU of any node has room for a device of that class."""
        devices = devices_by_name(HARDWARE)
        held: dict[tuple[str, str], list[Device]] = {}
        for given in chain.from_iterable(self._there.allocations.held().values()):
            device = devices[given.device]
            held.setdefault((given.pool, device.gpu.uuid), []).append(device)
        wanted = [
            device
            for device in devices.values()
            if (device.profile.name if device.profile else "") == PROFILES[device_class]
        ]
        pools = [f"{plugin.node.name}-{DRIVER}" for plugin in self._there.nodes]
        return any(
            GpuState.of(device.gpu, held.get((pool, device.gpu.uuid), ())).fits(device)
            for pool in pools
            for device in wanted
        )

    def _end_some(self, *, everybody: bool) -> None:
        """End a third of those that have a device, or all of them."""
        waiting = self._waiting()
        self._most_waited = max(self._most_waited, len(waiting))
        served = sorted(self._classes.keys() - set(waiting))
        ending = served if everybody else self._random.sample(served, -(-len(served) // 3))
        for name in ending:
            self._bound[PROFILES[self._classes.pop(name)] or "full"] += 1
        self._there.jobs.end(*ending)
