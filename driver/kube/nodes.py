"""The Node object, as far as its plugin needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from driver.errors import ApiError
from driver.kube.transport import KubeClient


def owner_reference(client: KubeClient, name: str) -> Mapping[str, Any]:
    """What makes an object go when the Node ``name`` goes. Raises ApiError naming the flag that gave the name."""
    try:
        node = msgspec.json.decode(client.get(f"/api/v1/nodes/{name}"), type=dict[str, Any])
        uid = node["metadata"]["uid"]
    except ApiError as error:
        raise ApiError(f"--node-name {name}: its Node object can't be read: {error}", error.status) from error
    except (msgspec.MsgspecError, KeyError) as error:
        raise ApiError(f"--node-name {name}: what the API server sent is no Node object: {error}") from error
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid, "controller": True}
