"""What issue 43 demands and is not there yet: each of these tests fails, and says so (strict ``xfail``)."""

from __future__ import annotations

import msgspec
import pytest

from controller.eviction.evictor import Job
from controller.eviction.preemption_preview import preview_of
from tests.support.preemption import OWNER, Contest, names
from tests.support.queues import node_of


@pytest.mark.xfail(strict=True, reason="only waiting pods of a gang are counted, not those that do not exist yet")
def test_a_gang_whose_other_pods_are_not_created_yet_gets_no_pod_evicted_for_one_of_them() -> None:
    """Such as pods of an Indexed Job that a ResourceQuota still forbids: a gang gets all of its devices or none."""
    contest = Contest(node_of("a", "full", gpus=1))
    contest.runs("p", "a", "gpu-0")
    spec = {"completionMode": "Indexed", "parallelism": 4, "completions": 4}
    contest.jobs.append(msgspec.convert({"metadata": {"name": "train", "uid": "train"}, "spec": spec}, Job))
    owner = {**OWNER, "kind": "Job", "apiVersion": "batch/v1", "name": "train", "uid": "train"}
    search = contest.search(metadata={"ownerReferences": [owner]})
    assert search.obstacle() is not None


@pytest.mark.xfail(strict=True, reason="a search for each set of which one owner would lose too many, 32 at most")
def test_nodes_with_many_pods_of_one_owner_do_not_keep_pods_on_other_nodes_from_being_evicted() -> None:
    nodes = [f"n{number:02}" for number in range(40)]
    contest = Contest([gpu for node in [*nodes, "other"] for gpu in node_of(node, "full", gpus=3)])
    for node in [*nodes, "other"]:
        for number in range(3):
            owner = {**OWNER, "uid": f"{number}"} if node == "other" else OWNER
            metadata = {"ownerReferences": [owner]}
            contest.runs(f"{node}-{number}", node, f"gpu-{number}", priority=int(node == "other"), metadata=metadata)
    preemption = preview_of(contest.search(count=3), None).preemption
    assert names(preemption) == ["other-0", "other-1", "other-2"]
