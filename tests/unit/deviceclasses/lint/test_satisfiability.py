"""What a claim asks of a class that it never gives: ``tessera lint`` finds what the chart's policies would refuse.

The policies themselves are tried at a real API server, with the same claims (tests/e2e/test_policies_misuse.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.linting import (
    DRIVER,
    OF_ANY_TYPE,
    OURS,
    TYPE,
    claim,
    device_class,
    findings,
    found,
    opaque,
    request,
    request_for,
)

FULL, PARTITION, SHARE = "gpu-training", "gpu-inference", "gpu-dev"
ONE = "gpu-inference-1g-10gb"
DEVICE = f'device.attributes["{DRIVER}"]'
KIND = "spec.devices.config[0].opaque.parameters.kind"
SELECTOR = "spec.devices.requests[0].exactly.selectors[0].cel.expression"


def parameters(kind: str, *requests: str) -> dict[str, Any]:
    return {**opaque(kind), **({"requests": list(requests)} if requests else {})}


def alternatives(name: str, *classes: str) -> dict[str, Any]:
    """A request for the first of these classes that fits; the alternatives are named a, b, ..."""
    return {"name": name, "firstAvailable": [{"name": n, "deviceClassName": c} for n, c in zip("abc", classes)]}  # noqa: B905


def told(*requests: dict[str, Any], **more: Any) -> list[str]:
    return [message for _, _, message in found(claim(*requests, **more))]


class TestParameters:
    @pytest.mark.parametrize(
        ("device_class", "kind", "message"),
        [
            (
                FULL,
                "MigDeviceConfig",
                (
                    "does not fit request gpu: class gpu-training gives full GPUs; take class gpu-inference or one of "
                    r"\d+ more, or parameters for what the class gives"
                ),
            ),
            (
                PARTITION,
                "GpuConfig",
                (
                    "does not fit request gpu: class gpu-inference gives partitions; take class gpu-training or "
                    "gpu-training-nvlink, or "
                    "parameters for what the class gives"
                ),
            ),
        ],
    )
    def test_of_another_kind_of_device_are_found(self, device_class: str, kind: str, message: str) -> None:
        answer = found(claim(request(device_class=device_class), config=[parameters(kind)]))
        [(path, value, said)] = answer
        assert (path, value) == (KIND, f'"{kind}"')
        assert re.fullmatch(message, said)

    def test_have_to_fit_every_request_that_they_name_and_one_where_they_name_none(self) -> None:
        both = [request("train", FULL), request("try", SHARE)]
        assert not told(*both, config=[parameters("ShareConfig")])
        assert not told(*both, config=[parameters("ShareConfig", "try"), parameters("GpuConfig", "train")])
        assert len(told(*both, config=[parameters("ShareConfig", "train", "try")])) == 1
        assert len(told(*both, config=[parameters("MigDeviceConfig")])) == 2
        nic = device_class("nic", 'device.driver == "dra.net"')
        assert found(claim(*both, request("nic", "nic"), config=[parameters("MigDeviceConfig")]), nic) == []

    def test_for_one_of_several_alternatives_are_let_be(self) -> None:
        either = alternatives("gpu", SHARE, PARTITION)
        assert not told(either, config=[parameters("ShareConfig")])
        assert not told(either, config=[parameters("MigDeviceConfig", "gpu")])
        assert not told(either, config=[parameters("MigDeviceConfig", "gpu/b")])
        [message] = told(either, config=[parameters("MigDeviceConfig", "gpu/a")])
        assert message.startswith("does not fit request gpu/a: class gpu-dev gives shares; take")
        assert len(told(either, config=[parameters("GpuConfig", "gpu")])) == 2

    def test_must_fit_classes_of_the_same_files_by_what_they_select(self) -> None:
        whole = device_class("mine", f'{OURS} && {TYPE} == "gpu"')
        answer = found(whole, claim(request(device_class="mine"), config=[parameters("MigDeviceConfig")]))
        assert [message.split(";")[0] for _, _, message in answer] == [
            "does not fit request gpu: class mine gives full GPUs"
        ]
        anything = device_class("mine", OF_ANY_TYPE)
        assert found(anything, claim(request(device_class="mine"), config=[parameters("MigDeviceConfig")])) == []
        narrowed = claim(request_for("mine", f'{TYPE} == "share"'), config=[parameters("MigDeviceConfig")])
        assert len(found(anything, narrowed)) == 1


class TestSelectors:
    @pytest.mark.parametrize(
        ("device_class", "selector", "message"),
        [
            (
                FULL,
                f'{TYPE} == "mig"',
                "gives full GPUs, never what this selector asks for; take class gpu-inference or one",
            ),
            (FULL, f'{OURS} && {DEVICE}.profile == "1g.10gb"', f"take class {PARTITION} or {ONE}"),
            (PARTITION, f'{TYPE} == "gpu" && {DEVICE}.memorySlices > 1', "gives partitions, never what this selector"),
            (ONE, f'{DEVICE}.profile == "2g.20gb"', f"take class {PARTITION} or gpu-inference-2g-20gb"),
            (SHARE, f'{TYPE} == "gpu"', "gives shares, never what this selector asks for; take class gpu-training"),
            (
                FULL,
                f'({TYPE} == "mig" || {TYPE} == "share") && {DEVICE}.simulated',
                "never what this selector asks for",
            ),
            (
                FULL,
                'device.driver == "dra.net"',
                "class gpu-training gives full GPUs, never what this selector asks for",
            ),
        ],
    )
    def test_for_another_kind_of_device_are_found(self, device_class: str, selector: str, message: str) -> None:
        [(path, _, said)] = found(claim(request_for(device_class, selector)))
        assert path == SELECTOR
        assert message in said

    @pytest.mark.parametrize(
        ("device_class", "selector"),
        [
            pytest.param(FULL, f'{TYPE} == "gpu" && {DEVICE}.profile == "none"', id="the same again"),
            pytest.param(FULL, f'{TYPE} != "mig"', id="anything but"),
            pytest.param(FULL, f'!({DEVICE}.ecc && {TYPE} == "mig" && {DEVICE}.migCapable)', id="negated"),
            pytest.param(FULL, f'{TYPE} == "mig" || {TYPE} == "gpu"', id="one of two"),
            pytest.param(FULL, f'{DEVICE}.ecc ? {TYPE} == "mig" : true', id="on a condition"),
            pytest.param(PARTITION, f'{DEVICE}.profile == "1g.10gb"', id="a profile of the class of all"),
            pytest.param(PARTITION, f'{DEVICE}.profile.startsWith("3g.")', id="profiles by their beginning"),
            pytest.param(ONE, f'{DEVICE}.profile == "1g.10gb"', id="the profile of the class"),
            pytest.param(FULL, f'{DEVICE}.?memoryType.orValue("").startsWith("HBM")', id="what may be absent"),
            pytest.param(FULL, f"has({DEVICE}.nvlinkClique)", id="that it is there"),
            pytest.param(FULL, f'"ecc" in {DEVICE} && {DEVICE}.ecc', id="that it is among those that are there"),
            pytest.param(FULL, f'{DEVICE}.exists(name, name == "ecc")', id="one of all"),
            pytest.param(FULL, f"size({DEVICE}) > 7", id="how many there are"),
            pytest.param(FULL, 'device.attributes[?"resource.kubernetes.io"].hasValue()', id="that a domain is there"),
            pytest.param(FULL, f'device.capacity["{DRIVER}"].?memory.hasValue()', id="that a capacity is there"),
        ],
    )
    def test_that_some_device_of_the_class_may_pass_are_let_be(self, device_class: str, selector: str) -> None:
        assert found(claim(request_for(device_class, selector))) == []

    def test_for_a_profile_that_is_not_known_fit_a_class_that_asks_for_it(self) -> None:
        selector = f'{DEVICE}.profile == "1g.99gb"'
        mine = device_class("mine", f"{OURS} && {selector}")
        answer = found(mine, claim(request_for("mine", selector)))
        assert [message.split(";")[0] for _, _, message in answer] == ["no known GPU has this profile"] * 2


class TestConstraints:
    def constraint(self, name: str, *requests: str, field: str = "matchAttribute") -> dict[str, Any]:
        return {field: f"{DRIVER}/{name}", **({"requests": list(requests)} if requests else {})}

    def test_on_what_such_devices_never_have_are_found(self) -> None:
        apart = self.constraint("parentUUID", field="distinctAttribute")
        answer = found(claim(request(), request("part", PARTITION), constraints=[apart]))
        [(path, value, message)] = answer
        assert (path, value) == ("spec.devices.constraints[0].distinctAttribute", '"gpu.tessera.dev/parentUUID"')
        assert message.startswith("can't hold for request gpu: class gpu-training gives full GPUs, which never have it")
        assert message.endswith("or list under requests of the constraint only those that it applies to")
        two = [request("a", ONE), request("b", ONE)]
        assert len(told(*two, constraints=[self.constraint("nvlinkClique")])) == 2
        [message] = told(alternatives("gpu", PARTITION, SHARE), constraints=[self.constraint("uuid")])
        assert (
            "request gpu/a: class gpu-inference gives partitions, request gpu/b: class gpu-dev gives shares" in message
        )

    def test_that_can_hold_are_let_be(self) -> None:
        assert not told(request("a"), request("b"), constraints=[self.constraint("nvlinkClique")])
        parts = [request("whole"), request("a", PARTITION), request("b", PARTITION)]
        assert not told(*parts, constraints=[self.constraint("parentUUID", "a", "b")])
        either = alternatives("gpu", PARTITION, FULL)
        assert not told(either, constraints=[self.constraint("nvlinkClique")])
        assert not told(either, constraints=[self.constraint("nvlinkClique", "gpu/a")])
        assert not told(
            request(device_class=SHARE), constraints=[{"matchAttribute": "resource.kubernetes.io/pcieRoot"}]
        )


def test_a_slip_in_the_drivers_name_is_found_in_parameters_and_constraints() -> None:
    [(path, value, message)] = found(claim(request(), config=[opaque("GpuConfig", driver="gpu.tesera.dev")]))
    assert (path, value) == ("spec.devices.config[0].opaque.driver", '"gpu.tesera.dev"')
    assert message == "is almost the driver's name; did you mean gpu.tessera.dev?"
    slip = {"matchAttribute": "gpu.tesera.dev/nvlinkClique"}
    assert told(request(), constraints=[slip]) == [
        "is almost a domain of Tessera's devices; did you mean gpu.tessera.dev?"
    ]
    elsewhere = [{"matchAttribute": f"{DRIVER}/{name}"} for name in ("numaNode", "memory")]
    assert told(request(), constraints=elsewhere) == [
        "is in Kubernetes' domain: resource.kubernetes.io/numaNode",
        "is a capacity; constraints are on attributes",
    ]


REQUESTS = "spec.devices.requests"


@pytest.mark.parametrize("count", [33, 2**63 - 1])
def test_a_count_that_no_claim_can_have_is_named(count: int) -> None:
    most = "a claim can have at most 32 devices: its pod would wait for ever"
    assert found(claim(request(count=count))) == [(f"{REQUESTS}[0].exactly.count", str(count), most)]
    assert most not in str(found(claim(request(count=32))))


def test_requests_that_are_together_for_more_devices_than_a_claim_can_have_are_named() -> None:
    both = [request("a", count=17), request("b", count=16)]
    assert found(claim(*both)) == [
        (REQUESTS, "", "ask for 33 devices together; a claim can have at most 32"),
    ]
    either = {
        "name": "b",
        "firstAvailable": [{"name": f"a{n}", "deviceClassName": "gpu-training", "count": n} for n in (16, 15)],
    }
    [(path, value, message)] = found(claim(request("a", count=17), either))
    assert (path, value) == ("spec.devices", "")
    assert message == (
        "the chart's admission policy claim-size.gpu.tessera.dev refuses it: the requests of this claim ask for 33 "
        "devices together; 16 are allowed (admission.maxDevices): spread them over several pods"
    )


@pytest.mark.parametrize(
    ("device_class", "amounts", "value", "message"),
    [
        ("gpu-inference", {"gpu.tessera.dev/memory": "9Gi"}, '"gpu.tessera.dev/memory"', "write memory"),
        ("gpu-inference", {"memry": "9Gi"}, '"memry"', "did you mean memory?"),
        ("gpu-inference", {"cores": "9"}, '"cores"', "accepted: clients, computeSlices, memory, multiprocessors"),
        ("gpu-dev", {"memory": "9Gi"}, '"9Gi"', "shares, which have no capacity"),
        ("gpu-training", {"clients": "1"}, '"1"', "class gpu-training gives full GPUs, which have no clients"),
        ("gpu-inference", {"memory": "40Gi"}, '"40Gi"', "leaves out 3g.40gb, which has 40192Mi to 40448Mi"),
        ("gpu-inference", {"memory": "5Ti"}, '"5Ti"', "no device of a known GPU that is selected has so much"),
        ("gpu-inference-1g-10gb", {"memory": "20Gi"}, '"20Gi"', "so much: 1g.10gb has"),
    ],
)
def test_capacities_that_nothing_of_the_class_has_are_found(
    device_class: str, amounts: dict[str, str], value: str, message: str
) -> None:
    [finding] = findings(claim(request(device_class=device_class, capacity={"requests": amounts})))
    assert finding.value == value
    assert message in finding.message


@pytest.mark.parametrize("amount", ["9Gi", "39Gi", "1", 9_000_000_000])
def test_capacities_that_some_device_of_the_class_has_are_let_be(amount: object) -> None:
    assert findings(claim(request(device_class="gpu-inference", capacity={"requests": {"memory": amount}}))) == []


def shared(name: str = "gpu", device_class: str = "gpu-shared", amount: str = "6Gi", **more: Any) -> dict[str, Any]:
    return request(name, device_class, capacity={"requests": {"memory": amount}}, **more)


OWN_SHARED = device_class("own", f'{OURS} && {TYPE} == "shared"')


@pytest.mark.parametrize(
    ("requests", "severity", "path", "message"),
    [
        ([request(device_class="gpu-shared")], "error", ".capacity", "add capacity: {requests: {memory: 6Gi}}"),
        ([request(device_class="own")], "error", ".capacity", "gets all memory of a GPU"),
        ([alternatives("b", "gpu-dev", "own")], "error", ".firstAvailable[1].capacity", "gets all memory of a GPU"),
        (
            [request(device_class="gpu-shared", capacity={"requests": {f"{DRIVER}/memory": "6Gi"}})],
            "error",
            f".capacity.requests.{DRIVER}/memory",
            "names are compared as written; write memory",
        ),
        (
            [request(device_class="own", capacity={"requests": {"memory": "6Gi", "multiprocessors": "2"}})],
            "error",
            ".capacity.requests.multiprocessors",
            "parts of shared GPUs, which have no multiprocessors",
        ),
        ([shared(amount="900Gi")], "warning", ".capacity.requests.memory", "no device of a known GPU"),
        ([shared(count=2)], "warning", ".count", "each with that memory; where GPUs are shared by MPS"),
        ([shared("a"), shared("b", "own")], "warning", ".deviceClassName", "a may get parts of two GPUs"),
    ],
)
def test_a_request_for_a_part_of_a_gpu_that_gets_something_else_is_found(
    requests: list[dict[str, Any]], severity: str, path: str, message: str
) -> None:
    [finding] = findings(claim(*requests), OWN_SHARED)
    assert finding.severity == severity
    assert finding.path.startswith("spec.devices.requests[")
    assert finding.path.endswith(path)
    assert message in finding.message


@pytest.mark.parametrize("requests", [[shared()], [shared(amount="1")], [shared("a"), request("b", "gpu-training")]])
def test_a_request_for_a_part_of_a_gpu_that_says_how_much_is_fine(requests: list[dict[str, Any]]) -> None:
    assert findings(claim(*requests)) == []


LIMITED_BY = f"{DEVICE}.memoryLimit"
MPS_CONFIG = opaque("SharedConfig", strategy="MPS")
BY_MPS = device_class("by-mps", f'{OURS} && {TYPE} == "shared"', config=[MPS_CONFIG])
LITTLE = (
    "warning",
    "spec.devices.requests[0].exactly.capacity.requests.memory",
    "where the MPS server limits memory, the context of each CUDA process counts, about 514 MiB: request 2Gi or more",
)


def slice_of(limit: str, driver: str = DRIVER) -> dict[str, Any]:
    """A ResourceSlice, as kubectl shows it, of a shared GPU whose claims ``limit`` holds to their memory."""
    attributes = {"type": {"string": "shared"}, "memoryLimit": {"string": limit}}
    spec = {"driver": driver, "devices": [{"name": "gpu-0"}, {"name": "gpu-0-shared", "attributes": attributes}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "a"}, "spec": spec}


@pytest.mark.parametrize(
    ("request_", "others", "config"),
    [
        (shared(amount="1Gi"), [], [MPS_CONFIG]),
        (shared(amount="1000Mi"), [], [opaque("SharedConfig", mps={"activeThreadPercentage": 30})]),
        (shared(amount="1Gi", selectors=[{"cel": {"expression": f'{LIMITED_BY} == "mps"'}}]), [], []),
        (shared(amount="1Gi", device_class="by-mps"), [BY_MPS], []),
        (shared(amount="1Gi"), [slice_of("mps")], []),
    ],
    ids=["strategy", "settings of MPS", "selector", "class", "GPUs of the cluster"],
)
def test_less_memory_than_programs_need_with_mps_is_a_warning(
    request_: dict[str, Any], others: list[dict[str, Any]], config: list[dict[str, Any]]
) -> None:
    [finding] = findings(claim(request_, config=config), *others)
    assert (finding.severity, finding.path, finding.message) == LITTLE


@pytest.mark.parametrize(
    ("request_", "others", "config"),
    [
        (shared(amount="1Gi"), [], []),
        (shared(amount="2Gi"), [slice_of("mps")], [MPS_CONFIG]),
        (shared(amount="1500Mi"), [], [MPS_CONFIG]),
        (shared(amount="1Gi"), [slice_of("cgroup"), slice_of("mps", "gpu.example.com")], []),
        (shared(amount="1Gi", selectors=[{"cel": {"expression": f'{LIMITED_BY} == "cgroup"'}}]), [slice_of("mps")], []),
        (shared(amount="1Gi", device_class="by-mps"), [BY_MPS], [opaque("SharedConfig", strategy="TimeSlicing")]),
        (shared(amount="1Gi"), [slice_of("mps")], [opaque("SharedConfig", strategy="TimeSlicing")]),
    ],
    ids=[
        "nothing says MPS",
        "2Gi",
        "rounded up",
        "other limits",
        "selector for cgroup",
        "in turns",
        "GPUs in turns",
    ],
)
def test_enough_memory_or_another_limit_than_that_of_mps_is_fine(
    request_: dict[str, Any], others: list[dict[str, Any]], config: list[dict[str, Any]]
) -> None:
    assert findings(claim(request_, config=config), *others) == []


def test_two_parts_that_a_constraint_keeps_on_one_gpu_are_let_be() -> None:
    assert not told(shared("a"), shared("b"), constraints=[{"matchAttribute": f"{DRIVER}/parentUUID"}])
    assert told(shared("a"), shared("b"), constraints=[{"matchAttribute": f"{DRIVER}/parentUUID", "requests": ["a"]}])


@pytest.mark.parametrize(("device_type", "number"), [("shared", 1), ("gpu", 0), ("share", 0)])
def test_a_resource_name_for_pods_without_a_claim_is_found_on_a_class_of_shared_gpus(
    device_type: str, number: int
) -> None:
    named = device_class("own", f'{OURS} && {TYPE} == "{device_type}"')
    named["spec"]["extendedResourceName"] = "example.com/gpu-memory"
    assert [path for path, _, _ in found(named)] == ["spec.extendedResourceName"] * number
