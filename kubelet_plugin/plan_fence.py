"""Letting go of the controller's fence around this node's devices.

A node that stands alone offers whatever fits, also what a controller that is gone had taken back: that is in the slices
again, so that the scheduler counts it, and nobody else would ever lift its fence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from driver.errors import NOT_FOUND, ApiError
from driver.kube.loop import Loop, MakeLoop
from driver.kube.transport import KubeClient
from driver.model.plan import FENCE

log = logging.getLogger(__name__)

COALESCE_S = 0.05


class OwnFence:
    """``alone`` says in which epoch the node stands alone, None: it follows a plan; ``notify`` when that changed."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        pool: str,
        alone: Callable[[], str | None],
        loop: MakeLoop = Loop,
    ) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{FENCE}"
        self._pool = pool
        self._alone = alone
        self._lifted: str | None = None
        self._loop = loop("lifting the fence of a controller that is gone", self._lift, COALESCE_S)
        self.notify = self._loop.notify
        self.run = self._loop.run

    def _lift(self) -> None:
        """Once in each epoch. Raises ApiError."""
        epoch = self._alone()
        if epoch is None or epoch == self._lifted:
            return
        try:
            self._client.patch(self._path, {"data": {self._pool: None}})
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        self._lifted = epoch
