"""Opaque parameters of our own kinds: what is accepted, and every fault told at once."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from driver.config.opaque_parameters import (
    GpuConfig,
    InvalidParameters,
    MigDeviceConfig,
    MpsSettings,
    ShareConfig,
    SharedConfig,
    parse_parameters,
)
from driver.model.gpu_settings import TimeSlice
from driver.model.offer import DeviceKind

VERSION = "gpu.tessera.dev/v1alpha1"


def parameters(kind: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": kind, **fields}


def refusal(raw: object) -> list[str]:
    with pytest.raises(InvalidParameters) as refused:
        parse_parameters(raw, "here")
    assert str(refused.value).startswith("here: opaque parameters are not valid: ")
    return [str(fault) for fault in refused.value.faults]


@pytest.mark.parametrize("kind", ["GpuConfig", "ShareConfig"])
@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        pytest.param({}, None, id="no sharing"),
        pytest.param({"sharing": None}, None, id="sharing is null"),
        pytest.param({"sharing": {}}, TimeSlice.DEFAULT, id="sharing is empty"),
        pytest.param({"sharing": {"strategy": None}}, TimeSlice.DEFAULT, id="strategy is null"),
        pytest.param({"sharing": {"strategy": "TimeSlicing"}}, TimeSlice.DEFAULT, id="only a strategy"),
        pytest.param({"sharing": {"timeSlicing": None}}, TimeSlice.DEFAULT, id="timeSlicing is null"),
        pytest.param({"sharing": {"timeSlicing": {}}}, TimeSlice.DEFAULT, id="timeSlicing is empty"),
        pytest.param({"sharing": {"timeSlicing": {"interval": None}}}, TimeSlice.DEFAULT, id="interval is null"),
        *(
            pytest.param({"sharing": {"timeSlicing": {"interval": interval.value}}}, interval, id=interval.value)
            for interval in TimeSlice
        ),
    ],
)
def test_the_interval_asked_for_is_understood_and_missing_pieces_are_the_default(
    kind: str, sharing: dict[str, Any], expected: TimeSlice | None
) -> None:
    assert parse_parameters(parameters(kind, **sharing), "here").time_slice is expected


def test_each_kind_is_its_own_type() -> None:
    for kind in (GpuConfig, MigDeviceConfig, ShareConfig, SharedConfig):
        assert type(parse_parameters(parameters(kind.__name__), "here")) is kind


def test_a_partition_has_no_wish_for_a_time_slice() -> None:
    assert parse_parameters(parameters("MigDeviceConfig"), "here").time_slice is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            parameters("GpuConfg"),
            r'kind "GpuConfg": is not known; accepted: GpuConfig, MigDeviceConfig, .*; did you mean GpuConfig\?$',
            id="kind misspelt",
        ),
        pytest.param(parameters("gpuconfig"), r"did you mean GpuConfig\?", id="kind without capitals"),
        pytest.param({"apiVersion": VERSION}, "kind: is missing; accepted: GpuConfig", id="no kind"),
        pytest.param(parameters("GpuConfig") | {"kind": None}, "kind: is missing; accepted:", id="kind is null"),
        pytest.param(parameters("GpuConfig") | {"kind": ["x"]}, r"kind \[\.\.\.\]: must be a string", id="kind a list"),
        pytest.param({"kind": "GpuConfig"}, f"apiVersion: is missing; accepted: {VERSION}, ", id="no apiVersion"),
        pytest.param(
            {"apiVersion": "gpu.tessera.dev/v1", "kind": "GpuConfig"},
            rf'apiVersion "gpu.tessera.dev/v1": is not known; .*did you mean {VERSION}\?',
            id="another version",
        ),
        pytest.param(
            {"apiVersion": 1, "kind": "GpuConfig"}, "apiVersion 1: must be a string", id="apiVersion a number"
        ),
        pytest.param(
            parameters("GpuConfig", sharng={}),
            r"sharng {}: no such field; accepted: sharing; did you mean sharing\?",
            id="field misspelt",
        ),
        pytest.param(
            parameters("ShareConfig", sharing={"time_slicing": {}}), r"did you mean timeSlicing\?", id="snake case"
        ),
        pytest.param(
            parameters("GpuConfig", sharing={"timeSlicing": {"interval": "short"}}),
            r'sharing.timeSlicing.interval "short": is not known; accepted: Default, Short, Medium, Long; '
            r"did you mean Short\?",
            id="interval without a capital",
        ),
        pytest.param(
            parameters("GpuConfig", sharing={"timeSlicing": {"interval": 2}}),
            "sharing.timeSlicing.interval 2: must be a string; accepted: Default, Short",
            id="interval a number",
        ),
        pytest.param(
            parameters("GpuConfig", sharing="TimeSlicing"),
            'sharing "TimeSlicing": must be an object with fields strategy, timeSlicing, or left out',
            id="sharing a string",
        ),
        pytest.param(
            parameters("ShareConfig", sharing={"timeSlicing": ["Short"]}),
            r"sharing.timeSlicing \[...\]: must be an object with fields interval",
            id="timeSlicing a list",
        ),
        pytest.param(
            parameters("ShareConfig", sharing={"strategy": "MPS"}),
            r'sharing.strategy "MPS": MPS is for shared devices \(kind SharedConfig\), .*; accepted: TimeSlicing',
            id="MPS as the strategy",
        ),
        pytest.param(
            parameters("GpuConfig", sharing={"mps": {"defaultActiveThreadPercentage": 50}}),
            "sharing.mps {...}: MPS is for shared devices .*; accepted: strategy, timeSlicing$",
            id="MPS settings",
        ),
        pytest.param(
            parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing"}),
            "sharing {...}: time-slicing settings have no effect on a MIG partition; this kind has no settings",
            id="time-slicing on a partition",
        ),
        *(
            pytest.param(
                parameters("SharedConfig", mps={"activeThreadPercentage": number}),
                rf"mps.activeThreadPercentage {shown}: must be a whole number from 1 to 100$",
                id=f"{shown} percent",
            )
            for number, shown in ((0, "0"), (101, "101"), (12.5, "12.5"), ("30", '"30"'), (True, "true"))
        ),
        pytest.param(
            parameters("SharedConfig", mps={"memory": "6Gi"}),
            'mps.memory "6Gi": no such field; accepted: activeThreadPercentage',
            id="memory in the parameters",
        ),
        pytest.param(
            parameters("SharedConfig", strategy="Mps"),
            'strategy "Mps": is not known; accepted: MPS, TimeSlicing; did you mean MPS',
            id="strategy misspelt",
        ),
        pytest.param(parameters("GpuConfig") | {7: 1}, "7: is no field: names of fields are strings", id="YAML's 7: 1"),
        pytest.param(parameters("x" * 500), f'kind "{"x" * 59}...: is not known', id="a long value is cut"),
        pytest.param(["GpuConfig"], r"parameters \[...\]: must be an object with apiVersion and kind", id="a list"),
        pytest.param(None, "parameters null: must be an object", id="null"),
    ],
)
def test_a_wrong_name_or_value_is_told_with_what_would_be_accepted(raw: object, expected: str) -> None:
    [fault] = refusal(raw)
    assert re.search(expected, fault)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SharedConfig()),
        ({"strategy": "MPS", "mps": None}, SharedConfig("MPS")),
        ({"strategy": "MPS", "mps": {"activeThreadPercentage": 30}}, SharedConfig("MPS", MpsSettings(30))),
        ({"mps": {"activeThreadPercentage": 100}}, SharedConfig(None, MpsSettings(100))),
    ],
)
def test_a_shared_device_has_a_strategy_and_a_percentage_of_threads(
    fields: dict[str, Any], expected: SharedConfig
) -> None:
    parsed = parse_parameters(parameters("SharedConfig", **fields), "here", DeviceKind.SHARED)
    assert parsed == expected
    assert parsed.time_slice is None


def test_a_time_sliced_shared_device_has_an_interval() -> None:
    raw = parameters("SharedConfig", strategy="TimeSlicing", timeSlicing={"interval": "Short"})
    assert parse_parameters(raw, "here", DeviceKind.SHARED).time_slice is TimeSlice.SHORT


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"strategy": "TimeSlicing", "mps": {"activeThreadPercentage": 30}}, "mps"),
        ({"strategy": "MPS", "timeSlicing": {"interval": "Short"}}, "timeSlicing"),
    ],
)
def test_settings_of_the_other_strategy_are_refused_for_a_device(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidParameters) as refused:
        parse_parameters(parameters("SharedConfig", **fields), "here", DeviceKind.SHARED)
    [fault] = refused.value.faults
    assert fault.path == path
    assert fault.message == f"strategy is {fields['strategy']}, which has no such settings; leave one out"


def test_every_fault_is_told_at_once() -> None:
    wrong = {
        "apiVersion": "gpu.tessera.dev/v1",
        "kind": "ShareConfg",
        "sharing": {"strategy": "MPS", "timeSlicing": {"interval": "Quick"}, "timeslice": 3},
        "extra": True,
    }
    paths = [fault.split(" ")[0].rstrip(":") for fault in refusal(wrong)]
    assert paths == [
        "apiVersion",
        "kind",
        "sharing.strategy",
        "sharing.timeSlicing.interval",
        "sharing.timeslice",
        "extra",
    ]


def test_two_missing_names_are_two_faults() -> None:
    assert len(refusal({})) == 2


FIRST_USE = """
import sys, threading
from typing import Literal
from msgspec import convert, defstruct
from driver.config.strict_schema import Group, Strict, faults_of

def strict(name, kind):
    fields = [(f"{name}{number}", kind | None, None) for number in range(20)]
    return defstruct(name, fields, bases=(Strict,), frozen=True, rename="camel")

def use(kind, all_there):
    all_there.wait()
    assert not list(faults_of(kind, {"outer1": {"inner1": "x"}}))
    convert({"outer1": {"inner1": "x"}}, kind)

sys.setswitchinterval(1e-6)
for _ in range(100):
    kind, all_there = strict("outer", strict("inner", Literal["x"])), threading.Barrier(4)
    Group("v1", {"Kind": kind}, {})
    threads = [threading.Thread(target=use, args=(kind, all_there)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_claims_that_are_the_first_to_use_a_kind_at_the_same_time_do_not_end_the_process() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)
