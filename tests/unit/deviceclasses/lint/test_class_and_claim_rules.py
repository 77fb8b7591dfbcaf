"""``tessera lint``: findings in classes and claims, their paths, and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceclasses.lint.selectors.attribute_catalogue import CAPACITIES
from driver.model.device import devices_of
from driver.model.gpu_settings import SharedProfiles
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from driver.slices.attributes import capacity
from tessera.cli import main
from tests.support.chart import CHART
from tests.support.gpus import gpu_of
from tests.support.linting import (
    APART,
    DRIVER,
    OF_ANY_TYPE,
    OURS,
    SHARE,
    TYPE,
    claim,
    device_class,
    findings,
    found,
    opaque,
    request,
    request_for,
)


@pytest.mark.parametrize("flags", [(), ("--kueue",)], ids=["", "kueue"])
def test_what_is_shipped_has_no_errors_and_names_only_what_is_not_installed(
    flags: tuple[str, ...],
) -> None:
    root = Path(__file__).parents[4]
    answer = json.loads(run(*flags, str(root / "deploy" / "examples"), str(CHART / "classes"), "-o", "json").output)
    found = [(finding["severity"], finding["value"]) for finding in answer]
    assert found == [("warning", '"rdma-nic"'), ("warning", '"nvidia.com/gpu"')]


def test_a_finding_says_file_document_object_path_and_value() -> None:
    [finding] = findings({"kind": "Pod"}, claim(request(device_class="gpu-trainig")))
    assert (finding.file, finding.document, finding.object) == ("file.yaml", 2, "ResourceClaim team/work")
    assert finding.path == "spec.devices.requests[0].exactly.deviceClassName"
    assert finding.value == '"gpu-trainig"'


def test_an_unknown_class_is_a_warning_with_the_nearest_name() -> None:
    [finding] = findings(claim(request(device_class="gpu-inference-1g-10g")))
    assert finding.severity.value == "warning"
    assert finding.message.endswith("did you mean gpu-inference-1g-10gb?")


def test_a_class_of_the_same_files_is_known() -> None:
    mine = device_class("mine", 'device.driver == "dra.net"')
    assert found(claim(request(device_class="mine")), mine) == []


def test_alternatives_and_templates_are_looked_into() -> None:
    template = claim({"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": "gpu-inferense"}]})
    template = {**template, "kind": "ResourceClaimTemplate", "spec": {"spec": template["spec"]}}
    [(path, value, _)] = found(template)
    assert path == "spec.spec.devices.requests[0].firstAvailable[0].deviceClassName"
    assert value == '"gpu-inferense"'


def test_every_fault_of_parameters_is_found_with_its_path() -> None:
    wrong = opaque("ShareConfig", sharing={"strategy": "MPS", "timeSlicing": {"interval": "short"}})
    config = [opaque("anything", driver="dra.net"), wrong]
    there = ".config[1].opaque.parameters.sharing"
    for content, path in ((device_class("x", config=config), "spec"), (claim(config=config), "spec.devices")):
        assert [where for where, _, _ in found(content)] == [
            f"{path}{there}.strategy",
            f"{path}{there}.timeSlicing.interval",
        ]


@pytest.mark.parametrize("parameters", [None, [], "GpuConfig", 3])
def test_parameters_that_are_no_object_are_found(parameters: object) -> None:
    entry = {"opaque": {"driver": DRIVER, "parameters": parameters}}
    [(path, value, message)] = found(device_class("x", config=[entry]))
    assert path == "spec.config[0].opaque.parameters"
    assert message == "must be an object with apiVersion and kind"
    assert value in ("null", "[]", '"GpuConfig"', "3")


@pytest.mark.parametrize(
    ("class_name", "kind", "fits"),
    [
        ("gpu-training", "GpuConfig", True),
        ("gpu-training", "ShareConfig", False),
        ("gpu-inference", "GpuConfig", False),
        ("team-shares", "ShareConfig", True),
    ],
)
def test_parameters_must_fit_the_class_of_their_request(class_name: str, kind: str, fits: bool) -> None:
    for config in ({**opaque(kind), "requests": ["gpu"]}, opaque(kind)):
        answer = found(claim(request(device_class=class_name), config=[config]))
        assert not answer if fits else "does not fit request gpu: class " + class_name in answer[0][2]


def test_nvidias_gpu_config_fits_full_gpus_and_shares() -> None:
    theirs = opaque("GpuConfig", apiVersion="resource.nvidia.com/v1beta1")
    for class_name, wrong in (("gpu-training", 0), ("team-shares", 0), ("gpu-inference", 1)):
        entry = {**theirs, "requests": ["gpu"]}
        assert len(found(claim(request(device_class=class_name), config=[entry]))) == wrong


@pytest.mark.parametrize("field", ["config", "constraints"])
def test_requests_that_do_not_exist_are_found_with_the_nearest(field: str) -> None:
    alternatives = {"name": "any", "firstAvailable": [{"name": "big", "deviceClassName": "gpu-training"}]}
    entry = {"requests": ["gpu", "any", "any/big", "gpuu", 7]}
    answer = found(claim(request(), alternatives, **{field: [entry]}))
    assert [(path, value) for path, value, _ in answer] == [
        (f"spec.devices.{field}[0].requests[3]", '"gpuu"'),
        (f"spec.devices.{field}[0].requests[4]", "7"),
    ]
    assert answer[0][2] == "no such request; accepted: gpu, any, any/big; did you mean gpu?"


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"matchAttribute": "gpu.tessera.dev/nvlinkCliqe"}, "did you mean nvlinkClique?"),
        ({"distinctAttribute": "gpu.tessera.dev/zzz"}, "publishes no such name in gpu.tessera.dev"),
        ({"matchAttribute": "nvlinkClique"}, "did you mean gpu.tessera.dev/nvlinkClique?"),
        ({"matchAttribute": "gpu.tessera.dev/nvlinkClique"}, None),
        ({"matchAttribute": "resource.kubernetes.io/pcieRoot"}, None),
        ({"matchAttribute": "dra.net/whatever"}, None),
    ],
)
def test_constraints_on_attributes_nobody_publishes_are_found(constraint: dict[str, str], expected: str | None) -> None:
    answer = found(claim(request(count=2), constraints=[constraint]))
    assert [path for path, _, _ in answer] == [f"spec.devices.constraints[0].{next(iter(constraint))}"] * bool(expected)
    assert expected is None or expected in answer[0][2]


COUNT = "spec.devices.requests[0].exactly.count"
OTHER = "spec.devices.requests[1].exactly.deviceClassName"


@pytest.mark.parametrize(
    ("requests", "constraints", "paths"),
    [
        pytest.param([request(device_class="team-shares")], [], [], id="one share"),
        pytest.param([request(device_class="team-shares", count=2)], [], [COUNT], id="two shares"),
        pytest.param([request(device_class="team-shares", count=2)], [APART], [], id="of different GPUs"),
        pytest.param(
            [request(device_class="team-shares", count=2)],
            [{"matchAttribute": "gpu.tessera.dev/parentUUID"}],
            [COUNT],
            id="of the same GPU on purpose",
        ),
        pytest.param(
            [request(device_class="team-shares", count=2), request("b", "gpu-inference")],
            [{**APART, "requests": ["b"]}],
            [COUNT],
            id="a constraint on another request",
        ),
        pytest.param(
            [request("a", "team-shares"), request("b", "team-shares")], [], [OTHER], id="two requests for a share"
        ),
        pytest.param([request("a", "team-shares"), request("b", "team-shares")], [APART], [], id="kept apart"),
        pytest.param(
            [request("a", "team-shares"), request("b", "gpu-inference")], [], [], id="a share and a partition"
        ),
        pytest.param([request(count=8)], [], [], id="eight full GPUs"),
        pytest.param(
            [
                {
                    "name": "gpu",
                    "firstAvailable": [
                        {"name": "a", "deviceClassName": "team-shares"},
                        {"name": "b", "deviceClassName": "team-shares"},
                    ],
                }
            ],
            [],
            [],
            id="alternatives are not together",
        ),
    ],
)
def test_two_shares_of_one_gpu_are_found_before_the_driver_refuses_them(
    requests: list[dict[str, Any]], constraints: list[dict[str, Any]], paths: list[str]
) -> None:
    answer = found(claim(*requests, constraints=constraints))
    assert [path for path, _, _ in answer] == paths
    assert all("distinctAttribute: gpu.tessera.dev/parentUUID" in message for _, _, message in answer)


@pytest.mark.parametrize(
    ("selectors", "several"),
    [
        pytest.param([SHARE], True, id="shares"),
        pytest.param(
            [SHARE + ' && device.attributes["gpu.tessera.dev"].productName == "NVIDIA L4"'], True, id="of L4s"
        ),
        pytest.param([OF_ANY_TYPE], True, id="anything of ours"),
        pytest.param(['device.driver == "dra.net"'], False, id="another driver"),
        pytest.param([OURS, SHARE.replace('"share"', '"gpu"')], False, id="full GPUs"),
        pytest.param([SHARE.replace("type", "profile").replace('"share"', '"1g.10gb"')], False, id="a profile"),
        pytest.param(
            [f"{OURS} && cel.bind(a, device.attributes['gpu.tessera.dev'], a.type == 'share')"], True, id="bind"
        ),
    ],
)
def test_selectors_that_let_shares_pass_are_known_by_what_they_do(selectors: list[str], several: bool) -> None:
    mine = device_class("mine", *selectors)
    assert [path for path, _, _ in found(mine, claim(request(device_class="mine", count=3)))] == [COUNT] * several
    by_request = claim(request_for("any", *selectors, count=3))
    assert [path for path, _, _ in found(device_class("any", OURS), by_request)].count(COUNT) == several


@pytest.mark.parametrize(
    ("expression", "value", "message"),
    [
        ("device.driver ==", '""', "at character 17: syntax error"),
        ('device.drivr == "x"', "drivr == ", "at character 8: unknown field .* did you mean 'driver'?"),
        ("frobnicate(device)", "frobnicate(device)", "unknown function 'frobnicate'"),
        (
            'device.driver == "gpu.tessera.dev" && device.attributes["gpu.tessera.dev"].nvlinkCliqe == "x"',
            '"nvlinkCliqe"',
            r"publishes no such name in gpu\.tessera\.dev .*; did you mean nvlinkClique\?",
        ),
        (
            f'{OURS} && cel.bind(a, device.attributes["gpu.tessera.dev"], a.profil == "1g.10gb")',
            '"profil"',
            r"did you mean profile\?",
        ),
        (
            f'{OURS} && device.capacity["gpu.tessera.dev"].memry.compareTo(quantity("40Gi")) >= 0',
            '"memry"',
            r"did you mean memory\?",
        ),
        (
            'device.attributes["gpu.tessera.dev"].type == "gpu"',
            "type ==",
            "fails on a device of another driver, which stops the pod's scheduling: no such key: type; ask for",
        ),
        (
            f'{OURS} && device.attributes["gpu.tessera.dev"].memoryBandwidth >= 3000',
            "device.driver ==",
            'fails on a partition, .*: no such key: memoryBandwidth; ask for .* and .type == "gpu" first',
        ),
        (
            f'{OURS} && device.capacity["gpu.tessera.dev"].memory.compareTo(quantity("40Gi")) >= 0',
            "device.driver ==",
            r'fails on a share, .* and \(.type == "gpu" \|\| .type == "mig" \|\| .*"shared"\) first',
        ),
    ],
)
def test_what_is_wrong_with_a_selector_is_found(expression: str, value: str, message: str) -> None:
    [(path, shown, told)] = found(device_class("x", expression))
    assert path == "spec.selectors[0].cel.expression"
    assert value in shown
    assert re.search(message, told)


@pytest.mark.parametrize(
    "expression",
    [
        f'{OURS} && {TYPE} == "gpu" && device.attributes["gpu.tessera.dev"].memoryBandwidth >= 3000',
        f'{OURS} && device.attributes["gpu.tessera.dev"].?memoryType.orValue("").startsWith("HBM")',
        f'{OURS} && {TYPE} == "mig" && device.capacity["gpu.tessera.dev"].memory.isGreaterThan(quantity("39Gi"))',
        'device.driver == "dra.net" && device.attributes["dra.net"].rdma',
    ],
)
def test_a_selector_that_asks_for_the_type_first_is_right(expression: str) -> None:
    assert found(device_class("x", expression)) == []


def test_selectors_of_a_request_are_held_against_what_its_class_lets_pass() -> None:
    expression = 'device.attributes["gpu.tessera.dev"].memoryBandwidth >= 3000'
    assert found(claim(request_for("gpu-training", expression))) == []
    [(path, _, message)] = found(claim(request_for("gpu-inference", expression)))
    assert path == "spec.devices.requests[0].exactly.selectors[0].cel.expression"
    assert message.startswith("fails on a partition")


def test_the_capacities_that_lint_knows_are_those_that_are_published() -> None:
    gpu = SharedProfiles.parse("1c.3g.40gb").applied_to(gpu_of(), {})
    by_mps = SharedMemory(SharingStrategy.MPS, 64 * GIB)
    published = {name for device in devices_of(gpu, 0, shares=2, shared=by_mps) for name in capacity(device)}
    assert published == CAPACITIES


KEYS = st.sampled_from(
    ["spec", "devices", "requests", "exactly", "firstAvailable", "config", "opaque", "constraints", "selectors", "name"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.long
@settings(deadline=None)
@given(JSON, st.sampled_from(["DeviceClass", "ResourceClaim", "ResourceClaimTemplate"]))
def test_no_shape_of_an_object_is_too_odd(odd: object, kind: str) -> None:
    for spec in (odd, {"devices": odd}, {"spec": {"devices": odd}}):
        content = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": odd, "spec": spec}
        assert all(finding.object.startswith(kind) for finding in findings(content, odd))


def run(*arguments: str, given: str = "") -> Result:
    return CliRunner().invoke(main, ["lint", *arguments], input=given)


def test_clean_is_exit_code_0_and_findings_are_1(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(claim(request())))
    assert run(str(tmp_path)).exit_code == 0
    (tmp_path / "bad.yml").write_text(yaml.safe_dump(claim(request(device_class="gpu-trainin"))))
    answer = run(str(tmp_path))
    assert answer.exit_code == 1
    assert f"warning   {tmp_path / 'bad.yml'}" in answer.output
    assert "2 objects checked, 1 finding\n" in answer.output


WRONG_CONFIGS = [{"name": "l4", "nodeSelector": {"gpu": "l4"}, "settings": {"sharez": "4"}}, {"name": "l4"}]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"nodeConfigs": WRONG_CONFIGS, "gpus": "nvml"}, id="chart values"),
        pytest.param(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "tessera-node-configs", "namespace": "tessera"},
                "data": {"configs.json": json.dumps(WRONG_CONFIGS)},
            },
            id="the ConfigMap",
        ),
    ],
)
def test_settings_by_node_are_checked_like_the_node_plugin_reads_them(content: object) -> None:
    answer = run("-", "-o", "json", given=yaml.safe_dump(content))
    assert answer.exit_code == 1
    messages = {finding["path"]: finding["message"] for finding in json.loads(answer.output)}
    assert messages.keys() == {"nodeConfigs[0].settings.sharez", "nodeConfigs[1].name"}
    assert "did you mean shares?" in messages["nodeConfigs[0].settings.sharez"]
    assert "another configuration has that name" in messages["nodeConfigs[1].name"]


@pytest.mark.parametrize("text", ["nodeConfigs: [{2026-01-01: x}]", "nodeConfigs: &it [*it]"], ids=["a date", "itself"])
def test_settings_by_node_that_are_no_json_are_a_finding(text: str) -> None:
    answer = run("-", "-o", "json", given=text)
    assert (answer.exit_code, [finding["path"] for finding in json.loads(answer.output)]) == (1, ["nodeConfigs"])


@pytest.mark.parametrize("content", [{"nodeConfigs": None}, {"nodeConfigs": []}, {"nodeConfigs": [{"name": "a"}]}])
def test_right_settings_by_node_are_nothing_to_report(content: object) -> None:
    answer = run("-", given=yaml.safe_dump(content))
    assert (answer.exit_code, answer.output) == (0, "1 object checked, nothing found\n")


def test_json_is_a_list_of_findings() -> None:
    text = yaml.safe_dump_all([{"kind": "Pod"}, claim(request(device_class="gpu-trainin"))])
    [finding] = json.loads(run("-", "-o", "json", given=text).output)
    assert finding == {
        "file": "-",
        "document": 2,
        "object": "ResourceClaim team/work",
        "path": "spec.devices.requests[0].exactly.deviceClassName",
        "value": '"gpu-trainin"',
        "message": "no such class in these files or among Tessera's; did you mean gpu-training?",
        "severity": "warning",
    }


def test_a_list_as_kubectl_prints_it_is_looked_into() -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [claim(request(device_class="x")), claim(request())]}
    answer = run("-", given=json.dumps(listed))
    assert "2 objects checked, 1 finding\n" in answer.output


@pytest.mark.parametrize(
    "value", ['!!int ""', '!!float "_"', "!!bool maybe", "!!timestamp soon", "!!set [1]", "!!python/name:x y"]
)
def test_a_value_that_is_not_of_its_tag_is_a_finding(value: str) -> None:
    answer = run("-", given=f"a: {value}\n")
    assert "is not valid YAML" in answer.output
    assert answer.exit_code == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "line 1, column 6"),
        ("a: 1\nb: 2\na: 3\n", "'a' is a duplicate key"),
        ("a: 2024-13-45", "is not valid YAML: month must be in 1..12"),
        ("\x00", "is not valid YAML"),
        ("{{ .Values.x }}: y", "is not valid YAML"),
        ("[" * 1200, "is not valid YAML"),
        (f"a: 1{':00' * 200}.5", "is not valid YAML: int too large to convert to float"),
    ],
)
def test_a_file_that_is_no_yaml_is_a_finding_after_what_could_be_read(text: str, expected: str) -> None:
    answer = run("-", given=text)
    assert answer.exit_code == 1
    assert expected in answer.output


def test_the_shipped_classes_are_those_of_a_driver_with_another_name() -> None:
    unfit = yaml.safe_dump(claim(request(), config=[opaque("MigDeviceConfig", driver="gpu.nvidia.com")]))
    answer = run("-", "--driver-name", "gpu.nvidia.com", given=unfit)
    assert "does not fit request gpu: class gpu-training gives full GPUs" in answer.output
    fit = yaml.safe_dump(claim(request(), config=[opaque("GpuConfig", driver="gpu.nvidia.com")]))
    assert run("-", "--driver-name", "gpu.nvidia.com", given=fit).exit_code == 0


NOTHING = "nothing here is a DeviceClass, ResourceClaim or ResourceClaimTemplate, or makes pods: "


@pytest.mark.parametrize(
    ("text", "there"),
    [
        pytest.param("", "it is empty", id="what a command that failed leaves"),
        pytest.param("---\n---\n", "it is empty", id="empty documents"),
        pytest.param("[a, b]", "there is a list", id="a list"),
        pytest.param("root:x:0:0:root:/root:/bin/bash\n", "there is text", id="no YAML object"),
        pytest.param("spec: {}", "there is an object without kind", id="no kind"),
        pytest.param("{kind: Node}\n---\n{kind: Node}\n---\n{kind: Role}", "there is Node, Role", id="other kinds"),
        pytest.param(
            "{apiVersion: resource.k8s.io/v1, kind: Deviceclass}",
            "there is Deviceclass (did you mean DeviceClass?)",
            id="a typo",
        ),
        pytest.param("{apiVersion: v1, kind: ResourceQuota}", "there is ResourceQuota", id="no typo"),
        pytest.param("{apiVersion: v1, kind: List, items: []}", "there is an empty List", id="an empty answer"),
    ],
)
def test_files_without_anything_to_check_are_a_finding_that_says_what_there_is(text: str, there: str) -> None:
    answer = run("-", "-o", "json", given=text)
    assert answer.exit_code == 1
    assert json.loads(answer.output)[-1]["message"] == NOTHING + there
    assert "0 objects checked, " in run("-", given=text).output


def test_files_that_hold_nothing_of_ours_are_passed_over_beside_those_that_do(tmp_path: Path) -> None:
    (tmp_path / "claim.yaml").write_text(yaml.safe_dump(claim(request())))
    (tmp_path / "service.yaml").write_text("kind: Service")
    (tmp_path / "empty.yaml").write_text("")
    assert run(str(tmp_path)).output == "1 object checked, 1 skipped (Service), nothing found\n"


def test_a_kind_with_a_slip_in_it_is_a_finding_beside_good_objects() -> None:
    for kind, meant in (("Deviceclass", "DeviceClass"), ("ResourceClaimTemplates", "ResourceClaimTemplate")):
        wrong = {**device_class("x"), "kind": kind}
        [finding] = findings(claim(request()), wrong)
        assert (finding.document, finding.object, finding.path) == (2, f"{kind} x", "kind")
        assert finding.message.endswith(f"; did you mean {meant}?")
    other = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    assert found(claim(request()), other, {**other, "kind": "DeviceTaintRule"}) == []


def test_a_list_of_one_kind_as_the_api_server_answers_it_is_looked_into() -> None:
    items = [{"metadata": {"name": "x"}, "spec": {"selectors": [{"cel": {"expression": "device.drivr"}}]}}]
    answer = run("-", given=json.dumps({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClassList", "items": items}))
    assert "1 object checked, 1 finding\n" in answer.output


def test_nothing_to_read_is_exit_code_2(tmp_path: Path) -> None:
    for arguments, expected in (
        ([], "Missing argument 'FILE...'"),
        ([str(tmp_path / "nowhere")], "nowhere: no such file or folder"),
        ([str(tmp_path)], "no file in this folder ends in .json, .yaml, .yml"),
    ):
        answer = run(*arguments)
        assert answer.exit_code == 2
        assert expected in answer.output


def test_help_has_examples() -> None:
    answer = run("--help")
    assert answer.exit_code == 0
    assert "helm template --kube-version 1.37 deploy/tessera | tessera lint -" in answer.output


def test_the_node_plugin_loads_neither_the_rules_nor_the_cel_engine() -> None:
    loaded = "[name for name in sys.modules if name.startswith(('deviceclasses', 'celpy', 'lark'))]"
    code = f"import sys, tessera.cli, kubelet_plugin.app; print({loaded})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == "[]\n"


MODE = {"deviceClassName": "gpu-training", "allocationMode": "All"}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        pytest.param(request(allocationMode="All"), "exactly", id="a request"),
        pytest.param(request(device_class="team-shares", allocationMode="All"), "exactly", id="shares"),
        pytest.param(request(device_class="any", allocationMode="All"), "exactly", id="a class that gives ours too"),
        pytest.param({"name": "gpu", "firstAvailable": [{"name": "a", **MODE}]}, "firstAvailable[0]", id="alternative"),
    ],
)
def test_a_request_for_all_devices_is_found_with_what_to_write_instead(asked: dict[str, Any], field: str) -> None:
    [(path, value, message)] = found(device_class("any", "true"), claim(asked))
    assert (path, value) == (f"spec.devices.requests[0].{field}.allocationMode", '"All"')
    assert message.endswith("ask for a number of devices instead, at most as many as one node has, such as count: 8")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(allocationMode="ExactCount", count=8), id="a number"),
        pytest.param(request(device_class="gpu-monitor", allocationMode="All", adminAccess=True), id="monitors"),
        pytest.param(request(device_class="nic", allocationMode="All"), id="another driver"),
    ],
)
def test_requests_for_which_all_is_right_are_let_through(asked: dict[str, Any]) -> None:
    assert found(device_class("nic", 'device.driver == "dra.net"'), claim(asked)) == []


@pytest.mark.parametrize("name", ["gpu-training", "gpu-inference-1g-10gb", "team-shares"])
def test_admin_access_to_other_devices_than_those_for_monitors_is_a_warning_that_says_what_happens(name: str) -> None:
    [finding] = findings(claim(request(device_class=name, adminAccess=True, allocationMode="All")))
    assert (finding.path, finding.value) == ("spec.devices.requests[0].exactly.deviceClassName", f'"{name}"')
    assert finding.severity.value == "warning"
    for told in ("take gpu-monitor", "From Kubernetes 1.36 on", "admission.monitoredClasses", "cannot start"):
        assert told in finding.message
    assert len(finding.message) < 300


ONLY_MONITORS = f'{OURS} && {TYPE} == "monitor"'


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(device_class="gpu-monitor"), id="a request"),
        pytest.param(request(device_class="gpu-monitor", adminAccess=False), id="with false"),
        pytest.param(request(device_class="mine", allocationMode="All"), id="a class of ones own"),
        pytest.param(
            {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": "gpu-monitor"}]}, id="alternative"
        ),
    ],
)
def test_a_class_of_monitor_devices_without_admin_access_is_an_error(asked: dict[str, Any]) -> None:
    [finding] = findings(device_class("mine", ONLY_MONITORS), claim(asked))
    assert finding.path.endswith(".deviceClassName")
    assert finding.severity.value == "error"
    assert "refuses to requests without adminAccess: true; take class gpu-training" in finding.message


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request_for("gpu-monitor"), id="the class of monitors"),
        pytest.param(request_for("gpu-monitor", 'device.attributes["gpu.tessera.dev"].uuid == "GPU-1"'), id="one GPU"),
        pytest.param(request_for("any"), id="a class that gives monitors too"),
        pytest.param(request_for("any", ONLY_MONITORS), id="of which a selector takes only these"),
        pytest.param(request_for("nic"), id="another driver"),
    ],
)
def test_admin_access_to_devices_that_it_can_have_is_let_through(asked: dict[str, Any]) -> None:
    asked["exactly"] |= {"adminAccess": True, "count": 4}
    others = device_class("any", "true"), device_class("nic", 'device.driver == "dra.net"')
    assert found(*others, claim(asked)) == []


def test_a_selector_that_no_monitor_device_passes_is_found() -> None:
    asked = request_for("gpu-monitor", "true", f'{TYPE} == "gpu"', adminAccess=True)
    [(path, _, message)] = found(claim(asked))
    assert path == "spec.devices.requests[0].exactly.selectors[1].cel.expression"
    assert message == "accepts no monitor device; requests with adminAccess get no other"
    asked = request_for("gpu-monitor", 'device.attributes["gpu.tessera.dev"].memorySlices > 1', adminAccess=True)
    [(_, _, message)] = found(claim(asked))
    assert message.startswith("fails on a monitor device, which stops the pod's scheduling: no such key: memorySlices")


def test_two_requests_of_one_name_are_found() -> None:
    devices = [request("a"), request("b"), request("a", "gpu-inference")]
    assert found(claim(*devices)) == [("spec.devices.requests[2].name", '"a"', "another request has this name")]
    two = {"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": "gpu-training"}] * 2}
    assert found(claim(two)) == [
        ("spec.devices.requests[0].firstAvailable[1].name", '"a"', "another alternative has this name")
    ]


@pytest.mark.parametrize(
    ("asked", "path", "value", "message"),
    [
        ({"name": "gpu"}, "", "{...}", "must have exactly or firstAvailable, with deviceClassName"),
        (request(count=-1), ".exactly.count", "-1", "must be at least 1"),
        (request(allocationMode="Some"), ".exactly.allocationMode", '"Some"', "accepted: ExactCount, All"),
        (request(capacity={"requests": {"memory": "x"}}), ".exactly.capacity.requests.memory", '"x"', "not a quantity"),
    ],
)
def test_values_that_the_api_server_refuses_are_found(
    asked: dict[str, Any], path: str, value: str, message: str
) -> None:
    [(where, what, said)] = found(claim(asked))
    assert (where, what) == (f"spec.devices.requests[0]{path}", value)
    assert message in said
