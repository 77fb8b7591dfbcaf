"""Claims that a ResourceQuota refuses: does what is said of their pods until the API server creates the claim."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st

from controller.explain.reason import ClaimReason, ReasonCode
from driver.errors import ApiError
from tests.conformance.allocator.judge import CLASSES, GROUP, WRITERS
from tests.conformance.reasons.pod_situations import CREATED
from tests.harness.api import Api
from tests.harness.waiting import DeadlineError, wait_for
from tests.support.queues import Situation, request
from tests.support.reasons import Answers, reasons_of_unplaced

SMALL, LARGE, TRAINING = "small", "large", "training"
RESOURCE = "example.com/training"
"""The extendedResourceName of the class ``training``, where the API server has that field."""

OF_CLASS = ".deviceclass.resource.k8s.io/devices"
CLAIMS = "count/resourceclaims.resource.k8s.io"
RECKONED_S, LATE_S, COUNTED_S, ATTEMPTS = 60.0, 10.0, 3.0, 20
MAX_QUOTAS, MAX_EXISTING, PLENTY = 3, 3, "1000"

REFUSAL = re.compile(r"the ResourceQuota (?P<quota>\S+): (?P<used>.+? used)(?:, by claims? (?P<by>.+))?$")
USED = re.compile(r"(\d+) of (\d+) (\S+) used")


class Quotas(NamedTuple):
    """Limits by quota and resource, the requests of the claims that exist already, and those of the next one."""

    hard: Mapping[str, Mapping[str, str]]
    existing: Sequence[Sequence[dict[str, Any]]]
    wanted: Sequence[dict[str, Any]]
    extended: bool


@st.composite
def quota_situations(draw: st.DrawFn, extended: bool = True) -> Quotas:
    """``extended``: whether classes can have names of extended resources, which quotas count, too."""
    resources = [SMALL + OF_CLASS, LARGE + OF_CLASS, TRAINING + OF_CLASS, CLAIMS]
    if extended:
        resources += [f"requests.{RESOURCE}", f"requests.deviceclass.resource.kubernetes.io/{TRAINING}"]
    limits = st.dictionaries(st.sampled_from(resources), st.sampled_from("01234"), min_size=1, max_size=3)
    hard = {f"quota-{number}": draw(limits) for number in range(draw(st.integers(1, MAX_QUOTAS)))}
    existing = draw(st.lists(_requests(), max_size=MAX_EXISTING))
    return Quotas(hard, existing, draw(_requests()), extended)


@st.composite
def _requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Of one claim."""
    number = draw(st.integers(1, 2))
    return [draw(st.one_of(_exactly(f"r-{index}"), _alternatives(f"r-{index}"))) for index in range(number)]


CLASS_NAMES = st.sampled_from([SMALL, LARGE, TRAINING])
AMOUNTS = st.sampled_from([{}, {}, {"count": 2}, {"allocationMode": "All"}])


def _exactly(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda device_class, more: request(device_class, name, **more), CLASS_NAMES, AMOUNTS)


@st.composite
def _alternatives(draw: st.DrawFn, name: str) -> dict[str, Any]:
    classes = draw(st.lists(CLASS_NAMES, min_size=1, max_size=3))
    wanted = [
        {"name": f"a-{number}", "deviceClassName": device_class, "count": draw(st.integers(1, 2))}
        for number, device_class in enumerate(classes)
    ]
    return {"name": name, "firstAvailable": wanted}


@dataclass
class QuotaWalk:
    """One claim. ``reasons`` and ``false`` are filled by ``run``."""

    api: Api
    name: str
    quotas: Quotas
    reasons: list[ClaimReason] = field(default_factory=list)
    false: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Raise what is said to be too little, until the claim is created."""
        there = _Namespace(self.api, self.name, self.quotas)
        raised: dict[str, dict[str, str]] = {}
        refusal = there.refusal()
        while refusal is not None:
            reason = self._reason(refusal)
            match = None if reason is None else REFUSAL.search(reason.sentence)
            if reason is None or reason.code != ReasonCode.OVER_QUOTA or match is None:
                self.false.append(f"{reason and reason.sentence} does not name the quota [{refusal}]")
                return
            self.reasons.append(reason)
            used = {name: (number, limit) for number, limit, name in USED.findall(match["used"])}
            already = raised.setdefault(match["quota"], {})
            if not used or not already.keys().isdisjoint(used):
                self.false.append(f"doing what is said does not help: {reason.sentence} [{refusal}]")
                return
            self._check_numbers(there, match["quota"], used, reason)
            if len(self.reasons) == 1:
                self._check_holders(match, used, reason)
            already |= dict.fromkeys(used, PLENTY)
            there.set_limits(match["quota"], already)
            refusal = there.refusal_after(refusal)

    def _check_numbers(
        self, there: _Namespace, quota: str, used: Mapping[str, tuple[str, str]], reason: ClaimReason
    ) -> None:
        status = there.quota(quota)["status"]
        truth = {name: (status["used"].get(name), status["hard"].get(name)) for name in used}
        if truth != used:
            self.false.append(f"used are {truth}: {reason.sentence}")

    def _check_holders(self, match: re.Match[str], used: Mapping[str, tuple[str, str]], reason: ClaimReason) -> None:
        """Whether all that is used is used by the claims that are named, and would suffice without them."""
        other = _Namespace(self.api, f"{self.name}-freed", self.quotas)
        other.delete([] if match["by"] is None else match["by"].split(", "))
        left = {name: other.quota(match["quota"])["status"]["used"][name] for name in used if name != CLAIMS}
        if set(left.values()) - {"0"}:
            self.false.append(f"without these claims {left} are used: {reason.sentence}")
        other.delete(other.existing)
        if reason.permanent != other.is_refused_by(match["quota"], expected=reason.permanent):
            self.false.append(f"permanent is {reason.permanent}, but not so without other claims: {reason.sentence}")

    def _reason(self, refusal: str) -> ClaimReason | None:
        """What is said of the pod whose claim is refused."""
        there = Situation([])
        for name, spec in _classes(self.quotas.extended).items():
            there.device_class(name, **spec)
        for index, requests in enumerate(self.quotas.existing):
            there.claim(f"claim-{index}", *requests)
        template = [{"name": "gpu", "resourceClaimTemplateName": "template"}]
        there.pod("pod", metadata={"creationTimestamp": CREATED}, resourceClaims=template)
        return next(iter(reasons_of_unplaced(there.queue, Answers(exists=True, failure=refusal))), None)


def _classes(extended: bool) -> dict[str, dict[str, str]]:
    return {SMALL: {}, LARGE: {}, TRAINING: {"extendedResourceName": RESOURCE} if extended else {}}


class _Namespace:
    """A namespace with the quotas and the claims of a situation."""

    def __init__(self, api: Api, name: str, quotas: Quotas) -> None:
        self._api, self._wanted = api, quotas.wanted
        self._quotas = f"/api/v1/namespaces/{name}/resourcequotas"
        self._claims = f"{GROUP}/namespaces/{name}/resourceclaims"
        self.existing: list[str] = []
        api.post("/api/v1/namespaces", {"metadata": {"name": name}})
        for quota, hard in quotas.hard.items():
            # With a count of claims in each, it can be seen which claims a quota has counted.
            plenty = dict.fromkeys([CLAIMS, *hard], PLENTY)
            api.post(self._quotas, {"metadata": {"name": quota}, "spec": {"hard": plenty}})
        self._wait_counted(quotas.hard)
        for index, requests in enumerate(quotas.existing):
            self.existing.append(f"claim-{index}")
            self._create(self.existing[-1], requests)
        for quota, hard in quotas.hard.items():
            self.set_limits(quota, hard)

    def quota(self, name: str) -> dict[str, Any]:
        return self._api.get(f"{self._quotas}/{name}")

    def refusal(self) -> str | None:
        """Why the API server would not create the claim; None: it would."""
        try:
            self._create("wanted", self._wanted, "?dryRun=All")
        except ApiError as error:
            return str(error)
        return None

    def refusal_after(self, before: str) -> str | None:
        """The next refusal, if any: the watch of quotas with which the API server decides may be late."""
        wait_for(lambda: self.refusal() != before, RECKONED_S, f"another answer than {before}")
        return self.refusal()

    def is_refused_by(self, quota: str, *, expected: bool) -> bool:
        """Whether ``quota`` refuses the claim, once that is as ``expected`` or for a while it is not."""

        def is_as_expected() -> bool:
            return (f"exceeded quota: {quota}," in (self.refusal() or "")) == expected

        try:
            wait_for(is_as_expected, LATE_S, f"{quota} refuses: {expected}")
        except DeadlineError:
            return not expected
        return expected

    def set_limits(self, quota: str, limits: Mapping[str, str]) -> None:
        self._api.patch(f"{self._quotas}/{quota}", {"spec": {"hard": dict(limits)}})
        self._wait_counted([quota])

    def delete(self, claims: Sequence[str]) -> None:
        for claim in claims:
            if claim in self.existing:
                self._api.request("DELETE", f"{self._claims}/{claim}")
        self.existing = [claim for claim in self.existing if claim not in claims]
        self._wait_counted([item["metadata"]["name"] for item in self._api.get(self._quotas)["items"]])

    def _create(self, claim: str, requests: Sequence[dict[str, Any]], query: str = "") -> None:
        body = {"metadata": {"name": claim}, "spec": {"devices": {"requests": requests}}}
        self._api.post(self._claims + query, body)

    def _wait_counted(self, quotas: Sequence[str] | Mapping[str, Any]) -> None:
        """Until these quotas have counted the claims that exist, with the limits that they have now."""

        def is_counted(name: str) -> bool:
            quota = self.quota(name)
            status = quota.get("status", {})
            counted = status.get("used", {}).get(CLAIMS) == str(len(self.existing))
            return bool(counted and status["hard"] == quota["spec"]["hard"])

        for quota in quotas:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    wait_for(partial(is_counted, quota), COUNTED_S, f"{self._quotas}/{quota} counts")
                    break
                except DeadlineError:
                    if attempt == ATTEMPTS:
                        raise
                    # kube-controller-manager counted before it had seen the claims: it counts anew for new limits.
                    new = {"spec": {"hard": {"count/configmaps": f"{attempt}{PLENTY}"}}}
                    self._api.patch(f"{self._quotas}/{quota}", new)


def walk_quotas(api: Api, situations: Sequence[Quotas]) -> list[QuotaWalk]:
    """The walks of the claims that are not created at once."""
    for name, spec in _classes(any(situation.extended for situation in situations)).items():
        api.post(CLASSES, {"metadata": {"name": name}, "spec": spec})
    walks = [QuotaWalk(api, f"quota-{index}", quotas) for index, quotas in enumerate(situations)]
    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(QuotaWalk.run, walks))
    return [walk for walk in walks if walk.reasons or walk.false]
