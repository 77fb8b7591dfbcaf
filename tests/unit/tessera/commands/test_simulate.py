"""``tessera simulate``: what becomes of pods and claims on nodes that are simulated, and on a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from driver.model.plan import PATH, OfferMode, PlanMode, PlanStatus
from driver.model.reported_gpus import GpuReport, encode_inventory
from driver.model.shared_memory import SharedMemory, SharingStrategy
from tessera.cli import main
from tessera.simulate.sources import POLICIES
from tests.support.api_server import SLICES, ObjectApi
from tests.support.chart import rendered
from tests.support.gpus import gpu_of
from tests.support.scheduling import asked, matching
from tests.unit.tessera.test_cli import KUBECONFIG, on_a_terminal

Object = dict[str, Any]
GROUP = "/apis/resource.k8s.io/v1"
OURS = "gpu.tessera.dev"


def run(objects: list[Object], *options: str) -> Result:
    text = yaml.safe_dump_all(objects)
    return CliRunner().invoke(main, ["simulate", *(["-"] if objects else []), *options], input=text)


def simulated(objects: list[Object], *options: str, code: int = 0) -> Object:
    ran = run(objects, *options, "-o", "json")
    assert ran.exit_code == code, ran.output
    found: Object = json.loads(ran.stdout)
    return found


def claim(name: str, *requests: Object, constraints: Any = ()) -> Object:
    spec = {"devices": {"requests": list(requests), "constraints": list(constraints)}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def exactly(**settings: Any) -> Object:
    return {"name": "r", "exactly": {"deviceClassName": "gpu-training", **settings}}


def template(name: str, *requests: Object) -> Object:
    return {**claim(name, *requests), "kind": "ResourceClaimTemplate", "spec": {"spec": claim(name, *requests)["spec"]}}


def pod(name: str, **spec: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def device_class(name: str, expression: str) -> Object:
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def alternatives(*classes: str) -> Object:
    return {"name": "gpu", "firstAvailable": [{"name": f"s{i}", "deviceClassName": c} for i, c in enumerate(classes)]}


def outcome(found: Object) -> dict[str, list[str] | str]:
    """The devices of each pod as node/request/device, or the code or else the message of its reason."""
    return {
        each["pod"].partition("/")[2]: [
            f"{each['node']}/{device['request']}/{device['device']}"
            for one in each["claims"]
            for device in one["devices"]
        ]
        if each["node"]
        else each["reasons"][0]["code"] or each["reasons"][0]["message"]
        for each in found["placements"]
    }


ONE = asked("gpu-inference-1g-10gb")
PARAMETERS = {"source": "FromClaim", "opaque": {"driver": "example.com", "parameters": "\ud800"}}
UNENCODABLE = {"status": {"allocation": {"devices": {"config": [PARAMETERS]}}}}
MIXED_FAMILY = claim("both", asked("gpu-inference-3g-40gb", count=2), constraints=[matching(f"{OURS}/parentUUID")])
OF_CLAIM = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}]}
CASES: dict[str, tuple[list[Object], dict[str, list[str] | str]]] = {
    "a claim that stands alone gets a pod": (
        [claim("one", ONE)],
        {"pod-of-one": ["h100-1-1/gpu/gpu-0-mig-1g10gb-6"]},
    ),
    "two partitions of one GPU": (
        [MIXED_FAMILY],
        {"pod-of-both": ["h100-1-1/gpu/gpu-0-mig-3g40gb-4", "h100-1-1/gpu/gpu-0-mig-3g40gb-0"]},
    ),
    "two pods share a claim": (
        [claim("shared", asked("gpu-training")), pod("a", **OF_CLAIM), pod("b", **OF_CLAIM)],
        {"a": ["h100-1-1/gpu/gpu-0"], "b": []},
    ),
    "what the first takes the second lacks": (
        [claim("first", asked("gpu-training")), claim("second", asked("gpu-training"))],
        {"pod-of-first": ["h100-1-1/gpu/gpu-0"], "pod-of-second": "AllHeld"},
    ),
    "the alternative that is left": (
        [claim("full", asked("gpu-inference-4g-40gb")), claim("either", alternatives("gpu-training", "gpu-inference"))],
        {
            "pod-of-full": ["h100-1-1/gpu/gpu-0-mig-4g40gb-0"],
            "pod-of-either": ["h100-1-1/gpu/s1/gpu-0-mig-1g10gb-6"],
        },
    ),
    "pods of a template": (
        [
            template("small", ONE),
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "job"},
                "spec": {
                    "parallelism": 2,
                    "template": {"spec": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "small"}]}},
                },
            },
        ],
        {"job-0": ["h100-1-1/gpu/gpu-0-mig-1g10gb-6"], "job-1": ["h100-1-1/gpu/gpu-0-mig-1g10gb-4"]},
    ),
    "a node that does not exist": (
        [claim("shared", ONE), pod("a", nodeSelector={"kubernetes.io/hostname": "other"}, **OF_CLAIM)],
        {"a": "NoNode"},
    ),
    "a claim that does not exist": (
        [pod("a", resourceClaims=[{"name": "gpu", "resourceClaimName": "lost"}])],
        {"a": "it does not exist, so the pod waits for it"},
    ),
    "an extended resource of a class": (
        [pod("a", containers=[{"resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu-training": "1"}}}])],
        {"a": ["h100-1-1/deviceclass.resource.kubernetes.io/gpu-training/gpu-0"]},
    ),
    "an extended resource of no class": (
        [pod("a", containers=[{"resources": {"limits": {"nvidia.com/gpu": "1"}}}])],
        {"a": "ResourceNotMapped"},
    ),
    "a class of the file, which selects full GPUs, too": (
        [device_class("own", f'device.attributes["{OURS}"].architecture == "Hopper"'), claim("a", asked("own"))],
        {"pod-of-a": ["h100-1-1/gpu/gpu-0-mig-1g10gb-6"]},
    ),
    "a constraint that no two devices meet": (
        [
            device_class("own", f'device.attributes["{OURS}"].type == "mig"'),
            claim("a", asked("own", count=2), constraints=[matching(f"{OURS}/uuid")]),
        ],
        {"pod-of-a": "ConstraintNotMet"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_pod_gets_devices_or_a_reason(case: str) -> None:
    objects, expected = CASES[case]
    fits = all(isinstance(each, list) for each in expected.values())
    assert outcome(simulated(objects, "--nodes", "h100-1", code=0 if fits else 1)) == expected


def part(name: str, memory: str, **more: Any) -> Object:
    """A claim for a part of a shared GPU."""
    amount = {"capacity": {"requests": {"memory": memory}}}
    return claim(name, {"name": "r", "exactly": {"deviceClassName": "gpu-shared", **amount, **more}})


SHARED = ("--nodes", "l4-4", "--shared", "all=time-slicing")


def test_claims_share_a_gpu_until_its_memory_is_used_up_and_only_then_the_next() -> None:
    claims = [
        part("a", "6Gi"),
        part("b", "15500Mi"),
        part("c", "6Gi"),
        claim("whole", exactly(count=3)),
        part("d", "24Gi"),
    ]
    found = simulated(claims, *SHARED, code=1)
    assert outcome(found) == {
        "pod-of-a": ["l4-4-1/r/gpu-0-shared"],
        "pod-of-b": ["l4-4-1/r/gpu-0-shared"],
        "pod-of-c": ["l4-4-1/r/gpu-1-shared"],
        "pod-of-whole": "AllHeld",
        "pod-of-d": "NothingMatches",
    }
    amounts = [
        device["consumedCapacity"] for each in found["placements"][:3] for device in each["claims"][0]["devices"]
    ]
    assert amounts == [{"memory": "6Gi"}, {"memory": "16Gi"}, {"memory": "6Gi"}]
    held = [(each["gpu"], device["claim"], device["gib"]) for each in found["gpus"] for device in each["held"]]
    assert held == [("gpu-0", "default/a", 6), ("gpu-0", "default/b", 16), ("gpu-1", "default/c", 6)]
    text = run(claims, *SHARED).output
    assert "gpu-0-shared (16Gi)" in text
    assert "22 of 23 GiB" in text


def test_a_shared_gpu_is_not_given_whole_and_a_whole_one_not_shared() -> None:
    claims = [claim("whole", exactly(count=3)), part("a", "23Gi"), part("b", "1Gi"), claim("late", exactly())]
    found = simulated(claims, *SHARED, code=1)
    assert {
        name: len(devices) if isinstance(devices, list) else devices for name, devices in outcome(found).items()
    } == {
        "pod-of-whole": 3,
        "pod-of-a": 1,
        "pod-of-b": "AllHeld",
        "pod-of-late": "AllHeld",
    }


def test_a_selector_that_fails_stops_the_scheduler_and_is_named() -> None:
    own = device_class("own", f'device.attributes["{OURS}"].memoryType.startsWith("HBM")')
    found = simulated([own, claim("a", asked("own"))], "--nodes", "h100-1", code=1)
    message = str(outcome(found)["pod-of-a"])
    assert message.startswith("the scheduler fails: class own: ")
    assert "no such key: memoryType" in message


def test_the_table_has_devices_and_reasons_and_then_a_picture() -> None:
    ran = run([claim("one", ONE), claim("full", asked("gpu-training"))], "--nodes", "h100-1")
    assert ran.exit_code == 1
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["default/pod-of-one", "one", "gpu", "h100-1-1", "gpu-0-mig-1g10gb-6", "-"] in lines
    assert lines[4][:3] == ["default/pod-of-full", "default/full", "AllHeld"]
    picture = "[.......|.......|.......|.......|.......|.......|1g.10gb|.......]"
    assert lines[-3] == ["h100-1-1", "gpu-0", picture, "NVIDIA", "H100", "80GB", "HBM3"]


@pytest.mark.parametrize(
    ("device_class", "options", "count"),
    [
        ("gpu-inference-1g-10gb", ["--nodes", "h100-1=3"], 21),
        ("gpu-training", ["--nodes", "h100-1=2,a30-4"], 6),
        ("gpu-inference-1g-6gb", ["--nodes", "a30-4"], 0),
        ("gpu-inference-1g-6gb", ["--nodes", "a30-4", "--mig-gpus", "all"], 16),
        ("gpu-inference-1g-6gb", ["--nodes", "a30-4", "--mig-gpus", "1"], 4),
        ("gpu-dev", ["--nodes", "h100-1", "--shares", "all=5"], 5),
        ("gpu-shared=6Gi", ["--nodes", "l4-4", "--shared", "0=mps,1=time-slicing"], 6),
        ("gpu-shared=100Mi", ["--nodes", "l4-4", "--shared", "0=mps"], 23),
        ("gpu-shared=1Gi", ["--nodes", "h100-1", "--shared", "0=mps"], 48),
        ("gpu-compute-instance", ["--nodes", "h100-1=2", "--compute-instances", "1c.3g.40gb"], 12),
        ("gpu-compute-instance", ["--nodes", "a30-4", "--mig-gpus", "0", "--compute-instances", "1c.4g.24gb"], 4),
    ],
)
def test_a_class_is_filled_until_nothing_fits(device_class: str, options: list[str], count: int) -> None:
    found = simulated([], "--fill", device_class, *options)["fill"]
    assert (found["fits"], sum(found["byNode"].values()), sum(found["byProduct"].values())) == (count, count, count)
    assert found["nextDoesNotFit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --nodes"),
        (["--nodes", "h100-1"], "give files"),
        (["--nodes", "h100-1=x", "--fill", "gpu-training"], "'h100-1=x' is not"),
        (["--nodes", "h100-11", "--fill", "gpu-training"], "h100-11"),
        (["--nodes", "h100-1", "--fill", "gpu-trainin"], "there is no such DeviceClass"),
        (["--nodes", "h100-1", "--fill", "gpu-shared=much"], "CLASS=MEMORY, such as gpu-shared=6Gi"),
        (["--nodes", "h100-1", "--fill", "gpu-training", "--without", "a/b"], "--without needs --cluster"),
        (["--nodes", "h100-1", "--fill", "gpu-training", "--uncordon", "h100-1-1"], "it is not cordoned"),
        (["--nodes", "h100-1", "--fill", "gpu-training", "--uncordon", "other/gpu-1"], "there is no such node"),
        (["--nodes", "h100-1", "--fill", "gpu-training", "--mig-gpus", "?"], "--mig-gpus"),
        (["/no/such/file", "--nodes", "h100-1"], "no such file"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(main, ["simulate", *arguments])
    assert ran.exit_code == 2, ran.output
    assert message in ran.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (claim("a", {"name": "r", "exactly": {"deviceClassName": 7}}), "Expected `str`"),
        ({"kind": "Job", "apiVersion": "batch/v1", "spec": {"parallelism": "many", "template": {"spec": OF_CLAIM}}},
         'spec.parallelism: "many": must be a whole number of at least 0'),
        ({"kind": "Job", "apiVersion": "batch/v1", "spec": {"template": {}}}, "Job: it has no pod template"),
        ("text", "this is no object"),
        (claim("a", {"name": "r", "deviceClassName": "x"}),
         'requests[0].deviceClassName: "x": no such field here; it belongs under exactly or firstAvailable'),
        ({**claim("a", ONE), "apiVersion": "resource.k8s.io/v1beta2"}, "Kubernetes serves resource.k8s.io/v1"),
        (claim("a", {"name": "r"}), "requests[0]: {...}: must have exactly or firstAvailable, with deviceClassName"),
        (claim("a", exactly(count=-1)), "requests[0].exactly.count: -1: must be at least 1"),
        (claim("a", exactly(allocationMode="Some")), 'allocationMode: "Some": accepted: ExactCount, All'),
        (template("a", exactly(capacity={"requests": {"memory": "much"}})),
         "requests[0].exactly.capacity.requests.memory: \"much\": 'much' is not a quantity"),
    ],
)  # fmt: skip
def test_a_manifest_that_can_not_be_read_is_named_with_its_document(content: Object, message: str) -> None:
    ran = run([claim("first", ONE), content], "--nodes", "h100-1")
    assert ran.exit_code == 2, ran.output
    assert "-, document 2: " in ran.stderr
    assert message in ran.stderr


def test_a_manifest_with_half_a_character_is_named_with_its_line() -> None:
    ran = run([{**claim("a", ONE), **UNENCODABLE}], "--nodes", "h100-1")
    assert ran.exit_code == 2, ran.output
    assert "-: line 20, column 26: is not valid YAML: found invalid Unicode character escape code" in ran.stderr


def test_other_objects_are_ignored_and_named() -> None:
    found = simulated([{"apiVersion": "v1", "kind": "Service"}, claim("a", ONE)], "--nodes", "h100-1")
    assert found["ignored"] == ["-, document 1: Service"]


# On a cluster


@pytest.fixture
def api() -> Iterator[ObjectApi]:
    """Two nodes with a GPU each: one is cordoned, the other held whole by a claim. A NIC of another driver."""
    with ObjectApi() as server:
        for index, (name, fault) in enumerate({"node-a": "cordoned: fan replacement", "node-b": None}.items()):
            server.store(f"/api/v1/nodes/{name}", spec={}, status={"allocatable": {"cpu": "8"}})
            inventory = encode_inventory([GpuReport(gpu_of(minor=index), 0, fault=fault)])
            status = PlanStatus(epoch="1", mode=PlanMode.PLANNED, inventory=inventory)
            server.store(f"{PATH}/{name}", spec={"epoch": "1"}, status=msgspec.to_builtins(status))
        result = {"request": "gpu", "driver": OURS, "pool": f"node-b-{OURS}", "device": "gpu-0"}
        allocation = {"devices": {"results": [result]}}
        server.store(
            f"{GROUP}/namespaces/team/resourceclaims/holder",
            spec=claim("holder", asked("gpu-training"))["spec"],
            status={"allocation": allocation},
        )
        for name, kind in (("gpu-training", "gpu"), ("gpu-inference", "mig")):
            expression = f'device.driver == "{OURS}" && device.attributes["{OURS}"].type == "{kind}"'
            server.store(f"{GROUP}/deviceclasses/{name}", spec={"selectors": [{"cel": {"expression": expression}}]})
        server.store(
            f"{GROUP}/deviceclasses/nic", spec={"selectors": [{"cel": {"expression": 'device.driver == "nic"'}}]}
        )
        pool = {"name": "nics", "generation": 1, "resourceSliceCount": 1}
        nics = {"driver": "nic", "pool": pool, "allNodes": True, "devices": [{"name": "eth0"}, {"name": "eth1"}]}
        server.store(f"{SLICES}/nics", spec=nics)
        server.store(
            f"{GROUP}/namespaces/default/resourceclaimtemplates/of-cluster",
            spec={"spec": claim("x", asked("gpu-training"))["spec"]},
        )
        yield server


@pytest.fixture
def cluster(api: ObjectApi, tmp_path: Path) -> list[str]:
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({**KUBECONFIG, "clusters": [{"name": "c", "cluster": {"server": api.server.url}}]}))
    return ["--cluster", "--kubeconfig", str(path)]


FULL = [claim("a", asked("gpu-training"))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "AllHeld"),
        (["--without", "team/holder"], ["node-b/gpu/gpu-0"]),
        (["--uncordon", "node-a"], ["node-a/gpu/gpu-0"]),
        (["--uncordon", "node-a/gpu-0"], ["node-a/gpu/gpu-0"]),
        (["--nodes", "h100-1"], ["h100-1-1/gpu/gpu-0"]),
    ],
)
def test_changes_of_the_cluster_are_imagined(cluster: list[str], options: list[str], expected: list[str] | str) -> None:
    fits = isinstance(expected, list)
    assert outcome(simulated(FULL, *cluster, *options, code=0 if fits else 1)) == {"pod-of-a": expected}


@pytest.mark.parametrize(
    ("gone", "expected"), [(["one"], "AllHeld"), (["one", "two"], ["node-b/gpu/gpu-0"])], ids=["one of two", "both"]
)
def test_a_shared_gpu_is_free_only_without_all_claims_that_have_a_part_of_it(
    api: ObjectApi, cluster: list[str], gone: list[str], expected: list[str] | str
) -> None:
    report = GpuReport(gpu_of(minor=1), 0, shared=SharedMemory(SharingStrategy.TIME_SLICING, 79 << 30))
    status = PlanStatus(epoch="1", mode=PlanMode.PLANNED, inventory=encode_inventory([report]))
    api.store(f"{PATH}/node-b", spec={"epoch": "1"}, status=msgspec.to_builtins(status))
    device = {
        "driver": OURS,
        "pool": f"node-b-{OURS}",
        "device": "gpu-0-shared",
        "consumedCapacity": {"memory": "10Gi"},
    }
    claims = api.folder(f"{GROUP}/namespaces/team/resourceclaims")
    spec = claims.pop("holder")["spec"]
    for name in ("one", "two"):
        allocation = {"devices": {"results": [{"request": "gpu", "shareID": name, **device}]}}
        api.store(f"{GROUP}/namespaces/team/resourceclaims/{name}", spec=spec, status={"allocation": allocation})
    options = [option for name in gone for option in ("--without", f"team/{name}")]
    code = 0 if isinstance(expected, list) else 1
    assert outcome(simulated(FULL, *cluster, *options, code=code)) == {"pod-of-a": expected}


@pytest.mark.parametrize(
    "status",
    [
        {"mode": PlanMode.COMPLETE},
        {"mode": PlanMode.STANDALONE},
        {"mode": PlanMode.PLANNED, "dropped": ("consumesCounters",)},
        {"mode": PlanMode.PLANNED, "dropped": ("consumesCounters",), "offer_mode": OfferMode.DISJOINT},
    ],
)
def test_nodes_that_publish_otherwise_have_room_for_as_much(
    api: ObjectApi, cluster: list[str], status: dict[str, Any]
) -> None:
    inventory = encode_inventory([GpuReport(gpu_of(minor=0), 0)])
    written = msgspec.to_builtins(PlanStatus(epoch="1", inventory=inventory, **status))
    api.store(f"{PATH}/node-a", spec={"epoch": "1"}, status=written)
    small = asked("gpu-inference", f'device.attributes["{OURS}"].profile == "1g.10gb"')
    large = asked("gpu-inference", f'device.attributes["{OURS}"].profile == "3g.40gb"')
    found = simulated([claim("a", small), claim("b", large), claim("c", asked("gpu-training"))], *cluster, code=1)
    assert [each["node"] for each in found["placements"]] == ["node-a", "node-a", None]
    held = {gpu["node"]: gpu["held"] for gpu in found["gpus"]}["node-a"]
    assert [each["claim"] for each in held] == ["default/a", "default/b"]


def test_each_list_of_the_cluster_is_read_once(api: ObjectApi, cluster: list[str]) -> None:
    api.store(f"{SLICES}/ours", spec={"driver": OURS, "pool": {"name": "x", "generation": 1, "resourceSliceCount": 1}})
    simulated(FULL, *cluster, code=1)
    assert api.repeated_lists() == []
    asked_for = {query for path in api.queries("list") if path.startswith(SLICES) for query in [path.partition("?")[2]]}
    assert asked_for == {f"fieldSelector=spec.driver{sign}{OURS}&limit=500" for sign in ("%3D", "%21%3D")}


def test_a_pod_that_is_pending_now_comes_first(api: ObjectApi, cluster: list[str]) -> None:
    api.store(f"{GROUP}/namespaces/default/resourceclaims/early", spec=FULL[0]["spec"])
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "early"}], "containers": []}
    api.store("/api/v1/namespaces/default/pods/early", spec=spec, status={"phase": "Pending"})
    found = simulated(FULL, *cluster, "--without", "team/holder", code=1)
    assert outcome(found) == {"early": ["node-b/gpu/gpu-0"], "pod-of-a": "AllHeld"}
    assert [each["pendingNow"] for each in found["placements"]] == [True, False]


def test_what_is_in_the_cluster_already_exists_once(api: ObjectApi, cluster: list[str]) -> None:
    api.store(f"{GROUP}/namespaces/default/resourceclaims/a", spec=FULL[0]["spec"])
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}], "containers": []}
    api.store("/api/v1/namespaces/default/pods/mine", spec=spec, status={"phase": "Pending"})
    found = simulated([*FULL, pod("mine", **spec)], *cluster, "--uncordon", "node-a")
    assert outcome(found) == {"mine": ["node-a/gpu/gpu-0"]}


def test_devices_of_other_drivers_are_given_as_they_are_published(api: ObjectApi, cluster: list[str]) -> None:
    both = [claim("a", asked("gpu-training"), asked("nic", name="net")), claim("b", asked("nic", count=2))]
    free = ["--without", "team/holder"]
    found = outcome(simulated(both, *cluster, *free, code=1))
    assert found["pod-of-a"] == ["node-b/gpu/gpu-0", "node-b/net/eth0"]
    assert found["pod-of-b"] == "none of 2 nodes has devices that fit"
    rule = {"deviceSelector": {"driver": "nic", "device": "eth0"}, "taint": {"key": "broken", "effect": "NoSchedule"}}
    api.store(f"{GROUP}/devicetaintrules/broken", spec=rule)
    assert outcome(simulated(both[:1], *cluster, *free))["pod-of-a"] == ["node-b/gpu/gpu-0", "node-b/net/eth1"]


def test_a_pod_that_no_scheduler_places_has_the_reason_that_tessera_why_gives(
    api: ObjectApi, cluster: list[str]
) -> None:
    named = pod("named", nodeName="node-b", resourceClaims=[{"name": "gpu", "resourceClaimName": "a"}])
    elsewhere = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "holder"}], "nodeSelector": {"zone": "x"}}
    second = {**pod("second", **elsewhere), "metadata": {"name": "second", "namespace": "team"}}
    found = simulated([*FULL[:1], named, second], *cluster, code=1)
    assert outcome(found) == {"named": "NodeNameSet", "second": "OnOtherNodesOnly"}


def test_a_pod_does_not_fit_on_nodes_whose_devices_have_a_taint(api: ObjectApi, cluster: list[str]) -> None:
    selector, taint = {"driver": OURS, "pool": f"node-b-{OURS}"}, {"key": "broken", "effect": "NoSchedule"}
    idle = ("--uncordon", "node-a", "--without", "team/holder")
    for rules, others in (({}, ["node-b"]), ({"deviceSelector": selector, "taint": taint}, [])):
        if rules:
            api.store(f"{GROUP}/devicetaintrules/broken", spec=rules)
        [placement] = simulated([claim("a", asked("gpu-inference"))], *cluster, *idle)["placements"]
        assert (placement["node"], placement["alsoFitsOn"]) == ("node-a", others)


def test_a_cordoned_node_is_uncordoned_with_its_taint(api: ObjectApi, cluster: list[str]) -> None:
    taint = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    api.store("/api/v1/nodes/node-b", spec={"unschedulable": True, "taints": [taint]})
    free = ["--without", "team/holder"]
    assert outcome(simulated(FULL, *cluster, *free, code=1)) == {"pod-of-a": "GpuCordoned"}
    assert outcome(simulated(FULL, *cluster, *free, "--uncordon", "node-b")) == {"pod-of-a": ["node-b/gpu/gpu-0"]}


def test_templates_of_the_cluster_are_found(cluster: list[str]) -> None:
    wanted = pod("a", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "of-cluster"}])
    assert outcome(simulated([wanted], *cluster, "--uncordon", "node-a")) == {"a": ["node-a/gpu/gpu-0"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--without", "team/nobody"], "there is no ResourceClaim team/nobody"),
        (["--uncordon", "node-b/gpu-0"], "it is not cordoned"),
    ],
)
def test_changes_that_are_impossible_are_refused(cluster: list[str], options: list[str], message: str) -> None:
    ran = run(FULL, *cluster, *options)
    assert ran.exit_code == 2
    assert message in ran.stderr


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ("h100-1=100000000", "h100-1=100000000"),
        ("h100-1=2,dgx-h100=4999", "dgx-h100=4999"),
        (f"h100-1={'9' * 5000}", "h100-1=999999999999"),
    ],
)
def test_more_nodes_than_can_be_simulated_are_refused_with_the_number_that_is_accepted(nodes: str, named: str) -> None:
    ran = run([claim("one", ONE)], "--nodes", nodes)
    assert ran.exit_code == 2
    assert f"--nodes {named}: all simulated nodes together are at most 5000" in ran.stderr


@pytest.mark.parametrize(
    ("kind", "field"), [("Deployment", "replicas"), ("StatefulSet", "replicas"), ("Job", "parallelism")]
)
@pytest.mark.parametrize("count", [100_000_000, 2**63 - 1])
def test_more_pods_than_can_be_simulated_are_refused_with_the_number_that_is_accepted(
    kind: str, field: str, count: int
) -> None:
    def manifest(name: str, count: int) -> Object:
        return workload(kind, name, **{field: count, "template": {"spec": OF_CLAIM}})

    ran = run([claim("shared", ONE), manifest("many", count)], "--nodes", "h100-1")
    assert ran.exit_code == 2
    asked_for = f"document 2: {kind} many: spec.template.spec: {count} pods"
    assert f"{asked_for}: `tessera simulate` takes 0 to 10000" in ran.stderr
    ran = run([claim("shared", ONE), manifest("many", 9_999), manifest("more", 2)], "--nodes", "h100-1")
    assert "2 pods: `tessera simulate` takes 0 to 1 more, since these files have 9999 pods" in ran.stderr
    ran = run([claim("shared", ONE), manifest("many", -1)], "--nodes", "h100-1")
    assert f"{kind} many: spec.{field}: -1: must be a whole number of at least 0" in ran.stderr


def workload(kind: str, name: str, /, **spec: Any) -> Object:
    return {"apiVersion": "example.com/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


POD = {"spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "small"}]}}
LINUX = {"kubernetes.io/os": "linux"}
WITH_PODS: dict[str, tuple[Object, list[str]]] = {
    "RayCluster": (
        workload(
            "RayCluster",
            "ray",
            headGroupSpec={"template": POD},
            workerGroupSpecs=[{"groupName": "gpu", "replicas": 2, "numOfHosts": 2, "template": POD}],
        ),
        ["ray-gpu-0", "ray-gpu-1", "ray-gpu-2", "ray-gpu-3", "ray-head-0"],
    ),
    "LeaderWorkerSet": (
        workload(
            "LeaderWorkerSet",
            "vllm",
            replicas=2,
            leaderWorkerTemplate={"size": 3, "leaderTemplate": POD, "workerTemplate": POD},
        ),
        [f"vllm-{role}" for role in ("leader-0", "leader-1", *(f"worker-{i}" for i in range(4)))],
    ),
    "LeaderWorkerSet whose leaders are workers": (
        workload("LeaderWorkerSet", "vllm", replicas=1, leaderWorkerTemplate={"size": 2, "workerTemplate": POD}),
        ["vllm-0", "vllm-1"],
    ),
    "JobSet": (
        workload(
            "JobSet",
            "train",
            replicatedJobs=[
                {"name": "driver", "template": {"spec": {"template": POD}}},
                {"name": "workers", "replicas": 2, "template": {"spec": {"parallelism": 2, "template": POD}}},
            ],
        ),
        ["train-driver-0", *(f"train-workers-{i}" for i in range(4))],
    ),
    "CronJob": (workload("CronJob", "nightly", jobTemplate={"spec": {"template": POD}}), ["nightly-0"]),
    "PyTorchJob": (
        workload("PyTorchJob", "fit", pytorchReplicaSpecs={"Master": {"template": POD}, "Worker": {"template": POD}}),
        ["fit-master-0", "fit-worker-0"],
    ),
    "Job that completes before it is as parallel as it may be": (
        workload("Job", "few", parallelism=5, completions=1, template=POD),
        ["few-0"],
    ),
    "DaemonSet": (
        workload(
            "DaemonSet", "each", template={"spec": {**POD["spec"], "nodeSelector": {"kubernetes.io/os": "linux"}}}
        ),
        ["each-0", "each-1"],
    ),
    "DaemonSet for no node": (
        workload("DaemonSet", "none", template={"spec": {**POD["spec"], "nodeSelector": {"no": "node"}}}),
        [],
    ),
}


@pytest.mark.parametrize("case", WITH_PODS)
def test_objects_of_any_kind_make_the_pods_of_their_templates(case: str) -> None:
    content, pods = WITH_PODS[case]
    found = simulated([template("small", ONE), content], "--nodes", "h100-1=2")
    assert sorted(each["pod"].partition("/")[2] for each in found["placements"]) == pods
    assert found["ignored"] == found["notTried"] == []


def test_each_pod_of_a_daemon_set_is_placed_on_its_node() -> None:
    content, _ = WITH_PODS["DaemonSet"]
    found = simulated([template("small", ONE), content], "--nodes", "h100-1=2")
    assert sorted(each["node"] for each in found["placements"]) == ["h100-1-1", "h100-1-2"]


def test_what_seems_to_make_pods_and_can_not_be_tried_is_named_and_no_success() -> None:
    predictor = {"predictor": {"containers": [{"image": "served"}]}}
    crd = {**workload("CustomResourceDefinition", "d", **predictor), "apiVersion": "apiextensions.k8s.io/v1"}
    objects = [claim("one", ONE), workload("InferenceService", "serve", **predictor), crd]
    found = simulated(objects, "--nodes", "h100-1", code=1)
    assert found["notTried"] == ["-, document 2: InferenceService serve"]
    assert found["ignored"] == ["-, document 3: CustomResourceDefinition"]
    ran = run(objects, "--nodes", "h100-1")
    assert (
        "NOT TRIED: -, document 2: InferenceService serve: it seems to make pods, but has no pod template" in ran.output
    )


def test_an_object_that_is_given_twice_counts_once_as_it_was_given_last() -> None:
    first, last = (workload("Deployment", "twice", replicas=count, template=POD) for count in (3, 1))
    found = simulated([template("small", ONE), first, last], "--nodes", "h100-1")
    assert [each["pod"] for each in found["placements"]] == ["default/twice-0"]
    assert found["notes"] == ["-, document 2: Deployment twice is given again in -, document 3, which counts"]


def test_the_last_line_sums_up_what_is_placed_and_what_is_left() -> None:
    objects = [claim("one", asked("gpu-training")), claim("many", asked("gpu-training", count=9))]
    line = "1 pod placed, 1 not; 1 of 2 GPUs in use; 1 of 2 nodes with GPUs have nothing on them"
    assert run(objects, "--nodes", "h100-1=2").output.endswith(f"\n\n{line}\n")
    assert run(objects, "--nodes", "h100-1=2", "--summary").output == f"{line}\n"
    found = simulated(objects, "--nodes", "h100-1=2", code=1)
    assert found["summary"] == {"placed": 1, "refused": 1, "gpusUsed": 1, "gpus": 2, "idleNodes": 1, "nodes": 2}


def test_a_pod_whose_template_is_missing_waits_and_the_others_are_placed() -> None:
    lost = pod("a", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "lost"}])
    found = simulated([lost, claim("one", ONE)], "--nodes", "h100-1", code=1)
    assert {placement["pod"]: placement["node"] for placement in found["placements"]} == {
        "default/a": None,
        "default/pod-of-one": "h100-1-1",
    }
    assert found["placements"][0]["reasons"][0]["claim"] == "default/a-gpu"
    assert found["notes"] == ["-, document 1: Pod a: there is no ResourceClaimTemplate default/lost"]


def test_the_pods_of_a_suspended_job_are_placed_and_it_is_said() -> None:
    job = workload("Job", "later", suspend=True, template=POD)
    found = simulated([template("small", ONE), job], "--nodes", "h100-1")
    assert [each["pod"] for each in found["placements"]] == ["default/later-0"]
    assert found["notes"] == ["-, document 2: Job later is suspended: its pods are placed as if it were not"]


def test_a_quantity_may_be_written_as_a_number() -> None:
    resources = {"requests": {"cpu": 0.5, "memory": "1.5Gi"}, "limits": {"cpu": 1.5}}
    found = simulated(
        [claim("shared", ONE), pod("a", containers=[{"resources": resources}], **OF_CLAIM)], "--nodes", "h100-1"
    )
    assert found["placements"][0]["node"] == "h100-1-1"


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "nodes", "bars"), [(1, 1, []), (20, 1, ["pods placed"]), (1, 20, ["nodes filled"])]
)
def test_long_work_shows_its_progress_on_a_terminal_only(
    tmp_path: Path, replicas: int, nodes: int, bars: list[str]
) -> None:
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"replicas": replicas, "template": {"spec": spec}},
    }
    objects = [template("one", exactly()), {"apiVersion": "apps/v1", **deployment}]
    options = ("--nodes", f"h100-1={nodes}", "--fill", "gpu-training", "--summary")
    (tmp_path / "d.yaml").write_text(yaml.safe_dump_all(objects))
    shown = on_a_terminal({}, "simulate", str(tmp_path / "d.yaml"), *options)
    assert [bar for bar in ("pods placed", "nodes filled") if bar in shown] == bars
    assert "GPUs in use" in shown
    assert run(objects, *options).stderr == ""


HELD = claim("held", asked("gpu-inference-4g-40gb"))
OTHERS: dict[str, list[Object]] = {
    "the largest partition, which nobody offers": [claim("last", asked("gpu-inference-7g-80gb"))],
    "next to a held partition": [HELD, claim("last", asked("gpu-inference-4g-40gb"))],
    "more than most nodes have": [claim("last", asked("gpu-training", count=2))],
    "partitions of one GPU": [HELD, {**MIXED_FAMILY, "metadata": {"name": "last"}}],
    "an alternative": [HELD, claim("last", alternatives("gpu-inference-4g-40gb", "gpu-dev", "gpu-inference-3g-40gb"))],
}


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS)
def test_a_pod_also_fits_on_the_nodes_that_would_take_it_if_it_had_to_run_there(case: str) -> None:
    def placed(**spec: Any) -> Object:
        last = pod("last", resourceClaims=[{"name": "gpu", "resourceClaimName": "last"}], **spec)
        ran = json.loads(run([*OTHERS[case], last], "--nodes", "h100-1=3,l40s-8", "-o", "json").stdout)
        [placement] = (each for each in ran["placements"] if each["pod"] == "default/last")
        return dict(placement)

    anywhere = placed()
    nodes = ("h100-1-1", "h100-1-2", "h100-1-3", "l40s-8-1")
    fitting = [name for name in nodes if placed(nodeSelector={"kubernetes.io/hostname": name})["node"]]
    assert sorted([anywhere["node"], *anywhere["alsoFitsOn"]]) == fitting


LIMIT_OF_PARTITIONS = "ask for 9 partitions together; 8 are allowed (admission.maxPartitions)"
NINE = asked("gpu-inference-1g-10gb", count=9)
JOB = {"template": {"spec": {"containers": [], "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "nine"}]}}}
OF_NINE = {"resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu-inference-1g-10gb": 9}}}


@pytest.mark.parametrize(
    ("objects", "about"),
    [
        ([claim("a", NINE)], "default/a"),
        ([template("nine", NINE), {"kind": "Job", "metadata": {"name": "a"}, "spec": JOB}], "default/a-0-g"),
        ([pod("a", containers=[OF_NINE])], "default/a"),
    ],
)
def test_what_an_admission_policy_would_refuse_is_not_placed_and_has_its_message(
    objects: list[Object], about: str
) -> None:
    simulation = simulated([*objects, claim("b", ONE)], "--nodes", "dgx-h100", code=1)
    refused, placed = sorted(simulation["placements"], key=lambda placement: placement["node"] is not None)
    [reason] = refused["reasons"]
    assert reason["claim"] == about
    assert LIMIT_OF_PARTITIONS in reason["message"]
    assert placed["node"] == "dgx-h100-1"


def test_the_limits_of_the_policies_are_those_of_the_cluster(api: ObjectApi, cluster: list[str]) -> None:
    def said() -> str:
        three = asked("gpu-inference", f'device.attributes["{OURS}"].profile == "1g.10gb"', count=3)
        return str(simulated([claim("a", three)], *cluster, "--without", "team/holder", code=1)["placements"])

    for policy in rendered({"admission": {"maxPartitions": 2}}):
        if policy["kind"] == "ValidatingAdmissionPolicy":
            api.store(f"{POLICIES}/{policy['metadata']['name']}", spec=policy["spec"])
    assert "ask for 3 partitions together; 2 are allowed" in said()


def gang(name: str, size: int, minimum: int, claims: Sequence[Object] = ()) -> list[Object]:
    """A PodGroup and its pods, each with a claim for one GPU; ``claims`` are those that they share."""
    policy = {"gang": {"minCount": minimum}}
    spec = {"schedulingPolicy": policy, "resourceClaims": list(claims)}
    entry = {"name": "gpu", "resourceClaimTemplateName": "one"}
    group = {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}
    member = {"schedulingGroup": {"podGroupName": name}, "resourceClaims": [entry]}
    return [template("one", exactly()), *(pod(f"{name}-{number}", **member) for number in range(size)), group]


def test_the_pods_of_a_gang_are_placed_together_or_not_at_all() -> None:
    alone = pod("alone", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one"}])
    objects = [*gang("train", 3, minimum=3), alone]
    refused = simulated(objects, "--nodes", "h100-1=2", code=1)
    nodes = {placement["pod"]: placement["node"] for placement in refused["placements"]}
    assert [name for name, node in nodes.items() if node] == ["default/alone"]
    for placement in refused["placements"][:3]:
        reason = placement["reasons"][0]
        assert reason["code"] == "PodGroupNeedsMore"
        assert reason["message"] == "PodGroup train needs 3 pods at once; only 2 can be placed"
    placed = simulated(objects, "--nodes", "h100-1=4")
    assert all(placement["node"] for placement in placed["placements"])


def test_a_gang_may_have_more_pods_than_it_needs_at_once() -> None:
    simulation = simulated(gang("train", 3, minimum=2), "--nodes", "h100-1=2", code=1)
    assert [bool(placement["node"]) for placement in simulation["placements"]] == [True, True, False]


def test_the_pods_of_a_group_share_the_claims_of_the_group() -> None:
    shared = {"name": "gpu", "resourceClaimTemplateName": "one"}
    simulation = simulated(gang("train", 3, minimum=3, claims=[shared]), "--nodes", "h100-1=2")
    assert {placement["node"] for placement in simulation["placements"]} == {"h100-1-1"}
    assert simulation["summary"]["gpusUsed"] == 1
