"""What the chart's admission policies know of parameters is what the driver knows; lint has the same policies."""

from __future__ import annotations

from tests.support import admission_policies
from tests.support.parameter_tables import FILE, LEVELS, tables, text


def test_the_charts_tables_are_those_of_the_code() -> None:
    assert FILE.read_text() == text(), "python -m tests.support.parameter_tables writes them anew"


def test_the_policies_that_lint_and_simulate_evaluate_are_those_of_the_chart() -> None:
    written, anew = admission_policies.FILE.read_text(), "python -m tests.support.admission_policies writes them anew"
    assert written == admission_policies.text(), anew


def test_every_kind_says_what_it_serves_and_no_field_is_deeper_than_the_policy_looks() -> None:
    found = tables()
    names = {f"{version}/{kind}" for version, kinds in found["kinds"].items() for kind in kinds}
    assert found["fields"].keys() == found["values"].keys() == found["serves"].keys() == names
    paths = [path for fields in (*found["fields"].values(), *found["values"].values()) for path in fields]
    assert max(path.count(".") for path in paths) == LEVELS - 1
    assert all(found["serves"].values())
