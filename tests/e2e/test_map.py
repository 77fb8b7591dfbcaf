"""``tessera map`` on a real control plane: what it shows is what claims, slices and nodes say."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import install
from tests.support.control_plane import control_plane
from tests.support.controller import ControllerProcess, plugins
from tests.support.map_cluster import DOCS
from tests.support.plugin import COMMAND_S, DRIVER, SLICES, TESSERA, PluginFlags
from tests.support.scheduling import Scheduling, asked, forget
from tests.support.workloads import CLAIMS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SOON_S = 60.0
ACCOUNT = "viewer"
WANTED = ("gpu-training", "gpu-inference-1g-10gb", "gpu-inference-3g-40gb", "gpu-dev")
Where = tuple[str, str]
"""Pool and device."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with four GPUs each, one of them for shares only, and an account with the rights of docs/map.md."""
    with control_plane("map") as running:
        install(running)
        running.apply(account())
        flags = PluginFlags(gpus="sim:h100-pcie-4", shares="3=4", shares_only="3")
        controller = ControllerProcess(running)
        with plugins(running, ["n1", "n2"], flags):
            controller.start()
            modes = ["Planned", "Planned"]
            wait_for(lambda: [plan.get("status", {}).get("mode") for plan in controller.plans().values()] == modes,
                     SOON_S, "both nodes follow the controller")  # fmt: skip
            yield running
            controller.stop()


@pytest.fixture
def claims(cluster: Cluster) -> Iterator[list[Scheduling]]:
    """One allocated claim of each class."""
    found = [Scheduling(cluster, f"claim-{number}") for number in range(len(WANTED))]
    for each, device_class in zip(found, WANTED, strict=True):
        each.ask(asked(device_class))
    for each in found:
        each.given()
    yield found
    forget(*(each for each in found if each.paths))


def account() -> list[dict[str, Any]]:
    role = yaml.safe_load((DOCS / "map.md").read_text().partition("```yaml\n")[2].partition("```")[0])
    metadata, group = {"name": ACCOUNT}, "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**metadata, "namespace": "default"}},
        role,
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": "default"}],
        },
    ]


def command(cluster: Cluster, *flags: str) -> list[str]:
    kubeconfig = cluster.service_account_kubeconfig("default", ACCOUNT)
    return [TESSERA, "map", "--kubeconfig", str(kubeconfig), *flags]


def read(cluster: Cluster, *flags: str) -> list[dict[str, Any]]:
    line = command(cluster, "-o", "json", *flags)
    done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def spans(nodes: list[dict[str, Any]], state: str) -> list[tuple[str, dict[str, Any]]]:
    """Pool and span."""
    return [
        (f"{node['name']}-{DRIVER}", span)
        for node in nodes
        for gpu in node["gpus"]
        for span in gpu["spans"]
        if span["state"] == state
    ]


def held_by_map(nodes: list[dict[str, Any]]) -> dict[Where, tuple[str, str]]:
    """Claim and class by device."""
    return {
        (pool, span["devices"][0]): (span["holder"]["claim"], span["holder"]["deviceClass"])
        for pool, span in spans(nodes, "held")
    }


def held_by_claims(cluster: Cluster) -> dict[Where, tuple[str, str]]:
    found = {}
    for claim in cluster.api.get(CLAIMS)["items"]:
        [request] = claim["spec"]["devices"]["requests"]
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
            place = (result["pool"], result["device"])
            found[place] = (claim["metadata"]["name"], request["exactly"]["deviceClassName"])
    return found


def published(cluster: Cluster) -> set[Where]:
    """The devices that new claims can be allocated: those without taints that keep them."""
    return {
        (item["spec"]["pool"]["name"], device["name"])
        for item in cluster.api.get(SLICES)["items"]
        for device in item["spec"].get("devices") or ()
        if not device.get("taints")
    }


def test_holders_and_offers_are_those_of_claims_and_slices(cluster: Cluster, claims: list[Scheduling]) -> None:
    expected = held_by_claims(cluster)
    assert len(expected) == len(WANTED)
    assert held_by_map(read(cluster)) == expected

    def offers_agree() -> bool:
        """Offers follow the claims a moment later: the map lies between two equal states of the slices."""
        before, nodes, after = published(cluster), read(cluster), published(cluster)
        offered = {(pool, device) for pool, span in spans(nodes, "offered") for device in span["devices"]}
        return before == after and bool(offered) and offered == before - expected.keys()

    wait_for(offers_agree, SOON_S, "the map has the offers of the slices")


def test_every_gpu_is_there_and_its_states_add_up(cluster: Cluster, claims: list[Scheduling]) -> None:
    nodes = read(cluster)
    assert [(node["name"], len(node["gpus"])) for node in nodes] == [("n1", 4), ("n2", 4)]
    for gpu in (gpu for node in nodes for gpu in node["gpus"]):
        assert sum(gpu["slices"].values()) == gpu["memorySlices"] == sum(span["slices"] for span in gpu["spans"])
        assert gpu["isDivided"] == (gpu["number"] == 3)
    [product] = read(cluster, "--summary")
    assert (product["gpus"], product["nodes"], product["slices"]["held"]) == (8, 2, 8 + 1 + 4 + 2)
    assert [gpu["number"] for node in read(cluster, "--class", "gpu-dev") for gpu in node["gpus"]] == [3]


def test_a_cordoned_gpu_is_unhealthy_with_its_reason(cluster: Cluster) -> None:
    admin = ["--kubeconfig", str(cluster.kubeconfig)]
    subprocess.run([TESSERA, "cordon", "n1/gpu-1", "--reason", "fan", *admin], check=True, timeout=COMMAND_S)
    found = wait_for(
        lambda: [gpu for node in read(cluster, "--unhealthy") for gpu in node["gpus"]],
        SOON_S,
        "the node has reported it",
    )
    subprocess.run([TESSERA, "uncordon", "n1/gpu-1", *admin], check=True, timeout=COMMAND_S)
    assert [(gpu["number"], gpu["cordon"], gpu["fault"], gpu["slices"]) for gpu in found] == [
        (1, "fan", "cordoned: fan", {"unavailable": 8})
    ]
    wait_for(lambda: read(cluster, "--unhealthy") == [], SOON_S, "nothing is unhealthy")


def test_watch_shows_a_new_claim_and_its_end(cluster: Cluster, tmp_path: Path) -> None:
    log, errors = tmp_path / "out", tmp_path / "err"
    line = command(cluster, "-o", "json", "--watch")

    def shown() -> dict[Where, tuple[str, str]] | None:
        complete = log.read_text().rpartition("\n")[0].splitlines()
        return held_by_map(json.loads(complete[-1])) if complete else None

    with (
        log.open("w") as output,
        errors.open("w") as told,
        subprocess.Popen(line, stdout=output, stderr=told) as process,
    ):
        try:
            wait_for(lambda: shown() == {}, SOON_S, "the empty map")
            job = Scheduling(cluster, "watched")
            job.ask(asked("gpu-inference-3g-40gb"))
            [given] = job.given()
            expected = {(given.pool, given.device): ("watched", "gpu-inference-3g-40gb")}
            wait_for(lambda: shown() == expected, SOON_S, "the claim is drawn")
            job.forget()
            wait_for(lambda: shown() == {}, SOON_S, "it is gone again")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SOON_S)
    assert (process.returncode, errors.read_text()) == (0, "")
