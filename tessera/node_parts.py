"""What the node plugin is put together from by its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from driver.config.settings import NodeSettings
from driver.config.shares import mig_warnings, share_warnings
from driver.kube.claims import Claim, list_claims, read_claim
from driver.kube.transport import KubeClient
from driver.model.device import number_gpus
from driver.model.gpu import Gpu
from kubelet_plugin.inventory import Inventory, Sharing
from kubelet_plugin.meter import Meter
from kubelet_plugin.neighbour_watch import NeighbourWatch
from kubelet_plugin.neighbours import Neighbours
from kubelet_plugin.records import ClaimRecord, held_shares
from kubelet_plugin.scan import Choice, Scanner

log = logging.getLogger(__name__)


class ApiClaims:
    """The claims of the API server, for who looks for orphans."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def read(self, namespace: str, name: str, *, any_age: bool) -> Claim:
        return read_claim(self._client, namespace, name, any_age=any_age)

    def every(self) -> Iterable[Claim]:
        return list_claims(self._client)


def meter_of(settings: NodeSettings) -> Meter:
    if settings.metrics_address is None:
        return Meter()
    from kubelet_plugin.metrics import Metrics  # a megabyte of the library, for those who want it

    return Metrics()


def choice_of(settings: NodeSettings) -> Choice:
    return Choice(
        settings.include_gpus, settings.exclude_gpus, settings.mig_gpus, settings.existing_partitions == "publish"
    )


def first_look(scanner: Scanner, records: Iterable[ClaimRecord], settings: NodeSettings) -> Inventory:
    """The node's GPUs, with the names that held devices were given out by. Raises HardwareError."""
    gpus, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    products = ", ".join(sorted({gpu.product_name for gpu in gpus}))
    log.info("discovered GPUs", extra={"count": len(gpus), "products": products})
    warnings = share_warnings(settings.shares, settings.shares_only, gpus)
    for warning in (*mig_warnings(settings.mig_gpus, gpus), *warnings):
        log.warning(warning)
    sharing = Sharing(settings.shares.of, settings.shares_only)
    return Inventory(gpus, number_gpus(gpus, kept), sharing, held_shares(records))


def needs_reset(gpu: Gpu) -> str:
    """What an operator has to do for a GPU that waits for its MIG mode to switch."""
    return (
        f"GPU {gpu.index} ({gpu.uuid}) changes its MIG mode with the next reset, and offers until then what it did "
        f"before. With nothing running on it: nvidia-smi --gpu-reset -i {gpu.index}"
    )


def neighbour_watch(
    settings: NodeSettings,
    client: KubeClient,
    on_change: Callable[[], None],
    tell: Callable[[str, str, bool], None],
) -> NeighbourWatch:
    """Who else is on the node, for ``tell`` and for whoever publishes."""
    mode = Neighbours(settings.neighbours)
    return NeighbourWatch(client, settings.node_name, settings.driver_name, settings.kubelet_dir, mode, on_change, tell)
