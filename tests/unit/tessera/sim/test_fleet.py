"""``tessera sim fleet``: what it refuses, and the facts of its GPUs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from driver.errors import ApiError, EnvironmentFault, UsageError
from driver.kube.client import KubeClient
from driver.kube.types import Claim, Key, Pod
from driver.model.plan import FENCE, PlanMode
from driver.slices.dropped_fields import KeptFields
from driver.slices.slice_names import Pool
from tessera.cli import main
from tessera.sim.fleet.fleet import SimulatedFleet, discover, gpus_of
from tessera.sim.fleet.kubelets import ClaimDevices, allocated
from tessera.sim.fleet.simulated_plugin import FleetSettings, OwnSlices
from tests.support.api_server import SLICES, ObjectApi
from tests.support.running import eventually
from tests.unit.tessera.test_cli import KUBECONFIG


def fleet(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("sim", "fleet", *arguments))


def test_help_has_examples() -> None:
    result = fleet("--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "many"], "--nodes"),
        (["--name", "Big_Fleet"], "--name Big_Fleet"),
        (["--driver-name", "no spaces"], "--driver-name no spaces"),
        (["--gpus", "dgx-9000"], "dgx-9000"),
        (["--mode", "sometimes"], "--mode"),
    ],
)
def test_nonsense_is_refused_before_anything_is_asked_of_a_cluster(arguments: list[str], told: str) -> None:
    result = fleet(*arguments, "--kubeconfig", "/nowhere")
    assert result.exit_code == UsageError.exit_code
    assert told in result.output


def test_a_kubeconfig_that_is_not_there_is_the_environments_fault() -> None:
    result = fleet("--kubeconfig", "/nowhere")
    assert result.exit_code == EnvironmentFault.exit_code
    assert "/nowhere" in result.output


@pytest.mark.long
def test_a_cluster_that_does_not_answer_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(yaml.safe_dump(KUBECONFIG))
    result = fleet("--nodes", "1", "--kubeconfig", str(tmp_path / "config"))
    assert result.exit_code == EnvironmentFault.exit_code
    assert "127.0.0.1:1" in result.output


def test_nodes_differ_in_the_uuids_of_their_gpus_alone_and_keep_them() -> None:
    like = discover("h100-1")
    one, again, other = (gpus_of(name, like) for name in ("sim-0000", "sim-0000", "sim-0001"))
    assert one == again
    assert {gpu.uuid for gpu in one}.isdisjoint(gpu.uuid for gpu in other)
    assert all(gpu.simulated for gpu in one)
    assert one[0].profiles is like[0].profiles


def test_slices_are_known_by_what_was_written(tmp_path: Path) -> None:
    slices = OwnSlices(KubeClient.__new__(KubeClient), Pool("sim-0000", "gpu.tessera.dev"), KeptFields())
    stored = {"metadata": {"name": "s", "uid": "u", "resourceVersion": "7"}, "spec": {"pool": {"name": "p"}}}
    slices.observe(stored)
    assert slices.snapshot()[Key("", "s")]["metadata"]["resourceVersion"] == "7"
    slices.forget(Key("", "s"))
    assert slices.snapshot() == {}


def test_slices_are_read_again_after_a_write_that_failed() -> None:
    with ObjectApi() as api:
        api.store(f"{SLICES}/s", spec={"driver": "gpu.tessera.dev", "nodeName": "sim-0000", "pool": {"name": "p"}})
        slices = OwnSlices(api.server.client(), Pool("sim-0000", "gpu.tessera.dev"), KeptFields())
        with pytest.raises(ApiError), slices.step():
            raise ApiError("409: it exists")
    assert slices.snapshot().keys() == {Key("", "s")}


def test_standalone_nodes_release_their_fence_and_no_other() -> None:
    fences = "/api/v1/namespaces/tessera/configmaps"
    other = {"worker-gpu.tessera.dev": "gpu-0"}
    settings = FleetSettings(
        "sim", 2, discover("h100-1"), "gpu.tessera.dev", "tessera", PlanMode.STANDALONE, leases=False
    )
    owners = {name: {"kind": "Node", "name": name, "uid": name} for name in ("sim-0000", "sim-0001")}
    stop = threading.Event()
    with ObjectApi() as api:
        api.store(f"{fences}/{FENCE}", data=other | {f"{name}-gpu.tessera.dev": "gpu-0" for name in owners})
        SimulatedFleet(api.server.client(), settings, owners).start(stop)
        try:
            eventually(lambda: api.folder(fences)[FENCE]["data"] == other, "both have released their fence")
        finally:
            stop.set()


def test_a_pods_claims_are_those_that_have_a_name_by_now() -> None:
    from msgspec import convert

    raw = {
        "metadata": {"name": "p", "namespace": "n", "resourceVersion": "1"},
        "spec": {"resourceClaims": [{"name": "a", "resourceClaimName": "given"}, {"name": "b"}, {"name": "c"}]},
        "status": {"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "made"}]},
    }
    assert convert(raw, Pod).claims == (Key("n", "given"), Key("n", "made"))


def test_of_an_allocation_only_this_drivers_devices_are_prepared() -> None:
    from msgspec import convert

    results = [
        {"request": "r", "driver": driver, "pool": "p", "device": device}
        for driver, device in (("gpu.tessera.dev", "gpu-0"), ("nic.example.com", "nic-0"), ("gpu.tessera.dev", "gpu-1"))
    ]
    raw = {
        "metadata": {"name": "c", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "of-pod"}],
        },
    }
    claim = convert(raw, Claim)
    assert allocated(claim, "gpu.tessera.dev") == ClaimDevices("u", {"p": ("gpu-0", "gpu-1")}, frozenset({"of-pod"}))
    assert allocated(claim, "other.example.com") is None
