"""Claims that ask a class for what it never gives, at the real API server: refused at once, with the class to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import yaml

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.chart import ANY_SIZE, install
from tests.support.control_plane import control_plane
from tests.support.plugin import DRIVER
from tests.support.workloads import CLAIMS, PROJECT, TEMPLATES, request

pytestmark = [pytest.mark.cluster, pytest.mark.core, pytest.mark.timeout(300)]

Object = dict[str, Any]

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
POLICY = "fitting-class.gpu.tessera.dev"
OURS, NVIDIAS = "gpu.tessera.dev/v1alpha1", "resource.nvidia.com/v1beta1"
FULL, PARTITION, SHARE, NVLINK = "gpu-training", "gpu-inference", "gpu-dev", "gpu-training-nvlink"
SHARED = "gpu-shared"
ONE = "gpu-inference-1g-10gb"
DEVICE = f'device.attributes["{DRIVER}"]'


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with control_plane("misuse") as running:
        install(running, ANY_SIZE)
        bad = {"requests": [request(FULL)], "config": [parameters("ShareConfig")]}
        claim = {"metadata": {"name": "tried"}, "spec": {"devices": bad}}
        # Of a claim alone: what is said to claim and template may differ in the moment in which it gets in force.
        wait_for(lambda: told(running, CLAIMS, claim), 60, "the policy is in force")
        yield running


def parameters(kind: str, *requests: str, version: str = OURS) -> Object:
    """An entry of ``config``; for all requests where none is named."""
    opaque = {"driver": DRIVER, "parameters": {"apiVersion": version, "kind": kind}}
    return {"opaque": opaque, **({"requests": list(requests)} if requests else {})}


def alternatives(name: str, *classes: str) -> Object:
    """A request for the first of these classes that fits; the alternatives are named a, b, ..."""
    return {"name": name, "firstAvailable": [{"name": n, "deviceClassName": c} for n, c in zip("abc", classes)]}  # noqa: B905


def refusal(
    cluster: Cluster, requests: Sequence[Object], config: Sequence[Object] = (), constraints: Sequence[Object] = ()
) -> str:
    """What the API server says to such a claim; empty: it would take it. It says the same to its template."""
    devices = {"requests": list(requests), "config": list(config), "constraints": list(constraints)}
    said = told(cluster, CLAIMS, {"metadata": {"name": "tried"}, "spec": {"devices": devices}})
    assert said == told(cluster, TEMPLATES, {"metadata": {"name": "tried"}, "spec": {"spec": {"devices": devices}}})
    return said


def told(cluster: Cluster, path: str, body: Object) -> str:
    try:
        cluster.api.request("POST", f"{path}?dryRun=All", body)
    except ApiError as error:
        assert error.status == 422, error  # noqa: PT017 - nothing else may refuse it
        assert POLICY in str(error), error  # noqa: PT017
        return str(error).partition("denied request: ")[2]
    return ""


class TestParameters:
    @pytest.mark.parametrize(
        ("device_class", "kind", "expected"),
        [
            (
                FULL,
                "MigDeviceConfig",
                (
                    "parameters of kind MigDeviceConfig are for partitions, but request gpu has class gpu-training, "
                    "which gives full GPUs: take class gpu-inference or gpu-inference-<profile>, or parameters for "
                    "what the class gives"
                ),
            ),
            (FULL, "ShareConfig", "are for shares, but request gpu has class gpu-training, which gives full GPUs"),
            (PARTITION, "GpuConfig", "are for full GPUs, but request gpu has class gpu-inference, which gives part"),
            (ONE, "ShareConfig", "are for shares, but request gpu has class gpu-inference-1g-10gb, which gives part"),
            (SHARE, "GpuConfig", "which gives shares: take class gpu-training"),
            (SHARE, "MigDeviceConfig", "which gives shares: take class gpu-inference"),
        ],
    )
    def test_of_another_kind_of_device_are_refused(
        self, cluster: Cluster, device_class: str, kind: str, expected: str
    ) -> None:
        assert expected in refusal(cluster, [request(device_class)], [parameters(kind)])
        assert expected in refusal(cluster, [request(device_class)], [parameters(kind, "gpu")])

    @pytest.mark.parametrize(
        ("device_class", "kind", "version"),
        [
            (FULL, "GpuConfig", OURS),
            (PARTITION, "MigDeviceConfig", OURS),
            (ONE, "MigDeviceConfig", OURS),
            (SHARE, "ShareConfig", OURS),
            (FULL, "GpuConfig", NVIDIAS),
            (SHARE, "GpuConfig", NVIDIAS),
            (ONE, "MigDeviceConfig", NVIDIAS),
            ("of-my-own", "ShareConfig", OURS),
        ],
    )
    def test_that_fit_are_let_through(self, cluster: Cluster, device_class: str, kind: str, version: str) -> None:
        assert not refusal(cluster, [request(device_class)], [parameters(kind, version=version)])

    def test_have_to_fit_every_request_that_they_name_and_one_where_they_name_none(self, cluster: Cluster) -> None:
        both = [request(FULL, "train"), request(SHARE, "try")]
        assert not refusal(cluster, both, [parameters("ShareConfig")])
        assert not refusal(cluster, both, [parameters("ShareConfig", "try"), parameters("GpuConfig", "train")])
        assert "request train has class gpu-training" in refusal(cluster, both, [parameters("ShareConfig", "train")])
        assert "request train has class" in refusal(cluster, both, [parameters("ShareConfig", "train", "try")])
        assert "request train has" in refusal(cluster, both, [parameters("MigDeviceConfig")])
        assert not refusal(cluster, [*both, request("a-nic", "nic")], [parameters("MigDeviceConfig")])

    def test_for_one_of_several_alternatives_are_let_through(self, cluster: Cluster) -> None:
        either = [alternatives("gpu", SHARE, PARTITION)]
        assert not refusal(cluster, either, [parameters("ShareConfig")])
        assert not refusal(cluster, either, [parameters("MigDeviceConfig", "gpu")])
        assert not refusal(cluster, either, [parameters("MigDeviceConfig", "gpu/b")])
        assert "request gpu/a has class gpu-dev" in refusal(cluster, either, [parameters("MigDeviceConfig", "gpu/a")])
        assert "are for full GPUs" in refusal(cluster, either, [parameters("GpuConfig", "gpu")])


class TestSelectors:
    @pytest.mark.parametrize(
        ("device_class", "selector", "expected"),
        [
            (
                FULL,
                f'{DEVICE}.type == "mig"',
                (
                    "request gpu has class gpu-training, which gives full GPUs, never what its selector asks for, "
                    'type == "mig": take class gpu-inference or gpu-inference-<profile>'
                ),
            ),
            (FULL, f'device.driver == "{DRIVER}" && {DEVICE}.profile == "1g.10gb"', "take class gpu-inference-1g-10gb"),
            (FULL, f'{DEVICE}.profile == "3g.99gb"', "take class gpu-inference"),
            (PARTITION, f'{DEVICE}.type == "gpu" && {DEVICE}.memorySlices > 1', "take class gpu-training"),
            (ONE, f'{DEVICE}.profile == "2g.20gb"', "take class gpu-inference-2g-20gb"),
            (SHARE, f'{DEVICE}.type=="gpu"', "which gives shares, never what its selector asks for"),
            (FULL, f'{DEVICE}.type ==\n"mig"', "request gpu has class gpu-training, which gives full GPUs, never what"),
        ],
    )
    def test_for_another_kind_of_device_are_refused(
        self, cluster: Cluster, device_class: str, selector: str, expected: str
    ) -> None:
        assert expected in refusal(cluster, [request(device_class, selector=selector)])

    @pytest.mark.parametrize(
        ("device_class", "selector"),
        [
            pytest.param(FULL, f'{DEVICE}.type == "gpu" && {DEVICE}.profile == "none"', id="the same again"),
            pytest.param(FULL, f'{DEVICE}.type != "mig"', id="anything but"),
            pytest.param(FULL, f'!({DEVICE}.ecc && {DEVICE}.type == "mig" && {DEVICE}.migCapable)', id="negated"),
            pytest.param(FULL, f'{DEVICE}.type == "mig" || {DEVICE}.type == "gpu"', id="one of two"),
            pytest.param(FULL, f'[1].all(n, n > 1 && {DEVICE}.type == "mig" && n > 2) || true', id="in a loop"),
            pytest.param(FULL, f'{DEVICE}.ecc ? {DEVICE}.type == "mig" : true', id="on a condition"),
            pytest.param(FULL, f'{DEVICE}.ecc\n// && {DEVICE}.type == "mig"', id="in a comment"),
            pytest.param(
                FULL, f'({DEVICE}.ecc && {DEVICE}.type == "mig" && {DEVICE}.ecc) == false', id="equal to false"
            ),
            pytest.param(FULL, 'device.attributes["nic.example.com"].type == "mig"', id="of another domain"),
            pytest.param(PARTITION, f'{DEVICE}.profile == "1g.10gb"', id="a profile of the class of all"),
            pytest.param(ONE, f'{DEVICE}.profile == "1g.10gb"', id="the profile of the class"),
            pytest.param("of-my-own", f'{DEVICE}.type == "mig"', id="of an unknown class"),
        ],
    )
    def test_that_some_device_of_the_class_may_pass_are_let_through(
        self, cluster: Cluster, device_class: str, selector: str
    ) -> None:
        assert not refusal(cluster, [request(device_class, selector=selector)])


class TestConstraints:
    def constraint(self, name: str, *requests: str, field: str = "matchAttribute") -> Object:
        return {field: f"{DRIVER}/{name}", **({"requests": list(requests)} if requests else {})}

    def test_on_what_such_devices_never_have_are_refused(self, cluster: Cluster) -> None:
        two = [request(ONE, "a"), request(ONE, "b")]
        said = refusal(cluster, two, constraints=[self.constraint("nvlinkClique")])
        assert f"constraint on {DRIVER}/nvlinkClique: request a has class {ONE}, which gives partitions, which" in said
        assert "take class gpu-training, or list under requests of the constraint only those that it applies to" in said

    @pytest.mark.needs("consumable capacity")
    def test_that_keep_requests_of_partitions_and_full_gpus_apart_are_refused(self, cluster: Cluster) -> None:
        apart = self.constraint("parentUUID", field="distinctAttribute")
        assert "request gpu has class gpu-training" in refusal(
            cluster, [request(FULL), request(PARTITION, "part")], constraints=[apart]
        )

    def test_that_can_hold_are_let_through(self, cluster: Cluster) -> None:
        four = [request(FULL, "a"), request(FULL, "b")]
        assert not refusal(cluster, four, constraints=[self.constraint("nvlinkClique")])
        two = [request(FULL, "whole"), request(PARTITION, "a"), request(PARTITION, "b")]
        assert not refusal(cluster, two, constraints=[self.constraint("parentUUID", "a", "b")])
        either = [alternatives("gpu", PARTITION, FULL), request("a-nic", "nic")]
        assert not refusal(cluster, either, constraints=[self.constraint("nvlinkClique")])
        assert not refusal(cluster, either, constraints=[self.constraint("nvlinkClique", "gpu/a")])
        elsewhere = {"matchAttribute": "resource.kubernetes.io/pcieRoot"}
        assert not refusal(cluster, [request(SHARE), request("a-nic", "nic")], constraints=[elsewhere])


class TestSeveralGpusJoinedByNvlink:
    clique: ClassVar[Object] = {"matchAttribute": f"{DRIVER}/nvlinkClique"}

    def several(self, name: str = "gpu", count: int = 4) -> Object:
        return {"name": name, "exactly": {"deviceClassName": NVLINK, "count": count}}

    def test_need_the_constraint_on_their_clique(self, cluster: Cluster) -> None:
        requests = [self.several(), request(FULL, "other")]
        expected = (
            "request gpu asks for 4 GPUs of class gpu-training-nvlink, which may be in different NVLink cliques: "
            f"add to constraints {{requests: [gpu], matchAttribute: {DRIVER}/nvlinkClique}}"
        )
        for constraints in ([], [{**self.clique, "requests": ["other"]}]):
            assert refusal(cluster, requests, constraints=constraints) == expected

    def test_with_the_constraint_are_let_through(self, cluster: Cluster) -> None:
        for constraint in (self.clique, {**self.clique, "requests": ["gpu"]}):
            assert not refusal(cluster, [self.several()], constraints=[constraint])

    def test_one_gpu_and_gpus_of_another_class_need_none(self, cluster: Cluster) -> None:
        assert not refusal(cluster, [request(NVLINK)])
        assert not refusal(cluster, [{"name": "gpu", "exactly": {"deviceClassName": FULL, "count": 4}}])

    def test_as_an_alternative_need_it_too(self, cluster: Cluster) -> None:
        first = {"name": "a", "deviceClassName": NVLINK, "count": 2}
        either = {"name": "gpu", "firstAvailable": [first, {"name": "b", "deviceClassName": FULL}]}
        assert "request gpu/a asks for 2 GPUs of class gpu-training-nvlink" in refusal(cluster, [either])
        for constraint in (self.clique, {**self.clique, "requests": ["gpu/a"]}):
            assert not refusal(cluster, [either], constraints=[constraint])


@pytest.mark.needs("consumable capacity")
class TestPartsOfSeveralGpusByMps:
    def part(self, name: str, **more: Any) -> Object:
        capacity = {"requests": {"memory": "6Gi"}}
        return {"name": name, "exactly": {"deviceClassName": SHARED, "capacity": capacity, **more}}

    def by_mps(self, *requests: str) -> Object:
        entry = parameters("SharedConfig", *requests)
        entry["opaque"]["parameters"]["strategy"] = "MPS"
        return entry

    def test_are_refused_with_what_to_write_instead(self, cluster: Cluster) -> None:
        assert refusal(cluster, [self.part("gpu", count=2)], [self.by_mps()]) == (
            "request gpu asks for several GPUs by MPS, and a program can use one: make it one request without count, "
            "with the sum of the memory, or take class gpu-training or gpu-inference"
        )
        assert refusal(cluster, [self.part("a"), self.part("b")], [self.by_mps()]).endswith(
            f"for parts of one GPU add to constraints {{requests: [a, b], matchAttribute: {DRIVER}/parentUUID}}"
        )

    def test_that_may_be_of_one_gpu_or_in_turns_are_let_through(self, cluster: Cluster) -> None:
        two = [self.part("a"), self.part("b")]
        assert not refusal(cluster, two)
        assert not refusal(cluster, two, [self.by_mps("a")])
        assert not refusal(cluster, two, [self.by_mps()], [{"matchAttribute": f"{DRIVER}/parentUUID"}])

    def test_in_the_largest_claim_that_the_api_takes_are_not_too_many_to_judge(self, cluster: Cluster) -> None:
        alternative = self.part("a")["exactly"]
        eight = [{"name": f"choice-{number}", **alternative} for number in range(8)]
        requests = [{"name": f"request-{number:02}", "firstAvailable": eight} for number in range(32)]
        names = [f"{request['name']}/choice-0" for request in requests]
        together = [{"matchAttribute": f"{DRIVER}/parentUUID"}]
        assert not refusal(cluster, requests, [parameters("SharedConfig", *names)] * 32, together * 32)
        assert "ask for several GPUs by MPS" in refusal(cluster, requests, [self.by_mps(*names)] * 32)


def test_a_claim_without_requests_is_let_through(cluster: Cluster) -> None:
    assert not told(cluster, CLAIMS, {"metadata": {"name": "tried"}, "spec": {}})


def examples() -> Iterator[Any]:
    """Parameters: the ResourceClaimTemplates of the examples."""
    for file in sorted((PROJECT / "deploy" / "examples").glob("*.yaml")):
        for template in yaml.safe_load_all(file.read_text()):
            if template["kind"] == "ResourceClaimTemplate":
                is_newer = any(field in str(template) for field in ("distinctAttribute", "'capacity'"))
                marks = [pytest.mark.needs("consumable capacity")] if is_newer else []
                yield pytest.param(template, id=file.stem, marks=marks)


@pytest.mark.parametrize("template", list(examples()))
def test_an_example_is_let_through(cluster: Cluster, template: Object) -> None:
    """Also one for a namespace in which adminAccess is allowed."""
    labels = {"resource.kubernetes.io/admin-access": "true"}
    cluster.api.patch("/api/v1/namespaces/default", {"metadata": {"labels": labels}})
    metadata = {name: value for name, value in template["metadata"].items() if name != "namespace"}
    assert not told(cluster, TEMPLATES, {**template, "metadata": metadata})


def test_the_largest_claim_that_the_api_takes_is_not_too_large_to_judge(cluster: Cluster) -> None:
    """32 requests with 8 alternatives each, 32 constraints, and 32 entries of parameters, each for all requests."""
    names = [f"request-{number:02}" for number in range(32)]
    eight = [
        {"name": f"choice-{n}", "deviceClassName": "of-my-own", "selectors": [{"cel": {"expression": "true"}}]}
        for n in range(8)
    ]
    requests = [{"name": name, "firstAvailable": eight} for name in names]
    almost = [*names[1:], f"{names[0]}/choice-0"]
    constraints = [{"matchAttribute": f"{DRIVER}/uuid", "requests": almost}] * 32
    assert not refusal(cluster, requests, [parameters("ShareConfig", *almost)] * 32, constraints)
    eight[0]["deviceClassName"] = FULL
    # Everything that is wrong would be more than a message may have.
    said = refusal(cluster, requests, [parameters("ShareConfig", *almost)] * 32, constraints)
    assert said == "the claim does not fit its class: see the classes in docs/workloads.md"


def test_the_policy_has_no_fault_that_the_api_server_could_find(cluster: Cluster) -> None:
    def checked() -> Object:
        status = cluster.api.get(f"{POLICIES}/{POLICY}").get("status", {})
        return {"found": status["typeChecking"]} if "typeChecking" in status else {}

    assert wait_for(checked, 60, "the expressions were checked") == {"found": {}}
