"""How much one prepare passes, as ``make trace-prepare`` prints it."""

from __future__ import annotations

from tests.trace.prepare import traced_prepares

MOST_FUNCTIONS, MOST_MODULES = 80, 16


def test_a_prepare_passes_few_functions_and_asks_the_firmware_rarely() -> None:
    prepares = {prepare.what: prepare for prepare in traced_prepares()}
    for prepare in prepares.values():
        assert len(prepare.trace.calls) <= MOST_FUNCTIONS, prepare.summary()
        assert len(prepare.trace.modules) <= MOST_MODULES, prepare.summary()
    assert prepares["prepare of a full GPU"].firmware.total() <= 1
    assert not prepares["repeat of a full GPU"].firmware
    assert all(prepare.firmware["nvmlDeviceGetMigMode"] <= 1 for prepare in prepares.values())
