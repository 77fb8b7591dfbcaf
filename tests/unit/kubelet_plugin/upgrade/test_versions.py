"""A node is updated and rolled back: what one version writes, those before and after it read (docs/upgrade.md).

The other way round can't be tried in a shallow clone, so each version's own types are kept beside its files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from driver.errors import StateError
from driver.model.gpu_settings import GpuSharing, parse_shared
from driver.model.plan import PlanSpec, PlanStatus
from kubelet_plugin.checkpoint.records import decode_record
from kubelet_plugin.health.recorded_faults import HEALTH_FILE
from kubelet_plugin.inventory.inventory import ClaimReference
from kubelet_plugin.plan.plan_file import PLAN_FILE
from kubelet_plugin.upgrade.rolling_update import check_readable
from tests.support.claims import result
from tests.support.node import NodeUnderTest, start_node
from tests.unit.golden.versions import v0_1_0
from tests.unit.golden.versions.written import BOOT, CLAIMS, FOLDER, documents, folder, write

VERSIONS = sorted(path for path in FOLDER.iterdir() if (path / "claims").is_dir())
READERS = {"0.1.0": v0_1_0}
SHARES = GpuSharing(lambda _: 4)
SHARING = replace(SHARES, strategy_of=parse_shared("all=time-slicing").of)
LIMITS = ("maxLength", "maxItems", "enum", "pattern", "type", "format")


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    """What one version wrote."""
    path: Path = request.param
    return path


def records(directory: Path) -> list[Path]:
    return sorted((directory / "claims").glob("*.json"))


def test_the_version_at_hand_writes_what_is_kept_of_it(tmp_path: Path) -> None:
    """Else what it writes has changed: see the rule, then `python -m tests.unit.golden.versions`."""
    write(tmp_path / "now")
    there = {path.relative_to(folder()): _known(path) for path in folder().rglob("*.json")}
    assert {path.relative_to(tmp_path / "now"): _known(path) for path in (tmp_path / "now").rglob("*.json")} == there


def test_what_another_version_wrote_is_read_and_nothing_of_it_is_lost(kept: Path) -> None:
    check_readable(kept)
    for path in records(kept):
        record = decode_record(path.read_bytes(), path)
        assert json.loads(msgspec.json.encode(record)) == json.loads(path.read_text())
    for file, type_ in (("plan-spec.json", PlanSpec), ("plan-status.json", PlanStatus)):
        read = msgspec.json.decode((kept / file).read_bytes(), type=type_)
        assert json.loads(msgspec.json.encode(read)) == json.loads((kept / file).read_text())
    for file, decoder in (("plan.json", PLAN_FILE), ("health.json", HEALTH_FILE)):
        read = decoder.decode((kept / file).read_bytes())
        assert json.loads(msgspec.json.encode(read)) == json.loads((kept / file).read_text())


def test_a_node_goes_on_with_what_another_version_prepared(kept: Path, tmp_path: Path) -> None:
    """What was prepared is held, what was half done is undone, and all of it can be unprepared."""
    node = _node_with(kept, tmp_path)
    assert {path.removesuffix(".json") for path in node.records()} == {f"uid-{claim}" for claim in CLAIMS}
    held = {name for gpu in range(4) for name in node.held(gpu)}
    assert held == {device for devices, _ in CLAIMS.values() for device in devices}
    for claim, (devices, config) in CLAIMS.items():
        reference = node.api.allocate(claim, *devices, config=config, uid=f"uid-{claim}")
        assert [device.device for device in node.preparer.prepare(reference)] == devices
        node.preparer.unprepare(reference)
    assert node.nothing_left()


def test_the_version_before_reads_what_this_one_writes(kept: Path, tmp_path: Path) -> None:
    """After a rollback: no field is missing, none has another type or a value that it doesn't know."""
    write(tmp_path / "now")
    reader = READERS[kept.name]
    for path in records(tmp_path / "now"):
        read: Any = msgspec.json.decode(path.read_bytes(), type=reader.CLAIM)
        assert read.uid == path.stem
    for file, content in documents():
        if file in reader.DOCUMENTS:
            msgspec.convert(content, reader.DOCUMENTS[file])


def test_the_version_before_refuses_a_node_until_its_shared_claims_have_ended(kept: Path, tmp_path: Path) -> None:
    """It would offer their GPUs. A file's name is the UID of the claim, and it is in the error."""
    node = start_node(tmp_path, gpus="h100-pcie-4", sharing=SHARING)
    node.preparer.prepare(node.api.allocate("full", "gpu-1", uid="uid-full"))
    part = result("gpu-0-shared", shareID="s1", consumedCapacity={"memory": "6Gi"})
    shared = node.api.allocate("shared", part, uid="uid-shared")
    node.preparer.prepare(shared)
    assert unreadable(READERS[kept.name].CLAIM, tmp_path / "state") == ["uid-shared"]
    check_readable(tmp_path / "state")
    node.preparer.unprepare(shared)
    assert unreadable(READERS[kept.name].CLAIM, tmp_path / "state") == []


def unreadable(record_type: type[msgspec.Struct], state_dir: Path) -> list[str]:
    """The claims whose records a version can't read."""
    found = []
    for path in records(state_dir):
        try:
            msgspec.json.decode(path.read_bytes(), type=record_type)
        except msgspec.ValidationError:
            found.append(path.stem)
    return found


def test_a_record_of_a_later_version_is_refused_and_its_claim_is_named(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "claims", tmp_path / "claims")
    path = tmp_path / "claims" / "uid-full.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    with pytest.raises(StateError, match="record of claim default/full has version 3, this program reads versions 1"):
        check_readable(tmp_path)


def test_a_node_that_shares_its_gpus_now_shares_none_that_earlier_claims_have(kept: Path, tmp_path: Path) -> None:
    node = _node_with(kept, tmp_path, SHARING)
    assert [name for gpu in range(4) for name in node.offered(gpu) if name.endswith("-shared")] == []
    for claim in CLAIMS:
        node.preparer.unprepare(ClaimReference("default", claim, f"uid-{claim}"))
    assert all(f"gpu-{gpu}-shared" in node.offered(gpu) for gpu in range(4))


def test_fields_that_a_later_version_adds_are_skipped(kept: Path, tmp_path: Path) -> None:
    for path in records(kept):
        later = {**json.loads(path.read_text()), "later": {"a": 1}}
        later["devices"] = [{**device, "later": [1]} for device in later["devices"]]
        found = decode_record(json.dumps(later).encode(), path)
        assert found == decode_record(path.read_bytes(), path)
    for file in ("plan-spec.json", "plan-status.json"):
        later = {**json.loads((kept / file).read_text()), "later": 1}
        msgspec.convert(later, PlanSpec if file == "plan-spec.json" else PlanStatus)


def test_the_definition_of_plans_takes_what_another_version_stores(kept: Path) -> None:
    """No field goes, none gets narrower, none is required: else stored plans could not be written any more."""
    now = dict(documents())["crd.json"]
    assert list(_narrower(json.loads((kept / "crd.json").read_text()), now, "plan")) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"properties": {}}, "plan.a: is gone"),
        ({"properties": {"a": {"type": "integer"}}}, "plan.a: type was string"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "plan.a: maxLength is new"),
        ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, "plan: requires a"),
    ],
)
def test_a_definition_that_got_narrower_is_noticed(change: dict[str, Any], complaint: str) -> None:
    before = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert complaint in list(_narrower(before, {"type": "object", **change}, "plan"))


def _without_description(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "description"}


def _known(path: Path) -> Any:
    """A file's content without descriptions, which no program reads; partitions get new UUIDs each time."""
    content = json.loads(
        path.read_text(), object_hook=lambda item: {k: v for k, v in item.items() if k != "description"}
    )
    for device in content.get("devices", ()) if path.parent.name == "claims" else ():
        device.pop("uuid", None)
    return content


def _node_with(kept: Path, root: Path, sharing: GpuSharing = SHARES) -> NodeUnderTest:
    boot = start_node(root, gpus="h100-pcie-4", sharing=sharing).node.boot
    shutil.copytree(kept / "claims", root / "state" / "claims", dirs_exist_ok=True)
    for path in records(root / "state"):
        path.write_text(path.read_text().replace(BOOT, boot))
    return start_node(root, gpus="h100-pcie-4", sharing=sharing)


def _narrower(before: Any, now: Any, path: str) -> list[str]:
    """What ``before`` took that ``now`` refuses or drops."""
    found = [f"{path}: requires {name}" for name in set(now.get("required", ())) - set(before.get("required", ()))]
    for limit in LIMITS:
        if before.get(limit) == now.get(limit) or _wider(limit, before.get(limit), now.get(limit)):
            continue
        found.append(f"{path}: {limit} " + (f"was {before[limit]}" if limit in before else "is new"))
    for name, schema in before.get("properties", {}).items():
        if name not in now.get("properties", {}):
            found.append(f"{path}.{name}: is gone")
            continue
        found += _narrower(schema, now["properties"][name], f"{path}.{name}")
    if "items" in before and "items" in now:
        found += _narrower(before["items"], now["items"], f"{path}[]")
    return found


def _wider(limit: str, before: Any, now: Any) -> bool:
    if now is None:
        return limit != "type"
    if before is None:
        return False
    if limit in ("maxLength", "maxItems"):
        return bool(now >= before)
    return limit == "enum" and set(before) <= set(now)
