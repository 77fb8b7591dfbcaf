"""Claims come and go at random for a while; then nothing may be left, and nothing may have grown."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

from prometheus_client.core import Metric

from kubelet_plugin.reconcile.trials import FIRST_PAUSE_SECONDS
from tests.bench.kubelet import Kubelet
from tests.harness.cluster import Cluster
from tests.harness.progress import Part, Progress
from tests.harness.waiting import DeadlineError, wait_for
from tests.soak.census import Census, Things, count_things, take
from tests.soak.life import Lives, Tally
from tests.soak.mix import HARDWARE, SHARES, Fate, draw
from tests.soak.verdict import Finding, findings
from tests.support.allocations import Allocations
from tests.support.metrics import families, port_in
from tests.support.plugin import PluginFlags, PluginProcess, bare_node

MOST_MOVED = 20
"""Claims that may be on their way to a GPU when it begins to refuse, those that are its trials later included."""

AT_ONCE = 96
"""Pods that may be there at one time; who comes when all are is counted as held back."""

WARM_S = 60.0
DRAINED_S = 60.0
SCRAPED_S = 60.0
NOTHING = Things(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Plan:
    """``rate`` is claims a minute; ``kills`` is how often the plugin is killed, in the first half of the time.

    ``failing_s`` is how long GPU 0 refuses to be cut, from a tenth of the time on.
    """

    duration_s: float
    rate: float
    kills: int
    seed: int
    failing_s: float = 0.0

    @property
    def warm_s(self) -> float:
        """How long a process may grow after its start."""
        return min(WARM_S, self.duration_s / 4)

    @property
    def census_s(self) -> float:
        return max(1.0, min(10.0, self.duration_s / 30))


@dataclass
class Report:
    """What happened. ``wrong`` are claims that had the same memory, and held devices that left the slices."""

    plan: Plan
    tally: Tally
    taken: list[Census] = field(default_factory=list)
    left: Things = NOTHING
    wrong: list[str] = field(default_factory=list)
    killed: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)
    """What the plugin said of itself at the end."""
    load_s: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        return findings(self.taken, self.left, self.plan.warm_s, self.tally.served)

    @property
    def problems(self) -> list[str]:
        """Everything because of which the soak has failed, as sentences."""
        leaks = (f"{each.name}: {each.value:g}, allowed {each.allowed:g}" for each in self.findings if each.leaks)
        return [*leaks, *self.tally.failures, *self.wrong, *_attracted(self.plan, self.tally)]

    @property
    def per_minute(self) -> float:
        """Claims that were served."""
        return 60 * self.tally.served / self.load_s if self.load_s else 0.0


def soak(cluster: Cluster, plan: Plan, progress: Progress) -> Report:
    """On a node of its own, which ends with the cluster."""
    node = bare_node(cluster, "soak-0")
    flags = PluginFlags(gpus=f"sim:{HARDWARE}", log_level="info", shares=f"all={SHARES}", metrics_address="127.0.0.1:0")
    with ExitStack() as stack:
        plugin = PluginProcess(cluster, node, flags)
        stack.callback(plugin.stop)
        plugin.spawn()
        plugin.wait_published()
        stop = threading.Event()
        stack.callback(stop.set)
        allocations = Allocations(cluster, HARDWARE, shares=SHARES)
        allocations.start(stop)
        kubelet = Kubelet(plugin.socket)
        stack.callback(kubelet.close)
        lives = Lives(cluster, node.name, kubelet, allocations)
        run = _Run(plan, plugin, lives, progress)
        report = run.report
        run.load()
        run.drain()
        report.metrics = run.scrape()
        report.wrong = [*allocations.overlaps, *allocations.touched, *_defects(plugin)]
    return report


class _Run:
    def __init__(self, plan: Plan, plugin: PluginProcess, lives: Lives, progress: Progress) -> None:
        self.report = Report(plan, lives.tally)
        self._plan = plan
        self._plugin = plugin
        self._lives = lives
        self._progress = progress
        self._random = Random(plan.seed)
        self._room = threading.Semaphore(AT_ONCE)
        self._began = time.monotonic()

    def load(self) -> None:
        """Claims come for as long as planned, and those that came are served."""
        what = f"{self._plan.rate:g} claims a minute, seed {self._plan.seed}"
        over = threading.Event()
        with self._progress.part(what, self._plan.duration_s) as part, ThreadPoolExecutor(AT_ONCE + 3) as pool:
            beside = [
                pool.submit(self._count, part, over),
                pool.submit(self._kill, Random(self._plan.seed + 1), over),
                pool.submit(self._fail, over),
            ]
            try:
                self._arrive(pool)
            finally:
                over.set()
            self.report.load_s = time.monotonic() - self._began
        for each in beside:
            each.result()

    def drain(self) -> None:
        """All have ended; wait until what they had is gone and offered again, and count what is not."""

        def is_over() -> bool:
            tainted = any("taints" in device for device in self._plugin.devices().values())
            return count_things(self._plugin) == NOTHING and self._plugin.everything_offered() and not tainted

        tried_s = self._plan.failing_s + FIRST_PAUSE_SECONDS  # the last pause is not longer than all before it
        try:
            wait_for(is_over, DRAINED_S + tried_s, "nothing is left", interval_s=0.5)
        except DeadlineError:
            self.report.left = count_things(self._plugin)

    def scrape(self) -> dict[str, Metric]:
        """What the plugin exports now."""
        return families(port_in(self._plugin.log, SCRAPED_S))

    def _arrive(self, pool: ThreadPoolExecutor) -> None:
        due, number = self._began, 0
        while (due := due + self._random.expovariate(self._plan.rate / 60)) < self._began + self._plan.duration_s:
            time.sleep(max(0.0, due - time.monotonic()))
            fate = draw(self._random)
            if not self._room.acquire(blocking=False):
                self._lives.tally.add("gangs_without_room")
                continue
            number += 1
            pool.submit(self._live, f"soak-{number}", fate)

    def _live(self, name: str, fate: Fate) -> None:
        try:
            self._lives.lead(name, fate)
        except Exception as error:  # noqa: BLE001 - a defect of the test's own must not look like a success
            self._lives.tally.failures.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            self._room.release()

    def _count(self, part: Part, over: threading.Event) -> None:
        """Take a census every few seconds, and show it."""
        tally = self._lives.tally
        while not over.wait(self._plan.census_s):
            census = take(self._plugin, time.monotonic() - self._began, partial(_alive, tally, tally.ended))
            if census is not None:
                self.report.taken.append(census)
                with suppress(OSError):  # just killed
                    self.scrape()
                part.tick(f"{tally.served} served, {census.things.partitions} partitions, {census.rss_mib:.1f} MiB")

    def _fail(self, over: threading.Event) -> None:
        """Let GPU 0 refuse to be cut for a while."""
        if not self._plan.failing_s or over.wait(self._plan.duration_s / 10):
            return
        self._plugin.fault("fail", "nvmlDeviceCreateGpuInstanceWithPlacement", "--code", "UNKNOWN", "--gpu", "0")
        self._progress.say(f"GPU 0 refuses to be cut for {self._plan.failing_s:g} s")
        over.wait(self._plan.failing_s)
        self._plugin.fault("clear")
        self._progress.say(f"GPU 0 can be cut again; {self._lives.tally.moved} claims were moved")

    def _kill(self, random: Random, over: threading.Event) -> None:
        """Kill and start the plugin at random moments of the first half: the last process must have time to leak."""
        moments = sorted(random.uniform(0.1, 0.5) * self._plan.duration_s for _ in range(self._plan.kills))
        for moment in moments:
            if over.wait(max(0.0, self._began + moment - time.monotonic())):
                return
            self._plugin.kill()
            self._plugin.spawn()
            self.report.killed += 1
            self._progress.say(f"killed the plugin at {moment:.0f} s")
            self._plugin.wait_published()


def _attracted(plan: Plan, tally: Tally) -> list[str]:
    """What is wrong if a GPU that refuses to be cut was given to more pods than were under way, and trials."""
    most = MOST_MOVED if plan.failing_s else 0
    return [] if tally.moved <= most else [f"{tally.moved} claims had to be moved, {most} at most were to be"]


def _alive(tally: Tally, ended: int) -> int:
    """Claims that began until now and had not ended when ``ended`` was read."""
    return tally.asked - ended


def _defects(plugin: PluginProcess) -> list[str]:
    """Lines of its log that tell of a bug."""
    return [line for line in plugin.log.read_text().splitlines() if "defect" in line]
