"""When nodes may rely on a controller's plans: while it reads everything that it decides from, and decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from controller.controller import Controller
from controller.settings import controller_settings
from driver.kube import watch_cache
from driver.kube.work_loop import Backoff
from tests.support.api_server import Exchange, ObjectApi
from tests.support.running import eventually, in_thread


@contextmanager
def led(api: ObjectApi, **settings: Any) -> Iterator[Controller]:
    """A controller at work; all of its threads have ended after the block."""
    before = set(threading.enumerate())
    controller = Controller(api.server.client(), controller_settings(**settings))
    with in_thread(controller.run, api.end_watches):
        yield controller
    own = {thread for thread in set(threading.enumerate()) - before if "process_request" not in thread.name}

    def ended() -> bool:
        api.end_watches()  # also a watch that a thread began just before it could see that it has to end
        return not any(thread.is_alive() for thread in own)

    eventually(ended, "its threads have ended")


def refuse(exchange: Exchange) -> None:
    exchange.refuse(403, "forbidden")


def test_nodes_may_rely_on_a_controller_only_while_its_lists_and_watches_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_cache, "FAILING_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(watch_cache, "Backoff", partial(Backoff, first_s=0.01, most_s=0.05))
    with ObjectApi() as api:
        unlisted = Controller(api.server.client(), controller_settings())
        assert unlisted.failure() == "/apis/resource.k8s.io/v1/resourceclaims has not been listed yet"
        with led(api) as controller:
            eventually(lambda: controller.failure() is None, "everything is listed and decided")
            for kind in ("list", "watch"):
                api.once(kind, *[refuse] * 10_000)
            api.end_watches()
            eventually(lambda: "can't be listed or watched" in (controller.failure() or ""), "it can't see")
            api.as_usual()
            eventually(lambda: controller.failure() is None, "it sees again")


def test_an_object_that_cannot_be_read_is_counted_and_gets_an_event() -> None:
    with ObjectApi() as api:
        path = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/odd"
        api.store(path, spec={"devices": {"requests": "many"}})
        with led(api) as controller:
            events = api.folder("/api/v1/namespaces/team/events")
            eventually(lambda: events, "an Event")
            (event,) = events.values()
            assert (event["reason"], event["involvedObject"]["kind"]) == ("ObjectUnreadable", "ResourceClaim")
            assert event["involvedObject"]["apiVersion"] == "resource.k8s.io/v1"
            assert "Expected `array | null`, got `str`" in event["message"]
            assert controller.unreadable() == {"ResourceClaim": 1}
            assert controller.failure() is None
