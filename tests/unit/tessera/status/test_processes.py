"""Output of ``tessera status``: of nodes whose directories or kubelets are in trouble, and of a missing fence."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError

import pytest

from controller.explain.events import InvolvedObject, WrittenEvent
from kubelet_plugin.status.events import EventReason
from tessera.commands.status import as_text
from tests.unit.tessera.status.test_checks import NODE, NOW, SOUND, found, item, lease, result, stamp


def event(reason: EventReason, ago_s: float, message: str = "") -> WrittenEvent:
    """An Event that the node's plugin reported so long ago."""
    at = stamp(NOW - timedelta(seconds=ago_s))
    about = InvolvedObject("Node", NODE)
    return WrittenEvent(about, reason.value, message or f"message of {reason.value}", at)


UNWRITABLE, WRITABLE = EventReason.STATE_UNWRITABLE, EventReason.STATE_WRITABLE
OTHER, RESTORED = EventReason.CDI_WRITABLE, EventReason.CDI_RESTORED


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], None, id="no event"),
        pytest.param([(UNWRITABLE, 20)], UNWRITABLE, id="not writable"),
        pytest.param([(UNWRITABLE, 1200)], None, id="not reported any more"),
        pytest.param([(UNWRITABLE, 50), (WRITABLE, 20)], None, id="writable again"),
        pytest.param([(WRITABLE, 50), (UNWRITABLE, 20)], UNWRITABLE, id="not writable again"),
        pytest.param([(UNWRITABLE, 50), (OTHER, 20)], UNWRITABLE, id="the other directory is writable"),
        pytest.param([(EventReason.CDI_UNWRITABLE, 20)], EventReason.CDI_UNWRITABLE, id="CDI directory"),
        pytest.param([(RESTORED, 60)], RESTORED, id="made again"),
        pytest.param([(RESTORED, 1200)], None, id="made again long ago"),
    ],
)
def test_a_directory_is_a_finding_while_its_plugin_reports_it(
    events: list[tuple[EventReason, float]], expected: EventReason | None
) -> None:
    snapshot = replace(SOUND, node_events=[event(*each) for each in events])
    assert found(snapshot) == ({"directories": f"{NODE} message of {expected.value}"} if expected else {})


def test_what_others_wrote_does_not_reach_the_terminal_as_commands() -> None:
    message = "no claim can be prepared \x1b[2J\u202e"
    snapshot = replace(SOUND, node_events=[event(UNWRITABLE, 20, message)])
    text = as_text([result(snapshot, "directories")])
    assert "no claim can be prepared ?[2J?" in text
    assert "\u202e" not in text


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_a_gpu_node_that_is_not_ready_is_a_finding(status: str) -> None:
    conditions = [{"type": "Ready", "status": status, "message": "the kubelet stopped posting"}]
    node = {"metadata": {"name": NODE}, "status": {"conditions": conditions}}
    other = {"metadata": {"name": "without-gpus"}, "status": {"conditions": conditions}}
    snapshot = replace(SOUND, nodes=[node, other])
    assert found(snapshot) == {"node plugins": f"{NODE} its Node is not ready: the kubelet stopped posting"}


def test_a_gpu_node_whose_kubelet_no_longer_renews_its_lease_is_a_finding() -> None:
    silent = replace(SOUND, node_leases=[lease(NODE, NODE, ago_s=90)])
    message = "its Node is not ready: its kubelet has not renewed its Lease for 90 s"
    assert found(silent) == {"node plugins": f"{NODE} {message}"}


def test_the_fence_is_missed_where_a_controller_runs() -> None:
    without = replace(SOUND, policies=[each for each in SOUND.policies if each["metadata"]["name"] != "tessera-fence"])
    assert found(without)["policies"].startswith("tessera-fence this admission policy is missing")
    assert result(without, "policies").findings[0].remedy.startswith("install it again: helm upgrade tessera")
    unbound = replace(
        SOUND, bindings=[each for each in SOUND.bindings if each["spec"]["policyName"] != "tessera-fence"]
    )
    assert found(unbound)["policies"].startswith("tessera-fence this admission policy has no binding")
    assert "policies" not in found(replace(without, leases={}))


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("stuck", "end the process that still uses it"),
        ("lost", "delete the claim's pod"),
        ("mps-lost", "see the pods of DaemonSet tessera-mps"),
        ("xid-79", "then tessera uncordon"),
    ],
)
def test_a_fault_that_ends_by_itself_is_not_explained_with_uncordon(value: str, remedy: str) -> None:
    taint = {"key": "gpu.tessera.dev/unhealthy", "value": value, "effect": "NoSchedule"}
    (finding,) = result(replace(SOUND, slices=[item(taints=[taint])]), "health").findings
    assert remedy in finding.remedy
    assert ("uncordon" in finding.remedy) is (value == "xid-79")


@pytest.mark.parametrize(("value", "name"), [("stuck", "gpu-0-mig-1g10gb-0"), ("xid-48", "gpu-0")])
def test_a_partition_that_can_not_be_removed_is_named_and_not_its_gpu(value: str, name: str) -> None:
    taint = {"key": "gpu.tessera.dev/unhealthy", "value": value, "effect": "NoSchedule"}
    (finding,) = result(replace(SOUND, slices=[item(name="gpu-0-mig-1g10gb-0", taints=[taint])]), "health").findings
    assert finding.about == f"{NODE}/{name}"


def test_a_tree_that_was_never_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("tessera.cluster_options.version", version_of)
    assert result(SOUND, "versions").summary.startswith("this command unknown, ")
