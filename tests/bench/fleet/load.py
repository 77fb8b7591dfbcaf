"""Claims that come at a steady rate, each with its pod, and go after a while."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from driver.errors import ApiError
from driver.kube.client import KubeClient
from tests.bench.placement.replay import Agenda, claim, pod
from tests.bench.placement.trace import PROFILES
from tests.support.workloads import CLAIMS, PODS

CLIENTS = 4


class Load:
    """``rate`` claims a second, any profile, each for ``stay_s`` seconds."""

    def __init__(self, client: KubeClient, rate: float, stay_s: float) -> None:
        self._client = client
        self._rate, self._stay_s = rate, stay_s
        self._agenda = Agenda()
        self._rng = random.Random(8)
        self.asked = 0

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set; what is there by then stays."""
        with ThreadPoolExecutor(CLIENTS) as self._requests:
            self._agenda.at(time.monotonic(), self._next)
            self._agenda.run(stop.is_set)

    def _next(self) -> None:
        self._agenda.at(time.monotonic() + 1 / self._rate, self._next)
        number, self.asked = self.asked, self.asked + 1
        self._requests.submit(self._ask, number)

    def _ask(self, number: int) -> None:
        name = f"load-{number}"
        self._client.create(CLAIMS, claim(name, self._rng.choice(PROFILES)))
        self._client.create(PODS, pod(name))
        self._agenda.at(time.monotonic() + self._stay_s, lambda: self._leave(name))

    def _leave(self, name: str) -> None:
        self._requests.submit(self._delete, name)

    def _delete(self, name: str) -> None:
        for path in (f"{PODS}/{name}", f"{CLAIMS}/{name}"):
            try:
                self._client.delete(path)
            except ApiError as error:
                if error.status != 404:
                    raise
