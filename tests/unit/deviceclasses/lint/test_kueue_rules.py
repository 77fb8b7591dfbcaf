"""``tessera lint --kueue``: what Kueue refuses at its start, what it never admits, and quotas that promise too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deviceclasses.lint.documents_and_findings import Document, Finding
from deviceclasses.lint.kueue_rules import lint_kueue
from tessera.cli import main
from tests.support.linting import CLASSES, DRIVER, OURS, SHARE, TYPE, request
from tests.support.queue_objects import (
    CAPACITY_GATE,
    cluster_queue,
    configuration,
    job,
    local_queue,
    mapping,
    source,
    template,
)

FULL, SMALL, OTHER = "gpu-training", "gpu-inference-1g-10gb", "gpu-inference-2g-20gb"
MAPPINGS = "resources.deviceClassMappings"
MEMORY = source("counter", "memory")
NINE = ("1g-5gb", "1g-6gb", "1g-10gb", "1g-18gb", "1g-20gb", "1g-23gb", "1g-35gb", "1g-45gb", "2g-10gb")


def findings(*contents: object) -> list[Finding]:
    documents = [Document("file.yaml", number, content) for number, content in enumerate(contents, 1)]
    return [*lint_kueue(documents, CLASSES, DRIVER)]


def found(*contents: object) -> list[tuple[str, str]]:
    """Path and severity of each finding."""
    return [(finding.path, finding.severity.value) for finding in findings(*contents)]


CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "one count per class": (configuration(mapping("gpus", FULL), mapping("small", SMALL)), []),
    "a counter for all": (configuration(mapping("gpu-memory", FULL, SMALL, sources=[MEMORY])), []),
    "no mappings": (configuration(), []),
    "17 mappings": (
        configuration(*(mapping(f"m{n}", sources=[source("counter", "memory")]) for n in range(17))),
        [(MAPPINGS, "error"), *((f"{MAPPINGS}[{n}].deviceClassNames", "error") for n in range(17))],
    ),
    "9 classes": (
        configuration(mapping("m", *(f"gpu-inference-{n}" for n in NINE), sources=[MEMORY])),
        [("[0].deviceClassNames", "error")],
    ),
    "a name with a space": (configuration(mapping("my gpus", FULL)), [("[0].name", "error")]),
    "a domain in capitals": (configuration(mapping("Example.com/gpus", FULL)), [("[0].name", "error")]),
    "a name of two mappings": (
        configuration(mapping("gpus", FULL), mapping("gpus", SMALL)),
        [("[1].name", "error")],
    ),
    "a class twice": (configuration(mapping("gpus", FULL, FULL)), [("[0].deviceClassNames[1]", "error")]),
    "a class of two mappings": (
        configuration(mapping("gpus", FULL), mapping("more", FULL)),
        [("[1].deviceClassNames[0]", "error")],
    ),
    "a class that does not exist": (
        configuration(mapping("gpus", "gpu-trainig")),
        [("[0].deviceClassNames[0]", "warning")],
    ),
    "an empty source": (configuration(mapping("m", FULL, sources=[{}])), [("[0].sources[0]", "error")]),
    "counter and capacity": (
        configuration(mapping("m", FULL, sources=[MEMORY, source("capacity", "memory")]), gates=CAPACITY_GATE),
        [("[0].sources", "error")],
    ),
    "capacity without its gate": (
        configuration(mapping("m", FULL, sources=[source("capacity", "memory")]), gates={"Other": True}),
        [("[0].sources[0].capacity", "error")],
    ),
    "capacity, and gates perhaps by flag": (
        configuration(mapping("m", FULL, sources=[source("capacity", "memory")])),
        [("[0].sources[0].capacity", "warning")],
    ),
    "capacity with a domain": (
        configuration(mapping("m", FULL, sources=[source("capacity", f"{DRIVER}/memory")]), gates=CAPACITY_GATE),
        [("[0].sources[0].capacity.name", "error")],
    ),
    "the counter of one memory slice": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory-slice-0")])),
        [("[0].sources[0].counter.name", "error")],
    ),
    "a driver that is almost ours": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", driver="gpu.tesera.dev")])),
        [("[0].sources[0].counter.driver", "warning")],
    ),
    "no driver": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", driver="")])),
        [("[0].sources[0].counter.driver", "error")],
    ),
    "a selector that does not compile": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", "device.driver =")])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "no selector": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", "")])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "a selector of other devices than the class gives": (
        configuration(mapping("m", FULL, sources=[source("counter", "memory", f'{OURS} && {TYPE} == "mig"')])),
        [("[0].sources[0].counter.deviceSelector.cel.expression", "error")],
    ),
    "capacity of shares": (
        configuration(mapping("m", "gpu-dev", sources=[source("capacity", "memory", SHARE)]), gates=CAPACITY_GATE),
        [("[0].sources[0].capacity", "error")],
    ),
    "full GPUs and partitions by count": (
        configuration(mapping("m", FULL, SMALL)),
        [("[0].deviceClassNames", "warning")],
    ),
}


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
    content = [COUNTS, template("t", ALTERNATIVES), job("t", queue="team")]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(content))
    answer = CliRunner().invoke(main, ["lint", "--kueue", str(tmp_path), "-o", "json"])
    assert answer.exit_code == 1
    [finding] = json.loads(answer.output)
    assert finding["path"] == f"{TEMPLATE}.firstAvailable"
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(COUNTS))
    answer = CliRunner().invoke(main, ["lint", "--kueue", str(tmp_path)])
    assert (answer.exit_code, answer.output) == (0, "1 object checked, nothing found\n")
