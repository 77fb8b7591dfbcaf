"""``tessera preempt``: what people see of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.eviction.evictor import Evictor
from controller.eviction.preemption_preview import Preview, preview_of
from controller.eviction.recent_evictions import RecentEvictions
from driver.kube.controller_heartbeat import HEARTBEAT
from driver.kube.types import Pod
from tessera.commands.waiting.preempt import _as_text, _recent, _why_not_now
from tests.support.evictions import ClusterApi
from tests.support.preemption import EVERYBODY, OWNER, Contest, policy
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


def test_a_pod_is_spared_whose_owner_has_lost_two_within_an_hour_as_the_controller_would() -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    search = contest.search()
    with ClusterApi() as api:
        client = api.server.client()
        api.store(f"/apis/coordination.k8s.io/v1/namespaces/gpus/leases/{HEARTBEAT}", spec={})
        recent = RecentEvictions(client, "gpus")
        for name in ("first", "second"):
            lost = msgspec.convert({"metadata": {"name": name, "namespace": "default", "uid": name}}, Pod)
            recent.add(lost, f"default/{OWNER['uid']}")
        preview = preview_of(search, Evictor(client, None, _recent(client)))
    assert preview.preemption is None
    assert "ReplicaSet web loses at most 2 pods an hour in this way, and has lost 2" in _as_text(preview, None)


@pytest.mark.parametrize(
    ("spec", "waits_for"),
    [
        ({}, "their policies only report it (mode or action): all"),
        ({"mode": "Active", "budget": {"podsPerHour": 0}}, "the budget of policy all is 0 pods an hour"),
        ({"mode": "Active"}, None),
    ],
)
def test_the_command_says_why_the_controller_does_not_evict_at_present(
    spec: dict[str, Any], waits_for: str | None
) -> None:
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    search = contest.search(policy(**EVERYBODY, **spec))
    preemption = search.best()
    assert preemption is not None
    with ClusterApi() as api:
        client = api.server.client()
        why = _why_not_now(search, preemption, Evictor(client, None, RecentEvictions(client, "gpus")))
    assert (why or "").startswith(waits_for or "")
    assert (why is None) == (waits_for is None)
