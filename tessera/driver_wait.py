"""Waiting for a driver that a container brings (the GPU Operator's): a node plugin may well start before it."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

from driver.checks import Check
from driver.config.settings import NodeSettings
from driver.hardware.driver_root import HOST, missing_driver
from driver.hardware.host import HostPaths
from tessera.endpoints import health_pages, serve

log = logging.getLogger(__name__)

LOOK_S = 2.0


def wait_for_driver(settings: NodeSettings, stop: threading.Event) -> None:
    """Return when the driver is below the driver root, or ``stop`` is set. Alive meanwhile, and not ready.

    A driver of the host itself is not waited for: there what is missing has to be installed.
    """
    if settings.simulated is not None or settings.driver_root == HOST:
        return
    paths = HostPaths(settings.host_root, HOST)
    if missing_driver(paths, settings.driver_root) is None:
        return
    with ExitStack() as stack:
        ready = [Check("driver", lambda: missing_driver(paths, settings.driver_root))]
        serve(stack, [("--health-address", settings.health_address, lambda: health_pages([], ready))])
        said = None
        while (missing := missing_driver(paths, settings.driver_root)) is not None and not stop.is_set():
            if missing != said:
                log.warning("waits for the NVIDIA driver of --driver-root", extra={"missing": missing})
                said = missing
            stop.wait(LOOK_S)
    if not stop.is_set():
        log.info("the NVIDIA driver is there", extra={"driverRoot": str(settings.driver_root)})
