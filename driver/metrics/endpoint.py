"""The page that Prometheus scrapes."""

from __future__ import annotations

from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from driver.web import Page, Question, Reply

PATH = "/metrics"


def metrics_page(registry: CollectorRegistry) -> Page:
    """``registry`` as it is at each request, in the format that the client takes."""

    def answer(question: Question) -> Reply:
        encoder, content_type = choose_encoder(question.accept)
        return Reply(HTTPStatus.OK, encoder(registry), content_type)

    return answer
