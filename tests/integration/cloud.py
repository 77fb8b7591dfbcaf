"""A cloud provider for cluster-autoscaler in this process: its nodes are simulated GPU nodes of a test cluster.

The autoscaler asks it over gRPC (``--cloud-provider=externalgrpc``). Only the messages that are needed are described
here, by their field numbers (cloudprovider/externalgrpc/protos of kubernetes/autoscaler).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "clusterautoscaler.cloudprovider.v1.externalgrpc"
GROUP = "gpus"

RUNNING = 1
"""InstanceStatus.instanceRunning."""

INT, TEXT = FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_STRING
MESSAGES: Mapping[str, Mapping[int, tuple[str, object]]] = {
    "NodeGroup": {1: ("id", TEXT), 2: ("minSize", INT), 3: ("maxSize", INT)},
    "Node": {1: ("providerID", TEXT), 2: ("name", TEXT)},
    "InstanceStatus": {1: ("instanceState", INT)},
    "Instance": {1: ("id", TEXT), 2: ("status", "InstanceStatus")},
    "Empty": {},
    "NodeGroups": {1: ("nodeGroups", ["NodeGroup"])},
    "OfNode": {1: ("node", "Node")},
    "GroupOfNode": {1: ("nodeGroup", "NodeGroup")},
    "Size": {1: ("targetSize", INT)},
    "Delta": {1: ("delta", INT), 2: ("id", TEXT)},
    "Nodes": {1: ("nodes", ["Node"]), 2: ("id", TEXT)},
    "Instances": {1: ("instances", ["Instance"])},
}
"""Fields by number; a list stands for a repeated message."""


def _message_classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="cloud.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = DescriptorProto(name=name)
        for number, (field, kind) in fields.items():
            repeated = isinstance(kind, list)
            described = message.field.add(name=field, number=number)
            described.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            of = kind[0] if isinstance(kind, list) else kind
            if isinstance(of, str):
                described.type, described.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{of}"
            else:
                described.type = of  # type: ignore[assignment]
        file.message_type.append(message)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


TYPES = _message_classes()


class Cloud:
    """One group of equal nodes. ``start`` makes the node of a name, ``end`` removes it; both may take a while.

    ``ordered`` are the names of the nodes that the autoscaler has asked for, in order.
    """

    def __init__(self, most: int, start: Callable[[str], None], end: Callable[[str], None]) -> None:
        self.ordered: list[str] = []
        self._most, self._start, self._end = most, start, end
        self._lock = threading.Lock()
        self._nodes: list[str] = []

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that there are or that are about to be there."""
        with self._lock:
            return list(self._nodes)

    def add(self, name: str) -> None:
        """Add a node without an order."""
        with self._lock:
            self._nodes.append(name)
        self._start(name)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve the autoscaler while the block runs; yields the address."""
        server = grpc.server(ThreadPoolExecutor(4))
        calls: dict[str, tuple[str, Callable[[Any], Any]]] = {
            "NodeGroups": ("Empty", lambda _: TYPES["NodeGroups"](nodeGroups=[self._group()])),
            "NodeGroupForNode": ("OfNode", self._group_of),
            "Refresh": ("Empty", lambda _: TYPES["Empty"]()),
            "Cleanup": ("Empty", lambda _: TYPES["Empty"]()),
            "GPULabel": ("Empty", lambda _: TYPES["Empty"]()),
            "GetAvailableGPUTypes": ("Empty", lambda _: TYPES["Empty"]()),
            "NodeGroupTargetSize": ("Empty", lambda _: TYPES["Size"](targetSize=len(self.nodes))),
            "NodeGroupIncreaseSize": ("Delta", self._increase),
            "NodeGroupDeleteNodes": ("Nodes", self._delete),
            "NodeGroupNodes": ("Empty", lambda _: TYPES["Instances"](instances=map(_instance, self.nodes))),
        }
        handlers = {name: _handler(*call) for name, call in calls.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{PACKAGE}.CloudProvider", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()

    def _group(self) -> Any:
        return TYPES["NodeGroup"](id=GROUP, minSize=1, maxSize=self._most)

    def _group_of(self, request: Any) -> Any:
        known = request.node.name in self.nodes
        return TYPES["GroupOfNode"](nodeGroup=self._group() if known else TYPES["NodeGroup"]())

    def _increase(self, request: Any) -> Any:
        with self._lock:
            new = [f"ordered-{len(self.ordered) + number}" for number in range(request.delta)]
            self.ordered += new
            self._nodes += new
        for name in new:
            threading.Thread(target=self._start, args=(name,), daemon=True).start()
        return TYPES["Empty"]()

    def _delete(self, request: Any) -> Any:
        names = [node.name for node in request.nodes]
        with self._lock:
            self._nodes = [name for name in self._nodes if name not in names]
        for name in names:
            self._end(name)
        return TYPES["Empty"]()


def provider_id(node: str) -> str:
    return f"test://{node}"


def _instance(node: str) -> Any:
    return TYPES["Instance"](id=provider_id(node), status=TYPES["InstanceStatus"](instanceState=RUNNING))


def _handler(request: str, call: Callable[[Any], Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        lambda message, _: call(message),
        request_deserializer=TYPES[request].FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
