"""Which GPUs a starting plugin still counts to its node though they do not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from driver.model.gpu import Gpu
from kubelet_plugin.checkpoint.recorded_gpus import KnownGpus
from tests.support.node import start_node


@pytest.fixture
def gpus(tmp_path: Path) -> list[Gpu]:
    """Those of a node, of which the last start has seen all."""
    found = list(start_node(tmp_path, gpus="h100-pcie-4").node.inventory.gpus)
    KnownGpus(tmp_path, "boot-1").save(found)
    return found


def test_a_gpu_that_does_not_answer_is_still_one_of_the_node(tmp_path: Path, gpus: list[Gpu]) -> None:
    present = gpus[:1] + gpus[2:]
    assert KnownGpus(tmp_path, "boot-1").missing(present, {1}, ()) == [gpus[1]]
    assert KnownGpus(tmp_path, "boot-1").missing(present, set(), ()) == [gpus[1]]
    assert KnownGpus(tmp_path, "boot-1").missing(gpus, set(), ()) == []
    assert KnownGpus(tmp_path, "boot-1").missing([], {0, 1, 2, 3}, ()) == gpus


def test_after_a_reboot_it_is_one_only_while_nvml_counts_it(tmp_path: Path, gpus: list[Gpu]) -> None:
    present = gpus[:1] + gpus[2:]
    assert KnownGpus(tmp_path, "boot-2").missing(present, {1}, ()) == [gpus[1]]
    assert KnownGpus(tmp_path, "boot-2").missing(present, set(), ()) == []


def test_a_gpu_in_the_place_of_another_replaces_it(tmp_path: Path, gpus: list[Gpu]) -> None:
    assert KnownGpus(tmp_path, "boot-1").missing([*gpus[1:], replace(gpus[0], uuid="GPU-new")], set(), ()) == []


def test_a_gpu_of_which_claims_hold_something_stays_known_whatever_became_of_it(
    tmp_path: Path, gpus: list[Gpu]
) -> None:
    held = {gpus[0].uuid}
    assert KnownGpus(tmp_path, "boot-2").missing(gpus[1:], set(), held) == gpus[:1]
    assert KnownGpus(tmp_path, "boot-2").missing([*gpus[1:], replace(gpus[0], uuid="GPU-new")], set(), held) == gpus[:1]
    assert KnownGpus(tmp_path, "boot-2").missing(gpus, set(), held) == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"boot": "boot-1", "inventory": "no"}', b"\xff"])
def test_a_file_that_cannot_be_read_names_no_gpu(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gpus.json").write_bytes(content)
    assert KnownGpus(tmp_path, "boot-1").missing([], set(), ()) == []
