"""Who may see the page, judged by a server that answers reviews as the API server does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from controller.web import access
from controller.web.access import TokenAccess, bearer_token, check_local, is_loopback
from driver.config.flag_values import parse_listen_address
from tests.support.api_server import Exchange, HttpServer

USER = {
    "username": "ann",
    "uid": "1",
    "groups": ["system:authenticated"],
    "extra": {"example.com/scopes": ["view"]},
}
ALL = frozenset({"resourceclaims", "pods", "nodes"})


class Reviews:
    """Answers TokenReviews and SubjectAccessReviews. ``rights``: what the account of each token may list."""

    def __init__(self) -> None:
        self.rights: dict[str, frozenset[str]] = {}
        self.asked: list[dict[str, Any]] = []
        self.is_broken = False
        self.now = 1000.0

    def answer(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        self.asked.append(body)
        if self.is_broken:
            exchange.refuse(500, "etcd is gone")
        elif body["kind"] == "TokenReview":
            token = body["spec"]["token"]
            status = {"authenticated": True, "user": {**USER, "username": token}} if token in self.rights else {}
            exchange.send_json({**body, "status": status}, 201)
        else:
            spec = body["spec"]
            attributes = spec["resourceAttributes"]
            allowed = attributes["resource"] in self.rights[spec["user"]] and attributes["verb"] == "list"
            exchange.send_json({**body, "status": {"allowed": allowed and "namespace" not in attributes}}, 201)

    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.asked]


@pytest.fixture
def reviews() -> Reviews:
    return Reviews()


@pytest.fixture
def tokens(reviews: Reviews) -> Iterator[TokenAccess]:
    with HttpServer(reviews.answer) as server:
        yield TokenAccess(server.client(), lambda: reviews.now)


@pytest.mark.parametrize(
    ("rights", "status", "message"),
    [
        (ALL, None, ""),
        (ALL - {"nodes"}, HTTPStatus.FORBIDDEN, "ann may not list nodes in all namespaces"),
        (ALL - {"pods"}, HTTPStatus.FORBIDDEN, "ann may not list pods in all namespaces"),
        (ALL - {"resourceclaims"}, HTTPStatus.FORBIDDEN, "ann may not list resourceclaims.resource.k8s.io in all"),
        (None, HTTPStatus.UNAUTHORIZED, "the cluster does not accept this token"),
    ],
)
def test_only_who_may_list_what_the_page_shows_sees_it(
    reviews: Reviews, tokens: TokenAccess, rights: frozenset[str] | None, status: HTTPStatus | None, message: str
) -> None:
    if rights is not None:
        reviews.rights["ann"] = rights
    refused = tokens.check("ann")
    assert (refused and refused.status) == status
    assert refused is None or message in refused.message


def test_the_access_is_reviewed_for_the_whole_user_and_all_namespaces(reviews: Reviews, tokens: TokenAccess) -> None:
    reviews.rights["ann"] = ALL
    tokens.check("ann")
    of_access = [each["spec"] for each in reviews.asked if each["kind"] == "SubjectAccessReview"]
    assert [each.pop("resourceAttributes") for each in of_access] == [
        {"verb": "list", "group": "resource.k8s.io", "resource": "resourceclaims"},
        {"verb": "list", "group": "", "resource": "pods"},
        {"verb": "list", "group": "", "resource": "nodes"},
    ]
    user = {"user": "ann", "uid": "1", "groups": USER["groups"], "extra": USER["extra"]}
    assert of_access == [user] * 3


def test_a_verdict_holds_for_a_minute_and_a_lost_right_counts_after_that(reviews: Reviews, tokens: TokenAccess) -> None:
    reviews.rights["ann"] = ALL
    assert tokens.check("ann") is None
    reviews.rights["ann"] = frozenset()
    reviews.now += 59.0
    assert tokens.check("ann") is None
    assert len(reviews.asked) == 4
    reviews.now += 1.0
    refused = tokens.check("ann")
    assert refused is not None
    assert refused.status == HTTPStatus.FORBIDDEN


def test_an_api_server_that_fails_lets_nobody_in_and_is_asked_again(reviews: Reviews, tokens: TokenAccess) -> None:
    reviews.rights["ann"], reviews.is_broken = ALL, True
    refused = tokens.check("ann")
    assert refused is not None
    assert (refused.status, "etcd" in refused.message) == (HTTPStatus.SERVICE_UNAVAILABLE, False)
    reviews.is_broken = False
    assert tokens.check("ann") is None


def test_a_flood_of_wrong_tokens_reaches_the_api_server_only_in_part_and_passes(
    reviews: Reviews, tokens: TokenAccess
) -> None:
    reviews.rights["ann"] = ALL
    assert tokens.check("ann") is None
    statuses = [refused.status for number in range(40) if (refused := tokens.check(f"wrong-{number}"))]
    assert statuses.count(HTTPStatus.SERVICE_UNAVAILABLE) == 40 - (access.MAX_REVIEWS - 1)
    assert reviews.kinds().count("TokenReview") == access.MAX_REVIEWS
    assert tokens.check("ann") is None, "who was let in before stays in"
    reviews.now += access.REVIEW_PERIOD_SECONDS
    refused = tokens.check("wrong-39")
    assert refused is not None
    assert refused.status == HTTPStatus.UNAUTHORIZED


def test_verdicts_do_not_pile_up(reviews: Reviews, tokens: TokenAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_VERDICTS", 4)
    for number in range(10):
        tokens.check(f"wrong-{number}")
    assert len(tokens._verdicts) == 4


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc.def-_", "abc.def-_"),
        ("bearer  abc ", "abc"),
        ("Basic abc", ""),
        ("Bearer", ""),
        ("", ""),
        ("Bearer a\x00b", ""),
        ("Bearer tok\u00e9n", ""),
        (f"Bearer {'a' * (access.MAX_TOKEN + 1)}", ""),
    ],
)
def test_only_a_plain_bearer_token_is_taken_from_the_header(header: str, token: str) -> None:
    assert bearer_token({"authorization": header}) == token


@pytest.mark.parametrize(
    ("host", "site", "passes"),
    [
        ("127.0.0.1:8082", None, True),
        ("localhost:8082", "same-origin", True),
        ("LOCALHOST", "none", True),
        ("[::1]:8082", "none", True),
        ("[::1]", None, True),
        ("evil.example:8082", "same-origin", False),  # a name that resolves to 127.0.0.1
        ("127.0.0.1.evil.example", None, False),
        ("localhost.evil.example:8082", None, False),
        ("", None, False),
        ("127.0.0.1:8082", "cross-site", False),
        ("localhost:8082", "same-site", False),
    ],
)
def test_a_foreign_page_can_not_read_that_of_the_own_machine(host: str, site: str | None, passes: bool) -> None:
    headers = {"host": host, **({"sec-fetch-site": site} if site else {})}
    assert (check_local(headers) is None) == passes


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", True),
        ("127.1.2.3:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        (":80", False),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("example.com:80", False),
        ("localhost.example.com:80", False),
    ],
)
def test_an_address_is_local_only_if_nobody_else_reaches_it(address: str, expected: bool) -> None:
    assert is_loopback(parse_listen_address(address)) == expected
