"""``tessera lint --kueue``: what Kueue refuses at its start, what it never admits, and quotas that promise too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deviceclasses.lint.documents import Document
from deviceclasses.lint.findings import Finding
from deviceclasses.lint.kueue_rules import is_checked, lint_kueue
from tessera.cli import main
from tests.support.linting import CLASSES, DRIVER, request
from tests.support.queue_objects import (
    CAPACITY_GATE,
    CONFIGURATIONS,
    FULL,
    MEMORY,
    SMALL,
    cluster_queue,
    configuration,
    job,
    local_queue,
    mapping,
    source,
    template,
)

MAPPINGS = "resources.deviceClassMappings"


def findings(*contents: object) -> list[Finding]:
    documents = [Document("file.yaml", number, content) for number, content in enumerate(contents, 1)]
    return [*lint_kueue(documents, CLASSES, DRIVER)]


def found(*contents: object) -> list[tuple[str, str]]:
    """Path and severity of each finding."""
    return [(finding.path, finding.severity.value) for finding in findings(*contents)]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_judged_as_kueue_does(name: str) -> None:
    content, expected = CONFIGURATIONS[name]
    full = [(path if path.startswith("resources") else f"{MAPPINGS}{path}", severity) for path, severity in expected]
    assert found(content) == full


COUNTS = configuration(mapping("gpus", FULL), mapping("small", SMALL))
TEMPLATE = "spec.spec.devices.requests[0]"
ALTERNATIVES = {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": FULL}]}

TEMPLATES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "a mapped class": (request(), []),
    "firstAvailable": (ALTERNATIVES, [(f"{TEMPLATE}.firstAvailable", "error")]),
    "all devices": (request(allocationMode="All"), [(f"{TEMPLATE}.exactly.allocationMode", "error")]),
    "administrative access": (
        request(allocationMode="All", adminAccess=True),
        [(f"{TEMPLATE}.exactly.adminAccess", "warning")],
    ),
    "a class without a mapping": (
        request(device_class="gpu-inference"),
        [(f"{TEMPLATE}.exactly.deviceClassName", "error")],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_a_queued_job_is_judged_as_kueue_does(name: str) -> None:
    asked, expected = TEMPLATES[name]
    assert found(COUNTS, template("t", asked), job("t", queue="team")) == expected


def test_a_template_that_only_pods_outside_of_kueue_use_is_ignored() -> None:
    assert found(COUNTS, template("t", ALTERNATIVES), job("t")) == []
    assert len(found(COUNTS, template("t", ALTERNATIVES), job("t"), job("t", queue="team"))) == 1


def test_a_claim_that_exists_already_is_refused_in_the_pods_of_any_kind() -> None:
    pod = {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}
    ray = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "ray", "labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {"workerGroupSpecs": [{"template": {"spec": pod}}]},
    }
    assert found(ray) == [("spec.workerGroupSpecs[0].template.spec.resourceClaims[0].resourceClaimName", "error")]


def test_an_extended_resource_whose_class_is_mapped_with_a_source_is_refused() -> None:
    mine = next(each for each in CLASSES if each["metadata"]["name"] == FULL)
    mine = {**mine, "spec": {**mine["spec"], "extendedResourceName": "nvidia.com/gpu"}}
    wanted = job(None, queue="team", resources={"limits": {"nvidia.com/gpu": "1"}})
    assert found(configuration(mapping("gpus", FULL)), mine, wanted) == []
    path = "spec.template.spec.containers[0].resources.limits[nvidia.com/gpu]"
    assert found(configuration(mapping("gpus", FULL, sources=[MEMORY])), mine, wanted) == [(path, "error")]


def test_quotas_for_the_same_gpus_are_a_warning_that_recommends_the_memory_counter() -> None:
    [finding] = findings(COUNTS, cluster_queue("a", gpus=8, small=56))
    assert finding.path == "spec.resourceGroups[0].flavors[0].resources[1].nominalQuota"
    assert (finding.value, finding.severity.value) == ("small: 56", "warning")
    assert "counter source memory" in finding.message
    assert len(findings(COUNTS, cluster_queue("a", gpus=8), cluster_queue("b", small=56))) == 1


@pytest.mark.parametrize(
    "queues",
    [
        pytest.param([cluster_queue("a", gpus=8, small=0)], id="one quota is zero"),
        pytest.param([cluster_queue("a", gpus=8), cluster_queue("b", "other", small=56)], id="other flavors"),
        pytest.param([cluster_queue("a", gpus=8, cpu=56)], id="not a mapped resource"),
    ],
)
def test_quotas_for_different_things_are_no_finding(queues: list[dict[str, Any]]) -> None:
    assert found(COUNTS, *queues) == []


def test_a_queue_that_is_not_in_the_files_is_a_warning_if_others_are() -> None:
    queue, other = local_queue("team", "gpus"), cluster_queue("gpu")
    assert found(queue) == []
    assert found(queue, other, job("t", queue="teem")) == [
        ("spec.clusterQueue", "warning"),
        ("metadata.labels[kueue.x-k8s.io/queue-name]", "warning"),
    ]


HOSTILE: list[Any] = [None, 7, "x", [], [None], {}, {"a": None}, [{"counter": 3}], [{"cel": []}]]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_values_of_any_type_in_any_field_do_not_stop_lint(value: object) -> None:
    whole = [
        configuration(mapping("m", FULL, sources=[MEMORY])),
        cluster_queue("a", gpus=1),
        local_queue("team", "a"),
        template("t", request()),
        job("t", queue="team"),
    ]

    def replaced(content: Any) -> Any:
        """Each variant of ``content`` in which one value is ``value``."""
        yield value
        if isinstance(content, dict | list):
            items = content.items() if isinstance(content, dict) else enumerate(content)
            for key, inner in list(items):
                for variant in replaced(inner):
                    copied = content.copy()
                    copied[key] = variant
                    yield copied

    for index, content in enumerate(whole):
        for variant in replaced(content):
            findings(*whole[:index], variant, *whole[index + 1 :])


def test_an_object_that_contains_itself_is_read_once() -> None:
    assert found(yaml.safe_load('{metadata: {labels: {"kueue.x-k8s.io/queue-name": q}}, spec: &a {x: *a}}')) == []


def test_the_command_reads_the_files_together(tmp_path: Path) -> None:
    uses_claim = {"resources": {"claims": [{"name": "gpu"}]}}
    content = [COUNTS, template("t", ALTERNATIVES), job("t", queue="team", **uses_claim)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(content))
    answer = CliRunner().invoke(main, ["lint", "--kueue", str(tmp_path), "-o", "json"])
    assert answer.exit_code == 1
    [finding] = json.loads(answer.output)
    assert finding["path"] == f"{TEMPLATE}.firstAvailable"
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(COUNTS))
    answer = CliRunner().invoke(main, ["lint", "--kueue", str(tmp_path)])
    assert (answer.exit_code, answer.output) == (0, "1 object checked, nothing found\n")


def test_a_configuration_in_a_configmap_has_the_same_findings_as_one_in_a_file() -> None:
    wrong = configuration(mapping("gpu.memory", "gpu-nothing", sources=[source("counter", "memoryy")]))
    data = {"controller_manager_config.yaml": yaml.safe_dump(wrong), "other": "text"}
    in_configmap = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kueue"}, "data": data}
    assert found(wrong)
    assert found(in_configmap) == found(wrong)
    assert is_checked(in_configmap)
    assert not is_checked({**in_configmap, "data": {"other": "text"}})


def test_a_configmap_whose_configuration_can_not_be_read_is_a_finding_with_its_place() -> None:
    data = {"config.yaml": "apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: [Configuration"}
    broken = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kueue"}, "data": data}
    [finding] = lint_kueue([Document("f", 3, broken)], CLASSES, DRIVER)
    assert (finding.document, finding.object) == (3, "ConfigMap kueue")
    assert finding.path.startswith("data[config.yaml]: line 2, column ")
    assert "is not valid YAML" in finding.message


@pytest.mark.parametrize(("kind", "severities"), [("counter", ["warning"]), ("capacity", [])])
def test_a_counter_would_charge_a_part_of_a_shared_gpu_as_a_whole_one(kind: str, severities: list[str]) -> None:
    answer = findings(
        configuration(mapping("memory", "gpu-shared", sources=[source(kind, "memory")]), gates=CAPACITY_GATE)
    )
    assert [finding.severity.value for finding in answer] == severities
    assert all("take a capacity source" in finding.message for finding in answer)
