"""Changes that help a claim whose pod has another claim that is allocated on another node."""

from __future__ import annotations

from typing import Any

import pytest

from controller.explain.helpful_changes import changes_that_help
from controller.explain.sources.no_free_device import Reasoning
from tests.support.queues import DRIVER, FULL, Situation, node_of, profile, request


def allocated(there: Situation, name: str, selector: str, node: str, driver: str = DRIVER) -> None:
    """A claim with a device of ``node``, on which alone it is available."""
    result = {"request": "gpu", "driver": driver, "pool": f"{node}-{driver}", "device": "gpu-0-mig-1g10gb-0"}
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    allocation: dict[str, Any] = {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]},
    }
    there.claim(name, request(selector=selector), status={"allocation": allocation})


def told(there: Situation) -> list[str]:
    return [change.text for change in changes_that_help(Reasoning(there.queue), there.waiting("wanted"))]


@pytest.mark.parametrize(("gpus", "helps"), [(1, False), (2, True)])
def test_another_claim_is_moved_to_a_node_only_where_both_would_fit(gpus: int, helps: bool) -> None:
    there = Situation([*node_of("a", "full", gpus=1), *node_of("b", gpus=gpus)])
    allocated(there, "other", profile("1g.10gb"), "a")
    there.claim("wanted", request(selector=FULL))
    there.pod("pod", "other", "wanted")
    assert any("claim other of the pod" in text and "were allocated on node b" in text for text in told(there)) == helps


def test_a_claim_with_devices_of_another_driver_is_not_moved_by_guesswork() -> None:
    there = Situation([*node_of("a", "full", gpus=1), *node_of("b", gpus=2)])
    there.device_class("nic", 'device.driver == "nic.example.com"')
    allocated(there, "other", 'device.driver == "nic.example.com"', "a", driver="nic.example.com")
    there.claim("wanted", request(selector=FULL))
    there.pod("pod", "other", "wanted")
    assert not any("were allocated on node" in text for text in told(there))
