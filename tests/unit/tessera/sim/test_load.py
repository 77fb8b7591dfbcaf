"""``tessera sim load``: loads of claims, GPUs and MIG devices, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from driver.errors import UsageError
from driver.simulator.description import load_description
from driver.simulator.node import SimulatedNode
from driver.simulator.state.gpu_load import LOAD_PID, Load, SimulatedActivity
from driver.simulator.state.latency import ZERO_LATENCY
from tessera.sim.node_commands import sim
from tests.support.memory_limits import machine_cgroup, node_with_limits, set_limit
from tests.support.nvml_client import G1, cut, enable_mig, one_h100, start_process

GIB = 2**30


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return one_h100(tmp_path / "node")


def run(node: SimulatedNode, *arguments: str) -> Result:
    command = ["load", *arguments, "--host-root", str(node.root)]
    return CliRunner().invoke(sim, command, catch_exceptions=False)


def loads(node: SimulatedNode) -> tuple[Load, ...]:
    return node.gpu_state(0).loads.running


def hold(node: SimulatedNode, state: Path, **claims: list[str | None]) -> None:
    """Write a node plugin's records of claims in namespace team, with the UUIDs of their MIG devices; None: the GPU."""
    (state / "claims").mkdir(parents=True)
    (node.root / "sim/plugin.json").write_text(json.dumps({"stateDir": str(state)}))
    for name, uuids in claims.items():
        common: dict[str, Any] = {
            "requests": ["gpu"],
            "pool": "n1",
            "number": 0,
            "gpuUUID": node.description.gpu_uuid(0),
        }
        devices = [
            common | {"device": "gpu-0-mig-1g10gb-0", "kind": "mig", "profile": "1g.10gb", "uuid": uuid}
            if uuid
            else common | {"device": "gpu-0-share-0", "kind": "share", "shares": 2}
            for uuid in uuids
        ]
        claim = {"version": 1, "namespace": "team", "name": name, "uid": name, "phase": "prepared", "devices": devices}
        (state / f"claims/{name}.json").write_text(json.dumps(claim))


def test_a_gpu_is_loaded_shown_and_cleared(tmp_path: Path) -> None:
    description = load_description("hgx-h100")
    node = SimulatedNode.open(description.replaced(gpus=description.gpus[:1]), tmp_path, latency=ZERO_LATENCY)
    options = "--sm 0.8 --occupancy 0.5 --tensor 0.4 --dram 0.6 --memory 7Gi --nvlink 20Gi --pcie 1G"
    uuid = node.description.gpu_uuid(0)
    assert run(node, "0", *options.split()).output == f"{uuid} loaded by process {LOAD_PID}\n"
    (load,) = loads(node)
    assert load.phases[0].activity == SimulatedActivity(1, 0.8, 0.5, 0.4, 0.6, 20 * GIB, 10**9)
    smi = CliRunner().invoke(sim, ["smi", "--host-root", str(node.root), "-o", "json"])
    (shown,) = json.loads(smi.output)
    assert (shown["memoryUsed"], shown["processes"]) == (7168, [LOAD_PID])
    run(node, uuid, "--clear")
    assert loads(node) == ()


def test_every_device_of_a_claim_gets_its_load(node: SimulatedNode, tmp_path: Path) -> None:
    gpu = enable_mig(node.nvml)
    one, other, alone = (cut(node.nvml, gpu, G1, start, 1).uuid for start in (0, 1, 2))
    hold(node, tmp_path / "state", train=[one, other], test=[alone])
    run(node, "team/train", "--sm", "0.5", "--pattern", "duty:0.3@1m")
    run(node, alone, "--sm", "0.1", "--pid", "7")
    assert [load.device for load in loads(node)] == [one, other, alone]
    assert [phase.seconds for phase in loads(node)[0].phases] == pytest.approx([18, 42])
    run(node, "team/train", "--clear")
    assert [(load.device, load.pid) for load in loads(node)] == [(alone, 7)]


def test_claims_that_share_a_gpu_have_processes_of_their_own(node: SimulatedNode, tmp_path: Path) -> None:
    hold(node, tmp_path / "state", one=[None], other=[None, None])
    run(node, "team/one", "--memory", "2Gi")
    run(node, "team/other", "--memory", "3Gi")
    run(node, "team/other", "--memory", "4Gi")
    assert sorted(load.phases[0].memory // GIB for load in loads(node)) == [2, 4]
    run(node, "0", "--sm", "0.2", "--pid", "5")
    with pytest.raises(UsageError, match=r"sm: 0\.9 is not accepted; 0 to 0\.8: other loads of the device take 0\.2"):
        run(node, "0", "--sm", "0.9", "--pid", "6")


def test_rows_of_a_file_follow_one_another(node: SimulatedNode, tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    file.write_text("0,0.5,0.25,0.1,1Gi\n30,0,0,0,2Gi\n40,1,0,0,512Mi\n")
    run(node, "0", "--pattern", str(file), "--occupancy", "0.3")
    phases = loads(node)[0].phases
    assert [(phase.seconds, phase.memory / GIB) for phase in phases] == [(30, 1), (10, 2), (10, 0.5)]
    assert phases[0].activity == SimulatedActivity(1, 0.5, 0.3, 0.25, 0.1)
    file.write_text("second,pcie\n0,1Mi\n")
    run(node, "0", "--pattern", str(file))
    assert [phase.activity.pcie for phase in loads(node)[0].phases] == [2**20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("0", "0: give either --clear or a load, such as --sm 0.8"),
        ("0 --clear --sm 1", "0: give either --clear or a load"),
        ("1 --sm 1", "TARGET: GPU 1 is not on this node; accepted: 0 to 0"),
        (
            "trian --sm 1",
            r"TARGET: 'trian' is unknown; did you mean train\?; accepted: the index of a GPU, team/later, ",
        ),
        ("team/later --sm 1", "TARGET: claim team/later is not prepared yet"),
        ("0 --sm 1.5", "--sm: '1.5' is not accepted; a number from 0 to 1"),
        ("0 --dram nan", "--dram: 'nan' is not accepted; a number from 0 to 1"),
        ("0 --tensor -1", "--tensor: '-1' is not accepted"),
        ("0 --memory 7GB", "--memory: '7GB' is not accepted; a number of bytes, such as 7Gi"),
        ("0 --memory 80Gi", "memory: 81920Mi is not accepted; up to 81559Mi"),
        ("0 --pattern duty:1.5@60s --sm 1", "--pattern: 'duty:1.5@60s' is not accepted; duty:FRACTION@PERIOD"),
        ("0 --pattern duty:0.5@1 --sm 1", "--pattern: 'duty:0.5@1' is not accepted"),
        ("0 --pattern nowhere.csv", "--pattern: nowhere.csv: .*; accepted: duty:FRACTION@PERIOD or a CSV file"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    node: SimulatedNode, tmp_path: Path, arguments: str, message: str
) -> None:
    hold(node, tmp_path / "state", train=[None], later=[])
    with pytest.raises(UsageError, match=message):
        run(node, *arguments.split())
    assert loads(node) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 rows are not accepted; 1 to 1000"),
        ("0,1,0,0,0\n" * 1001, "1001 rows are not accepted"),
        ("second,smm\n0,1", "column 'smm' is unknown; accepted: second, sm, tensor, dram, memory, occupancy"),
        ("0,1", "row 1: 2 values are not accepted; 5: second,sm,tensor,dram,memory"),
        ("5,1,0,0,0", "row 1: second: '5' is not accepted; 0 in the first row, then ascending"),
        ("0,1,0,0,0\n0,1,0,0,0", "row 2: second: '0' is not accepted"),
        ("0,2,0,0,0", "row 1: sm: '2' is not accepted; a number from 0 to 1"),
    ],
)
def test_a_wrong_file_is_refused_by_row_and_column(
    node: SimulatedNode, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "load.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        run(node, "0", "--pattern", str(tmp_path / "load.csv"))


def test_partitions_take_the_loads_of_a_gpu_in_mig_mode(node: SimulatedNode) -> None:
    run(node, "0", "--sm", "1")
    gpu = enable_mig(node.nvml)
    assert loads(node) == ()
    part = cut(node.nvml, gpu, G1, 0, 1).uuid
    with pytest.raises(UsageError, match=f"the GPU is in MIG mode; accepted: one of its partitions: {part}"):
        run(node, "0", "--sm", "1")
    start_process(node, part, pid=9, memory=GIB)
    with pytest.raises(UsageError, match="memory: 9216Mi is not accepted; up to 8960Mi"):
        run(node, part, "--memory", "9Gi")
    with pytest.raises(UsageError, match="nvlink: the GPU has no NVLink; accepted: 0"):
        run(node, part, "--nvlink", "1Gi")


def test_a_process_obeys_the_limit_of_its_cgroup_until_the_driver_is_reloaded(tmp_path: Path) -> None:
    node = node_with_limits(tmp_path / "limited")
    with machine_cgroup(node) as cgroup, subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            set_limit(node, cgroup, 6 * GIB)
            options = ["0", "--memory", "7Gi"]
            for cgroup_of in (["--pid", str(process.pid)], ["--cgroup", str(cgroup)]):
                with pytest.raises(UsageError, match="7168Mi ends in CUDA_ERROR_OUT_OF_MEMORY"):
                    run(node, *options, *cgroup_of)
            assert run(node, *options).exit_code == 0
            CliRunner().invoke(sim, ["fault", "--host-root", str(node.root), "reload"], catch_exceptions=False)
            assert run(node, *options, "--pid", str(process.pid)).exit_code == 0
        finally:
            process.kill()
            process.wait()
