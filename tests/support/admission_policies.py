"""The chart's admission policies as `tessera lint` and `tessera simulate` have them.

``python -m tests.support.admission_policies`` writes their file anew; a test fails where it is not what the chart has.
"""

from __future__ import annotations

import json
from pathlib import Path

from deviceclasses.lint import admission_policies
from deviceclasses.lint.admission_policies import PLACEHOLDER, RESOURCES
from tests.support.chart import Object, rendered

FILE = Path(admission_policies.__file__).with_suffix(".json")


def text() -> str:
    """The policies that are asked when an object of one of the kinds is created."""
    policies = [
        {"metadata": {"name": each["metadata"]["name"]}, "spec": each["spec"]}
        for each in rendered({"driverName": PLACEHOLDER})
        if each["kind"] == "ValidatingAdmissionPolicy" and _concerns(each)
    ]
    return f"{json.dumps(policies, indent=1)}\n"


def _concerns(policy: Object) -> bool:
    return any(
        (group, resource) in RESOURCES.values() and "CREATE" in rule["operations"]
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    )


if __name__ == "__main__":
    FILE.write_text(text())
