"""Labels that keep GPUs for one use, and what is said of those that can't."""

from __future__ import annotations

import pytest

from controller.cluster.node_dedication import DEDICATED_TO, UNDEDICATED, Dedication, dedication_of, faults_in

GPUS = range(8)


def of_gpu(number: object) -> str:
    return f"gpu-{number}.{DEDICATED_TO}"


def test_a_node_without_such_a_label_is_for_every_use() -> None:
    assert dedication_of({"kubernetes.io/os": "linux"}) == UNDEDICATED


def test_a_node_and_single_gpus_of_it_can_have_different_uses() -> None:
    labels = {DEDICATED_TO: "training", of_gpu(3): "inference", of_gpu(10): "dev"}
    assert dedication_of(labels) == Dedication("training", {3: "inference", 10: "dev"})
    assert faults_in(labels, [*GPUS, 10]) == []


def test_a_label_that_says_nothing_sensible_changes_nothing() -> None:
    labels = {DEDICATED_TO: "traning", of_gpu(0): "infer", of_gpu("x"): "dev", of_gpu("07"): "dev"}
    assert dedication_of(labels) == UNDEDICATED


@pytest.mark.parametrize(
    ("label", "value", "parts"),
    [
        pytest.param(
            DEDICATED_TO,
            "traning",
            (f"label {DEDICATED_TO}=traning is ignored", "training, inference, dev", "did you mean training?"),
            id="a typo in the node's",
        ),
        pytest.param(
            of_gpu(1), "", (f"label {of_gpu(1)}= is ignored: '' is no use", "training, inference, dev"), id="empty"
        ),
        pytest.param(of_gpu(8), "dev", (of_gpu(8), "no GPU 8", "0, 1, 2, 3, 4, 5, 6, 7"), id="a GPU it doesn't have"),
        pytest.param(of_gpu("x"), "dev", (of_gpu("x"), "names no GPU", of_gpu("<number>")), id="no number"),
        pytest.param(of_gpu("01"), "dev", ("names no GPU",), id="a number that names have not"),
        pytest.param(f"gpu1.{DEDICATED_TO}", "dev", ("names no GPU",), id="without the dash"),
    ],
)
def test_what_is_wrong_with_a_label_is_said_with_what_would_do(label: str, value: str, parts: tuple[str, ...]) -> None:
    [fault] = faults_in({label: value, of_gpu(2): "dev"}, GPUS)
    for part in parts:
        assert part in fault


def test_while_the_gpus_of_a_node_are_not_known_none_is_said_to_be_missing() -> None:
    assert faults_in({of_gpu(8): "dev"}, ()) == []


def test_labels_of_others_are_not_ours_to_judge() -> None:
    assert faults_in({"example.com/dedicated-to": "me", "gpu.tessera.dev/other": "x"}, GPUS) == []
