"""The demo's picture of the GPUs: to scale, in line, everybody once."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.model.device import Device, devices_of, shared_device
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from driver.placement.occupancy import overlap
from driver.slices.build import PublishedGpu, slice_object
from driver.slices.slice_names import Pool
from tessera.tables_and_drawings import Span
from tests.demo.picture import INNER, draw, holdings, rows
from tests.demo.svg import svg
from tests.support.gpus import gpu_of
from tests.support.plugin import DRIVER
from tests.support.published import build_slices

A100 = "NVIDIA A100 80GB PCIe"
SHARES = 10
KINDS = ("gpu", "mig", "share")
"""What GPUs 0, 1 and 2 of the test's node are given out as."""

Slices = list[dict[str, Any]]


def offered(number: int) -> list[Device]:
    return [device for device in devices_of(gpu_of(A100, number), number, SHARES) if device.kind == KINDS[number]]


def slices_with(held: set[str], node: str = "node-0") -> Slices:
    """A node's slices: what is held, and what is free beside it."""
    pool = Pool(node, DRIVER)
    gpus = []
    for number in range(len(KINDS)):
        devices = offered(number)
        mine = tuple(device for device in devices if device.name in held)
        free = tuple(device for device in devices if not any(overlap(device, taken) for taken in mine))
        gpus.append(PublishedGpu(gpu_of(A100, number), number, mine, free))
    built = build_slices(pool, gpus)
    return [slice_object(name, content, pool, 1, len(built), None) for name, content in built.items()]


def claim(pod: str, device: str, node: str = "node-0") -> dict[str, Any]:
    """A claim that the scheduler gave ``device`` for ``pod``."""
    results = [{"request": "gpu", "driver": DRIVER, "pool": f"{node}-{DRIVER}", "device": device}]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": [{"resource": "pods", "name": pod}]}
    return {"metadata": {"name": f"{pod}-gpu-x7k2p"}, "status": status}


def picture(placed: dict[str, str]) -> list[str]:
    """The lines drawn for devices by pod."""
    slices = slices_with(set(placed.values()))
    claims = [claim(pod, device) for pod, device in placed.items()]
    return click.unstyle(draw(slices, holdings(slices, claims))).splitlines()


def test_free_gpus_are_drawn_as_what_they_are_given_out_as() -> None:
    node, *gpus = picture({})
    assert node.split(maxsplit=1) == ["node-0", A100]
    assert [line.split("[")[0].split() for line in gpus] == [["gpu-0", "full"], ["gpu-1", "MIG"], ["gpu-2", "shares"]]
    assert [line.count("|") for line in gpus] == [0, 7, SHARES - 1]
    assert not re.search("-{2}", "".join(gpus))


def test_a_full_gpu_is_one_bar_with_its_pod() -> None:
    assert picture({"train-1": "gpu-0"})[1].endswith("[train-1" + "-" * (INNER - len("train-1")) + "]")


def test_partitions_are_drawn_to_the_scale_of_memory_slices_at_their_place() -> None:
    line = picture({"small": "gpu-1-mig-1g10gb-1", "large": "gpu-1-mig-3g40gb-4"})[2]
    free, small, *between, large = line[line.index("[") + 1 : -1].split("|")
    assert (free, small) == ("." * 9, "small----")
    assert between == ["." * 9] * 2
    assert large == "large".ljust(4 * 9 + 3, "-")


def test_shares_are_cells_in_their_order() -> None:
    line = picture({"note-01": "gpu-2-share-7", "note-02": "gpu-2-share-0"})[3]
    cells = line[line.index("[") + 1 : -1].split("|")
    assert (cells[0], cells[7]) == ("note-02", "note-01")
    assert cells.count("." * 7) == SHARES - 2


def test_claims_of_a_shared_gpu_are_as_wide_as_their_memory() -> None:
    gpu = gpu_of(A100, 0)
    shared = SharedMemory(SharingStrategy.TIME_SLICING, 79 * GIB)
    device = shared_device(gpu, 0, shared)
    built = build_slices(Pool("node-0", DRIVER), [PublishedGpu(gpu, 0, (device,), ())])
    slices = [
        slice_object(name, content, Pool("node-0", DRIVER), 1, len(built), None) for name, content in built.items()
    ]
    claims = [claim("nb-1", device.name), claim("nb-2", device.name)]
    for number, item in enumerate(claims):
        [result] = item["status"]["allocation"]["devices"]["results"]
        result |= {"shareID": f"{number}", "consumedCapacity": {"memory": f"{7 + 14 * number}Gi"}}
    held = holdings(slices, claims)
    [row] = rows(slices, held)
    assert (row.kind, row.cells, row.spans) == ("shared", 11, (Span(0, 1, "nb-1"), Span(1, 3, "nb-2")))
    assert "[nb-1--|nb-2" in click.unstyle(draw(slices, held))


def test_seven_small_partitions_leave_the_eighth_slice_visibly_free() -> None:
    line = picture({f"infer-{i}": f"gpu-1-mig-1g10gb-{i}" for i in range(7)})[2]
    assert line.count("infer-") == 7
    assert line.endswith("|.........]")


def test_nodes_come_in_order_each_with_its_own_gpus() -> None:
    slices = [*slices_with({"gpu-0"}, "node-1"), *slices_with(set(), "node-0")]
    lines = click.unstyle(draw(slices, holdings(slices, [claim("train", "gpu-0", "node-1")]))).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("node")] == ["node-0", "node-1"]
    assert ["train" in line for line in lines] == [False] * 5 + [True] + [False] * 2


def test_only_what_is_held_has_a_colour() -> None:
    slices = slices_with({"gpu-2-share-0"})
    _, full, mig, shares = draw(slices, holdings(slices, [claim("note", "gpu-2-share-0")])).splitlines()
    assert "\x1b[33m" in shares
    assert "\x1b[2m" in full
    assert "\x1b[2m" in mig


def test_a_claim_that_nobody_uses_yet_is_nowhere() -> None:
    slices = slices_with(set())
    waiting = {"metadata": {"name": "waiting"}, "status": {}}
    assert holdings(slices, [waiting, {"metadata": {"name": "new"}}]) == []


def test_a_held_device_that_is_not_published_is_an_error_and_not_left_out() -> None:
    with pytest.raises(KeyError, match="gpu-9"):
        holdings(slices_with(set()), [claim("pod", "gpu-9")])


@given(
    st.sets(st.sampled_from(range(7))),
    st.sets(st.sampled_from(range(SHARES))),
    st.booleans(),
)
def test_everybody_is_drawn_once_and_every_line_is_as_long(mig: set[int], shares: set[int], full: bool) -> None:
    placed = {f"i{place}-": f"gpu-1-mig-1g10gb-{place}" for place in mig}
    placed |= {f"n{index}-": f"gpu-2-share-{index}" for index in shares}
    placed |= {"t0-": "gpu-0"} if full else {}
    lines = picture(placed)
    assert {pod: "\n".join(lines).count(pod) for pod in placed} == dict.fromkeys(placed, 1)
    assert len({len(line) for line in lines[1:]}) == 1


def test_the_image_shows_every_pod_once_and_is_valid_xml() -> None:
    placed = {"train": "gpu-0", "serve<1>": "gpu-1-mig-1g10gb-2", "note-1": "gpu-2-share-3"}
    slices = slices_with(set(placed.values()))
    image = ElementTree.fromstring(svg(rows(slices, holdings(slices, [claim(*each) for each in placed.items()]))))  # noqa: S314
    texts = [element.text for element in image.iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(pod) == 1 for pod in placed)
    fields = list(image.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(fields) == 1 + 8 + SHARES  # a full GPU, memory slices, shares: each held or free
