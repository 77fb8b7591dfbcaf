"""What single reasons need and no cache has, read from the API server."""

from __future__ import annotations

import msgspec

from controller.explain.situation import Lookups
from driver.errors import ApiError
from driver.kube.client import KubeClient
from driver.kube.reads import RESOURCE_GROUP, DevicesByNode, read_all
from driver.kube.slice_types import ResourceSlice
from driver.kube.types import Key, Pod, Struct


class EventMessage(Struct, frozen=True):
    """The part of an Event that says why a claim was not created."""

    message: str = ""
    last_timestamp: str | None = None


class ApiLookups(Lookups):
    """Lookups at the API server; what this account may not read is not known."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def template_exists(self, template: Key) -> bool | None:
        path = f"{RESOURCE_GROUP}/namespaces/{template.namespace}/resourceclaimtemplates/{template.name}"
        try:
            return self._client.find(path) is not None
        except ApiError:
            return None

    def creation_failure(self, pod: Pod) -> str | None:
        """Why kube-controller-manager could not create a claim of ``pod`` last; None, too, if it could."""
        selector = {"fieldSelector": f"involvedObject.uid={pod.metadata.uid},reason=FailedResourceClaimCreation"}
        path = f"/api/v1/namespaces/{pod.metadata.namespace}/events"
        try:
            events = list(read_all(self._client, path, EventMessage, selector))
        except (ApiError, msgspec.MsgspecError):
            return None
        return max(events, key=lambda event: event.last_timestamp or "").message if events else None

    def devices_of(self, driver: str) -> DevicesByNode | None:
        devices: dict[str, set[tuple[str, str]]] = {}
        of_driver = {"fieldSelector": f"spec.driver={driver}"}
        try:
            for slice_ in read_all(self._client, f"{RESOURCE_GROUP}/resourceslices", ResourceSlice, of_driver):
                names = {(slice_.spec.pool.name, device.name) for device in slice_.spec.devices}
                devices.setdefault(slice_.spec.node_name, set()).update(names)
        except (ApiError, msgspec.MsgspecError):
            return None
        return devices
