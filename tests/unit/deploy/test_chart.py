"""The Helm chart: what a release has by its values, which values it refuses, and what its ServiceAccounts may do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from controller.decision.hardware_labels import OWN
from deviceclasses.cel.engine import compile_selector, from_slice_device
from deviceclasses.chart_classes import chart_classes
from tessera.cli import main
from tests.support.chart import (
    CHART,
    NO_PROCESS,
    RELEASE,
    Object,
    Values,
    class_texts,
    hooks,
    manifests,
    notes,
    rendered,
)

PROJECT = CHART.parents[1]
WARNING = 2
"""Helm's severity; 1 is a recommendation."""

GROUP = "gpu.tessera.dev"
OTHER = "gpu.nvidia.com"
CRD = "CustomResourceDefinition"
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
FENCE, ONE_SHARE = "tessera-fence", "one-share-of-a-gpu.gpu.tessera.dev"
PARAMETERS, MISUSE = "valid-parameters.gpu.tessera.dev", "fitting-class.gpu.tessera.dev"
ALL = "no-allocation-mode-all.gpu.tessera.dev"
CLAIM_SIZE, RESOURCE_SIZE = "claim-size.gpu.tessera.dev", "extended-resource-size.gpu.tessera.dev"
OF_SHARED_GPUS = ["stated-memory.gpu.tessera.dev", "largest-shared-claim.gpu.tessera.dev"]
ADMISSION = [MISUSE, ALL, ONE_SHARE, PARAMETERS, CLAIM_SIZE, RESOURCE_SIZE, *OF_SHARED_GPUS]
LABELS, POD_CLAIMS = "node-labels.gpu.tessera.dev", "pod-claims.gpu.tessera.dev"
OF_NODES = [f"own-{what}.gpu.tessera.dev" for what in ("claims", "events", "fence", "plan", "slices")]
BOUNDARIES = [LABELS, POD_CLAIMS, *OF_NODES]
"""Part of the rights: what a node's token, and the rights to patch Nodes and the status of Pods, may not do."""

CLASSES = class_texts()
RIGHTS_ALONE = Counter(
    ServiceAccount=3,
    ClusterRole=3,
    ClusterRoleBinding=3,
    Role=3,
    RoleBinding=3,
    **dict.fromkeys(POLICIES, len(BOUNDARIES)),
)
NODE_PLUGIN = Counter(["DaemonSet"])
UNINSTALLING = Counter(["ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"])
CONTROLLER = Counter(["Deployment", "PodDisruptionBudget"])
PROCESSES = NODE_PLUGIN + CONTROLLER
POLICIES_IN_ALL = dict.fromkeys(POLICIES, 1 + len(ADMISSION))
EVERYTHING = RIGHTS_ALONE + PROCESSES + Counter({CRD: 2, "DeviceClass": len(CLASSES), **POLICIES_IN_ALL})

NO_CLASSES = dict.fromkeys(CLASSES, False)
OFF = {"enabled": False}
NOTHING_ELSE = {"classes": NO_CLASSES, "fence": OFF, "admission": OFF, "crd": {"install": False}, **NO_PROCESS}

PARTS = ("nodePlugin", "controller")
ELABORATE: Values = {
    "neighbours": "exclude",
    "nodePlugin": {
        "nodeSelector": {"pool": "gpus"},
        "affinity": {"nodeAffinity": {}},
        "tolerations": [],
        "resources": {},
        "kubeletDir": "/var/data/kubelet",
        "cdiDir": "/etc/cdi",
        "stateDir": "/var/lib/tessera/state",
        "logLevel": "debug",
        "extraArgs": ["--shares=all=4", "--mig-gpus=0"],
    },
    "controller": {
        "replicas": 1,
        "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
        "resources": {},
        "extraArgs": ["--unused-s=90"],
    },
}

VALUE_SETS: dict[str, tuple[Values, Counter[str]]] = {
    "defaults": ({}, EVERYTHING),
    "one class off": ({"classes": {"gpu-dev": False}}, EVERYTHING - Counter(DeviceClass=1)),
    "a class on by name": ({"classes": {"gpu-dev": True}}, EVERYTHING),
    "no classes": ({"classes": NO_CLASSES}, EVERYTHING - Counter(DeviceClass=len(CLASSES))),
    "another driver": ({"driverName": OTHER}, EVERYTHING),
    "resource names": ({"extendedResourceNames": ["gpu-training", "gpu-dev"]}, EVERYTHING),
    "no labels": ({"controller": {"nodeLabels": "none"}}, EVERYTHING - Counter(POLICIES)),
    "no fence": ({"fence": OFF}, EVERYTHING - Counter(POLICIES)),
    "no admission": ({"admission": OFF}, EVERYTHING - Counter(POLICIES * len(ADMISSION))),
    "any parameters": ({"admission": {"parameters": False}}, EVERYTHING - Counter(POLICIES)),
    "any use": ({"admission": {"misuse": False}}, EVERYTHING - Counter(POLICIES)),
    "no definitions": ({"crd": {"install": False}}, EVERYTHING - Counter({CRD: 2})),
    "a part of another chart": ({"global": {"imageRegistry": "example.com"}}, EVERYTHING),
    "rights alone": (NOTHING_ELSE, RIGHTS_ALONE),
    "no process": (NO_PROCESS, EVERYTHING - PROCESSES - Counter(POLICIES)),
    "no node plugin": ({"nodePlugin": OFF}, EVERYTHING - NODE_PLUGIN),
    "no controller": ({"controller": OFF}, EVERYTHING - CONTROLLER - Counter(POLICIES)),
    "no hook": ({"uninstall": {"hook": False}}, EVERYTHING - UNINSTALLING),
    "no budget": ({"controller": {"pdb": OFF}}, EVERYTHING - Counter(["PodDisruptionBudget"])),
    "simulated GPUs": ({"gpus": "sim:dgx-h100"}, EVERYTHING),
    "null for nvml": ({"gpus": None, "nodePlugin": {"stateDir": None}}, EVERYTHING),
    "the GPU Operator's driver": ({"nodePlugin": {"driverRoot": "/run/nvidia/driver"}}, EVERYTHING),
    "the host's network": ({each: {"hostNetwork": True} for each in PARTS}, EVERYTHING),
    "no ports": ({each: {"hostNetwork": True, "metricsPort": 0, "healthPort": 0} for each in PARTS}, EVERYTHING),
    "a web page": ({"controller": {"webAddress": "127.0.0.1:8082"}}, EVERYTHING),
    "a web page over TLS": ({"controller": {"webAddress": ":8443", "webTlsSecret": "web-tls"}}, EVERYTHING),
    "GKE": (
        {"priorityQuota": {"enabled": True}, "nodePlugin": {"driverRoot": "/home/kubernetes/bin/nvidia"}},
        EVERYTHING + Counter(["ResourceQuota"]),
    ),
    "priority classes": ({"priorityClasses": {"create": True}}, EVERYTHING + Counter(PriorityClass=3)),
    "no priority": ({each: {"priorityClassName": ""} for each in PARTS}, EVERYTHING),
    "Prometheus operator": (
        {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        EVERYTHING + Counter(["PodMonitor"]),
    ),
    "alerts": (
        {"prometheusRules": {"enabled": True, "labels": {"release": "prometheus"}}},
        EVERYTHING + Counter(["PrometheusRule"]),
    ),
    "a registry of ones own": (
        {"image": {"repository": "example.com:5000/gpu/tessera", "tag": "7"}, "imagePullSecrets": [{"name": "pull"}]},
        EVERYTHING,
    ),
    "network policies": ({"networkPolicy": {"enabled": True}}, EVERYTHING + Counter(NetworkPolicy=3)),
    "network policies for few peers": (
        {
            "networkPolicy": {
                "enabled": True,
                "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "apiServers": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
                "extraEgress": [{"ports": [{"port": 53, "protocol": "UDP"}]}],
            }
        },
        EVERYTHING + Counter(NetworkPolicy=3),
    ),
    "pods of ones own": (
        {
            each: {
                "podLabels": {"team": "gpus"},
                "podAnnotations": {"sidecar.istio.io/inject": "false"},
                "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            }
            for each in PARTS
        },
        EVERYTHING,
    ),
    "GPUs shared by MPS": (
        {"nodePlugin": {"extraArgs": ["--shared=NVIDIA L4=time-slicing,0=mps"]}},
        EVERYTHING + Counter(["DaemonSet"]),
    ),
    "simulated GPUs shared by MPS": (
        {"gpus": "sim:dgx-h100", "nodePlugin": {"extraArgs": ["--shared=all=mps"]}},
        EVERYTHING + Counter(["DaemonSet"]),
    ),
    "GPUs of some nodes shared by MPS": (
        {"nodeConfigs": [{"name": "plain"}, {"name": "shared", "settings": {"shared": "0=mps"}}]},
        EVERYTHING + Counter(["ConfigMap", "DaemonSet"]),
    ),
    "GPUs shared without MPS": ({"nodePlugin": {"extraArgs": ["--shared=all=time-slicing"]}}, EVERYTHING),
    "everything said of a node plugin": ({"excludeGpus": [0, "0000:17:00.0"], **ELABORATE}, EVERYTHING),
}


def _null_at(path: str) -> Values:
    """Values in which this one is null: Helm then removes its default."""
    parent, _, name = path[1:].rpartition("/")
    values: Values = {name: None}
    for each in reversed(parent.split("/") if parent else ()):
        values = {each: values}
    return values


BAD_VALUES: dict[str, tuple[Values, str]] = {
    "a slip": ({"fense": {}}, "at '': additional properties 'fense' not allowed"),
    "a slip below": ({"crd": {"kep": True}}, "at '/crd': additional properties 'kep' not allowed"),
    "a slip in the fence": ({"fence": {"on": True}}, "at '/fence': additional properties 'on' not allowed"),
    "a slip in admission": ({"admission": {"off": 1}}, "at '/admission': additional properties 'off' not allowed"),
    "no object": ({"fence": True}, "at '/fence': got boolean, want object"),
    "a word for a switch": ({"crd": {"keep": "yes"}}, "at '/crd/keep': got string, want boolean"),
    "capitals": ({"driverName": "GPU.tessera.dev"}, "at '/driverName': 'GPU.tessera.dev' does not match pattern"),
    "a name that CDI refuses": ({"driverName": "3gpu.dev"}, "at '/driverName': '3gpu.dev' does not match pattern"),
    "a long name": ({"driverName": "g" * 64}, "at '/driverName': maxLength: got 64, want 63"),
    "an injection": (
        {"admission": {"shareClasses": ["a'b"]}},
        "at '/admission/shareClasses/0': 'a\\'b' does not match",
    ),
    "a slip in a process": (
        {"nodePlugin": {"driverRot": "/"}},
        "at '/nodePlugin': additional properties 'driverRot' not",
    ),
    "a slip in an image": ({"image": {"name": "x"}}, "at '/image': additional properties 'name' not allowed"),
    "a slip in a toleration": (
        {"controller": {"tolerations": [{"op": "Exists"}]}},
        "at '/controller/tolerations/0': additional properties 'op' not allowed",
    ),
    "a slip in resources": (
        {"nodePlugin": {"resources": {"limit": {}}}},
        "at '/nodePlugin/resources': additional properties 'limit' not allowed",
    ),
    "a relative path": ({"nodePlugin": {"cdiDir": "run/cdi"}}, "at '/nodePlugin/cdiDir': 'run/cdi' does not match"),
    "no such hardware": ({"gpus": "amd"}, "at '/gpus': 'amd' does not match pattern"),
    "a file of the host": ({"gpus": "sim:/tmp/mine.yaml"}, "at '/gpus': 'sim:/tmp/mine.yaml' does not match pattern"),
    "a neighbour ignored": ({"neighbours": "ignore"}, "at '/neighbours': value must be one of 'refuse', 'exclude'"),
    "a short digest": ({"image": {"digest": "sha256:12"}}, "at '/image/digest': 'sha256:12' does not match pattern"),
    "a tag in the repository": ({"image": {"tag": ":1"}}, "at '/image/tag': ':1' does not match pattern"),
    "a high port": (
        {"controller": {"healthPort": 65536}},
        "at '/controller/healthPort': maximum: got 65,536, want 65,535",
    ),
    "nobody to lead": ({"controller": {"replicas": 0}}, "at '/controller/replicas': minimum: got 0, want 1"),
    "no flag": (
        {"nodePlugin": {"extraArgs": ["shares"]}},
        "at '/nodePlugin/extraArgs/0': 'shares' does not match pattern",
    ),
    "no node at a time": (
        {"nodePlugin": {"updateStrategy": {"maxUnavailable": 0}}},
        "at '/nodePlugin/updateStrategy/maxUnavailable': minimum: got 0, want 1",
    ),
    "no share of the nodes": (
        {"nodePlugin": {"updateStrategy": {"maxUnavailable": "0%"}}},
        "at '/nodePlugin/updateStrategy/maxUnavailable': '0%' does not match pattern",
    ),
    "a label of the chart": (
        {"controller": {"podLabels": {"app.kubernetes.io/name": "x"}}},
        "at '/controller/podLabels/app.kubernetes.io~1name': false schema",
    ),
    "an annotation of the chart": (
        {"nodePlugin": {"podAnnotations": {"kubectl.kubernetes.io/default-container": "x"}}},
        "at '/nodePlugin/podAnnotations/kubectl.kubernetes.io~1default-container': false schema",
    ),
    "a variable of the chart": (
        {"nodePlugin": {"extraEnv": [{"name": "NODE_NAME", "value": "x"}]}},
        "at '/nodePlugin/extraEnv/0/name': 'not' failed",
    ),
    "no port of the API server": (
        {"networkPolicy": {"apiServerPorts": []}},
        "at '/networkPolicy/apiServerPorts': minItems: got 0, want 1",
    ),
    "no metrics to look at": (
        {"podMonitor": {"enabled": True}, **{each: {"metricsPort": 0} for each in PARTS}},
        "podMonitor.enabled: there are no metrics: nodePlugin.metricsPort and controller.metricsPort are 0",
    ),
    "a quota of nothing": (
        {"priorityQuota": {"enabled": True}, **{each: {"priorityClassName": ""} for each in PARTS}},
        "priorityQuota.enabled: no pod has a priority class",
    ),
    "no share class": ({"admission": {"shareClasses": []}}, "at '/admission/shareClasses': minItems: got 0, want 1"),
    "a number for a class": ({"classes": {"gpu-dev": 1}}, "at '/classes/gpu-dev': got number, want boolean"),
    **{
        f"null for {path}": (
            _null_at(path),
            f"at '{path.rpartition('/')[0]}': missing property '{path.rpartition('/')[2]}'",
        )
        for path in (
            *("/driverName", "/neighbours", "/image", "/image/repository", "/image/pullPolicy", "/nodePlugin"),
            *(f"/nodePlugin/{name}" for name in ("kubeletDir", "cdiDir", "driverRoot", "logLevel", "updateStrategy")),
            *("/nodePlugin/updateStrategy/maxUnavailable", "/networkPolicy", "/networkPolicy/apiServerPorts"),
            *("/controller", "/controller/replicas", "/controller/logLevel", "/controller/pdb"),
            *("/controller/pdb/maxUnavailable", "/podMonitor", "/podMonitor/interval", "/dashboards"),
            *("/prometheusRules", "/priorityQuota", "/priorityQuota/pods", "/admission", "/admission/shareClasses"),
            *("/priorityClasses", "/fence", "/crd"),
            *("/uninstall", "/uninstall/timeoutSeconds"),
        )
    },
    "a web page for every process of the node": (
        {"controller": {"hostNetwork": True, "webAddress": "127.0.0.1:8082"}},
        "controller.webAddress: with controller.hostNetwork every process of the node could see a page that needs no",
    ),
    "a certificate of no page": (
        {"controller": {"webTlsSecret": "web-tls"}},
        "controller.webTlsSecret: there is no web page: controller.webAddress is empty",
    ),
    "a web page at no port": ({"controller": {"webAddress": "127.0.0.1"}}, "at '/controller/webAddress': '127.0.0.1'"),
    "no such class": (
        {"classes": {"gpu-dve": False}},
        "classes.gpu-dve: there is no such class; there are gpu-compute-instance, ",
    ),
    "requirements of no class": (
        {"classRequirements": {"gpu-dve": {"nvlink": True}}},
        "classRequirements.gpu-dve: there is no such class; there are gpu-compute-instance, ",
    ),
    "a requirement that no partition meets": (
        {"classRequirements": {"gpu-inference-1g-10gb": {"nvlink": True}}},
        "classRequirements.gpu-inference-1g-10gb: its devices never have the attribute nvlinkClique",
    ),
    "a requirement that is no version": (
        {"classRequirements": {"gpu-training": {"computeCapability": "08.0"}}},
        "at '/classRequirements/gpu-training/computeCapability'",
    ),
    "a requirement beyond 64 bits": (
        {"classRequirements": {"gpu-training": {"memoryBandwidth": 10**20}}},
        "at '/classRequirements/gpu-training/memoryBandwidth'",
    ),
    "a requirement that is no text of CEL": (
        {"classRequirements": {"gpu-training": {"products": ['L4"]) || (true']}}},
        "at '/classRequirements/gpu-training/products/0'",
    ),
    "twice": ({"extendedResourceNames": ["gpu-dev", "gpu-dev"]}, "at '/extendedResourceNames': items at 0 and 1 are"),
    "a class without resource name": (
        {"extendedResourceNames": ["gpu-dev", "gpu-inference"]},
        "extendedResourceNames[1]: gpu-inference has no resource name; these have: gpu-dev, gpu-inference-1g-10gb, ",
    ),
}


def of_kind(kind: str, objects: list[Object]) -> dict[str, Object]:
    """By name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def strings(content: object) -> Iterator[str]:
    """All strings inside, keys included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from (key, *strings(value))
    elif isinstance(content, list):
        for value in content:
            yield from strings(value)


@pytest.mark.parametrize("values", [values for values, _ in VALUE_SETS.values()], ids=VALUE_SETS)
def test_helm_finds_nothing_to_warn_of(values: Values) -> None:
    report = helm_python.lint(CHART, dict(values), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []


@pytest.mark.parametrize(("values", "kinds"), VALUE_SETS.values(), ids=VALUE_SETS)
def test_a_release_has_what_its_values_say(values: Values, kinds: Counter[str]) -> None:
    objects = rendered(values)
    assert Counter(each["kind"] for each in objects) == kinds
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("values", [values for values, _ in VALUE_SETS.values()], ids=VALUE_SETS)
def test_no_key_is_without_a_value(values: Values) -> None:
    """As where a comma in an unquoted text begins a new key; kubectl only warns of it, helm does not install it."""
    # As a value, not as a word of CEL.
    assert not re.findall(r'[^\\]": null|[\[,] ?null[,\]]', json.dumps(rendered(values)))


@pytest.mark.parametrize(("values", "complaint"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_value_is_refused_with_its_path(values: Values, complaint: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(complaint)):
        rendered(values)


def test_the_classes_are_those_of_the_files_and_of_the_command() -> None:
    classes = of_kind("DeviceClass", rendered())
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (CHART / "classes").glob("*.yaml")}
    profiles = yaml.safe_load((CHART / "classes" / "partitions" / "profiles.yaml").read_text())
    assert classes.keys() == files.keys() | {f"gpu-inference-{name.replace('.', '-')}" for name in profiles}
    assert {name: classes[name] for name in files} == files
    assert classes == of_kind("DeviceClass", chart_classes())


def test_the_admission_policies_know_every_class() -> None:
    policies = of_kind(POLICIES[0], rendered())
    variables = {each["name"]: each["expression"] for each in policies[MISUSE]["spec"]["variables"]}
    assert json.loads(variables["types"]).keys() == CLASSES.keys()
    sizes = {each["name"]: each["expression"] for each in policies[CLAIM_SIZE]["spec"]["variables"]}
    kinds = json.loads(sizes["kinds"])
    partitions = {name for name in CLASSES if name.startswith("gpu-inference")}
    assert (kinds.keys(), {name for name in kinds if kinds[name] == "partition"}) == (CLASSES.keys(), partitions)
    assert all(f'"{name}"' in json.dumps(policies[ALL]["spec"]).replace("\\", "") for name in CLASSES)


def test_the_class_that_is_off_is_the_one_that_is_left_out() -> None:
    classes = of_kind("DeviceClass", rendered({"classes": {"gpu-dev": False, "gpu-training": True}}))
    assert classes.keys() == CLASSES.keys() - {"gpu-dev"}


def test_only_the_named_classes_get_their_resource_name() -> None:
    classes = of_kind("DeviceClass", rendered({"extendedResourceNames": ["gpu-training", "gpu-inference-1g-10gb"]}))
    found = {name: each["spec"]["extendedResourceName"] for name, each in classes.items() if len(each["spec"]) > 2}
    assert found == {"gpu-training": "nvidia.com/gpu", "gpu-inference-1g-10gb": "nvidia.com/mig-1g.10gb"}


@pytest.mark.parametrize(
    ("switched", "gone"),
    [
        ({"fence": OFF}, [FENCE]),
        ({"admission": OFF}, ADMISSION),
        ({"admission": {"parameters": False}}, [PARAMETERS]),
        ({"admission": {"misuse": False}}, [MISUSE]),
        ({"admission": {"maxDevices": 0, "maxPartitions": 0}}, [CLAIM_SIZE, RESOURCE_SIZE]),
        ({"admission": {"sharedClasses": []}}, OF_SHARED_GPUS),
        ({"controller": OFF}, [ALL]),
        ({"controller": {"nodeLabels": "none"}}, [LABELS]),
    ],
)
def test_each_policy_goes_alone_and_with_its_binding(switched: Values, gone: list[str]) -> None:
    objects = rendered(switched)
    for kind in POLICIES:
        assert sorted(of_kind(kind, objects)) == sorted({FENCE, *ADMISSION, *BOUNDARIES} - {*gone})


def test_serving_comes_before_training_and_training_before_development() -> None:
    classes = of_kind("PriorityClass", rendered({"priorityClasses": {"create": True}}))
    in_order = sorted(classes, key=lambda name: -int(classes[name]["value"]))
    assert in_order == ["tessera-serving", "tessera-training", "tessera-dev"]


@pytest.mark.parametrize("keep", [True, False])
def test_plans_and_policies_outlive_the_release_unless_told_otherwise(keep: bool) -> None:
    definitions = of_kind(CRD, rendered({"crd": {"keep": keep}})).values()
    kept = [definition["metadata"].get("annotations") for definition in definitions]
    assert kept == [{"helm.sh/resource-policy": "keep"} if keep else None] * 2


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ({}, ["gpu-training"]),
        ({"driverName": OTHER}, ["gpu-training", OTHER]),
        ({"driverName": OTHER, "admission": {"monitoredClasses": [OTHER]}}, [OTHER]),
        ({"admission": {"monitoredClasses": ["gpu-hbm-large", OTHER]}}, ["gpu-hbm-large", OTHER]),
        ({"driverName": OTHER, "admission": {"monitoredClasses": []}}, None),
        ({"admission": OFF}, None),
        ({"classes": {"gpu-monitor": False}}, None),
    ],
)
def test_where_claims_can_be_changed_monitors_with_a_listed_class_get_that_of_monitors(
    values: Values, classes: list[str] | None
) -> None:
    assert not [each for each in rendered(values) if each["kind"].startswith("Mutating")]
    policies = of_kind("MutatingAdmissionPolicy", rendered(values, mutating=True)).values()
    bindings = of_kind("MutatingAdmissionPolicyBinding", rendered(values, mutating=True)).values()
    assert [each["spec"]["policyName"] for each in bindings] == [each["metadata"]["name"] for each in policies]
    listed = [re.findall(r" in \[(.*)\], ", json.dumps(each["spec"]["mutations"])) for each in policies]
    assert listed == ([] if classes is None else [[",".join(f"'{name}'" for name in classes)]])


def test_the_admission_policy_knows_share_classes_of_ones_own() -> None:
    policy = of_kind(POLICIES[0], rendered({"admission": {"shareClasses": ["gpu-dev", "team-a.dev"]}}))[ONE_SHARE]
    assert policy["spec"]["variables"][0] == {"name": "classes", "expression": '["gpu-dev","team-a.dev"]'}


# A name that YAML would take for a number or a word of its own stays a name.
@pytest.mark.parametrize("namespace", ["gpus", "2026", "true"])
def test_everything_is_in_the_namespace_of_the_release(namespace: str) -> None:
    objects = rendered(namespace=namespace)
    placed = {each["kind"]: each["metadata"]["namespace"] for each in objects if "namespace" in each["metadata"]}
    assert placed == dict.fromkeys(("Role", "RoleBinding", "ServiceAccount", *PROCESSES), namespace)
    subjects = [subject for each in objects for subject in each.get("subjects", ())]
    assert {subject["namespace"] for subject in subjects} == {namespace}
    assert of_kind(POLICIES[1], objects)[FENCE]["spec"]["paramRef"]["namespace"] == namespace


class TestAnotherDriver:
    def test_leaves_the_name_only_to_the_api_group_and_what_is_named_after_it(self) -> None:
        names = "product|count|driver-version|nvlink-generation|fabric-clique|largest-shared-claim"
        labels = re.compile(rf"{GROUP}/({names})")
        kept = {GROUP, f"{GROUP}/v1alpha1", f"{GROUP}/node", *ADMISSION, *BOUNDARIES}
        objects = [each for each in rendered({"driverName": OTHER}) if each["kind"] != CRD]
        texts = (labels.sub("a label", text).replace(f"{GROUP}/v1alpha1", "the API group") for text in strings(objects))
        assert {text for text in texts if GROUP in text} == kept - {f"{GROUP}/v1alpha1"}

    def test_has_its_attributes_in_the_admission_policy(self) -> None:
        before, after = (of_kind(POLICIES[0], rendered(values))[ONE_SHARE] for values in ({}, {"driverName": OTHER}))
        told = json.dumps(before["spec"]).replace(f"{GROUP}/parentUUID", f"{OTHER}/parentUUID")
        assert json.loads(told) == after["spec"]
        assert before != after

    def test_has_classes_that_the_linter_finds_right_for_it(self, tmp_path: Path) -> None:
        file = tmp_path / "classes.yaml"
        file.write_text(manifests({"driverName": OTHER})["classes.yaml"])
        lint = ["lint", "--driver-name", OTHER, str(file)]
        assert CliRunner().invoke(main, lint).output == f"{len(CLASSES)} objects checked, nothing found\n"
        file.write_text(file.read_text().replace("].type ==", "].typ =="))
        assert CliRunner().invoke(main, lint).output.endswith("7 findings\n")

    def test_has_classes_that_a_full_gpu_of_nvidias_own_driver_does_not_stop(self) -> None:
        """It has no attribute profile; an error in a selector would end the scheduling of every pod with that class."""
        attributes = {"type": {"string": "gpu"}, "uuid": {"string": "GPU-1"}, "productName": {"string": "NVIDIA H100"}}
        device = from_slice_device(OTHER, {"name": "gpu-0", "attributes": attributes})
        classes = of_kind("DeviceClass", rendered({"driverName": OTHER}))
        assert {item["metadata"]["name"]: item for item in chart_classes(OTHER)} == classes
        for name, device_class in classes.items():
            [selector] = device_class["spec"]["selectors"]
            verdict = compile_selector(selector["cel"]["expression"]).verdict(device)
            assert verdict is (name == "gpu-training"), name

    @pytest.mark.long
    @given(st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?(\.[a-z0-9]{1,8}){0,3}", fullmatch=True))
    def test_is_a_name_everywhere_whatever_yaml_would_take_it_for(self, name: str) -> None:
        objects = rendered({"driverName": name})
        for each in of_kind("DeviceClass", objects).values():
            assert [entry["opaque"]["driver"] for entry in each["spec"].get("config", [])] in ([name], [])
            [selector] = each["spec"]["selectors"]
            guard = f'device.driver == "{name}" && device.attributes["{name}"].'
            assert selector["cel"]["expression"].startswith(guard)
        rules = of_kind("ClusterRole", objects)["tessera-node"]["rules"]
        assert [rule["resourceNames"] for rule in rules if "resourceNames" in rule] == [[name]]


class TestTheRights:
    """A right is (who, where, what, names, verbs), as a line of the table in ``docs/install.md`` has it."""

    Right = tuple[str, str, str, str, str]

    def granted(self, values: Values | None = None) -> Counter[Right]:
        found: Counter[TestTheRights.Right] = Counter()
        for kind, where in (("ClusterRole", "cluster"), ("Role", "here")):
            for who, role in of_kind(kind, rendered(values)).items():
                found.update(right for rule in role["rules"] for right in self._rights(who, where, rule))
        return found

    def _rights(self, who: str, where: str, rule: dict[str, Any]) -> Iterator[Right]:
        [group] = rule["apiGroups"]
        for resource in rule["resources"]:
            what = f"{group}/{resource}" if group else resource
            yield who, where, what, ", ".join(rule.get("resourceNames", ())), ", ".join(rule["verbs"])

    def documented(self) -> Counter[Right]:
        line = re.compile(r"^\| `(\S+)` \| (\w+) \| `(\S+?)`(?: of `(\S+)`)? \| ([^|]+) \| [^|]{6,} \|$", re.MULTILINE)
        return Counter(line.findall((PROJECT / "docs" / "install.md").read_text()))

    def test_are_exactly_the_documented_ones_each_with_a_reason(self) -> None:
        assert self.granted({"controller": {"kueue": True, "webAddress": ":8082"}}) == self.documented()

    def test_to_read_workloads_are_granted_only_to_a_controller_that_reads_kueues_queue(self) -> None:
        values = {"controller": {"kueue": True}}
        more = self.granted(values) - self.granted()
        assert {(who, what, verbs) for who, _, what, _, verbs in more} == {
            ("tessera-controller", "kueue.x-k8s.io/workloads", "list, watch"),
        }
        flags = [strings(each) for each in rendered(values) if each["kind"] == "Deployment"]
        assert "--kueue" in chain.from_iterable(flags)

    @pytest.mark.parametrize("address", ["", "127.0.0.1:8082", "[::1]:8082", ":8082"])
    def test_to_check_tokens_are_granted_only_to_a_controller_whose_page_needs_them(self, address: str) -> None:
        more = self.granted({"controller": {"webAddress": address}}) - self.granted()
        needed = {
            ("tessera-controller", "authentication.k8s.io/tokenreviews", "create"),
            ("tessera-controller", "authorization.k8s.io/subjectaccessreviews", "create"),
        }
        assert {(who, what, verbs) for who, _, what, _, verbs in more} == (needed if address == ":8082" else set())

    def test_have_their_reason_in_the_chart_too(self) -> None:
        for part in ("node-plugin", "controller", "uninstall"):
            lines = (CHART / "templates" / f"{part}-rbac.yaml").read_text().splitlines()
            rules = [number for number, line in enumerate(lines) if line.startswith("  - apiGroups")]
            assert rules
            for rule in rules:
                # Its own comment, or that of the rule before it, which it continues.
                before = next(line for line in reversed(lines[:rule]) if re.match(r"  #|rules:|  - apiGroups", line))
                assert before != "rules:", lines[rule:]

    def test_to_evict_pods_is_granted_only_to_a_controller_that_does(self) -> None:
        values = {"controller": {"evictConflicting": False, "evictFailedStartsAfter": 0}}
        gone = self.granted() - self.granted(values)
        evicting = {("pods/eviction", "create"), ("pods/status", "patch")}
        assert {(what, verbs) for _, _, what, _, verbs in gone} == evicting
        assert self.granted() == self.granted({"controller": {"evictFailedStartsAfter": 0}})
        flags = [strings(each) for each in rendered(values) if each["kind"] == "Deployment"]
        assert "--no-evict-conflicting" in chain.from_iterable(flags)

    def test_to_patch_nodes_is_granted_only_for_labels(self) -> None:
        values = {"controller": {"nodeLabels": "none"}}
        gone = self.granted() - self.granted(values)
        assert {(who, what, verbs) for who, _, what, _, verbs in gone} == {
            ("tessera-controller", "nodes", "patch"),
            ("tessera-uninstall", "nodes", "list, patch"),
        }
        [policy] = (each for each in rendered() if each["metadata"]["name"] == LABELS and "validations" in each["spec"])
        [names] = (each["expression"] for each in policy["spec"]["variables"] if each["name"] == "names")
        assert sorted(re.findall(r"'([^']+)'", names)) == sorted(OWN.names)

    def test_are_never_everything_nor_on_secrets(self) -> None:
        assert not [right for right in self.granted() if "*" in "".join(right) or "secrets" in right[2]]

    def test_belong_to_the_account_of_the_same_name_and_no_other(self) -> None:
        objects = rendered()
        accounts = of_kind("ServiceAccount", objects)
        assert accounts.keys() == {"tessera-node", "tessera-controller", "tessera-uninstall"}
        for kind in ("Role", "ClusterRole"):
            bindings = of_kind(f"{kind}Binding", objects)
            assert bindings.keys() == accounts.keys()
            for name, binding in bindings.items():
                assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (kind, name)
                assert [(each["kind"], each["name"]) for each in binding["subjects"]] == [("ServiceAccount", name)]


class TestTheNotes:
    @pytest.mark.parametrize("process", ["node", "controller"])
    def test_tell_the_flags_of_a_process_that_somebody_else_has_to_start(self, process: str) -> None:
        assert f" tessera {process}" not in notes()
        assert re.search(rf"^ +tessera {process}( --node-name NODE)?$", notes(NO_PROCESS), re.MULTILINE)
        other = notes({"driverName": OTHER, **NO_PROCESS}, namespace="gpus")
        [line] = [line for line in other.splitlines() if f" tessera {process} " in line]
        assert line.endswith(f" --namespace gpus --driver-name {OTHER}")
        assert {*re.findall(r"--[a-z-]+", line)} <= {
            *re.findall(r"--[a-z-]+", CliRunner().invoke(main, [process, "-h"]).output)
        }

    def test_name_only_files_that_are_there(self) -> None:
        files = re.findall(r"(?:deploy|docs)/[\w/.-]*\w", notes())
        assert files
        assert all((PROJECT / file).exists() for file in files)

    @pytest.mark.parametrize("values", [values for values, _ in VALUE_SETS.values()], ids=VALUE_SETS)
    def test_name_only_objects_that_are_there(self, values: Values) -> None:
        processes = [each for each in rendered(values) if each["kind"] in ("DaemonSet", "Deployment")]
        # kubectl knows no status of a DaemonSet whose pods are replaced by hand.
        rolled = [each for each in processes if each["spec"].get("updateStrategy", {}).get("type") != "OnDelete"]
        named = re.findall(r"rollout status (\S+)", notes(values))
        assert {*named} == {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in rolled}

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"fence": OFF}, "The fence is off"),
            ({"admission": OFF}, "Admission is off"),
            ({"nodePlugin": OFF}, "The node plugin is off"),
            ({"controller": OFF}, "The controller is off: each node offers whatever fits"),
            ({"controller": {"healthPort": 0}}, "controller.healthPort is 0"),
            ({"gpus": "sim:dgx-h100"}, "GPUs are SIMULATED (sim:dgx-h100)"),
        ],
        ids=["fence", "admission", "node plugin", "controller", "health", "simulator"],
    )
    def test_warn_of_what_is_off_or_not_real(self, values: Values, said: str) -> None:
        assert said not in notes()
        assert said in notes(values)

    @pytest.mark.parametrize(
        ("version", "controller", "disjoint"),
        [
            ("v1.34.4", {}, True),
            ("v1.35.4-gke.100", {"enabled": False}, True),
            ("v1.36.3", {}, True),
            ("v1.36.3", {"enabled": False}, False),
            ("v1.36.3", {"offerMode": "counters"}, False),
            ("v1.37.1", {}, False),
            ("v1.37.1", {"offerMode": "disjoint"}, True),
        ],
    )
    def test_tell_where_a_gpu_offers_only_what_does_not_overlap(
        self, tmp_path: Path, version: str, controller: Values, disjoint: bool
    ) -> None:
        text = rendered_on(version, {"controller": controller}, tmp_path)["tessera/templates/NOTES.txt"]
        assert (f"Kubernetes {version}: each GPU offers only devices that do not overlap" in text) is disjoint


def rendered_on(version: str, values: Values, folder: Path) -> dict[str, str]:
    """The chart as helm renders it on another version of Kubernetes; offline it knows only that of its libraries."""
    copy = shutil.copytree(CHART, folder / CHART.name)
    for template in (copy / "templates").iterdir():
        template.write_text(template.read_text().replace(".Capabilities.KubeVersion.Version", f'"{version}"'))
    with helm_python.Chart.load(copy) as chart:
        return chart.render(dict(values), name=RELEASE, namespace="tessera")


@pytest.mark.parametrize("version", ["v1.33.9", "v1.38.0-alpha.1", "v1.38.0", "v2.0.0"])
def test_a_version_that_was_never_tested_is_refused_unless_allowed(tmp_path: Path, version: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=rf"was not tested on Kubernetes {version}, only on 1\.34 to"):
        rendered_on(version, {}, tmp_path / "refused")
    assert rendered_on(version, {"allowUntestedKubernetes": True}, tmp_path / "allowed")


@pytest.mark.parametrize("version", ["v1.34.0", "v1.35.4-eks-113cf36", "v1.36.3-gke.1", "v1.37.9"])
def test_every_name_of_a_tested_version_is_accepted(tmp_path: Path, version: str) -> None:
    assert rendered_on(version, {}, tmp_path)


def settings(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Dotted names of all values a schema knows; every object in it must refuse others."""
    assert schema["additionalProperties"] is False, path
    for name, each in schema["properties"].items():
        if "properties" in each:
            yield from settings(each, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def defaults(values: dict[str, Any], known: set[str], path: str = "") -> Iterator[str]:
    """Dotted names of what a file of values says, down to the names that are ``known``."""
    for name, each in values.items():
        if f"{path}{name}" not in known and isinstance(each, dict):
            yield from defaults(each, known, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_value_has_a_default_a_schema_and_a_line_in_the_docs() -> None:
    known = [*settings(json.loads((CHART / "values.schema.json").read_text()))]
    known.remove("global")
    assert [*defaults(yaml.safe_load((CHART / "values.yaml").read_text()), {*known})] == known
    docs = (PROJECT / "docs" / "install.md").read_text()
    assert re.findall(r"^\| `([\w.]+)` \| `[^|]+` \| [^|]+ \|$", docs, re.MULTILINE) == known


def comments() -> dict[str, str]:
    """The comment before each value and each group in values.yaml, as one line, by dotted name."""
    texts: dict[str, str] = {}
    path, comment = [""], [""]
    for line in (CHART / "values.yaml").read_text().splitlines():
        if key := re.match(r"( *)([A-Za-z]+):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            texts[".".join(path)] = " ".join(comment)
        comment = [*filter(None, comment), line.strip(" #")] if line.strip().startswith("#") else []
    return texts


def descriptions(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The description of each value and each group of values in the schema, by dotted name."""
    for name, each in schema["properties"].items():
        yield f"{path}{name}", each.get("description", "")
        if "properties" in each:
            yield from descriptions(each, f"{path}{name}.")


def test_the_schema_describes_every_value_as_its_comment_does() -> None:
    described = dict(descriptions(json.loads((CHART / "values.schema.json").read_text())))
    assert all(described.values())
    del described["global"]
    texts = comments()
    assert {name: texts[name] for name in described} == described


def test_the_packed_chart_is_complete_by_itself(tmp_path: Path) -> None:
    with helm_python.Chart.load(helm_python.package(CHART, destination=tmp_path)) as packed:
        files = packed.render(name="tessera", namespace="tessera")
        assert packed.version == packed.metadata["appVersion"]
        assert f'\nversion = "{packed.version}"\n' in (PROJECT / "pyproject.toml").read_text()
    assert {Path(file).name: text for file, text in files.items() if file.endswith(".yaml")} == manifests() | hooks()


def test_the_hook_that_uninstalls_has_what_its_values_say() -> None:
    assert hooks({"uninstall": {"hook": False}}) == {}
    [text] = hooks({"uninstall": {"force": True, "timeoutSeconds": 7}, "driverName": OTHER}).values()
    job = yaml.safe_load(text)
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "tessera-uninstall"
    arguments = pod["containers"][0]["args"]
    assert arguments == ["uninstall", "--namespace=tessera", f"--driver-name={OTHER}", "--timeout=7", "--force"]


@pytest.mark.parametrize(
    ("acceptance", "kinds", "arguments"),
    [
        ({}, [], []),
        ({"node": "n1"}, ["Job"], ["--read-only"]),
        ({"node": "n1", "gpu": "gpu-3", "readOnly": False}, ["Job"], ["gpu-3", "--yes"]),
        ({"node": "n1", "container": True}, ["ResourceClaimTemplate", "Job"], ["--read-only", "--container"]),
    ],
)
def test_the_job_that_tests_a_gpu_has_what_its_values_say_and_no_rights(
    acceptance: Values, kinds: list[str], arguments: list[str]
) -> None:
    objects = [item for item in rendered({"acceptance": acceptance}) if "acceptance" in item["metadata"]["name"]]
    assert [item["kind"] for item in objects] == kinds
    if kinds:
        pod = objects[-1]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        usual = {"acceptance", "--capture=-", "--driver-name=gpu.tessera.dev", "--kubelet-dir=/var/lib/kubelet"}
        usual |= {"--state-dir=/var/lib/kubelet/plugins/gpu.tessera.dev"}
        assert [argument for argument in container["args"] if argument not in usual] == arguments
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["privileged"] is False
        assert all(mount["readOnly"] for mount in container["volumeMounts"])
        assert "n1" in json.dumps(pod["affinity"])


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"tag": "9.9.9"}},
        {"nodePlugin": {"stateDir": "/var/lib/other"}},
        {"nodePlugin": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
        {"imagePullSecrets": [{"name": "registry"}]},
        {"controller": {"replicas": 1}},
    ],
)
def test_an_upgrade_with_other_values_never_changes_a_job_that_tests_a_gpu(values: Values) -> None:
    acceptance: dict[str, Any] = {"acceptance": {"node": "n1", "container": True}}
    jobs = [
        next(item for item in rendered(given) if item["kind"] == "Job" and "acceptance" in item["metadata"]["name"])
        for given in (acceptance, {**acceptance, **values})
    ]
    names, templates = (
        {json.dumps(value) for value in parts}
        for parts in zip(*((job["metadata"]["name"], job["spec"]["template"]) for job in jobs), strict=True)
    )
    assert len(names) == len(templates)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        pytest.param(None, "No such file or directory", id="no file"),
        pytest.param("controler: {}", "at '': additional properties 'controler' not allowed", id="a typo"),
        pytest.param("controller: {offers: 3}\nnodePlugin: 1", "'offers' not allowed; at '/nodePlugin'", id="two"),
        pytest.param("a: [b", "yaml: line 1: did not find expected", id="no YAML"),
        pytest.param("- 1", "cannot unmarshal array", id="a list"),
        pytest.param(b"\xff", "can't decode byte 0xff", id="no text"),
    ],
)
def test_manifests_of_values_that_cannot_be_used_are_one_line_that_names_them(
    values: str | bytes | None, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    if values is not None:
        file.write_bytes(values.encode() if isinstance(values, str) else values)
    command = [sys.executable, "-m", "tests.support.chart", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout) == (1, "")
    [line] = answer.stderr.splitlines()
    assert line.startswith(f"manifests: VALUES={file}: ")
    assert told in line
