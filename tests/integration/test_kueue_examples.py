"""The real Kueue manager admits the jobs of deploy/examples/queues, and refuses what lint calls an error."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.kube.client import KubeClient, load_configuration
from tests.harness.waiting import wait_for
from tests.integration.kueue import JOBS, Queues, curated_nodes, kueue_manager
from tests.support.control_plane import control_plane
from tests.support.gangs import GANGS
from tests.support.linting import request
from tests.support.plugin import TESSERA
from tests.support.queue_examples import STRICT, apply, collection, example
from tests.support.queue_objects import FULL, job, template
from tests.support.workloads import TEMPLATES

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


@pytest.mark.parametrize(("file", "name"), [("kueue-job", "queued-inference"), ("kueue-gang", "queued-gang")])
def test_both_pods_of_a_queued_job_run(queues: Queues, file: str, name: str) -> None:
    apply(queues.client, file)
    wait_for(lambda: queues.admitted(name), SOON_S, f"{name} is admitted")
    wait_for(lambda: queues.running(name) == 2, SOON_S, f"both pods of {name} run")
    queues.finish(queues.pods(name))


ALTERNATIVES = {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": FULL}]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "first-available": (ALTERNATIVES, "FirstAvailable device selection is not supported"),
    "all-devices": (request(allocationMode="All"), "AllocationMode 'All' is not supported"),
    "no-mapping": (request(device_class="gpu-inference-2g-20gb"), "is not mapped in DRA configuration"),
}


def refusal(queues: Queues, name: str) -> str:
    """The message on the Workload of a job that Kueue has no quota for; empty before."""
    found: str = queues.conditions(name).get("QuotaReserved", {}).get("message", "")
    return found


def queued(name: str, **claim: str) -> dict[str, Any]:
    content = job(None, queue="team-a", image="none", resources={"claims": [{"name": "gpu"}]})
    content["metadata"]["name"] = name
    content["spec"]["template"]["spec"] |= {"restartPolicy": "Never", "resourceClaims": [{"name": "gpu", **claim}]}
    return content


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_lint_calls_an_error_is_never_admitted(queues: Queues, name: str) -> None:
    asked, message = REFUSED[name]
    queues.client.create(TEMPLATES, template(name, asked))
    queues.client.create(JOBS, queued(name, resourceClaimTemplateName=name))
    wait_for(lambda: message in refusal(queues, name), SOON_S, message)
    assert not queues.admitted(name)


def test_a_job_with_a_claim_that_exists_already_is_never_admitted(queues: Queues) -> None:
    queues.client.create(JOBS, queued("direct", resourceClaimName="mine"))
    wait_for(lambda: "does not support use of resource claims" in refusal(queues, "direct"), SOON_S, "it is refused")
    assert not queues.admitted("direct")


def test_kueue_accepts_the_queues_that_tessera_prints(queues: Queues) -> None:
    command = [TESSERA, "kueue", "config", "--gpus", "sim:dgx-h100", "--queues", "-o", "json"]
    _, *printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for content in printed:
        content["metadata"]["name"] = "printed"
        queues.client.create(collection(content), content, {**STRICT, "dryRun": "All"})
