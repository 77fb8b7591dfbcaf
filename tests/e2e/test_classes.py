"""The shipped classes on the real API server and scheduler: what each allocates, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from driver.errors import ApiError
from driver.kube.get_and_list import CLAIM
from driver.model.gpu import Gpu, MigMode
from driver.model.gpu_settings import EVERY_GPU, UNSHARED, GpuSelection, GpuSharing, TimeSlice
from driver.simulator.description import load_description
from kubelet_plugin.claims.allocation import resolve
from kubelet_plugin.inventory.inventory import ClaimReference
from tests.harness.cluster import Cluster
from tests.harness.manifests import busybox_pod
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install, rendered
from tests.support.control_plane import control_plane
from tests.support.nic_driver import nic_class, nic_slice
from tests.support.plugin import SLICES, is_of_monitors
from tests.support.published import DRIVER, discover
from tests.support.scheduling import SCHEDULED_S, Offering, Scheduling, asked, forget
from tests.support.workloads import CLAIMS, PODS, PROJECT, TEMPLATES, is_gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/one-share-of-a-gpu.gpu.tessera.dev"

TRAINING, DEV, ANY_PARTITION, MONITOR = "gpu-training", "gpu-dev", "gpu-inference", "gpu-monitor"
NVLINK, SHARED, COMPUTE_INSTANCE = "gpu-training-nvlink", "gpu-shared", "gpu-compute-instance"
SMALL, WHOLE_PARTITION = "gpu-inference-1g-10gb", "gpu-inference-7g-80gb"

CARDS = {
    **dict.fromkeys(("a30-4", "dgx-a100", "dgx-a100-40gb", "dgx-b200", "dgx-h100", "dgx-h200")),
    **dict.fromkeys(("gb200-nvl72-tray", "gb300-nvl72-tray", "h100-nvl-bridged", "hgx-b300", "hgx-h20")),
    **dict.fromkeys(("rtx-pro-6000-8",)),
    **{f"gh200-144gb-{number}": "gh200-144gb" for number in range(5)},
}
"""Nodes by name, and what they simulate (None: their name): together they have a place for each class."""

TEN, FOUR = GpuSharing(lambda _: 10), GpuSharing(lambda _: 4)
DISTINCT = f"{DRIVER}/parentUUID"
DIFFERENT_GPUS = {"distinctAttribute": DISTINCT}


SHIPPED = {each["metadata"]["name"]: each for each in rendered() if each["kind"] == "DeviceClass"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With Tessera's chart, and the class of a NIC driver."""
    with control_plane("classes") as running:
        install(running, ANY_SIZE)
        label = {"labels": {"resource.kubernetes.io/admin-access": "true"}}
        running.api.patch("/api/v1/namespaces/default", {"metadata": label})
        running.apply(nic_class())
        # The policy is in force some milliseconds after it was created.
        two = "two shares of one GPU"
        wait_for(lambda: two in refusal(running, asked(DEV, count=2)), SCHEDULED_S, "the policy in force")
        yield running


def ready_for_mig(gpu: Gpu) -> Gpu:
    """Every second GPU in MIG mode: where that takes a reset, it decides what is offered."""
    in_mig_mode = gpu.mig_capable and gpu.index % 2
    return replace(gpu, mig_mode=MigMode.ENABLED) if in_mig_mode else gpu


def node(cluster: Cluster, name: str, description: str, sharing: GpuSharing = UNSHARED) -> Offering:
    """A node object that offers what the GPUs of a simulated node can be."""
    with tempfile.TemporaryDirectory() as folder:
        gpus = discover(load_description(description), Path(folder))
        nics = nic_slice(name, Path(folder))
    offering = Offering(cluster, name, map(ready_for_mig, gpus), sharing)
    if nics["spec"]["devices"]:
        cluster.api.post(SLICES, nics)
    return offering


@pytest.fixture(scope="module")
def cards(cluster: Cluster) -> dict[str, Offering]:
    return {name: node(cluster, name, description or name, FOUR) for name, description in CARDS.items()}


@pytest.fixture(scope="module")
def one_gpu_node(cluster: Cluster) -> Offering:
    return node(cluster, "one", "h100-1", TEN)


@pytest.fixture
def one_gpu(one_gpu_node: Offering) -> Offering:
    """A node with one H100 that offers ten shares, with nothing held."""
    one_gpu_node.start_again(TEN)
    return one_gpu_node


@pytest.fixture(scope="module")
def four_gpus_node(cluster: Cluster) -> Offering:
    return node(cluster, "four", "h100-pcie-4")


@pytest.fixture
def four_gpus(four_gpus_node: Offering) -> Offering:
    """A node with four H100, of which the first two offer two shares each and nothing else; nothing is held."""
    two_each = GpuSharing(lambda gpu: 2 if gpu.index < 2 else 0, GpuSelection.parse("0,1"))
    four_gpus_node.start_again(two_each)
    return four_gpus_node


@dataclass
class Asking:
    """Pods with a claim each, by name."""

    cluster: Cluster
    asked: dict[str, Scheduling]

    def __call__(self, name: str, *requests: dict[str, Any], **more: Any) -> Scheduling:
        self.asked[name] = Scheduling(self.cluster, name)
        self.asked[name].ask(*requests, **more)
        return self.asked[name]

    def forget(self) -> None:
        forget(*self.asked.values())


@pytest.fixture
def ask(cluster: Cluster) -> Iterator[Asking]:
    asking = Asking(cluster, {})
    yield asking
    asking.forget()


def devices_of(cluster: Cluster) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every published device with its pool, except monitor devices."""
    for item in cluster.api.get(SLICES)["items"]:
        for device in item["spec"].get("devices") or () if not is_of_monitors(item) else ():
            yield item["spec"]["pool"]["name"], device


def status_of(cluster: Cluster, path: str) -> dict[str, Any]:
    """The object's status; empty while it has none."""
    status: dict[str, Any] = cluster.api.get(path).get("status", {})
    return status


def refusal(cluster: Cluster, *requests: dict[str, Any], template: bool = False, constraints: Any = ()) -> str:
    """What the API server says against such a claim (or template); empty where it would take it."""
    spec: dict[str, Any] = {"devices": {"requests": list(requests), "constraints": list(constraints)}}
    folder, spec = (TEMPLATES, {"spec": spec}) if template else (CLAIMS, spec)
    try:
        cluster.api.post(f"{folder}?dryRun=All", {"metadata": {"name": "tried"}, "spec": spec})
    except ApiError as error:
        return str(error)
    return ""


def cel(attribute: str) -> str:
    return f'device.attributes["{DRIVER}"].{attribute}'


class TestEveryClass:
    def test_installs_and_comes_back_unchanged(self, cluster: Cluster) -> None:
        installed = {each["metadata"]["name"]: each["spec"] for each in cluster.api.get(CLASSES)["items"]}
        assert {name: installed.get(name) for name in SHIPPED} == {name: each["spec"] for name, each in SHIPPED.items()}

    @pytest.mark.smoke
    @pytest.mark.usefixtures("cards")
    def test_allocates_what_its_name_says(self, cluster: Cluster, ask: Asking) -> None:
        published = {(pool, device["name"]): device["attributes"] for pool, device in devices_of(cluster)}
        # test_monitors.py, test_shared_gpus.py and test_shared_partitions.py are about the others.
        names = SHIPPED.keys() - {MONITOR, SHARED, COMPUTE_INSTANCE}
        for name in names:
            ask(name, asked(name))
        for name in names:
            [given] = ask.asked[name].given()
            device = published[given.pool, given.device]
            kind, profile = says(name)
            assert (given.driver, device["type"]["string"]) == (DRIVER, kind), name
            assert profile in {None, device["profile"]["string"]}, name

    @pytest.mark.parametrize(
        ("description", "sharing", "fitting", "others"),
        [
            ("h100-1", GpuSharing(lambda _: 10, EVERY_GPU), DEV, (TRAINING, ANY_PARTITION, SMALL)),
            ("t4-4", UNSHARED, TRAINING, (DEV, ANY_PARTITION, SMALL)),
        ],
    )
    def test_takes_no_other_kind_of_device(
        self,
        cluster: Cluster,
        ask: Asking,
        description: str,
        sharing: GpuSharing,
        fitting: str,
        others: tuple[str, ...],
    ) -> None:
        only = node(cluster, f"only-{fitting}", description, sharing)
        ask(fitting, asked(fitting), node=only.node).given()
        for other in others:
            assert "cannot allocate all claims" in ask(other, asked(other), node=only.node).refused()


def says(class_name: str) -> tuple[str, str | None]:
    """The type of device, and the profile, that a class has by its name."""
    kinds = {TRAINING: "gpu", NVLINK: "gpu", DEV: "share", ANY_PARTITION: "mig"}
    if class_name in kinds:
        return kinds[class_name], None
    return "mig", class_name.removeprefix(f"{ANY_PARTITION}-").replace("-", ".")


KINDS = (TRAINING, SMALL, DEV)
EXCLUDING = [
    *((first, second) for first in KINDS for second in KINDS if first != second),
    (TRAINING, TRAINING),
    (WHOLE_PARTITION, WHOLE_PARTITION),
    (WHOLE_PARTITION, SMALL),
]


COUNTERS = pytest.mark.needs("shared counters")
APART = pytest.mark.needs("consumable capacity")


class TestOneGpu:
    """Full GPU, partition and share of one H100."""

    @pytest.mark.parametrize(
        "published", [True, pytest.param(False, marks=COUNTERS)], ids=["published", "counters-alone"]
    )
    @pytest.mark.parametrize(("first", "second"), EXCLUDING)
    def test_excludes_what_does_not_go_together(
        self, one_gpu: Offering, ask: Asking, first: str, second: str, published: bool
    ) -> None:
        holder = ask("first", asked(first), node=one_gpu.node)
        [held] = holder.given()
        if published:
            one_gpu.hold(held.device)
        late = ask("second", asked(second), node=one_gpu.node)
        assert "cannot allocate all claims" in late.refused()
        holder.forget()
        if published:
            one_gpu.release(held.device)
        [given] = late.given()
        assert one_gpu.devices()[given.device]["type"] == says(second)[0]

    def test_is_shared_by_ten_and_not_by_eleven(self, one_gpu: Offering, ask: Asking) -> None:
        holders = ten_holders(one_gpu, ask)
        assert holders.keys() == {f"gpu-0-share-{i}" for i in range(10)}
        eleventh = ask("eleventh", asked(DEV), node=one_gpu.node)
        assert "cannot allocate all claims" in eleventh.refused()
        holders["gpu-0-share-3"].forget()
        assert eleventh.given()[0].device == "gpu-0-share-3"

    @COUNTERS
    @pytest.mark.parametrize("kept", [(0, 5, 9), (1, 2, 3)], ids=str)
    def test_gives_as_many_larger_shares_as_fit_beside_old_ones(
        self, one_gpu: Offering, ask: Asking, kept: tuple[int, ...]
    ) -> None:
        holders = ten_holders(one_gpu, ask)
        staying = {f"gpu-0-share-{i}" for i in kept}
        forget(*(holders[name] for name in holders.keys() - staying))
        one_gpu.release(*(holders.keys() - staying))
        one_gpu.share(FOUR)
        assert {one_gpu.devices()[name]["shares"] for name in staying} == {10}

        # Three tenths are held: of four quarters two fit, and not one more.
        for name in ("new-0", "new-1"):
            ask(name, of_shares(4), node=one_gpu.node).given()
        for device_class in (DEV, TRAINING, SMALL):
            assert "cannot allocate all claims" in ask(device_class, asked(device_class), node=one_gpu.node).refused()
        # Of those that wait only one: any of them might be first. They go before anything is free: the scheduler does
        # not try the others again for one that is deleted while it is bound.
        leaving = [each for name, each in ask.asked.items() if name != TRAINING and each.paths]
        forget(*leaving)
        one_gpu.release(*staying)
        [full] = ask.asked[TRAINING].given()
        assert full.device == "gpu-0"


def ten_holders(node: Offering, ask: Asking) -> dict[str, Scheduling]:
    """Who holds which of the ten shares of the node's GPU."""
    first = ask("old-0", of_shares(10), node=node.node)
    # Not before the first share is held is there room for all of them in the slice.
    node.hold(first.given()[0].device)
    ten = [first, *(ask(f"old-{i}", of_shares(10), node=node.node) for i in range(1, 10))]
    holders = {each.given()[0].device: each for each in ten}
    node.hold(*holders)
    return holders


def of_shares(number: int) -> dict[str, Any]:
    return asked(DEV, f"{cel('shares')} == {number}")


def alternatives(*classes: str, name: str = "gpu", **more: Any) -> dict[str, Any]:
    named = [{"name": f"choice-{i}", "deviceClassName": each, **more} for i, each in enumerate(classes)]
    return {"name": name, "firstAvailable": named}


def all_of(device_class: str) -> dict[str, Any]:
    return {"name": "gpu", "exactly": {"deviceClassName": device_class, "allocationMode": "All"}}


def of_different_gpus(*requests: str) -> list[dict[str, Any]]:
    return [{**DIFFERENT_GPUS, "requests": list(requests)}]


def marked(*cases: tuple[Any, Any]) -> list[Any]:
    """Requests and constraints; those with ``distinctAttribute`` need consumable capacity."""
    return [pytest.param(*case, marks=[APART] if "distinctAttribute" in str(case) else []) for case in cases]


class TestSharesOfOneGpuInOneClaim:
    """What the admission policy refuses and lets through, in claims and in templates."""

    ONE, TWO = asked(DEV, name="a"), asked(DEV, name="b")

    @pytest.mark.parametrize("template", [False, True], ids=["claim", "template"])
    @pytest.mark.parametrize(
        ("requests", "constraints"),
        marked(
            ([asked(DEV, count=2)], []),
            ([all_of(DEV)], []),
            ([ONE, TWO], []),
            ([ONE, asked(TRAINING, name="b"), alternatives(SMALL, DEV, name="c")], []),
            ([alternatives(SMALL, DEV, name="a"), alternatives(DEV, name="b")], []),
            ([alternatives(SMALL, DEV, count=2)], []),
            ([alternatives(SMALL, DEV, allocationMode="All")], []),
            ([ONE, TWO], of_different_gpus("a")),
            ([ONE, TWO], [*of_different_gpus("a"), *of_different_gpus("b")]),
            ([ONE, TWO], [{"distinctAttribute": "resource.kubernetes.io/pcieRoot"}]),
            ([ONE, TWO], [{"matchAttribute": DISTINCT}]),
            ([ONE, alternatives(DEV, DEV, name="b")], of_different_gpus("a", "b/choice-0")),
        ),
    )
    def test_is_refused_with_what_to_ask_for(
        self, cluster: Cluster, requests: list[dict[str, Any]], constraints: list[dict[str, Any]], template: bool
    ) -> None:
        message = refusal(cluster, *requests, template=template, constraints=constraints)
        sharing = [each["name"] for each in requests if DEV in str(each)]
        assert f"requests {', '.join(sharing)}: two shares of one GPU" in message
        for instead in ("one share", "fewer shares", ANY_PARTITION, TRAINING, f"distinctAttribute: {DISTINCT}"):
            assert instead in message

    @pytest.mark.parametrize("template", [False, True], ids=["claim", "template"])
    @pytest.mark.parametrize(
        ("requests", "constraints"),
        marked(
            ([asked(DEV)], []),
            ([{"name": "gpu", "exactly": {"deviceClassName": DEV}}], []),
            ([asked(DEV, name="a"), asked(TRAINING, name="b", count=2), all_of(SMALL)], []),
            ([alternatives(DEV, SMALL, DEV)], []),
            ([asked(DEV, count=2)], [DIFFERENT_GPUS]),
            ([ONE, TWO], [{"matchAttribute": DISTINCT, "requests": ["a"]}, *of_different_gpus("a", "b")]),
            ([ONE, alternatives(DEV, SMALL, name="b")], of_different_gpus("a", "b/choice-0")),
            ([asked(TRAINING, count=8)], []),
            ([all_of(ANY_PARTITION)], []),
        ),
    )
    def test_is_no_matter_where_it_cannot_happen(
        self, cluster: Cluster, requests: list[dict[str, Any]], constraints: list[dict[str, Any]], template: bool
    ) -> None:
        assert refusal(cluster, *requests, template=template, constraints=constraints) == ""

    @APART
    def test_is_found_in_the_largest_claim_the_api_takes(self, cluster: Cluster) -> None:
        names = [f"request-{i:02}" for i in range(32)]
        largest = [alternatives(*[DEV] * 8, name=name) for name in names]
        almost = of_different_gpus(*names[1:], f"{names[0]}/choice-0") * 32
        assert "two shares of one GPU" in refusal(cluster, *largest, constraints=almost)
        assert refusal(cluster, *largest, constraints=of_different_gpus(*names)) == ""

    def test_is_checked_by_expressions_of_the_right_types(self, cluster: Cluster) -> None:
        checked: dict[str, Any] = wait_for(partial(status_of, cluster, POLICY), SCHEDULED_S, "the type check")
        assert checked["typeChecking"] == {}


class TestShares:
    """Two H100 with two shares each, and two that can be cut."""

    @APART
    def test_of_different_gpus_serve_one_claim(self, four_gpus: Offering, ask: Asking) -> None:
        both = ask("both", asked(DEV, count=2), constraints=[DIFFERENT_GPUS], node=four_gpus.node).given()
        assert {each.device.partition("-share-")[0] for each in both} == {"gpu-0", "gpu-1"}
        three = ask("three", asked(DEV, count=3), constraints=[DIFFERENT_GPUS], node=four_gpus.node)
        assert "cannot allocate all claims" in three.refused()

    def test_give_way_to_a_partition_when_they_are_used_up(self, four_gpus: Offering, ask: Asking) -> None:
        notebooks = [ask(f"notebook-{i}", alternatives(DEV, SMALL), node=four_gpus.node) for i in range(5)]
        given = [result for each in notebooks for result in each.given()]
        assert sorted(each.request for each in given) == [*["gpu/choice-0"] * 4, "gpu/choice-1"]
        [partition] = [each.device for each in given if each.request == "gpu/choice-1"]
        assert partition.startswith(("gpu-2-mig-1g10gb-", "gpu-3-mig-1g10gb-"))


def parameters(api_version: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": api_version, "kind": kind, **settings}}}


TESSERA, NVIDIA = "gpu.tessera.dev/v1alpha1", "resource.nvidia.com/v1beta1"


class TestOpaqueParameters:
    @pytest.mark.parametrize(
        ("config", "interval"),
        [
            ([], TimeSlice.DEFAULT),
            ([parameters(TESSERA, "ShareConfig", sharing={"timeSlicing": {"interval": "Short"}})], TimeSlice.SHORT),
            ([parameters(TESSERA, "ShareConfig")], None),
            ([parameters(NVIDIA, "GpuConfig", sharing={"timeSlicingConfig": {"interval": "Long"}})], TimeSlice.LONG),
        ],
        ids=["class", "claim", "claim-without-a-wish", "nvidia"],
    )
    def test_of_class_and_claim_reach_the_node(
        self, one_gpu: Offering, ask: Asking, config: list[dict[str, Any]], interval: TimeSlice | None
    ) -> None:
        asking = ask("notebook", asked(DEV), config=config, node=one_gpu.node)
        asking.given()
        claim = CLAIM.decode(msgspec.json.encode(asking.claim()))
        assert claim.status.allocation is not None
        sources = [entry.source for entry in claim.status.allocation.devices.config]
        assert sources == ["FromClass", *["FromClaim"] * len(config)]
        reference = ClaimReference("default", "notebook", claim.metadata.uid)
        [allocated] = resolve(reference, claim, one_gpu.pool, one_gpu.inventory).devices
        assert allocated.time_slice is interval


EXAMPLES = PROJECT / "deploy" / "examples"


def example(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


@pytest.fixture
def example_pod(cluster: Cluster, cards: dict[str, Offering], request: pytest.FixtureRequest) -> Iterator[str]:
    """The pod of the example named by the parameter, on the DGX H100, with what it needs; gone afterwards."""
    name, paths = str(request.param), []
    for each in example(name):
        folder = PODS if each["kind"] == "Pod" else TEMPLATES
        if each["kind"] == "Pod":
            each["spec"]["nodeSelector"] = {"kubernetes.io/hostname": cards["dgx-h100"].node}
        cluster.api.post(folder, each)
        paths.append(f"{folder}/{name}")
    yield name
    for path in paths:
        cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    # The claim that was made for the pod goes after it.
    wait_for(lambda: not cluster.api.get(CLAIMS)["items"], SCHEDULED_S, "the pod's claim gone")


def given_to(cluster: Cluster, pod: str) -> list[dict[str, Any]]:
    """What was allocated for the pod, by whatever claim was made for it; empty before."""
    claims = [
        each
        for each in cluster.api.get(CLAIMS)["items"]
        for owner in each["metadata"].get("ownerReferences", ())
        if owner["name"] == pod
    ]
    allocations = [each.get("status", {}).get("allocation", {}) for each in claims]
    return [result for each in allocations for result in each.get("devices", {}).get("results", ())]


DEVICES = {
    "training": ["gpu"],
    "training-clique": ["gpu"] * 4,
    "training-nic": ["gpu", "nic"],
    "inference": ["1g.10gb"],
    "inference-large": ["3g.40gb"],
    "dev": ["share"],
    "dev-or-partition": ["share"],
    "dev-two-gpus": ["share", "share"],
}
"""What each example gets on a DGX H100: a type, or a profile."""

SAME = {"training-clique": "nvlinkClique", "training-nic": "resource.kubernetes.io/pcieRoot"}
DIFFERENT = {"dev-two-gpus": "parentUUID"}


@pytest.mark.parametrize(
    "example_pod", [pytest.param(name, marks=[APART] if name in DIFFERENT else []) for name in DEVICES], indirect=True
)
def test_every_example_gets_what_it_says(cluster: Cluster, cards: dict[str, Offering], example_pod: str) -> None:
    given = wait_for(partial(given_to, cluster, example_pod), SCHEDULED_S, "an allocation")
    published = cards["dgx-h100"].devices()
    devices = [published.get(each["device"], {"type": "nic"}) for each in given]
    kinds = [device["profile"] if device["type"] == "mig" else device["type"] for device in devices]
    assert kinds == DEVICES[example_pod]
    if attribute := SAME.get(example_pod):
        found = [device.get(attribute) for device in devices if device["type"] != "nic"]
        assert len(set(found)) == 1
        assert None not in found
    if attribute := DIFFERENT.get(example_pod):
        assert len({device[attribute] for device in devices}) == len(devices)


@APART
def test_no_example_is_blocked_by_another_when_the_folder_is_applied(
    cluster: Cluster, cards: dict[str, Offering]
) -> None:
    cluster.kubectl("apply", "-f", str(EXAMPLES))
    try:
        for name, devices in DEVICES.items():
            wait_for(lambda: len(given_to(cluster, name)) == len(devices), SCHEDULED_S, f"devices of {name}")  # noqa: B023
    finally:
        cluster.kubectl("delete", "--grace-period=0", "--force", "--ignore-not-found", "-f", str(EXAMPLES))
    wait_for(lambda: not cluster.api.get(CLAIMS)["items"], SCHEDULED_S, "the pods' claims gone")


def test_the_examples_tried_here_are_all_there_are_but_that_of_a_checkpoint() -> None:
    """``test_checkpoint.py`` tries that."""
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == DEVICES.keys() | {
        "checkpoint",
        "extended-resource",
        "monitor",
        "shared",
    }


@pytest.fixture
def counted_resource(cluster: Cluster) -> Iterator[None]:
    """``gpu-training`` and ``gpu-dev`` serve unchanged pods while the test runs, as the comments in the files say."""
    names = {TRAINING: "nvidia.com/gpu", DEV: "nvidia.com/gpu.shared"}
    for device_class, name in names.items():
        cluster.api.patch(f"{CLASSES}/{device_class}", {"spec": {"extendedResourceName": name}})
    yield
    for device_class in names:
        cluster.api.patch(f"{CLASSES}/{device_class}", {"spec": {"extendedResourceName": None}})


@pytest.mark.needs("extended resources")
@pytest.mark.usefixtures("counted_resource")
class TestUnchangedPods:
    @pytest.mark.parametrize("example_pod", ["extended-resource"], indirect=True)
    def test_that_count_gpus_get_a_full_one(
        self, cluster: Cluster, cards: dict[str, Offering], example_pod: str
    ) -> None:
        [given] = wait_for(partial(given_to, cluster, example_pod), SCHEDULED_S, "an allocation")
        assert cards["dgx-h100"].devices()[given["device"]]["type"] == "gpu"
        status = cluster.api.get(f"{PODS}/{example_pod}")["status"]["extendedResourceClaimStatus"]
        assert [each["resourceName"] for each in status["requestMappings"]] == ["nvidia.com/gpu"]

    def test_that_count_two_shares_are_told_what_to_ask_for(self, cluster: Cluster, four_gpus: Offering) -> None:
        limits = {"resources": {"limits": {"nvidia.com/gpu.shared": "2"}}}
        cluster.api.post(PODS, busybox_pod("two", container=limits, node=four_gpus.node))
        try:
            message = wait_for(lambda: scheduling_trouble(cluster, "two"), SCHEDULED_S, "the refusal")
        finally:
            cluster.api.request("DELETE", f"{PODS}/two", {"gracePeriodSeconds": 0})
        assert "two shares of one GPU give a claim no more than one" in message


def scheduling_trouble(cluster: Cluster, pod: str) -> str:
    """What the policy told the scheduler about the pod; empty before it did."""
    conditions = cluster.api.get(f"{PODS}/{pod}")["status"].get("conditions", ())
    return next((str(each["message"]) for each in conditions if "denied request" in each.get("message", "")), "")


MANY = 32
"""The most that a claim may ask for, and more than any quota here allows."""


def in_force(cluster: Cluster, quota: str) -> bool:
    """Whether the quota's controller has counted what there is."""
    return "used" in status_of(cluster, quota)


@contextmanager
def limited(cluster: Cluster, quotas: Sequence[dict[str, Any]]) -> Iterator[None]:
    """With these quotas inside the block. The API server judges by its own copy of them, which is of a moment ago."""
    paths = [f"{QUOTAS}/{quota['metadata']['name']}" for quota in quotas]
    try:
        for quota in quotas:
            cluster.api.post(QUOTAS, quota)
        for path in paths:
            wait_for(partial(in_force, cluster, path), SCHEDULED_S, f"{path} in force")
        yield
    finally:
        for path in paths:
            cluster.api.request("DELETE", path)
        for name in SHIPPED:
            wait_taken(cluster, name, MANY)


def said_to(cluster: Cluster, name: str, count: int) -> str:
    constraints = {DEV: [DIFFERENT_GPUS], NVLINK: [{"matchAttribute": f"{DRIVER}/nvlinkClique"}]}.get(name, [])
    request = asked(name, count=count, memory="1Gi" if name == SHARED else None)
    request["exactly"]["adminAccess"] = name == MONITOR
    return refusal(cluster, request, constraints=constraints)


def wait_taken(cluster: Cluster, name: str, count: int) -> None:
    """Wait until the API server would take a claim for so many."""
    wait_for(lambda: not said_to(cluster, name, count), SCHEDULED_S, f"{count} {name} allowed")


def wait_refused(cluster: Cluster, name: str, count: int, told: str) -> None:
    """Wait until it says this to such a claim."""
    wait_for(lambda: told in said_to(cluster, name, count), SCHEDULED_S, f"of {count} {name}: {told}")


@APART
def test_the_quota_example_limits_every_class(cluster: Cluster) -> None:
    quotas = example("quota/quota")
    hard = {key: int(number) for quota in quotas for key, number in quota["spec"]["hard"].items()}
    assert hard.keys() == {f"{name}.deviceclass.resource.k8s.io/devices" for name in SHIPPED}
    with limited(cluster, quotas):
        for name in SHIPPED:
            limit = hard[f"{name}.deviceclass.resource.k8s.io/devices"]
            wait_refused(cluster, name, limit + 1, f"limited: {name}.deviceclass.resource.k8s.io/devices={limit}")
            assert "exceeded quota" in said_to(cluster, name, limit + 1)
            if limit:
                wait_taken(cluster, name, limit)


@APART
def test_quota_refuses_a_second_claim_and_counts_every_alternative(cluster: Cluster) -> None:
    keys = {name: f"{name}.deviceclass.resource.k8s.io/devices" for name in (TRAINING, DEV, SMALL)}
    hard = dict.fromkeys(keys.values(), "1")
    paths = [f"{CLAIMS}/training", f"{CLAIMS}/dev"]
    with limited(cluster, [{"metadata": {"name": "one-each"}, "spec": {"hard": hard}}]):
        for name in keys:
            wait_taken(cluster, name, 1)
        try:
            for name, request in (("training", asked(TRAINING)), ("dev", alternatives(DEV, SMALL))):
                spec = {"devices": {"requests": [request]}}
                cluster.api.post(CLAIMS, {"metadata": {"name": name}, "spec": spec})
            for name, key in keys.items():
                wait_refused(cluster, name, 1, f"exceeded quota: one-each, requested: {key}=1, used: {key}=1")
        finally:
            for path in paths:
                if not is_gone(cluster, path):
                    cluster.api.request("DELETE", path)
    for path in paths:
        wait_for(partial(is_gone, cluster, path), SCHEDULED_S, f"{path} gone")
