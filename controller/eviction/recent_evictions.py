"""Which pods were evicted within a day and which nodes asked for it, for people to see, and so that the limits of
``evictor`` (an owner), ``failed_starts`` (a node, the cluster) and policies hold after a change of leaders, too."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TypedDict, Unpack

import msgspec

from controller.eviction.gpu_policy import GpuPolicy
from driver.clock import Clock
from driver.errors import CONFLICT, ApiError
from driver.kube.client import KubeClient, Object
from driver.kube.types import Pod
from driver.model.plan import FENCE

log = logging.getLogger(__name__)

ANNOTATION = "gpu.tessera.dev/evictions"
"""Annotation of the fence's ConfigMap, of which nodes may change only the data: the record as JSON."""

RECORD_SECONDS, HISTORY_SECONDS = 3600.0, 86_400.0
"""Time for which an eviction counts, and for which it is shown."""

MAX_RECORD_BYTES, MAX_HISTORY_BYTES = 200 << 10, 64 << 10
"""Longest record; beyond that no pod is evicted. Beyond the second, evictions that do not count any more are forgotten:
every write of the fence carries them. All annotations of an object have at most 256 KiB together."""

MOVED, FAILED_TO_START = "repack", "failed-start"
"""Triggers with a limit of their own: pods that can have their devices elsewhere, and those that can't start."""

MAX_ATTEMPTS = 5
"""Attempts of one write: meanwhile the fence may have changed its data."""


class Eviction(msgspec.Struct, frozen=True, array_like=True):
    """A pod by its UID, its owner as the evictor names it, the API server's time in seconds since 1970, and the
    GpuPolicy, if there is one. Then, which earlier versions do not write: for whom, what it has cost, and the first of
    the pods that could only go together with it."""

    pod: str
    owner: str
    node: str
    at: float
    policy: str = ""
    name: str = ""
    trigger: str = ""
    contender: str = ""
    gpu_hours: float = 0.0
    unit: str = ""


class EvictionCause(TypedDict, total=False):
    """The GpuPolicy by which a pod is evicted, the pod for which it is, the work that is lost, and its unit."""

    policy: str
    contender: str
    gpu_hours: float
    unit: str


class Record(msgspec.Struct, frozen=True):
    """``asked_at``: when each node asked last for evictions."""

    evictions: tuple[Eviction, ...] = ()
    asked_at: dict[str, float] = {}


class RecentEvictions:
    """The record. For one thread; methods raise ApiError. Limits count the last hour; ``record`` has a day.

    It is written before a pod is evicted: a leader that is killed between the two leaves a pod that counts only once.
    Writes build on what was read: of two leaders for a moment, one evicts no pod.
    """

    def __init__(self, client: KubeClient, namespace: str, clock: Clock | None = None) -> None:
        self._client, self._namespace = client, namespace
        self._clock = clock or client.clock
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self.record, self._version, self._text = Record(), "", ""

    def refresh(self) -> None:
        """Read the record anew, before it is decided who is evicted."""
        self._remember(self._client.find(f"{self._folder}/{FENCE}") or {})

    def of_owner(self, owner: str, besides: Collection[str]) -> int:
        """Number of units of ``owner`` that were evicted; pods with a UID in ``besides`` do not count."""
        lost = (past for past in self._counting() if past.owner == owner and past.pod not in besides)
        return len({past.unit or past.pod for past in lost})

    def on_node(self, node: str, seconds: float) -> int:
        """Number of pods that were evicted from ``node`` within the last ``seconds`` since they could not start."""
        since, triggers = self._now() - seconds, {FAILED_TO_START, ""}
        of_node = (past for past in self.record.evictions if past.node == node and past.trigger in triggers)
        return sum(past.at > since for past in of_node)

    def limit(self, victims: Collection[tuple[Pod, GpuPolicy]], moves: Collection[object] = ()) -> str | None:
        """Why the policies of these pods do not let them be evicted now: quiet hours, a budget; None: they do.

        With ``moves``, to where they can have their devices, the limit of repacking counts, too. An eviction of one of
        them that is in the record was not sent.
        """
        uids = {pod.metadata.uid for pod, _ in victims}
        for policy in {policy.metadata.name: policy for _, policy in victims}.values():
            name, budget = policy.metadata.name, policy.spec.budget
            ends = [end for hours in policy.spec.quiet_hours if (end := hours.end_of(self._clock.now())) is not None]
            if ends:
                return f"policy {name} has quiet hours until {max(ends):%a %H:%M} ({max(ends).tzinfo})"
            counting = [past for past in self._counting() if past.policy == name and past.pod not in uids]
            lost = Counter(past.owner.partition("/")[0] for past in counting)
            more = Counter(pod.metadata.namespace for pod, decides in victims if decides.metadata.name == name)
            limits = [(f" of namespace {key}", lost[key], more[key], budget.per_namespace) for key in sorted(more)]
            if moves:
                moved = sum(past.trigger == MOVED for past in counting)
                limits.append((" moved", moved, more.total(), policy.spec.repack.max_per_hour))
            for whose, used, count, most in [("", lost.total(), more.total(), budget.pods_per_hour), *limits]:
                if most is not None and used + count > most:
                    return f"the budget of policy {name} is {most} pods{whose} an hour, of which {used} are used"
        return None

    def asking(self, nodes: Collection[str], seconds: float) -> set[str]:
        """Record that ``nodes`` ask for evictions now. Return those that did so within the last ``seconds``.

        A node that asks again is written only after half that time.
        """
        self.refresh()
        now = self._now()
        asked_at = {node: at for node, at in self.record.asked_at.items() if at > now - seconds}
        is_due = any(asked_at.get(node, 0.0) <= now - seconds / 2 for node in nodes)
        record = msgspec.structs.replace(self.record, asked_at=asked_at | dict.fromkeys(nodes, now))
        if is_due:
            self._write(record)
        self.record = record
        return {*record.asked_at}

    def add(self, pod: Pod, owner: str, trigger: str = "", **cause: Unpack[EvictionCause]) -> None:
        """Record that ``pod`` is about to be evicted."""
        uid, name, at = pod.metadata.uid, str(pod.metadata.key), self._now()
        others = tuple(past for past in self.record.evictions if past.pod != uid)
        eviction = Eviction(uid, owner, pod.spec.node_name, at, name=name, trigger=trigger, **cause)
        self._write(msgspec.structs.replace(self.record, evictions=(*others, eviction)))

    def discard(self, pod: Pod) -> None:
        """Forget ``pod``, which was not evicted after all. Does not raise: if this can't be written, it ends like any
        other."""
        others = tuple(past for past in self.record.evictions if past.pod != pod.metadata.uid)
        self.record = msgspec.structs.replace(self.record, evictions=others)
        with suppress(ApiError):
            self._write(self.record)

    def _counting(self) -> list[Eviction]:
        since = self._now() - RECORD_SECONDS  # once: every waiting pod is asked about
        return [past for past in self.record.evictions if past.at > since]

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _remember(self, stored: Object) -> None:
        metadata, now = stored.get("metadata") or {}, self._now()
        self._version = str(metadata.get("resourceVersion", ""))
        self._text = (metadata.get("annotations") or {}).get(ANNOTATION, "{}")
        try:
            record = msgspec.json.decode(self._text, type=Record)
        except msgspec.MsgspecError as error:
            log.warning("the record of evictions does not parse: it starts anew", extra={"error": str(error)})
            record = Record()
        recent = (past for past in record.evictions if past.at > now - HISTORY_SECONDS)
        # A time in the future, after the API server's clock was set back, ends like any other.
        evictions = tuple(msgspec.structs.replace(past, at=min(past.at, now)) for past in recent)
        asked_at = {node: min(at, now) for node, at in record.asked_at.items()}
        self.record = Record(evictions, asked_at)

    def _write(self, record: Record) -> None:
        since = self._now() - RECORD_SECONDS
        while len(text := msgspec.json.encode(record)) > MAX_HISTORY_BYTES:
            if all(past.at > since for past in record.evictions[:1]):
                break
            record = msgspec.structs.replace(record, evictions=record.evictions[1:])
        if len(text) > MAX_RECORD_BYTES:
            raise ApiError(f"the record of evictions is full ({MAX_RECORD_BYTES >> 10} KiB): no pod is evicted")
        metadata: Object = {"annotations": {ANNOTATION: text.decode()}}
        identity = {"name": FENCE, "namespace": self._namespace}
        new: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**identity, **metadata}}
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            body = {"metadata": {"resourceVersion": self._version, **metadata}} if self._version else new
            try:
                self._remember(self._client.create_or_patch(f"{self._folder}/{FENCE}", body, new))
                return
            except ApiError as error:
                if error.status != CONFLICT or not attempts_left:
                    raise
                before = self._text
                self.refresh()
                if self._text != before:
                    raise  # another controller evicts pods


def read_evictions(client: KubeClient, namespace: str) -> Sequence[Eviction]:
    """Those of the last day, the oldest first. Raises ApiError."""
    recent = RecentEvictions(client, namespace)
    recent.refresh()
    return recent.record.evictions
