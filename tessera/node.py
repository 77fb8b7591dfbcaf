"""The node plugin, put together: the only place that knows every part of it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec

from driver.config.settings import NodeSettings
from driver.errors import ApiError
from driver.kube.claims import Claim, read_claim
from driver.kube.transport import KubeClient, load_configuration
from driver.model.device import number_gpus
from driver.slices.build import Content, SliceBuilder
from driver.slices.names import Pool
from driver.slices.publisher import Publisher
from kubelet_plugin.cdi import CdiDirectory
from kubelet_plugin.checkpoint import Checkpoint, ClaimRecord
from kubelet_plugin.driver_files import find_driver_files
from kubelet_plugin.files import claim_directory
from kubelet_plugin.inventory import Inventory
from kubelet_plugin.locks import KeyedLocks
from kubelet_plugin.preparation import Node, Preparer
from kubelet_plugin.recovery import hold_recorded, recover
from kubelet_plugin.registration import Registration, SocketServer
from kubelet_plugin.scan import Choice, Scanner
from kubelet_plugin.service import DraService
from kubelet_plugin.steps import Observer, Steps, unobserved
from tessera.hosts import open_host

log = logging.getLogger(__name__)

USER_AGENT = "tessera-node"
SWITCH_INTERVAL_S = 0.0005
"""How long a busy thread may keep the interpreter from one that has an answer to give; Python's own is 5 ms."""


class NodePlugin:
    """One node's plugin process. ``run`` returns after ``stop`` was called from another thread or a signal."""

    def __init__(self, settings: NodeSettings, observer: Observer = unobserved) -> None:
        """Discovers and recovers; touches neither the API server nor the kubelet. Raises FatalError."""
        self._settings = settings
        self._stop = threading.Event()
        self._hardware = ExitStack()
        self._client = KubeClient(load_configuration(settings.kubeconfig), USER_AGENT)
        claim_directory(settings.state_dir)
        host, paths = self._hardware.enter_context(open_host(settings, lasting=True))
        checkpoint = Checkpoint(settings.state_dir)
        records = checkpoint.load()
        self._scanner = Scanner(host, _choice(settings))
        inventory = _first_look(self._scanner, records)
        pool = Pool(settings.node_name, settings.driver_name)
        files = find_driver_files(paths, settings.driver_root)
        cdi = CdiDirectory(settings.cdi_dir, settings.driver_name)
        self._node = Node(pool, host, inventory, checkpoint, cdi, files)
        self._builder = SliceBuilder(pool)
        self._publisher = Publisher(self._client, pool, self._desired, self._owner)
        self._preparer = Preparer(self._node, self._read_claim, self._publisher.notify, Steps(observer), KeyedLocks())
        recover(self._node, self._preparer, records)
        self._scanner.look_at_partitions(inventory, inventory.gpus)

    def run(self) -> None:
        """Serve until ``stop``. Sockets are gone when this returns; slices stay, for what runs stays held."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for target in (self._publisher.cache.run, self._publisher.run, self._scan):
            threading.Thread(target=target, args=(self._stop,), daemon=True, name=target.__qualname__).start()
        registration = Registration(self._settings.driver_name, self._settings.plugin_socket, self._registered)
        with ExitStack() as stack:  # the last to start is the first to stop, also where the next can't start
            stack.callback(self.stop)
            service = DraService(self._preparer)
            stack.callback(service.close)
            plugin = SocketServer(self._settings.plugin_socket, service.handlers())
            stack.callback(plugin.stop)
            registry = SocketServer(self._settings.registration_socket, [registration.handler()], calls=2)
            stack.callback(registry.stop)
            socket = str(self._settings.plugin_socket)
            log.info("serving", extra={"driver": self._settings.driver_name, "socket": socket})
            self._stop.wait()
            log.info("stopping")

    def stop(self) -> None:
        """Ask ``run`` to return."""
        self._stop.set()
        self._publisher.notify()

    def _scan(self, stop: threading.Event) -> None:
        self._scanner.run(self._node.inventory, self._hardware_changed, stop)

    def _hardware_changed(self) -> None:
        hold_recorded(self._node)
        self._publisher.notify()

    def _desired(self) -> Mapping[str, Content]:
        return self._builder.build(self._node.inventory.published())

    def _owner(self) -> Mapping[str, Any]:
        name = self._settings.node_name
        try:
            node = msgspec.json.decode(self._client.get(f"/api/v1/nodes/{name}"), type=dict[str, Any])
            uid = node["metadata"]["uid"]
        except ApiError as error:
            raise ApiError(f"--node-name {name}: its Node object can't be read: {error}", error.status) from error
        except (msgspec.MsgspecError, KeyError) as error:
            raise ApiError(f"--node-name {name}: what the API server sent is no Node object: {error}") from error
        return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid, "controller": True}

    def _read_claim(self, namespace: str, name: str) -> Claim:
        return read_claim(self._client, namespace, name)

    def _registered(self, accepted: bool, reason: str) -> None:
        if accepted:
            # The kubelet has just started, and a kubelet that starts deletes the node's slices.
            self._publisher.notify()


def _choice(settings: NodeSettings) -> Choice:
    return Choice(
        settings.include_gpus, settings.exclude_gpus, settings.mig_gpus, settings.existing_partitions == "publish"
    )


def _first_look(scanner: Scanner, records: Iterable[ClaimRecord]) -> Inventory:
    """The node's GPUs, with the names that held devices were given out by."""
    gpus, _ = scanner.discover()
    kept = {device.gpu_uuid: device.number for record in records for device in record.devices}
    products = ", ".join(sorted({gpu.product_name for gpu in gpus}))
    log.info("discovered GPUs", extra={"gpus": len(gpus), "products": products})
    return Inventory(gpus, number_gpus(gpus, kept))
