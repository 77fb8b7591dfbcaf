"""Why a claim does not get the monitor devices that it requests with adminAccess."""

from __future__ import annotations

from typing import Any

import pytest

from controller.demand import namespace_selector_time, selected_devices
from controller.demand.namespace_selector_time import BudgetExhausted
from controller.explain.pipeline import reasons_in
from controller.explain.reason import ReasonCode
from controller.explain.situation import Situation as Now
from driver.model.reported_gpus import FaultKind
from tests.support.clock import FakeClock
from tests.support.queues import DRIVER, FULL, OURS, Situation, fleet_gpu, node_of, profile, request, selected_by
from tests.support.reasons import reasons_of

MONITOR = selected_by('type == "monitor"')
FIRST, SECOND = (selected_by('type == "monitor"', f'uuid == "{uuid}"') for uuid in ("a/0", "b/1"))
L4 = "NVIDIA L4"
OF_L4 = selected_by('type == "monitor"', f'productName == "{L4}"')
LOST = {"fault": "it does not answer (GPU_IS_LOST)", "fault_kind": FaultKind.UNAVAILABLE}


def monitors(name: str = "monitor", selector: str | None = MONITOR, device_class: str = "any", **more: Any) -> Any:
    return request(device_class, name, selector, adminAccess=True, **more)


def told(there: Situation, code: ReasonCode, *parts: str) -> None:
    [reason] = reasons_of(there.queue)
    assert reason.code is code, reason.sentence
    for part in parts:
        assert part in reason.sentence


@pytest.mark.parametrize("mode", [{}, {"allocationMode": "All"}, {"count": 2}])
def test_monitor_devices_are_free_whatever_is_held(mode: dict[str, Any]) -> None:
    there = Situation(node_of("a", "full", gpus=2)).wants(monitors(**mode))
    assert reasons_of(there.queue) == []


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        (FaultKind.UNAVAILABLE, ReasonCode.FAULT, "a fault keeps gpu-1 (it does not answer) from use"),
        (FaultKind.RESERVED, ReasonCode.DEDICATED, "another driver of the node manages gpu-1 (it does not answer)"),
    ],
)
def test_a_gpu_whose_monitor_device_is_not_published_is_named_where_it_is_needed(
    kind: FaultKind, code: ReasonCode, text: str
) -> None:
    gpus = [fleet_gpu("a", 0), fleet_gpu("a", 1, fault="it does not answer", fault_kind=kind)]
    there = Situation(gpus).wants(monitors(count=2))
    told(there, code, "needs 2 monitor devices of one node, but only 1 of 2 can be had on node a: ", text)


@pytest.mark.parametrize("kind", [FaultKind.UNHEALTHY, FaultKind.CORDONED])
def test_the_gpu_that_is_ill_or_cordoned_is_monitored_all_the_same(kind: FaultKind) -> None:
    gpus = [fleet_gpu("a", 0), fleet_gpu("a", 1, fault="XID 79", fault_kind=kind)]
    assert reasons_of(Situation(gpus).wants(monitors(count=2)).queue) == []


def test_who_asks_for_all_gets_those_of_the_gpus_that_answer() -> None:
    gpus = [fleet_gpu("a", 0), fleet_gpu("a", 1, **LOST)]
    assert reasons_of(Situation(gpus).wants(monitors(allocationMode="All")).queue) == []
    told(Situation(gpus[1:]).wants(monitors(allocationMode="All")), ReasonCode.FAULT, "gpu-1", "GPU_IS_LOST")


@pytest.mark.parametrize("device", [None, "gpu-1-monitor"])
@pytest.mark.parametrize("mode", [{"count": 2}, {"allocationMode": "All"}])
def test_a_device_taint_rule_keeps_monitor_devices_from_claims_that_do_not_tolerate_it(
    device: str | None, mode: dict[str, Any]
) -> None:
    there = Situation(node_of("a", gpus=2))
    there.taint_rule(
        "repair", {"driver": DRIVER} | ({} if device is None else {"device": device}), key="broken", effect="NoExecute"
    )
    there.wants(monitors(**mode))
    told(there, ReasonCode.TAINTED, "gpu-1", "DeviceTaintRule repair", "broken")
    tolerating = Situation(there.gpus, taint_rules=there.taint_rules)
    tolerating.wants(monitors(tolerations=[{"key": "broken", "operator": "Exists"}], **mode))
    assert reasons_of(tolerating.queue) == []


def test_a_device_taint_rule_for_another_device_of_the_gpu_says_nothing_about_its_monitor_device() -> None:
    there = Situation(node_of("a", gpus=1))
    there.taint_rule("repair", {"driver": DRIVER, "device": "gpu-0"}, key="broken", effect="NoExecute")
    assert reasons_of(there.wants(monitors()).queue) == []


def test_all_the_monitor_devices_of_a_node_may_be_more_than_a_claim_can_have() -> None:
    there = Situation(node_of("a", gpus=33)).wants(monitors(allocationMode="All"))
    told(there, ReasonCode.TOO_MANY, "needs 33 different monitor devices", "more than the 32 that one claim can have")


def test_more_monitor_devices_than_a_claim_can_have_are_too_many() -> None:
    there = Situation(node_of("a", gpus=40)).wants(monitors(count=33))
    told(there, ReasonCode.TOO_MANY, "needs 33 different monitor devices", "more than the 32 that one claim can have")


@pytest.mark.parametrize(
    "modes",
    [({"count": 3}, {"count": 2}), ({"allocationMode": "All"}, {"allocationMode": "All"}), ({"count": 4}, {})],
)
def test_the_requests_of_a_claim_get_different_monitor_devices(modes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = modes
    there = Situation(node_of("a", gpus=4)).wants(monitors("x", **first), monitors("y", **second))
    told(there, ReasonCode.TOO_MANY, "requests x, y need", "different monitor devices of node a, which has 4")
    fitting = Situation(node_of("a", gpus=4)).wants(monitors("x", count=2), monitors("y", count=2))
    assert reasons_of(fitting.queue) == []


def test_more_monitor_devices_than_a_node_has_gpus_are_too_many() -> None:
    there = Situation([*node_of("a", gpus=2), *node_of("b", gpus=4)]).wants(monitors(count=5))
    told(there, ReasonCode.TOO_MANY, "asks for 5 monitor devices of one node; no node has more than 4")


def test_monitor_devices_of_nodes_where_the_pod_can_not_run_are_named() -> None:
    there = Situation([*node_of("a"), *node_of("b", product=L4)])
    there.node("a", {"zone": "x"})
    there.wants(monitors(selector=OF_L4), nodeSelector={"zone": "x"})
    told(there, ReasonCode.OTHER_NODES, "the monitor devices that it selects are only on", "b lacks the label")


def test_who_asks_for_admin_access_by_a_class_that_is_not_there_is_told_so() -> None:
    told(Situation(node_of("a")).wants(monitors(device_class="nope")), ReasonCode.NO_SUCH_CLASS, "nope")


@pytest.mark.parametrize("selector", [FULL, profile("1g.99gb")])
def test_who_asks_for_admin_access_to_other_devices_is_told_which_selector_excludes_monitors(selector: str) -> None:
    there = Situation(node_of("a")).wants(monitors(selector=selector))
    told(there, ReasonCode.NOTHING_MATCHES, "selects no GPU's monitor device", f"none satisfies {OURS} and {selector}")


def test_monitor_devices_of_two_nodes_do_not_serve_one_claim() -> None:
    there = Situation([fleet_gpu("a", 0), fleet_gpu("b", 1)])
    there.wants(monitors("x", FIRST), monitors("y", SECOND))
    told(there, ReasonCode.NOT_TOGETHER, "requests x, y", "no node where its pod can run has enough for all of them")


def test_the_monitor_devices_and_the_other_devices_of_a_pod_are_on_one_node() -> None:
    there = Situation([fleet_gpu("a", 0, **LOST), fleet_gpu("b", 0)])
    there.wants(monitors("x"), request(selector=FULL), nodeSelector={"zone": "x"})
    there.node("a", {"zone": "x"})
    told(there, ReasonCode.FAULT, "gpu-0")
    apart = Situation([fleet_gpu("a", 0, L4), fleet_gpu("b", 0)])
    apart.wants(monitors("x", OF_L4), request(selector=selected_by('type == "gpu"', f'productName != "{L4}"')))
    told(
        apart,
        ReasonCode.NOT_TOGETHER,
        "(on b)",
        "no single node can",
        "its monitor devices",
    )


def test_a_claim_for_monitor_devices_has_the_reason_of_the_other_claim_of_its_pod() -> None:
    there = Situation(node_of("a", "full", gpus=1))
    there.claim("watch", monitors())
    there.claim("work", request(selector=FULL))
    there.pod("both", "watch", "work")
    sentences = {reason.pending.key: reason.sentence for reason in reasons_of(there.queue)}
    assert "none is free" in sentences["default/work"]
    assert "its pod also has the claim work: " in sentences["default/watch"]
    assert "none is free" in sentences["default/watch"]


def test_a_claim_whose_pod_can_not_get_the_monitor_devices_of_another_claim_says_so() -> None:
    there = Situation(node_of("a", gpus=1))
    there.claim("watch", monitors(count=2))
    there.claim("work", request(selector=FULL))
    there.pod("both", "watch", "work")
    sentences = {reason.pending.key: reason.sentence for reason in reasons_of(there.queue)}
    assert "no node has more than 1" in sentences["default/watch"]
    assert "its pod also has the claim watch: " in sentences["default/work"]


def test_a_class_that_selects_no_monitor_device_is_named_with_the_one_that_does() -> None:
    there = Situation(node_of("a"))
    there.device_class("training", FULL)
    there.wants(monitors(selector=None, device_class="training"))
    told(there, ReasonCode.NOTHING_MATCHES, "class training selects no monitor device", "request class gpu-monitor")


def test_the_claims_own_selector_is_named_where_it_excludes_the_monitor_devices_of_its_class() -> None:
    there = Situation(node_of("a"))
    there.device_class("watching", MONITOR)
    there.wants(monitors(selector=selected_by('architecture == "Blackwell"'), device_class="watching"))
    told(there, ReasonCode.NOTHING_MATCHES, "selects no GPU's monitor device", 'architecture == "Blackwell"')


def test_requested_capacity_excludes_monitor_devices_which_have_none() -> None:
    there = Situation(node_of("a"))
    there.wants(monitors(capacity={"requests": {"memory": "1Gi"}}))
    told(there, ReasonCode.NOTHING_MATCHES, "monitor devices have none")


def test_a_selector_that_fails_on_monitor_devices_is_named_with_the_error() -> None:
    there = Situation(node_of("a"))
    there.wants(monitors(selector=selected_by('nvlinkClique == "x"')))
    told(there, ReasonCode.SELECTOR_FAILS, "fails on monitor devices", "no such key", "nvlinkClique")


def test_a_namespace_without_time_for_selectors_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_devices, "BUDGET_SECONDS", 0.0)
    [reason] = reasons_of(Situation(node_of("a")).wants(monitors()).queue)
    assert namespace_selector_time.EXHAUSTED in reason.sentence


def test_a_claim_for_monitor_devices_on_a_full_node_waits_for_the_scheduler_only() -> None:
    reasons = reasons_in(Now(Situation(node_of("a", "full", gpus=1)).wants(monitors()).queue), FakeClock())
    assert reasons["default/claim"].code is ReasonCode.WAITS
    assert reasons["default/claim"].sentence == "the scheduler has not allocated its monitor devices yet"


def test_a_request_that_may_also_get_other_devices_is_not_judged() -> None:
    assert reasons_of(Situation(node_of("a", gpus=2)).wants(monitors(selector=None, count=5)).queue) == []


def test_lost_gpus_are_not_to_blame_where_one_taint_keeps_a_claim_from_all_devices() -> None:
    there = Situation([*node_of("a", gpus=2), *(fleet_gpu("a", number, **LOST) for number in (2, 3))])
    there.taint_rule("repair", {"driver": DRIVER, "device": "gpu-1-monitor"}, key="broken", effect="NoExecute")
    told(there.wants(monitors(allocationMode="All")), ReasonCode.TAINTED, "taints gpu-1 (DeviceTaintRule repair")


def test_a_node_where_the_pod_can_run_may_have_too_few_gpus() -> None:
    there = Situation([*node_of("a", gpus=2), *node_of("b", gpus=4)])
    there.node("a", {"zone": "x"})
    there.wants(monitors(count=4), nodeSelector={"zone": "x"})
    told(there, ReasonCode.OTHER_NODES, "no node where its pod can run has more than 2; it would fit only on")


def test_the_need_and_what_there_is_are_of_one_node() -> None:
    there = Situation([*node_of("a", gpus=20), *node_of("b", gpus=2)])
    there.wants(*(monitors(name, allocationMode="All") for name in "xy"))
    told(there, ReasonCode.TOO_MANY, "need 4 different monitor devices of node b, which has 2; no other node")


def test_a_selector_that_had_no_time_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_time(_work: object) -> None:
        raise BudgetExhausted

    there = Situation([fleet_gpu("a", 0, **LOST)]).wants(monitors())
    queue = there.queue
    time = there.matching.namespaces["default"].time
    with monkeypatch.context() as patched:
        patched.setattr(time, "spend", no_time)
        assert not queue.monitored_nodes
        told(there, ReasonCode.SELECTOR_FAILS, namespace_selector_time.EXHAUSTED)
    assert there.queue.monitored_nodes == {"a"}
    told(there, ReasonCode.FAULT, "gpu-0")
