"""The text of ``tessera why``; what it says is tested with ``controller.report.explanation`` and on a cluster."""

from __future__ import annotations

from controller.report.explanation import Explanation
from tessera.commands.why import _as_text


def test_what_the_scheduler_reports_on_many_pods_of_a_claim_is_shown_once() -> None:
    reports = tuple((f"job-{number}", "0/1 nodes are available") for number in range(256))
    text = _as_text(Explanation("default/shared", (), "AllHeld", "none is free", reports=reports), ())
    said = "the scheduler reports on pods job-0, job-1, job-2 and 253 more: 0/1 nodes are available"
    assert text.splitlines()[-1] == said
