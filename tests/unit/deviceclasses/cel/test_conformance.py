"""Verdicts of the CEL engine equal those of the real API server and scheduler (renewed by `make conformance`)."""

from __future__ import annotations

import pytest

from deviceclasses.cel.engine import CelDevice, compile_selector, from_slice_device
from driver.errors import CelError
from tests.conformance import table
from tests.conformance.devices import DEVICES, entry
from tests.conformance.expressions import UNSUPPORTED, expressions, refused_for_cost

ROWS = table.read()
RENEW = "renew the table with `make conformance`"
VALID = sorted(name for name, row in ROWS.items() if row.valid and name not in UNSUPPORTED)
COSTLY = sorted(name for name in ROWS if refused_for_cost(name))
REFUSED = sorted(name for name, row in ROWS.items() if not row.valid and name not in COSTLY)
ON: dict[str, CelDevice] = {name: from_slice_device(driver, entry(name)) for name, (driver, _) in DEVICES.items()}


def verdicts(name: str) -> dict[str, bool | str]:
    program = compile_selector(ROWS[name].expression)
    found = {device: program.verdict(ON[device]) for device in ROWS[name].devices}
    return {device: "error" if isinstance(verdict, str) else verdict for device, verdict in found.items()}


@pytest.mark.parametrize("name", VALID)
def test_devices_are_selected_as_by_the_real_scheduler(name: str) -> None:
    assert verdicts(name) == ROWS[name].devices


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_real_api_server_refuses_is_refused(name: str) -> None:
    with pytest.raises(CelError):
        compile_selector(ROWS[name].expression)


@pytest.mark.parametrize("name", COSTLY)
def test_what_the_real_api_server_refuses_only_for_its_estimated_cost_is_evaluated_within_the_work_limit(
    name: str,
) -> None:
    assert not ROWS[name].valid, "no exception: the API server accepts it"
    program = compile_selector(ROWS[name].expression)
    assert isinstance(program.verdict(next(iter(ON.values()))), (bool, str)), "a work limit ends what takes long"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_tessera_does_not_evaluate_is_refused_and_not_answered(name: str) -> None:
    assert ROWS[name].valid, "no exception: the real one refuses it too"
    with pytest.raises(CelError):
        compile_selector(ROWS[name].expression)


def test_the_table_is_of_the_expressions_there_are() -> None:
    assert {name: row.expression for name, row in ROWS.items()} == expressions(), RENEW


def test_the_table_has_every_kind_of_answer_often() -> None:
    answers = [answer for row in ROWS.values() for answer in row.devices.values()]
    assert len(ROWS) >= 200
    assert min(answers.count(answer) for answer in (True, False, "error")) >= 100
    assert len(REFUSED) >= 50
