"""A controller's recorder of Events, at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from driver.kube.events import Recorder
from tests.support.api_server import ObjectApi
from tests.support.clock import FakeClock
from tests.support.running import in_thread


@contextmanager
def recording(api: ObjectApi) -> Iterator[tuple[FakeClock, Recorder]]:
    """Writes Events to ``api`` while the block runs, by a clock of the test."""
    clock = FakeClock()
    recorder = Recorder(api.server.client(), "tessera-controller", "controller-0", clock)
    with in_thread(recorder.run, recorder.wake):
        yield clock, recorder
