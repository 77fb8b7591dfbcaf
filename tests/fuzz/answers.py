"""What people ask of a cluster with hostile objects: each answer needs little time and memory."""

from __future__ import annotations

import faulthandler
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import thread_time

from click.testing import CliRunner

from controller.report.claim_explainer import Explainer
from controller.report.cluster_view import ClusterView
from controller.report.map_model import cluster_map
from controller.web.page_json import content_of
from tessera.cli import main
from tessera.commands.status import as_text, run_checks
from tessera.map_drawing import draw_map
from tessera.status.snapshot import StatusSnapshot
from tests.fuzz.objects import Hostile

ANSWER_SECONDS = 2.0
"""Most processor time of one answer."""

ANSWER_BYTES = 200 << 20
"""Most memory by which one answer makes the process grow."""

HANGS_SECONDS = 300
"""After this time an answer ends the process, with the traceback of where it hangs."""

MANIFESTS = {"resourceclaims": ("resource.k8s.io/v1", "ResourceClaim"), "pods": ("v1", "Pod")}
WORKLOADS = (
    ("apps/v1", "Deployment", "replicas"),
    ("apps/v1", "StatefulSet", "replicas"),
    ("batch/v1", "Job", "parallelism"),
)


NOW = datetime(2026, 11, 26, tzinfo=UTC)


class Answers:
    """Asks, and measures each answer; ``failures`` name the answers that took too much."""

    def __init__(self) -> None:
        self.count = 0
        self.slowest_seconds = 0.0
        self.failures: list[str] = []

    def of_view(self, view: ClusterView) -> None:
        """What ``why -A``, ``map``, ``status`` and the web page show of a cluster."""
        explanations, asked = [], Explainer(view).pending()
        while True:
            with self._measured("why"):
                explanation = next(asked, None)
            if explanation is None:
                break
            explanations.append(explanation)
        with self._measured("map"):
            draw_map(tuple(cluster_map(view)), 100)
        with self._measured("status"):
            snapshot = StatusSnapshot(view.driver, "tessera", NOW, pending=explanations)
            as_text(run_checks(snapshot))
        with self._measured("page"):  # most of it is for pending claims, each of which has been measured
            content_of(view, lambda: False).complete("version")

    def of_commands(self, hostile: Hostile, number: int) -> None:
        """What ``lint`` and ``simulate`` say of an object, and of a workload with such a pod."""
        kind = "pods" if number % 3 == 0 else "resourceclaims"
        _, text = hostile.draw(kind, number)
        version, written = MANIFESTS[kind]
        manifest = f'{{"apiVersion":"{version}","kind":"{written}",{text[1:]}'
        if number % 3 == 0:
            manifest += "\n---\n" + hostile.workload(*WORKLOADS[number // 3 % len(WORKLOADS)])
        for command in (("lint", "-"), ("simulate", "-", "--nodes", f"h100-1={hostile.number()}")):
            with self._measured(f"{command} of object {number}"):
                ran = CliRunner().invoke(main, command, input=manifest.encode("utf-8", "replace"))
            if not isinstance(ran.exception, SystemExit | None):
                self.failures.append(f"{command} of object {number}: {ran.exception!r}")

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        began, before = thread_time(), _most_memory()
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        took, grown = thread_time() - began, _most_memory() - before
        self.count += 1
        self.slowest_seconds = max(self.slowest_seconds, took)
        if took > ANSWER_SECONDS or grown > ANSWER_BYTES:
            self.failures.append(f"{what} took {took:.1f} s and {grown >> 20} MiB")


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
