"""Labels of Nodes: their values, and when they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.cluster.fleet import Fleet, FleetGpu
from controller.decision.hardware_labels import LABEL_SETS, NVIDIA, OWN, LabelSet, NodeLabels, label_value
from driver.errors import FORBIDDEN, ApiError
from driver.kube.client import KubeClient
from driver.kube.types import Metadata, Node
from driver.model.gpu import Gpu, NvLink
from tests.harness.waiting import wait_for
from tests.support.gpus import gpu_of

CLIQUE = "5f3c9d2e-7a41-4b8e-9c60-1d2e3f4a5b6c.2"
SOON_S = 10.0


def tray(clique: str = CLIQUE) -> list[Gpu]:
    link = NvLink(5, 18, 1800, {"switch": 18})
    gpus = (gpu_of("NVIDIA GB200", minor) for minor in range(4))
    return [replace(gpu, fabric_clique=clique, nvlink=link) for gpu in gpus]


def test_a_tray_says_what_its_gpus_have_in_common() -> None:
    assert OWN.of(tray()) == {
        "gpu.tessera.dev/product": "NVIDIA-GB200",
        "gpu.tessera.dev/count": "4",
        "gpu.tessera.dev/driver-version": "580.95.5",
        "gpu.tessera.dev/nvlink-generation": "5",
        "gpu.tessera.dev/fabric-clique": CLIQUE,
    }
    assert NVIDIA.of(tray()) == {"nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.clique": CLIQUE}


def test_what_differs_between_gpus_or_is_missing_has_no_label() -> None:
    mixed = OWN.of([*tray()[:1], *tray("other.1")[1:2], gpu_of("NVIDIA L40S", 2)])
    assert mixed == {"gpu.tessera.dev/count": "3", "gpu.tessera.dev/driver-version": "580.95.5"}
    assert NVIDIA.of([gpu_of()]) == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@given(st.text(max_size=100))
def test_every_text_becomes_a_valid_value(text: str) -> None:
    value = label_value(text)
    assert len(value) <= 63
    assert not value or (value[0].isalnum() and value[-1].isalnum() and value.isascii())
    assert not {*value} - {*"-_."} - {each for each in value if each.isalnum()}


Applied = tuple[str, str, Mapping[str, str], bool]


class Api(KubeClient):
    """Keeps what is applied; ``answer`` may raise."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []
        self.answer: Callable[[], None] = lambda: None

    def apply(self, path: str, body: dict[str, Any], manager: str, *, force: bool = True) -> None:
        self.applied.append((path.rpartition("/")[2], manager, body["metadata"]["labels"], force))
        self.answer()


class Cluster:
    """Nodes whose labels are compared and written by a NodeLabels that runs."""

    def __init__(self, sets: tuple[LabelSet, ...]) -> None:
        self.api, self.fleet, self.nodes = Api(), Fleet(), dict[str, Node]()
        self.labels = NodeLabels(self.api, sets)
        self._stop = threading.Event()
        threading.Thread(target=self.labels.loop.run, args=(self._stop,), daemon=True).start()

    def end(self) -> None:
        self._stop.set()
        self.labels.loop.notify()

    def has(self, name: str, labels: Mapping[str, str], gpus: list[Gpu] | None = None) -> None:
        """The Node is seen with these labels, and its report with these GPUs."""
        if gpus is not None:
            self.fleet = Fleet.of(FleetGpu(name, replace(gpu, uuid=f"{name}-{gpu.uuid}"), gpu.minor) for gpu in gpus)
        node = Node(Metadata(name, uid=f"uid-{name}", labels=dict(labels)))
        self.labels.update([node], [name], self.fleet)

    def written(self, count: int) -> list[Applied]:
        wait_for(lambda: len(self.api.applied) >= count, SOON_S, "labels are written")
        return self.api.applied


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster(LABEL_SETS["tessera"])
    yield found
    found.end()


def test_a_node_gets_its_labels_and_gets_them_back_however_often_they_are_changed(cluster: Cluster) -> None:
    cluster.has("a", {}, tray())
    right = OWN.of(tray())
    assert cluster.written(1) == [("a", OWN.manager, right, True)]
    for count in (2, 3):
        cluster.has("a", {**right, "example.com/other": "x"})
        cluster.has("a", {**right, "gpu.tessera.dev/count": "8"})
        assert cluster.written(count)[-1] == ("a", OWN.manager, right, True)
    cluster.has("a", right)


def test_the_same_change_again_before_the_correction_was_seen_is_corrected_again(cluster: Cluster) -> None:
    wrong = {**OWN.of(tray()), "gpu.tessera.dev/count": "8"}
    cluster.has("a", wrong, tray())
    cluster.written(1)
    cluster.has("a", wrong)
    assert len(cluster.written(2)) == 2


def test_what_the_api_server_refuses_is_not_repeated_until_the_node_changes(cluster: Cluster) -> None:
    def refuse() -> None:
        raise ApiError("not allowed", FORBIDDEN)

    cluster.api.answer = refuse
    cluster.has("a", {}, tray())
    cluster.written(1)
    cluster.has("a", {"example.com/other": "x"})
    cluster.has("a", {"gpu.tessera.dev/count": "8"})
    assert len(cluster.written(2)) == 2


def test_a_write_without_an_answer_is_repeated(cluster: Cluster) -> None:
    def fail_once() -> None:
        cluster.api.answer = lambda: None
        raise ApiError("no answer")

    cluster.api.answer = fail_once
    cluster.has("a", {}, tray())
    assert cluster.written(2)[0] == cluster.written(2)[1]


def test_labels_of_nvidia_are_never_taken_from_another_writer() -> None:
    cluster = Cluster(LABEL_SETS["all"])
    cluster.has("a", {**OWN.of(tray()), "nvidia.com/gpu.product": "NVIDIA-GB200-SHARED"}, tray())
    assert cluster.written(1) == [("a", NVIDIA.manager, NVIDIA.of(tray()), False)]
    cluster.end()


def test_a_node_that_reports_no_gpu_is_left_alone(cluster: Cluster) -> None:
    cluster.has("b", {"gpu.tessera.dev/count": "8"})
    cluster.has("a", {}, tray())
    assert [each[0] for each in cluster.written(1)] == ["a"]


def test_without_labels_to_write_nothing_is_compared() -> None:
    cluster = Cluster(LABEL_SETS["none"])
    cluster.has("a", {}, tray())
    cluster.end()
    assert cluster.api.applied == []
