"""The pods of the Helm chart: what they may do on a node, what they are told, and how Kubernetes looks after them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from click import Context

from kubelet_plugin.mps.protocol import DIRECTORY
from tessera.cli import main
from tests.image.wheels import PYTHON
from tests.support.chart import CHART, Object, Values, hooks, manifests, rendered

SIMULATED: Values = {"gpus": "sim:dgx-h100"}
MPS: Values = {"nodePlugin": {"extraArgs": ["--shared=0=mps"]}}
PROCESSES = {"node": "nodePlugin", "controller": "controller"}
"""The container's name, which is the command's too, and the name of its values."""

OF_OTHERS: dict[str, set[str]] = {"node": {"--pod-uid"}, "controller": set()}
"""Flags of the pods that the commands don't have yet: made at the same time as the chart. To be emptied."""

DIGEST = f"sha256:{'0123456789abcdef' * 4}"

Pod = Mapping[str, Any]


def workload(process: str, values: Values | None = None) -> Object:
    """The DaemonSet or Deployment."""
    [found] = (
        each
        for each in rendered(values)
        if each["kind"] in {"DaemonSet", "Deployment"} and each["metadata"]["name"] == f"tessera-{process}"
    )
    return found


def pod(process: str, values: Values | None = None) -> Pod:
    spec: Pod = workload(process, values)["spec"]["template"]["spec"]
    return spec


def container(process: str, values: Values | None = None) -> Mapping[str, Any]:
    [found] = pod(process, values)["containers"]
    assert found["name"] == process
    only: Mapping[str, Any] = found
    return only


def args(process: str, values: Values | None = None) -> dict[str, str]:
    """What each flag is set to; of one given twice, the last."""
    command, *flags = container(process, values)["args"]
    assert command == process
    return dict(flag.split("=", 1) for flag in flags)


def host_paths(values: Values | None = None) -> dict[str, str]:
    """Where a container of the node plugin sees which directory of its node."""
    volumes = {each["name"]: each["hostPath"]["path"] for each in pod("node", values)["volumes"]}
    mounts = container("node", values)["volumeMounts"]
    assert sorted(each["name"] for each in mounts) == sorted(volumes)
    return {each["mountPath"]: volumes[each["name"]] for each in mounts}


class TestTheController:
    def test_has_no_right_on_its_node(self) -> None:
        assert pod("controller")["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container("controller")["securityContext"] == {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "volumes" not in pod("controller")
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod("controller").keys()

    def test_spreads_where_it_can_and_runs_where_it_cannot(self) -> None:
        spread = pod("controller")["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        assert {each["whenUnsatisfiable"] for each in spread} == {"ScheduleAnyway"}

    @pytest.mark.parametrize("replicas", [1, 3])
    def test_can_always_be_drained_but_not_all_of_it_at_once(self, replicas: int) -> None:
        objects = rendered({"controller": {"replicas": replicas}})
        [budget] = (each for each in objects if each["kind"] == "PodDisruptionBudget")
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["selector"] == workload("controller")["spec"]["selector"]
        assert workload("controller", {"controller": {"replicas": replicas}})["spec"]["replicas"] == replicas


class TestTheNodePlugin:
    def test_is_privileged_for_real_gpus_and_writes_nowhere_but_into_its_own_directories(self) -> None:
        assert container("node")["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "readOnlyRootFilesystem": True,
            "privileged": True,
        }
        writable = {each["mountPath"] for each in container("node")["volumeMounts"] if not each.get("readOnly")}
        kubelet = "/var/lib/kubelet"
        assert writable == {f"{kubelet}/plugins/gpu.tessera.dev", f"{kubelet}/plugins_registry", "/var/run/cdi"}

    def test_is_not_privileged_with_simulated_gpus_and_sees_nothing_of_its_node(self) -> None:
        assert container("node", SIMULATED)["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "readOnlyRootFilesystem": True,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["MKNOD"]},
        }
        assert pod("node", SIMULATED)["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
        assert set(host_paths()) - set(host_paths(SIMULATED)) == {"/host"}
        assert set(host_paths(SIMULATED)) - set(host_paths()) == {"/var/lib/tessera/sim"}

    def test_sees_at_the_same_path_what_the_kubelet_and_the_runtime_look_for_there(self) -> None:
        values = {"nodePlugin": {"kubeletDir": "/data/kubelet", "cdiDir": "/etc/cdi", "stateDir": "/data/tessera"}}
        found = host_paths(values)
        assert found.pop("/host") == "/"
        assert found == {path: path for path in found}
        assert {*found} == {
            "/data/kubelet/plugins/gpu.tessera.dev",
            "/data/kubelet/plugins_registry",
            "/data/kubelet/device-plugins",
            "/etc/cdi",
            "/data/tessera",
        }
        flags = args("node", values)
        assert [flags[f"--{name}-dir"] for name in ("kubelet", "cdi", "state")] == [
            "/data/kubelet",
            "/etc/cdi",
            "/data/tessera",
        ]

    def test_sees_a_driver_that_is_mounted_later(self) -> None:
        [host] = (each for each in container("node")["volumeMounts"] if each["mountPath"] == "/host")
        assert host["readOnly"]
        assert host["mountPropagation"] == "HostToContainer"
        flags = args("node", {"nodePlugin": {"driverRoot": "/run/nvidia/driver"}})
        assert (flags["--host-root"], flags["--driver-root"]) == ("/host", "/run/nvidia/driver")
        assert flags["--cdi-hook"] == "auto"
        assert not {"--host-root", "--driver-root", "--cdi-hook"} & args("node", SIMULATED).keys()

    def test_has_a_reason_for_each_mount_and_each_right_in_the_template(self) -> None:
        lines = (CHART / "templates" / "node-plugin.yaml").read_text().splitlines()
        lines = [line.strip() for line in lines if not re.match(r" *\{\{-", line)]
        mounts = lines[lines.index("volumeMounts:") : lines.index("volumes:")]
        rights = lines[lines.index("runAsUser: 0") - 2 : lines.index("volumeMounts:")]
        asked = [number for number, line in enumerate(mounts) if line.startswith("- name:")]
        assert len(asked) == len(
            {*host_paths(), *host_paths({"nodePlugin": {"stateDir": "/s"}}), *host_paths(SIMULATED), *host_paths(MPS)}
        )
        assert all(mounts[number - 1].startswith("# ") for number in asked)
        for right in ("runAsUser: 0", "privileged: true", "add: [MKNOD]"):
            assert rights[rights.index(right) - 1].startswith("# ")

    def test_runs_where_gpus_are_known_to_be(self) -> None:
        def node_affinity(values: Values | None = None) -> Any:
            return pod("node", values).get("affinity", {}).get("nodeAffinity")

        terms = node_affinity()["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        keys = {term["matchExpressions"][0]["key"] for term in terms}
        assert {"gpu.tessera.dev/node", "nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present"} <= keys
        assert all(len(term["matchExpressions"]) == 1 for term in terms), "one label is enough"
        own: Values = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
        assert node_affinity({"nodePlugin": {"affinity": {"nodeAffinity": own}}}) == own
        assert node_affinity(SIMULATED) is None, "simulated GPUs are on every node"

    @pytest.mark.parametrize("share", [1, 20, "10%"])
    @pytest.mark.parametrize(
        ("values", "has_gap"),
        [
            ({}, False),
            ({"hostNetwork": True}, True),
            ({"hostNetwork": True, "healthPort": 0}, True),
            ({"hostNetwork": True, "metricsPort": 0, "healthPort": 0}, False),
        ],
    )
    def test_is_updated_without_a_gap_unless_two_would_need_one_port_on_as_many_nodes_at_a_time_as_its_value_says(
        self, values: Values, has_gap: bool, share: int | str
    ) -> None:
        chosen = {**values, "updateStrategy": {"maxUnavailable": share}}
        strategy = workload("node", {"nodePlugin": chosen})["spec"]["updateStrategy"]
        surge, unavailable = (0, share) if has_gap else (share, 0)
        assert strategy == {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
        }

    def test_is_told_which_gpus_are_not_its_own(self) -> None:
        flags = args("node", {"neighbours": "exclude", "excludeGpus": [0, "0000:17:00.0", "GPU-1"]})
        assert (flags["--neighbours"], flags["--exclude-gpus"]) == ("exclude", "0,0000:17:00.0,GPU-1")
        assert "--exclude-gpus" not in args("node")

    def test_is_told_the_layout_of_gpus_without_a_controller(self) -> None:
        layout = "NVIDIA H100 80GB HBM3=3g.40gb,1g.10gb+me; 0=7g.80gb"
        assert args("node", {"nodePlugin": {"layout": layout}})["--layout"] == layout
        assert "--layout" not in args("node")

    @pytest.mark.parametrize("gpus", ["nvml", "sim:dgx-h100", None])
    def test_simulates_only_when_told_to(self, gpus: str | None) -> None:
        assert args("node", {"gpus": gpus})["--gpus"] == (gpus or "nvml")
        assert args("node")["--gpus"] == "nvml"


class TestTheMpsDaemons:
    def test_have_no_rights_at_the_api_server(self) -> None:
        assert pod("mps", MPS)["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in pod("mps", MPS)

    def test_are_replaced_by_hand_only_and_never_for_lack_of_room(self) -> None:
        assert workload("mps", MPS)["spec"]["updateStrategy"] == {"type": "OnDelete"}
        assert pod("mps", MPS)["priorityClassName"] == "system-node-critical"
        assert "limits" not in container("mps", MPS)["resources"]

    def test_run_where_the_node_plugin_does(self) -> None:
        for name in ("affinity", "tolerations"):
            assert pod("mps", MPS)[name] == pod("node", MPS)[name]

    def test_know_processes_by_their_ids_on_the_node(self) -> None:
        assert pod("mps", MPS)["hostPID"] is True

    def test_share_their_directory_with_the_node_plugin_at_the_path_of_the_node(self) -> None:
        [path] = {each["mountPath"] for each in container("mps", MPS)["volumeMounts"] if not each.get("readOnly")}
        assert container("mps", MPS)["command"][-1] == path == DIRECTORY
        assert host_paths(MPS)[path] == path
        [host] = (each for each in container("mps", MPS)["volumeMounts"] if each["mountPath"] == "/host")
        assert (host["readOnly"], host["mountPropagation"]) == (True, "HostToContainer")

    def test_see_the_simulated_gpus_and_nothing_else_of_a_simulated_node(self) -> None:
        values = {**SIMULATED, **MPS}
        assert {each["mountPath"] for each in container("mps", values)["volumeMounts"]} == {
            DIRECTORY,
            "/var/lib/tessera/sim",
        }
        assert container("mps", values)["securityContext"]["privileged"] is False
        assert container("mps", values)["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_run_with_the_python_of_the_image(self) -> None:
        python, *options = container("mps", MPS)["command"]
        assert python == PYTHON
        assert options[:3] == ["-I", "-m", "kubelet_plugin.mps"]

    @pytest.mark.parametrize("shared", ["all=time-slicing", "NVIDIA mps=time-slicing"])
    def test_are_absent_without_a_gpu_that_is_shared_by_mps(self, shared: str) -> None:
        values = {"nodePlugin": {"extraArgs": [f"--shared={shared}", "--mig-gpus=0"]}}
        assert all(each["metadata"]["name"] != "tessera-mps" for each in rendered(values))
        assert DIRECTORY not in host_paths(values)


@pytest.mark.parametrize("process", PROCESSES)
class TestBoth:
    def test_are_found_by_their_selectors_and_by_no_others(self, process: str) -> None:
        spec = workload(process)["spec"]
        labels = spec["template"]["metadata"]["labels"].items()
        assert spec["selector"]["matchLabels"].items() <= labels
        [other] = PROCESSES.keys() - {process}
        assert not workload(other)["spec"]["selector"]["matchLabels"].items() <= labels

    def test_keep_their_selectors_through_upgrades(self, process: str) -> None:
        labels = {"app.kubernetes.io/name": "tessera", "app.kubernetes.io/component": process}
        assert workload(process)["spec"]["selector"] == {"matchLabels": labels}

    def test_have_the_token_of_their_own_account_and_only_because_they_ask(self, process: str) -> None:
        assert pod(process)["serviceAccountName"] == f"tessera-{process}"
        assert pod(process)["automountServiceAccountToken"] is True
        accounts = {each["metadata"]["name"]: each for each in rendered() if each["kind"] == "ServiceAccount"}
        assert accounts[f"tessera-{process}"]["automountServiceAccountToken"] is False

    @pytest.mark.parametrize(
        ("image", "name"),
        [
            ({}, "tessera:0.1.0"),
            ({"tag": "7"}, "tessera:7"),
            ({"tag": "7", "digest": DIGEST}, f"tessera@{DIGEST}"),
            ({"repository": "example.com:5000/gpu/tessera"}, "example.com:5000/gpu/tessera:0.1.0"),
        ],
    )
    def test_run_the_image_of_the_values_a_digest_before_a_tag(self, process: str, image: Values, name: str) -> None:
        assert container(process, {"image": image})["image"] == name

    def test_get_flags_that_their_command_knows(self, process: str) -> None:
        command = main.get_command(Context(main), process)
        assert command is not None
        known = {flag for parameter in command.params for flag in parameter.opts}
        elaborate = {PROCESSES[process]: {"stateDir": "/s"}} if process == "node" else {}
        given = {*args(process), *args(process, {"excludeGpus": [0], **elaborate})}
        assert given - known - OF_OTHERS[process] == set()

    def test_get_what_the_downward_api_knows_of_them(self, process: str) -> None:
        names = {each["name"] for each in container(process)["env"]}
        assert names == {"NODE_NAME", "POD_NAME", "POD_NAMESPACE", "POD_UID"}
        referred = {name for arg in container(process)["args"] for name in re.findall(r"\$\((\w+)\)", arg)}
        assert referred <= names

    def test_have_labels_annotations_and_variables_of_ones_own_next_to_those_of_the_chart(self, process: str) -> None:
        variable = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
        more = {"podLabels": {"team": "gpus"}, "podAnnotations": {"inject": "false"}, "extraEnv": [variable]}
        before = workload(process)["spec"]["template"]["metadata"]
        after = workload(process, {PROCESSES[process]: more})["spec"]["template"]["metadata"]
        assert after["labels"] == {**before["labels"], "team": "gpus"}
        assert after["annotations"] == {**before["annotations"], "inject": "false"}
        assert container(process, {PROCESSES[process]: more})["env"] == [*container(process)["env"], variable]

    def test_let_flags_of_ones_own_win(self, process: str) -> None:
        values = {PROCESSES[process]: {"extraArgs": ["--log-level=debug", "--log-format=text"]}}
        assert (args(process, values)["--log-level"], args(process, values)["--log-format"]) == ("debug", "text")

    def test_are_probed_at_the_port_they_serve(self, process: str) -> None:
        values = {PROCESSES[process]: {"healthPort": 8099}}
        assert args(process, values)["--health-address"] == ":8099"
        assert {each["name"]: each["containerPort"] for each in container(process, values)["ports"]}["health"] == 8099
        probes = {
            name: container(process, values)[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
        }
        assert {name: each["path"] for name, each in probes.items()} == {
            "startup": "/livez",
            "liveness": "/livez",
            "readiness": "/readyz",
        }
        assert {each["port"] for each in probes.values()} == {"health"}

    def test_listen_nowhere_with_both_ports_0(self, process: str) -> None:
        values = {PROCESSES[process]: {"metricsPort": 0, "healthPort": 0}}
        assert not {"--health-address", "--metrics-address"} & args(process, values).keys()
        assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & container(process, values).keys()

    def test_find_services_by_name_on_either_network(self, process: str) -> None:
        on_host = pod(process, {PROCESSES[process]: {"hostNetwork": True}})
        assert (on_host["hostNetwork"], on_host["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert (pod(process).get("hostNetwork"), pod(process)["dnsPolicy"]) == (None, "ClusterFirst")

    def test_have_a_priority_that_can_be_changed_or_left_out(self, process: str) -> None:
        assert pod(process)["priorityClassName"].startswith("system-")
        for name in ("mine", ""):
            values = {PROCESSES[process]: {"priorityClassName": name}}
            assert pod(process, values).get("priorityClassName", "") == name

    def test_ask_for_resources_and_have_a_limit_of_memory_alone(self, process: str) -> None:
        resources = container(process)["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert resources["limits"].keys() == {"memory"}, "a process that is throttled keeps pods waiting"


def test_the_web_page_is_served_where_its_value_says_with_the_certificate_of_the_secret() -> None:
    assert not {"--web-address", "--web-tls-cert"} & args("controller").keys()
    values = {"controller": {"webAddress": ":8443", "webTlsSecret": "web-tls"}}
    given, main = args("controller", values), container("controller", values)
    assert given["--web-address"] == ":8443"
    assert {each["name"]: each["containerPort"] for each in main["ports"]}["web"] == 8443
    [mount] = main["volumeMounts"]
    [volume] = pod("controller", values)["volumes"]
    assert (mount["name"], volume["secret"]) == (volume["name"], {"secretName": "web-tls"})
    for flag, file in (("--web-tls-cert", "tls.crt"), ("--web-tls-key", "tls.key")):
        assert given[flag] == f"{mount['mountPath']}/{file}"


def test_the_quota_is_for_the_priority_classes_of_the_pods() -> None:
    values = {"priorityQuota": {"enabled": True, "pods": 12}, "controller": {"priorityClassName": "mine"}}
    [quota] = (each for each in rendered(values) if each["kind"] == "ResourceQuota")
    assert quota["spec"]["hard"] == {"pods": "12"}
    [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert scope == {"scopeName": "PriorityClass", "operator": "In", "values": ["system-node-critical", "mine"]}


def test_the_quota_lets_the_hook_in_that_uninstalls_without_a_controller() -> None:
    values: Values = {"priorityQuota": {"enabled": True}, "controller": {"enabled": False}}
    [quota] = (each for each in rendered(values) if each["kind"] == "ResourceQuota")
    [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
    [hook] = hooks(values).values()
    assert yaml.safe_load(hook)["spec"]["template"]["spec"]["priorityClassName"] in scope["values"]


def test_the_monitor_finds_both_by_label_and_port_name() -> None:
    [monitor] = yaml.safe_load_all(
        manifests({"podMonitor": {"enabled": True, "labels": {"a": "b"}}})["pod-monitor.yaml"]
    )
    assert monitor["metadata"]["labels"]["a"] == "b"
    for process in PROCESSES:
        labels = workload(process)["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {each["name"] for each in container(process)["ports"]}
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports


def network_policies(values: Values) -> dict[str, Object]:
    """By the component whose pods they select."""
    found = [each for each in rendered(values) if each["kind"] == "NetworkPolicy"]
    return {each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"] for each in found}


def test_network_policies_admit_exactly_what_connects_to_the_ports_of_a_pod() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values: Values = {
        "networkPolicy": {"enabled": True, "clients": clients},
        "controller": {"webAddress": ":8443", "webTlsSecret": "web-tls"},
    }
    policies = network_policies(values)
    for process in PROCESSES:
        spec = policies[process]
        labels = workload(process)["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        probes, rest = spec["ingress"]
        open_ports = {each["port"] for rule in (probes, rest) for each in rule["ports"]}
        assert open_ports == {each["containerPort"] for each in container(process, values)["ports"]}
        assert (probes, rest["from"]) == ({"ports": [{"port": 8081, "protocol": "TCP"}]}, clients)
    [hook] = hooks(values).values()
    labels = yaml.safe_load(hook)["spec"]["template"]["metadata"]["labels"]
    assert policies["uninstall"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "ingress" not in policies["uninstall"]


def test_network_policies_let_pods_reach_the_api_server_and_nothing_else() -> None:
    servers, proxy = [{"ipBlock": {"cidr": "10.0.0.1/32"}}], {"ports": [{"port": 3128, "protocol": "TCP"}]}
    wanted = {"enabled": True, "apiServers": servers, "apiServerPorts": [6443], "extraEgress": [proxy]}
    to_server = {"ports": [{"port": 6443, "protocol": "TCP"}], "to": servers}
    policies = network_policies({"networkPolicy": wanted})
    assert policies.keys() == {*PROCESSES, "uninstall"}
    for spec in policies.values():
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert spec["egress"] == [to_server, proxy]


def test_a_page_for_port_forwards_and_ports_that_are_off_are_not_open() -> None:
    closed = {"metricsPort": 0, "healthPort": 0}
    values: Values = {
        "networkPolicy": {"enabled": True},
        "nodePlugin": closed,
        "controller": {**closed, "webAddress": "127.0.0.1:8082"},
    }
    assert not any("ingress" in spec for spec in network_policies(values).values())
