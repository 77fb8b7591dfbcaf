"""What every object of Kubernetes has, as far as Tessera reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec


class Key(NamedTuple):
    """Which object of one resource; ``namespace`` is empty for resources of the whole cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    """Part of ``metadata``. A subclass adds fields (labels, deletionTimestamp, ...) where they are needed."""

    name: str
    resource_version: str
    namespace: str = ""
    uid: str = ""

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)

    @property
    def version(self) -> int:
        """Resource versions of one resource compare as integers (KEP-5504; true of every supported release)."""
        return int(self.resource_version)


class KubeObject(Protocol):
    """A msgspec struct with metadata, and of the rest whatever its reader needs."""

    @property
    def metadata(self) -> ObjectMeta: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """One object, as Events point at it."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"
