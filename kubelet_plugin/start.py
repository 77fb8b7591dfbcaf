"""Starting a node plugin: wait for the driver, then run as the node's only plugin or as one of a rolling update."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import Protocol

from driver.hardware.host_paths import HOST, HostPaths, missing_driver
from driver.http import Check, health_pages, serve
from kubelet_plugin.app import NodePlugin
from kubelet_plugin.checkpoint.files import claim_directory
from kubelet_plugin.settings import NodeSettings

log = logging.getLogger(__name__)

DRIVER_CHECK_INTERVAL_SECONDS = 2.0


class Runnable(Protocol):
    """``run`` returns after the stop that it was made with was set."""

    def run(self) -> None: ...


def node_plugin(settings: NodeSettings, stop: threading.Event) -> Runnable | None:
    """Return the plugin to run. Without a pod's uid, wait for the state directory first; None: ``stop`` was set
    meanwhile. Raises FatalError."""
    if settings.pod_uid:
        from kubelet_plugin.upgrade.rolling_update import RollingInstance  # megabytes that only a rolling update needs

        wait_for_driver(settings, stop)
        return RollingInstance(settings, stop)
    claim_directory(settings.state_dir, stop)
    wait_for_driver(settings, stop)
    return None if stop.is_set() else NodePlugin(settings, stop=stop)


def wait_for_driver(settings: NodeSettings, stop: threading.Event) -> None:
    """Return when a container (the GPU Operator's) has installed the driver, or ``stop`` is set.

    The process is alive and not ready meanwhile. A driver of the host itself is not waited for: an administrator has to
    install it.
    """
    if settings.simulated is not None or settings.driver_root == HOST:
        return
    paths = HostPaths(settings.host_root, HOST)
    if missing_driver(paths, settings.driver_root) is None:
        return
    with ExitStack() as stack:
        ready = [Check("driver", lambda: missing_driver(paths, settings.driver_root))]
        serve(stack, [("--health-address", settings.health_address, lambda: health_pages([], ready))])
        logged = None
        while (missing := missing_driver(paths, settings.driver_root)) is not None and not stop.is_set():
            if missing != logged:
                log.warning("waits for the NVIDIA driver of --driver-root", extra={"missing": missing})
                logged = missing
            stop.wait(DRIVER_CHECK_INTERVAL_SECONDS)
    if not stop.is_set():
        log.info("the NVIDIA driver is there", extra={"driverRoot": str(settings.driver_root)})
