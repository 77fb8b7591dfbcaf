"""The check of ``tessera status`` about claims that wait, by what the controller says of them (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

from controller.reasons import Code
from driver.kube.heartbeat import HEARTBEAT, SILENT_S
from driver.kube.transport import Object
from tessera.status_cluster import age_of
from tessera.status_finding import Finding, Told
from tessera.status_picture import Picture, What, read_time

PASSED = timedelta(minutes=10)
"""The controller repeats its Events within a minute or, with thousands of them, a few: an older one is over."""

SHOWN = 3
"""Claims with a finding of their own."""

SENTENCE = 300
"""Characters of the controller's sentence."""

LASTING: Mapping[str, str] = {
    Code.NO_SUCH_CLASS: "create the DeviceClass, or correct the claim",
    Code.SELECTOR_REFUSED: "correct its selector: tessera lint",
    Code.SELECTOR_FAILS: "correct its selector: tessera lint",
    Code.NOTHING_MATCHES: "correct the claim, or add GPUs that have it",
    Code.TOO_MANY: "ask for less",
    Code.DEDICATED: "change the label of a node or a GPU (docs/controller.md), or the claim",
    Code.RESET: "reset one of them when it is idle (docs/health.md), or change the claim",
    Code.FOREIGN: "end the partitions that Tessera did not make, or change the claim",
    Code.NO_GPUS: "see node plugins",
    Code.UNUSED: "docs/controller.md says what to look at",
}
"""What to do about reasons that don't pass by themselves, as held GPUs do."""


def waiting(picture: Picture) -> Told:
    told = _told(picture)
    if not told:
        if picture.has_read(What.LEASES):
            yield "the controller tells of none that waits" if _is_led(picture) else "nobody tells why any waits"
        return
    codes = Counter(str(event["reason"]) for _, event in told)
    spaces = {claim["metadata"]["namespace"] for claim, _ in told}
    where = f"-n {spaces.pop()}" if len(spaces) == 1 else "-A"
    counts = ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
    yield f"{len(told)} wait{'s' if len(told) == 1 else ''}: {counts} (kubectl describe resourceclaim {where})"
    lasting = [(claim, event) for claim, event in told if event["reason"] in LASTING]
    for claim, event in lasting[:SHOWN]:
        yield _finding(claim, event)
    if (more := len(lasting) - SHOWN) > 0:
        remedy = "kubectl get events -A --field-selector reportingComponent=tessera-controller"
        yield Finding(f"{more} more", "of the same kind", remedy)


def _is_led(picture: Picture) -> bool:
    """Whether a controller is there that would tell."""
    beat = age_of(picture, picture.leases.get(HEARTBEAT))
    return beat is not None and beat <= SILENT_S


def _told(picture: Picture) -> list[tuple[Object, Object]]:
    """Claims that wait, each with the last thing the controller said of it."""
    pending = {claim["metadata"].get("uid"): claim for claim in picture.pending}
    last: dict[str, Object] = {}
    for event in sorted(picture.events, key=lambda event: str(event.get("lastTimestamp") or "")):
        at, uid = read_time(event.get("lastTimestamp")), event["involvedObject"].get("uid")
        if event.get("reason") in set(Code) and at is not None and picture.now - at <= PASSED and uid in pending:
            last[uid] = event
    found = [(pending[uid], event) for uid, event in last.items()]
    return sorted(found, key=lambda each: _name(each[0]))


def _finding(claim: Object, event: Object) -> Finding:
    said = str(event.get("message", ""))
    sentence = said if len(said) <= SENTENCE else f"{said[: SENTENCE - 1]}…"
    message = f"waits, and not for GPUs that others hold: {event['reason']}: {sentence}"
    return Finding(f"claim {_name(claim)}", message, LASTING[event["reason"]])


def _name(claim: Object) -> str:
    return f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
