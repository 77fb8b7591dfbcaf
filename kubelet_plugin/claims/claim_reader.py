"""Reading ResourceClaims, with the pods that use them, from the API server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from driver.kube.client import KubeClient
from driver.kube.reads import list_claims, read_claim
from driver.kube.types import Claim


class ClaimReader(Protocol):
    """Both methods raise ApiError."""

    def read(self, namespace: str, name: str, *, any_age: bool = False) -> Claim:
        """Read one claim; the error has status 404 if it does not exist. ``any_age``: a cached answer is sufficient."""
        ...

    def read_all(self) -> Iterable[Claim]:
        """Read all claims of the cluster."""
        ...


class ApiClaimReader:
    """Reads from the API server. ``observe`` receives each claim that ``read`` returns."""

    def __init__(self, client: KubeClient, observe: Callable[[Claim], None]) -> None:
        self._client = client
        self._observe = observe

    def read(self, namespace: str, name: str, *, any_age: bool = False) -> Claim:
        claim = read_claim(self._client, namespace, name, any_age=any_age)
        self._observe(claim)
        return claim

    def read_all(self) -> Iterable[Claim]:
        return list_claims(self._client)
