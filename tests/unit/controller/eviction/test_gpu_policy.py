"""What a GpuPolicy says: the times in which it evicts no pod, and values that are refused."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from controller.eviction.gpu_policy import QuietHours, parse_policy
from driver.errors import UsageError

OFFICE = {"from": "08:00", "to": "18:00", "days": ["Mon", "Tue", "Wed", "Thu", "Fri"], "timeZone": "Europe/Berlin"}
NIGHT = {"from": "22:00", "to": "06:00", "days": ["Fri"], "timeZone": "Europe/Berlin"}
SUNDAY = {"from": "00:00", "to": "00:00", "days": ["Sun"], "timeZone": "America/New_York"}
EARLY = {"from": "01:00", "to": "04:00", "timeZone": "Europe/Berlin"}
TWICE = {"from": "22:00", "to": "02:30", "timeZone": "Europe/Berlin"}


@pytest.mark.parametrize(
    ("hours", "now", "end"),
    [
        pytest.param(OFFICE, "2026-11-23T07:00:00", "Mon 18:00", id="from its first minute"),
        pytest.param(OFFICE, "2026-11-23T06:59:59", None, id="not before"),
        pytest.param(OFFICE, "2026-11-23T16:59:59", "Mon 18:00", id="to its last minute"),
        pytest.param(OFFICE, "2026-11-23T17:00:00", None, id="not after"),
        pytest.param(OFFICE, "2026-11-22T12:00:00", None, id="not on another day"),
        pytest.param(OFFICE, "2026-07-06T06:00:00", "Mon 18:00", id="in summer an hour earlier"),
        pytest.param(NIGHT, "2026-11-27T21:00:00", "Sat 06:00", id="the evening"),
        pytest.param(NIGHT, "2026-11-28T04:59:59", "Sat 06:00", id="the night after it"),
        pytest.param(NIGHT, "2026-11-27T04:00:00", None, id="not the night before it"),
        pytest.param(NIGHT, "2026-11-28T21:00:00", None, id="not the evening of the next day"),
        pytest.param(SUNDAY, "2026-11-29T05:00:00", "Mon 00:00", id="a whole day begins"),
        pytest.param(SUNDAY, "2026-11-30T04:59:59", "Mon 00:00", id="a whole day ends"),
        pytest.param(SUNDAY, "2026-11-30T05:00:00", None, id="the day after"),
        pytest.param(EARLY, "2026-03-29T01:59:59", "Sun 04:00", id="a night of two hours"),
        pytest.param(EARLY, "2026-03-29T02:00:00", None, id="the end of a night of two hours"),
        pytest.param(EARLY, "2026-10-24T23:00:00", "Sun 04:00", id="a night of four hours"),
        pytest.param(EARLY, "2026-10-25T03:00:00", None, id="the end of a night of four hours"),
        pytest.param(TWICE, "2026-10-25T01:29:59", "Sun 02:30", id="to a time that is there twice"),
        pytest.param(TWICE, "2026-10-25T01:30:00", None, id="not after it is there again"),
        pytest.param(TWICE, "2026-03-29T01:29:59", "Sun 02:30", id="to a time that is not there"),
        pytest.param(TWICE, "2026-03-29T01:30:00", None, id="not after it"),
    ],
)
def test_quiet_hours_are_those_of_the_clocks_in_their_time_zone(
    hours: dict[str, Any], now: str, end: str | None
) -> None:
    ends = QuietHours.model_validate(hours).end_of(datetime.fromisoformat(f"{now}Z"))
    assert (None if ends is None else f"{ends:%a %H:%M}") == end


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"quietHours": [{**OFFICE, "timeZone": "Berlin"}]}, "spec.quietHours[0].timeZone"),
        ({"quietHours": [OFFICE, {**OFFICE, "timeZone": "Europe"}]}, "spec.quietHours[1].timeZone"),
        ({"quietHours": [{**OFFICE, "timeZone": "../Europe/Berlin"}]}, "spec.quietHours[0].timeZone"),
        ({"quietHours": [{"from": "08:00", "to": "18:00"}]}, "spec.quietHours[0].timeZone: Field required"),
        ({"quietHours": [{**OFFICE, "from": "24:00"}]}, "spec.quietHours[0].from"),
        ({"quietHours": [{**OFFICE, "from": "8:00"}]}, "spec.quietHours[0].from"),
        ({"quietHours": [{**OFFICE, "to": 1080}]}, "spec.quietHours[0].to"),  # 18:00 without quotes
        ({"quietHours": [{**OFFICE, "days": ["Monday"]}]}, "spec.quietHours[0].days[0]"),
        ({"quietHours": [{**OFFICE, "days": []}]}, "spec.quietHours[0].days"),
        ({"budget": {"perNamespace": -1}}, "spec.budget.perNamespace"),
        ({"budget": {"perNamespace": "3"}}, "spec.budget.perNamespace"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(spec: dict[str, Any], field: str) -> None:
    manifest = {"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "p"}, "spec": spec}
    with pytest.raises(UsageError) as refused:
        parse_policy(manifest, "here")
    assert f"here: {field}" in str(refused.value)


def test_time_zones_are_known_in_the_image_which_has_no_folder_of_them() -> None:
    code = f"from controller.eviction.gpu_policy import QuietHours as q; print(q.model_validate({OFFICE!r}).time_zone)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONTZPATH": ""}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "Europe/Berlin\n", done.stderr
