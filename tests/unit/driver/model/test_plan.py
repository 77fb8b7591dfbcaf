"""What a node reports in its plan's status, read by the version after."""

from __future__ import annotations

import pytest

from driver.errors import StateError
from driver.model.reported_gpus import FaultKind, GpuReport, decode_inventory, encode_inventory
from tests.support.gpus import gpu_of


@pytest.mark.parametrize(
    ("fault", "kind", "condition"),
    [
        (None, None, None),
        ("cordoned: fan on Friday", FaultKind.CORDONED, None),
        ("cordoned", FaultKind.CORDONED, None),
        ("mig-manager (a label) owns it", FaultKind.RESERVED, None),
        ("xid-74: XID 74, NVLink error", FaultKind.UNHEALTHY, "xid-74"),
        ("NVML says: GPU is lost", FaultKind.UNAVAILABLE, None),
    ],
)
def test_the_kind_of_a_fault_follows_from_its_text_where_an_earlier_version_reports_it(
    fault: str | None, kind: FaultKind | None, condition: str | None
) -> None:
    [report] = decode_inventory(encode_inventory([GpuReport(gpu_of(), 0, fault=fault)]))
    assert (report.fault, report.fault_kind, report.condition) == (fault, kind, condition)


def test_a_reported_kind_is_not_read_from_the_text() -> None:
    reported = GpuReport(gpu_of(), 0, fault="cordoned: fan", fault_kind=FaultKind.UNAVAILABLE)
    assert decode_inventory(encode_inventory([reported])) == [reported]


def test_a_kind_that_only_a_later_version_knows_leaves_the_gpu_unavailable() -> None:
    reported = GpuReport(gpu_of(), 0, fault="failing: it refused to be cut", fault_kind=FaultKind.UNHEALTHY)
    [report] = decode_inventory(encode_inventory([reported]).replace('"Unhealthy"', '"Failing"'))
    assert (report.fault, report.fault_kind) == ("failing: it refused to be cut", FaultKind.UNAVAILABLE)


@pytest.mark.parametrize(
    ("written", "hostile"),
    [
        ('"memory_slices":8', '"memory_slices":9223372036854775807'),
        ('"size":1}', '"size":1000000000}'),
        ('"start":0', '"start":-1'),
        ('"shares":4', '"shares":100000000'),
        ('"foreign":0', '"foreign":-1'),
        ('"simulated":true', f'"simulated":true,"later":{"[" * 5000}{"]" * 5000}'),
    ],
)
def test_numbers_of_a_node_that_no_gpu_has_make_its_inventory_unreadable(written: str, hostile: str) -> None:
    inventory = encode_inventory([GpuReport(gpu_of(), 0, shares=4)])
    assert written in inventory
    with pytest.raises(StateError):
        decode_inventory(inventory.replace(written, hostile, 1))
