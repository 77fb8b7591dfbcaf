"""Whether an installation is sound, on a real cluster: health pages, neighbours, ``tessera status``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.clock import micro_time
from driver.config.flag_values import NVIDIA_DRIVER
from driver.kube.lease import leases
from driver.model.plan import PATH
from tests.harness.cluster import Cluster
from tests.harness.processes import ProcessTable, kill
from tests.harness.progress import Progress
from tests.harness.settings import Settings
from tests.harness.waiting import wait_for
from tests.support.chart import install, rendered
from tests.support.controller import ControllerProcess
from tests.support.metrics import fetch, port_in
from tests.support.plugin import COMMAND_S, DRIVER, SLICES, TESSERA, PluginFlags, PluginProcess
from tests.support.status import SEEN_S, findings, status, told, wait_sound
from tests.support.workloads import is_gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOUNDNESS = Path(__file__).parents[2] / "docs" / "soundness.md"
NODES = "/api/v1/nodes"
POLICIES = "/apis/admissionregistration.k8s.io/v1"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
NODE_LEASES = leases("kube-node-lease")
JSON_PATCH = "application/json-patch+json"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    binaries = os.environ.get("TESSERA_BINARIES")
    settings = Settings(name="sound", binaries=Path(binaries) if binaries else None)
    with Cluster.start(settings, Progress()) as running:
        install(running)
        yield running


@pytest.fixture(scope="module")
def plugin(cluster: Cluster) -> Iterator[PluginProcess]:
    process = PluginProcess(cluster, cluster.nodes[0], PluginFlags(gpus="sim:h100-1", health_address="127.0.0.1:0"))
    process.spawn()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def controller(cluster: Cluster, plugin: PluginProcess) -> Iterator[ControllerProcess]:
    process = ControllerProcess(cluster, flags=("--health-address", "127.0.0.1:0"))
    process.start()
    wait_for(
        lambda: process.plans().get(plugin.node.name, {}).get("status", {}).get("mode") == "Planned", SEEN_S, "led"
    )
    yield process
    process.stop()


def page(process: PluginProcess | ControllerProcess, path: str) -> str:
    return fetch(port_in(process.log, SEEN_S, "/readyz"), path)[1]


def ready(process: PluginProcess | ControllerProcess) -> bool:
    return "readyz check passed" in page(process, "/readyz?verbose")


def test_a_plugin_is_ready_once_the_kubelet_has_it(plugin: PluginProcess) -> None:
    wait_for(lambda: ready(plugin), 60, "it is ready")
    log = plugin.log.read_text()
    assert log.index("serving over HTTP") < log.index("registered with the kubelet")
    assert page(plugin, "/livez") == "ok"


@pytest.mark.slow
def test_a_plugin_is_unready_while_its_hardware_hangs_and_lives(plugin: PluginProcess) -> None:
    wait_for(lambda: ready(plugin), 60, "it is ready")
    plugin.fault("slow", "--seconds", "20")
    wait_for(lambda: "[-]hardware failed: " in page(plugin, "/readyz"), SEEN_S, "it is not ready")
    assert page(plugin, "/livez") == "ok"
    plugin.fault("clear")
    wait_for(lambda: ready(plugin), SEEN_S, "it is ready again")
    # Calls that began before the end of the fault still hang: whoever listens hears late what happens now.
    heard = xids_heard(plugin)
    plugin.fault("xid", "13", "--gpu", "0")
    wait_for(lambda: xids_heard(plugin) > heard, SEEN_S, "it hears its GPU again")


def xids_heard(plugin: PluginProcess) -> int:
    return plugin.log.read_text().count("GPU reported an XID")


def test_a_plugin_lives_through_an_outage_of_the_api_server(cluster: Cluster, plugin: PluginProcess) -> None:
    wait_for(lambda: ready(plugin), 60, "it is ready")
    with outage(cluster):
        wait_for(lambda: "[-]api failed: " in page(plugin, "/readyz"), SEEN_S, "it is not ready")
        assert page(plugin, "/livez") == "ok"
    wait_for(lambda: ready(plugin), SEEN_S, "it is ready again")
    assert page(plugin, "/livez") == "ok"


@contextmanager
def outage(cluster: Cluster) -> Iterator[None]:
    """No API server inside the block."""
    record = ProcessTable(cluster.directory).get("kube-apiserver")
    kill([record] if record else [])
    try:
        yield
    finally:
        cluster.control_plane.start_apiserver()
        cluster.control_plane.wait()


def test_a_leader_is_ready_when_it_decides_and_a_candidate_when_it_reaches_the_api_server(
    cluster: Cluster, controller: ControllerProcess
) -> None:
    wait_for(lambda: ready(controller), 60, "the leader is ready")
    assert page(controller, "/livez") == "ok"
    second = ControllerProcess(cluster, "second", ("--health-address", "127.0.0.1:0", "--identity", "second"))
    second.start()
    wait_for(lambda: ready(second), 60, "the candidate is ready")
    second.stop()


def nothing_offered(plugin: PluginProcess) -> bool:
    return all(device.get("taints") for device in plugin.devices().values())


def test_a_gpu_in_a_slice_of_nvidias_driver_is_offered_to_nobody_new_while_that_is_there(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    wait_sound(cluster)
    wait_for(lambda: "gpu-0" in plugin.devices(), SEEN_S, "the GPU is offered")
    uuid = plugin.devices()["gpu-0"]["attributes"]["uuid"]["string"]
    pool = {"name": plugin.node.name, "generation": 1, "resourceSliceCount": 1}
    theirs = {"driver": NVIDIA_DRIVER, "nodeName": plugin.node.name, "pool": pool}
    device = {"name": "gpu-0", "attributes": {"uuid": {"string": uuid}}}
    cluster.api.post(SLICES, {"metadata": {"name": "theirs"}, "spec": {**theirs, "devices": [device]}})
    try:
        wait_for(lambda: "[-]neighbours failed: the DRA driver" in page(plugin, "/readyz"), SEEN_S, "it is named")
        wait_for(lambda: nothing_offered(plugin), SEEN_S, "nothing is offered")
        # "in its slices and in ours" until the controller has withdrawn our devices, then "not offered"
        wait_for(lambda: "1 GPU is" in told(cluster).get("neighbours", ""), SEEN_S, "status finds it")
    finally:
        cluster.api.request("DELETE", f"{SLICES}/theirs")
    wait_for(lambda: any(not d.get("taints") for d in plugin.devices().values()), SEEN_S, "it is offered again")
    wait_for(lambda: ready(plugin), 60, "it is ready again")


@pytest.mark.slow
def test_a_device_plugin_beside_ours_takes_the_gpus_and_is_named(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    wait_sound(cluster)
    capacity = f"{NODES}/{plugin.node.name}/status"
    patch = {"status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}}}
    cluster.api.patch(capacity, patch)
    try:
        wait_for(lambda: "[-]neighbours failed: a device plugin" in page(plugin, "/readyz"), SEEN_S, "it is named")
        wait_for(lambda: nothing_offered(plugin), SEEN_S, "nothing is offered")
        found = "nvidia.com/gpu: 8 in the Node's status.allocatable"
        wait_for(lambda: found in told(cluster).get("neighbours", ""), SEEN_S, "status finds it")
        wait_for(lambda: "NeighbourFound" in cluster.kubectl("get", "events", "-o", "wide"), SEEN_S, "an Event")
    finally:
        cluster.api.patch(
            capacity, {"status": {"capacity": {"nvidia.com/gpu": None}, "allocatable": {"nvidia.com/gpu": None}}}
        )
    wait_for(lambda: any(not d.get("taints") for d in plugin.devices().values()), SEEN_S, "it is offered again")


def test_status_says_that_all_is_well_and_what_there_is(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    def sound() -> dict[str, str]:
        code, checks = status(cluster)
        assert code in (0, 1)
        return {check["check"]: check["summary"] for check in checks} if code == 0 else {}

    said = wait_for(sound, SEEN_S, "all is well")
    assert "1 of 1 nodes publish" in said["node plugins"]
    assert "leader" in said["controller"]
    assert "1 node follows the controller, 0 standalone" in said["mode"]
    assert "simulated GPUs" in said["devices"]
    command = [TESSERA, "status", "--kubeconfig", str(cluster.kubeconfig)]

    def text() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        return done.stdout if done.returncode == 0 else ""

    shown = wait_for(text, SEEN_S, "all is well, for people")
    assert "No problems found." in shown
    assert "\x1b" not in shown


@contextmanager
def deleted(cluster: Cluster, *paths: str) -> Iterator[None]:
    """Without these objects inside the block."""
    kept = [cluster.api.get(path) for path in paths]
    for path in paths:
        cluster.api.request("DELETE", path)
    try:
        yield
    finally:
        for path, item in zip(paths, kept, strict=True):
            item["metadata"] = {key: item["metadata"][key] for key in ("name", "labels") if key in item["metadata"]}
            item.pop("status", None)
            cluster.api.post(path.rpartition("/")[0], item)


@contextmanager
def created(cluster: Cluster, folder: str, item: dict[str, Any]) -> Iterator[None]:
    """With this object inside the block."""
    cluster.api.post(folder, item)
    try:
        yield
    finally:
        path = f"{folder}/{item['metadata']['name']}"
        if not is_gone(cluster, path):  # Kubernetes itself ends a pod of a node that is not there, some time
            cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})


def trouble(cluster: Cluster, plugin: PluginProcess, kind: str) -> AbstractContextManager[None]:
    """One thing that is wrong, and right again after the block."""
    if kind == "no binding":
        return deleted(cluster, f"{POLICIES}/validatingadmissionpolicybindings/own-fence.gpu.tessera.dev")
    if kind == "no policy":
        return deleted(cluster, f"{POLICIES}/validatingadmissionpolicies/own-plan.gpu.tessera.dev")
    if kind == "no classes":
        names = [item["metadata"]["name"] for item in cluster.api.get(CLASSES)["items"]]
        return deleted(cluster, *(f"{CLASSES}/{name}" for name in names))
    if kind == "a GPU with an XID":
        return unwell(plugin)
    return created(cluster, *OBJECTS[kind]())


@contextmanager
def unwell(plugin: PluginProcess) -> Iterator[None]:
    plugin.fault("xid", "48", "--gpu", "0")
    try:
        yield
        # A reset ends what NVML says the GPU needs: nothing shows one that came before anybody looked.
        wait_for(plugin.faults_of_gpus, SEEN_S, "the plugin knows that its GPU needs a reset")
    finally:
        plugin.fault("reset", "--gpu", "0")


def node_without_plugin() -> tuple[str, dict[str, Any]]:
    return NODES, {"metadata": {"name": "other", "labels": {"gpu.tessera.dev/node": "true"}}}


def stuck_pod() -> tuple[str, dict[str, Any]]:
    containers = [{"name": "node", "image": "none"}]
    spec = {"serviceAccountName": "tessera-node", "nodeName": "nowhere", "containers": containers}
    return "/api/v1/namespaces/tessera/pods", {"metadata": {"name": "stuck"}, "spec": spec}


def fast_clock() -> tuple[str, dict[str, Any]]:
    ahead = micro_time(datetime.now(UTC) + timedelta(seconds=95))
    return NODE_LEASES, {"metadata": {"name": "fast"}, "spec": {"holderIdentity": "fast", "renewTime": ahead}}


def half_a_pool() -> tuple[str, dict[str, Any]]:
    pool = {"name": "ghost", "generation": 1, "resourceSliceCount": 2}
    spec = {"driver": DRIVER, "nodeName": "ghost", "pool": pool, "devices": [{"name": "gpu-0"}]}
    return SLICES, {"metadata": {"name": "ghost"}, "spec": spec}


OBJECTS = {
    "a GPU node without a plugin": node_without_plugin,
    "a pod that is not ready": stuck_pod,
    "a clock that is ahead": fast_clock,
    "an incomplete pool": half_a_pool,
}


TROUBLES = {
    "no binding": ("policies", "own-fence.gpu.tessera.dev this admission policy has no binding"),
    "no policy": ("policies", "own-plan.gpu.tessera.dev this admission policy is missing"),
    "no classes": ("classes", "none selects devices of gpu.tessera.dev"),
    "a GPU with an XID": ("health", "unhealthy=xid-48"),
    "a GPU node without a plugin": ("node plugins", "other publishes nothing"),
    "a pod that is not ready": ("node plugins", "pod stuck is not ready on nowhere"),
    "a clock that is ahead": ("clocks", "fast its clock is 9"),
    "an incomplete pool": ("slices", "ghost its pool is incomplete: 1 of 2 slices"),
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_status_finds(cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess, kind: str) -> None:
    wait_sound(cluster)
    check, message = TROUBLES[kind]
    with trouble(cluster, plugin, kind):
        codes: list[int] = []

        def is_found() -> bool:
            code, checks = status(cluster)
            codes.append(code)
            return message in findings(checks).get(check, "")

        wait_for(is_found, SEEN_S, f"{kind} is found")
        assert codes[-1] == 1
    wait_sound(cluster)


def test_a_gpu_that_is_unwell_is_still_found_when_nothing_of_it_is_published_any_more(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    wait_sound(cluster)
    with unwell(plugin):
        wait_for(lambda: not plugin.devices(), SEEN_S, "its offers are taken back")
        wait_for(lambda: "unhealthy=xid-48" in told(cluster).get("health", ""), SEEN_S, "it is found")
    wait_sound(cluster)


def test_status_finds_that_nobody_leads(cluster: Cluster, controller: ControllerProcess) -> None:
    wait_sound(cluster)
    controller.stop()
    wait_for(lambda: "no replica is the leader" in told(cluster).get("controller", ""), SEEN_S, "it is found")
    controller.start()
    wait_sound(cluster)


def test_status_without_a_cluster_ends_with_3_and_without_sense_with_2(tmp_path: Path, cluster: Cluster) -> None:
    elsewhere = tmp_path / "config"
    elsewhere.write_text(cluster.kubeconfig.read_text().replace(cluster.server, "https://127.0.0.1:1"))
    for flags, code in ((["--kubeconfig", str(elsewhere)], 3), (["--nonsense"], 2)):
        assert (
            subprocess.run([TESSERA, "status", *flags], capture_output=True, timeout=COMMAND_S, check=False).returncode
            == code
        )


def status_as(cluster: Cluster, account: str, *roles: dict[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and checks, as a ServiceAccount sees it that has these ClusterRoles, or the one of Kubernetes' own."""
    metadata = {"name": account}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "default"}
    service_account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**metadata, "namespace": "default"}}
    bindings = [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{account}-{role['metadata']['name']}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role["metadata"]["name"],
            },
            "subjects": [subject],
        }
        for role in roles
    ]
    cluster.apply([service_account, *(role for role in roles if "rules" in role), *bindings])
    kubeconfig = cluster.service_account_kubeconfig("default", account)
    code, checks = status(cluster, "--kubeconfig", str(kubeconfig))
    return code, {check["check"]: check for check in checks}


def test_the_rights_in_the_documentation_are_enough(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    role = yaml.safe_load(SOUNDNESS.read_text().partition("```yaml\n")[2].partition("```")[0])
    wait_sound(cluster)

    def whole() -> bool:
        """The binding is heard of by then, and nothing has to be dealt with."""
        code, checks = status_as(cluster, "documented", role)
        return code == 0 and all(check["state"] == "ok" for check in checks.values())

    wait_for(whole, SEEN_S, "all is read, and well")


def test_what_may_not_be_read_is_neither_well_nor_an_alarm(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    wait_sound(cluster)
    view = {"metadata": {"name": "view"}}

    def viewed() -> dict[str, dict[str, Any]]:
        code, checks = status_as(cluster, "viewer", view)
        assert code == 1
        [finding] = checks["API server"]["findings"]
        return {} if "pods" in finding["about"] else checks

    with_view = wait_for(viewed, SEEN_S, "the binding is heard of")
    assert "ResourceSlices" in with_view["API server"]["findings"][0]["about"]
    assert with_view["versions"]["state"] == "ok"
    for name in ("classes", "policies", "controller", "node plugins", "slices", "devices", "health", "mode"):
        assert (with_view[name]["state"], with_view[name]["findings"]) == ("unread", []), name
    code, without = status_as(cluster, "default")
    assert code == 1
    assert {name for name, check in without.items() if check["findings"]} == {"API server"}
    assert {check["state"] for name, check in without.items() if name != "API server"} == {"unread"}


def test_a_wrong_namespace_is_a_mistake_and_the_right_one_is_named(
    cluster: Cluster, controller: ControllerProcess
) -> None:
    wait_sound(cluster)
    for name in ("nope", "default"):
        command = [TESSERA, "status", "--kubeconfig", str(cluster.kubeconfig), "--namespace", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert done.returncode == 2, done.stdout
        assert f"--namespace {name}: Tessera is not installed there; it is in --namespace tessera" in done.stderr


def test_a_cordon_is_shown_and_is_a_finding_once_no_gpu_is_left(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    wait_sound(cluster)
    gpu = f"{plugin.node.name}/gpu-0"
    for_command = ["--kubeconfig", str(cluster.kubeconfig)]
    subprocess.run([TESSERA, "cordon", gpu, "--reason", "fan on Friday", *for_command], check=True, timeout=COMMAND_S)
    wait_for(lambda: "all GPUs are cordoned or unhealthy" in told(cluster).get("health", ""), SEEN_S, "it is found")
    _, checks = status(cluster)
    [health] = [check for check in checks if check["check"] == "health"]
    assert health["summary"] == f"0 unhealthy, 1 cordoned: {gpu} (fan on Friday)"
    subprocess.run([TESSERA, "uncordon", gpu, *for_command], check=True, timeout=COMMAND_S)
    wait_sound(cluster)


def test_a_daemon_set_that_runs_nowhere_is_found(
    cluster: Cluster, controller: ControllerProcess, plugin: PluginProcess
) -> None:
    """The chart's own, on a cluster without a label of GPUs, and nothing else that publishes."""
    [daemon_set] = [each for each in rendered() if each["kind"] == "DaemonSet"]
    wait_sound(cluster)
    plugin.stop()
    for folder in (SLICES, PATH):
        for item in cluster.api.get(folder)["items"]:
            cluster.api.request("DELETE", f"{folder}/{item['metadata']['name']}")
    with created(cluster, "/apis/apps/v1/namespaces/tessera/daemonsets", daemon_set):
        wanted = "the DaemonSet tessera-node matches no node: no node has a label of NVIDIA GPUs"
        wait_for(lambda: wanted in told(cluster).get("node plugins", ""), SEEN_S, "it is found")
        assert status(cluster)[0] == 1
    plugin.spawn()
    plugin.wait_ready()
    wait_sound(cluster)
