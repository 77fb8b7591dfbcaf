"""Slices wait for the kubelet, but not for ever; a kubelet that does not come is told of."""

from __future__ import annotations

import math

import pytest

from kubelet_plugin.changes import ChangeNotifier
from kubelet_plugin.dra.registration_state import Registration
from kubelet_plugin.health.node_problems import NodeConditions
from tests.support.clock import FakeClock


class Node:
    """A node whose plugin a kubelet has yet to register; the Events on it."""

    def __init__(self, has_kubelet: bool | None = True) -> None:
        self.has_kubelet, self.clock = has_kubelet, FakeClock()
        self.events: list[tuple[str, str]] = []
        self.conditions = NodeConditions(ChangeNotifier(), self, lambda: 0.0)
        self.registration = Registration(lambda: self.has_kubelet, self.conditions, self.clock.monotonic)

    def node(self, reason: str, message: str, warning: bool = True, about: str = "") -> None:
        self.events.append((reason, message))

    def delay(self, absent_since: float | None) -> float:
        return self.registration.creation_delay(absent_since)


@pytest.mark.parametrize("has_kubelet", [True, None])
def test_the_first_slices_wait_for_the_registration(has_kubelet: bool | None) -> None:
    node = Node(has_kubelet)
    assert node.delay(None) == math.inf
    assert "has not called" in str(node.registration.failure())
    node.registration.set(True, "")
    assert node.delay(None) == 0.0
    assert node.registration.failure() is None


def test_a_node_object_without_a_kubelet_counts_as_registered() -> None:
    node = Node(has_kubelet=False)
    node.registration.set(False, "nobody came for 30 s")
    assert node.delay(None) == node.delay(node.clock.monotonic()) == 0.0
    assert node.registration.failure() is None
    assert not node.conditions.current()
    assert not node.events


@pytest.mark.parametrize("registered_before", [True, False])
def test_wiped_slices_come_back_with_the_next_registration_or_after_five_seconds(registered_before: bool) -> None:
    node = Node()
    if registered_before:
        node.registration.set(True, "")
    node.clock.advance(1.0)
    wiped = node.clock.monotonic()
    assert node.delay(wiped) == 5.0
    node.clock.advance(2.0)
    assert node.delay(wiped) == 3.0
    node.registration.set(True, "")
    assert node.delay(wiped) == 0.0
    node.clock.advance(1.0)
    wiped = node.clock.monotonic()
    node.clock.advance(5.0)
    assert node.delay(wiped) == 0.0


def test_a_kubelet_that_does_not_register_the_plugin_is_a_condition_until_it_does() -> None:
    node = Node()
    node.registration.set(False, "no kubelet")
    node.registration.set(False, "no kubelet")
    [condition] = node.conditions.current()
    assert (condition.type, condition.message) == ("Unregistered", "no kubelet")
    node.registration.set(True, "")
    assert not node.conditions.current()
    assert node.events == [("PluginNotRegistered", "no kubelet"), ("PluginRegistered", "no longer: no kubelet")]
