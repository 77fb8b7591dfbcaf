"""The cluster of the web page's tests: two nodes, what happens on them, and whether the page shows what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from driver.errors import ApiError
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.command import run_tessera
from tests.support.controller import ControllerProcess
from tests.support.plugin import DRIVER, SLICES, PluginFlags
from tests.support.scheduling import Scheduling, forget
from tests.support.web_page import SOON_S, Shown, WebPage, devices_in
from tests.support.workloads import CLAIMS

DGX, MIXED = "dgx", "mixed"
NODES = {
    DGX: PluginFlags(gpus="sim:dgx-h100"),
    MIXED: PluginFlags(gpus="sim:h100-pcie-4", shares="3=4", shares_only="3"),
}
GPU = re.compile(r"gpu-\d+")

Where = tuple[str, str]
"""Node and device."""


@dataclass
class Place:
    """A cluster with a page of the leader for local users, and one of a standby for those with a token."""

    cluster: Cluster
    local: ControllerProcess
    page: WebPage
    guarded_url: str
    asked: list[Scheduling] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def ask(self, name: str, *requests: dict[str, Any]) -> None:
        self.asked.append(Scheduling(self.cluster, name))
        self.asked[-1].ask(*requests)

    def hold(self, name: str, *requests: dict[str, Any]) -> None:
        self.ask(name, *requests)
        self.asked[-1].given()

    def tessera(self, command: str, *arguments: str) -> str:
        done = run_tessera(self.cluster, command, *arguments)
        assert not done.stderr, done.stderr
        return done.stdout

    def cordon_node(self, *, unschedulable: bool = True) -> None:
        self.cluster.api.patch(f"/api/v1/nodes/{MIXED}", {"spec": {"unschedulable": unschedulable}})
        if unschedulable:
            self.undo.append(lambda: self.cordon_node(unschedulable=False))

    def cordon_gpu(self, reason: str) -> None:
        self.tessera("cordon", f"{DGX}/gpu-1", "--reason", reason)
        self.undo.append(lambda: self.tessera("uncordon", f"{DGX}/gpu-1"))

    def clean(self) -> None:
        for undo in self.undo:
            undo()
        forget(*(each for each in self.asked if each.paths))

    def held(self) -> dict[Where, str]:
        """The claims by held device, from their allocations."""
        return {
            (result["pool"].removesuffix(f"-{DRIVER}"), result["device"]): f"default/{claim['metadata']['name']}"
            for claim in self.cluster.api.get(CLAIMS)["items"]
            for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
        }

    def published(self) -> set[Where]:
        """The devices in slices without a taint."""
        return {
            (item["spec"]["nodeName"], device["name"])
            for item in self.cluster.api.get(SLICES)["items"]
            if item["spec"]["driver"] == DRIVER
            for device in item["spec"].get("devices") or ()
            if not device.get("taints")
        }

    def pending(self) -> list[dict[str, Any]]:
        """What ``tessera why`` says, in the form of the page."""
        return [
            {
                "claim": each["claim"],
                "reason": each["reason"],
                "message": each["message"],
                "changes": [change["text"] for change in each["changes"]],
            }
            for each in json.loads(self.tessera("why", "-A", "-o", "json"))
        ]

    def objects(self) -> tuple[dict[Where, str], set[Where], list[dict[str, Any]]]:
        """What is held, offered and pending."""
        held = self.held()
        return held, self.published() - held.keys(), self.pending()

    def wait_equal(self) -> Shown:
        """What the page shows, once it is what the API server's objects say."""
        found: list[Shown] = []

        def is_equal() -> bool:
            """The page lies between two equal states of the API server."""
            before = self.objects()
            shown = self.page.shown()
            found.append(shown)
            keys = ("claim", "reason", "message", "changes")
            pending = [{key: each[key] for key in keys} for each in shown["pending"]]
            seen = (devices_in(shown, "held"), {*devices_in(shown, "offered")}, pending)
            held, offered, reasons = before
            # Stranded slices are drawn as such, though something that nobody requests may be offered there.
            drawn = {(name, device) for name, device in offered if not is_stranded(shown, name, device)}
            agrees = (seen[0], seen[2]) == (held, reasons) and drawn <= seen[1] <= offered
            if before != self.objects() or not agrees:
                raise ApiError(f"the page shows {seen}, the API server has {before}")
            return True

        wait_for(is_equal, SOON_S, "the page shows what the API server has")
        return found[-1]


def is_stranded(shown: Shown, name: str, device: str) -> bool:
    """Whether slices of the GPU of ``device`` are shown as stranded."""
    [gpu] = [each for each in node(shown, name)["gpus"] if f"gpu-{each['number']}" == GPU.match(device)[0]]  # type: ignore[index]
    return any(span["state"] == "stranded" for span in gpu["spans"])


def node(shown: Shown, name: str) -> dict[str, Any]:
    [found] = [each for each in shown["nodes"] if each["name"] == name]
    return dict(found)
