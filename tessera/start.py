"""Which node plugin a process is: the only one of its node, or one that may stand beside another."""

from __future__ import annotations

import threading
from typing import Protocol

from driver.config.settings import NodeSettings
from kubelet_plugin.files import claim_directory
from tessera.driver_wait import wait_for_driver
from tessera.node import NodePlugin


class Runnable(Protocol):
    """``run`` returns after the stop that it was made with was set."""

    def run(self) -> None: ...


def node_plugin(settings: NodeSettings, stop: threading.Event) -> Runnable | None:
    """Without a pod's uid it waits for the node; None: until ``stop`` was set. Raises FatalError."""
    if settings.pod_uid:
        from tessera.instance import Instance  # megabytes that only those need who hand over

        wait_for_driver(settings, stop)
        return Instance(settings, stop)
    claim_directory(settings.state_dir, stop)
    wait_for_driver(settings, stop)
    return None if stop.is_set() else NodePlugin(settings, stop=stop)
