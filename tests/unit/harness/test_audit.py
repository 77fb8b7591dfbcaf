"""What counts as the use of a right, and what as a refusal, in an audit log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.audit.__main__ import main
from tests.audit.grants import Grant, grants, stand_in
from tests.audit.log import read
from tests.audit.report import compare
from tests.support.chart import rendered

NODE = "system:serviceaccount:tessera:tessera-node"
FENCE = {"resource": "configmaps", "namespace": "tessera", "name": "tessera-fence", "apiVersion": "v1"}
PATCH_FENCE = Grant("tessera-node", "patch", "", "configmaps", "tessera", "tessera-fence")


def event(code: int = 200, agent: str = "tessera-node", message: str = "", **target: str) -> dict[str, Any]:
    status = {"code": code, **({"message": message} if message else {})}
    reference = {**FENCE, **target}
    return {
        "user": {"username": NODE},
        "verb": "patch",
        "userAgent": agent,
        "objectRef": reference,
        "responseStatus": status,
    }


def logged(folder: Path, *events: dict[str, Any], name: str = "some") -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in events) + '{"cut of')
    return file


def test_a_right_on_one_object_is_used_by_a_request_for_that_object_alone(tmp_path: Path) -> None:
    own = read([logged(tmp_path, event(), event(404))])
    assert compare([PATCH_FENCE], own).used == [(PATCH_FENCE, 2)]
    others: list[dict[str, Any]] = [{"name": "another"}, {"namespace": "default"}, {"resource": "secrets"}]
    for other in others:
        assert compare([PATCH_FENCE], read([logged(tmp_path, event(**other))])).unused == [PATCH_FENCE]


def test_what_a_test_asks_with_the_token_counts_for_nothing(tmp_path: Path) -> None:
    asked = read([logged(tmp_path, event(agent="test"), event(403, agent="test"))])
    assert not asked.granted
    assert not asked.refused


@pytest.mark.parametrize(
    ("code", "message", "refused"),
    [
        (403, 'configmaps "tessera-fence" is forbidden', True),
        (403, 'configmaps "tessera-fence" is forbidden: not yet ready to handle request', False),
        (422, "ValidatingAdmissionPolicy 'own-fence.gpu.tessera.dev' denied request", True),
        (422, 'changing status.devices requires resource="resourceclaims/driver"', True),
        (422, "ValidatingAdmissionPolicy 'tessera-fence' denied request: is taking back", False),
        (409, "the object has been modified", False),
    ],
)
def test_a_refusal_is_what_a_right_was_missing_for(tmp_path: Path, code: int, message: str, refused: bool) -> None:
    report = compare([], read([logged(tmp_path, event(code, message=message), name="mine")]))
    assert bool(report.refused) is refused
    assert report.sound is not refused
    assert all("in cluster mine, 1 times: " in each for each in report.refused)


def test_what_is_granted_is_refused_only_by_an_api_server_that_has_just_started(tmp_path: Path) -> None:
    message = 'configmaps "tessera-fence" is forbidden: User "x" cannot patch resource "configmaps"'
    asked = read([logged(tmp_path, event(403, message=message))])
    assert not compare([PATCH_FENCE], asked).refused
    assert len(compare([], asked).refused) == 1
    boundary = read([logged(tmp_path, event(422, message="ValidatingAdmissionPolicy 'own-fence' denied"))])
    assert len(compare([PATCH_FENCE], boundary).refused) == 1


def test_a_right_that_no_request_names_is_used_with_the_one_it_is_checked_with() -> None:
    special = {str(grant): stand_in(grant) for grant in grants(rendered()) if stand_in(grant) != grant}
    assert {f"{each.who}: {each.verb} {each.resource}" for each in special.values()} == {
        "tessera-node: patch resourceclaims/status",
        "tessera-controller: update resourceclaims/status",
    }
    assert len(special) == 2


def test_logs_of_too_little_are_a_failure_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path)) == 2
    assert "no audit logs" in capsys.readouterr().err
    logged(tmp_path, event())
    assert main(str(tmp_path)) == 1
    table = capsys.readouterr().out
    assert "tessera-node: patch configmaps of tessera-fence in tessera" in table
    assert re.search(r"\d+ never used, 0 kinds of request refused: not as few as needed, or too few\n$", table)
