"""The real Kueue manager admits the jobs of deploy/examples/queues with the mappings and queues of the examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.kube.client import KubeClient, load_configuration
from tests.harness.waiting import wait_for
from tests.integration.kueue import Queues, curated_nodes, kueue_manager
from tests.support.control_plane import control_plane
from tests.support.gangs import GANGS
from tests.support.queue_examples import apply, example

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 60.0


@pytest.fixture(scope="module")
def queues(kueue_program: Path, kueue_source: Path) -> Iterator[Queues]:
    [configuration] = example("kueue-configuration")
    mappings = configuration["resources"]["deviceClassMappings"]
    with (
        control_plane("kueue-examples", GANGS) as running,
        curated_nodes(running, 1),
        kueue_manager(running, kueue_program, kueue_source, mappings),
    ):
        found = Queues(KubeClient(load_configuration(running.kubeconfig), "test"))
        apply(found.client, "kueue-queues")
        yield found


@pytest.mark.parametrize(("name", "job"), [("kueue-job", "queued-inference"), ("kueue-gang", "queued-gang")])
def test_both_pods_of_a_queued_job_run(queues: Queues, name: str, job: str) -> None:
    apply(queues.client, name)
    wait_for(lambda: queues.admitted(job), SOON_S, f"{job} is admitted")
    wait_for(lambda: queues.running(job) == 2, SOON_S, f"both pods of {job} run")
    queues.finish(queues.pods(job))
