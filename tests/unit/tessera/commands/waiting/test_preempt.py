"""``tessera preempt``: what people see of it."""

from __future__ import annotations

from controller.eviction.preemption_preview import Preview
from tessera.commands.waiting.preempt import _as_text
from tests.support.preemption import Contest
from tests.support.queues import FULL, node_of, request


def test_what_a_tenant_has_written_does_not_control_the_terminal() -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    group = {"scheduling.k8s.io/group-name": "group\x1b[2J"}
    contest.there.wants(request(selector=FULL), name="other", schedulerName="volcano", metadata={"annotations": group})
    search = contest.search(schedulerName="volcano", metadata={"annotations": group})
    text = _as_text(Preview(search.obstacle(), None, search, ()), None)
    assert "it is one of 2 waiting pods of PodGroup group" in text
    assert "\x1b" not in text
