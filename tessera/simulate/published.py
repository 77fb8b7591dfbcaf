"""The ResourceSlices that node plugins would publish for what the controller offers (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import msgspec

from controller.cluster.fleet import Fleet, FleetGpu
from driver.kube.slice_types import DetailedSlice, DetailedSliceSpec
from driver.kube.types import ObjectMeta
from driver.model.offer import Offer
from driver.model.plan import OfferMode
from driver.slices.build import SliceBuilder, slice_spec
from driver.slices.pool_names import Pool
from kubelet_plugin.inventory.published_devices import ForeignPartitions, PublishableGpu, PublishPolicy


class PublishedSlices:
    """The slices of all nodes; those of a node of which nothing changed are not built again.

    ``policies`` are those of the nodes that do not follow the controller's plans.
    """

    def __init__(self, driver: str, mode: OfferMode, policies: Mapping[str, PublishPolicy]) -> None:
        self._driver, self._mode, self._policies = driver, mode, policies
        self._built: dict[str, tuple[tuple[FleetGpu, ...], frozenset[Offer], tuple[DetailedSlice, ...]]] = {}

    def of(self, fleet: Fleet, offers: Iterable[Offer]) -> Iterator[DetailedSlice]:
        """The slices of the nodes of ``fleet``."""
        wanted: dict[str, set[Offer]] = {}
        for offer in offers:
            wanted.setdefault(fleet.gpus[offer.gpu].node, set()).add(offer)
        for node, gpus in fleet.nodes.items():
            offered, built = frozenset(wanted.get(node, ())), self._built.get(node)
            if built is None or built[0] is not gpus or built[1] != offered:
                self._built[node] = (gpus, offered, tuple(self._slices(node, gpus, offered)))
            yield from self._built[node][2]

    def _slices(self, node: str, gpus: tuple[FleetGpu, ...], offers: frozenset[Offer]) -> Iterator[DetailedSlice]:
        policy = self._policies.get(node) or PublishPolicy(offers=offers, closing=True)
        policy, pool = replace(policy, mode=self._mode), Pool(node, self._driver)
        built = SliceBuilder(pool).build(_publishable(entry).published(policy) for entry in gpus)
        for name, content in built.items():
            spec = msgspec.convert(slice_spec(content, pool, 1, len(built)), DetailedSliceSpec)
            yield DetailedSlice(ObjectMeta(name, "0"), spec)


def _publishable(entry: FleetGpu) -> PublishableGpu:
    return PublishableGpu(
        entry.gpu,
        entry.number,
        entry.devices,
        prepared=entry.held,
        allocated=(),
        shares_only=entry.shares_only,
        foreign=ForeignPartitions(entry.foreign),
        reserved=False,
        fault=entry.fault,
        conditions=(),
    )
