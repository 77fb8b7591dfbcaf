"""The map as text and as SVG: to scale, with everything in it, and harmless whatever names it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from xml.etree import ElementTree

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.report.map_summary import classes_of
from driver.model.shared_memory import GIB, SharedMemory, SharingStrategy
from tessera.map_drawing import COLOURS, draw_map, draw_summary
from tessera.map_svg import map_as_svg
from tests.support.map_cluster import DOCS, MapCluster, example, example_text, shared_example
from tests.support.queues import request

HOSTILE = "\x1b[31mred\x1b]0;title\x07\n<script>'\"&\u202e\ufffe"
"""Control sequences of terminals, markup, a change of the writing direction, and what XML does not allow."""


def hostile() -> MapCluster:
    """Whatever tenants and nodes write is hostile, though an API server would refuse most of these names."""
    cluster = MapCluster().node(HOSTILE, {"spec": {"cordoned": [f"{HOSTILE}/0 {HOSTILE}"]}})
    cluster.gpu(HOSTILE, 0, facts={"product_name": HOSTILE, "fabric_clique": HOSTILE})
    cluster.gpu(HOSTILE, 1, fault=HOSTILE).holds(f"{HOSTILE.replace('/', '')}/c", HOSTILE, "gpu-0", HOSTILE)
    cluster.holds(f"n/{HOSTILE.replace('/', '')}", HOSTILE, "gpu-1", device_class=HOSTILE)
    return cluster


def lines(cluster: MapCluster, width: int | None = None) -> list[str]:
    return click.unstyle(draw_map(cluster.map(), width)).splitlines()


def texts(image: str) -> list[str]:
    parsed = ElementTree.fromstring(image)  # noqa: S314
    return [element.text or "" for element in parsed.iter("{http://www.w3.org/2000/svg}text")]


def test_the_documentation_shows_the_example_as_it_is_drawn() -> None:
    nodes = example().map()
    assert f"```\n{example_text(nodes)}```" in (DOCS / "map.md").read_text(), "python -m tests.support.map_cluster"
    *shared, _, _, _ = lines(shared_example())
    assert "```\n" + "\n".join(shared) + "\n```" in (DOCS / "map.md").read_text()
    assert (DOCS / "map.svg").read_text() == map_as_svg(nodes), "python -m tests.support.map_cluster"


@pytest.mark.parametrize("width", [60, 80, 100, 173, 240])
def test_bars_fit_into_the_line_and_are_to_scale(width: int) -> None:
    bars = [line for line in lines(example(), width) if line.startswith("gpu-")]
    assert max(map(len, bars)) <= width
    assert min(map(len, bars)) > width - 9
    [half] = [line for line in bars if "team-b/chat" in line]
    left, right = half[half.index("[") + 1 : -1].split("|")
    assert len(left) == len(right)


def shared(*gib: int) -> MapCluster:
    """An H100 of 79 GiB that claims share by memory."""
    by_memory = SharedMemory(SharingStrategy.TIME_SLICING, 79 * GIB)
    cluster = MapCluster().gpu("n", 0, shared=by_memory).offers("n", "gpu-0-shared")
    for number, part in enumerate(gib):
        cluster.holds(f"team/c{number}", "n", "gpu-0-shared", device_class="gpu-shared", gib=part)
    return cluster


@pytest.mark.parametrize("width", [80, 120, 240])
def test_claims_of_a_shared_gpu_are_as_wide_as_their_memory(width: int) -> None:
    [bar] = [line for line in lines(shared(40, 10, 20), width) if line.startswith("gpu-")]
    large, small, medium, rest = bar[bar.index("[") + 1 : -1].split("|")
    assert large.startswith("A 40Gi team/c0")
    assert rest.startswith("+9 GiB")
    assert len(small) < len(medium) < len(large)
    assert abs(len(large) - 4 * len(small)) <= 8
    assert len(bar) <= width
    image = map_as_svg(shared(40, 10, 20).map())
    assert "gpu-0-shared (40 GiB): team/c0, gpu-shared" in image
    assert "offered: gpu-0-shared (9 GiB)" in image


def test_many_small_claims_of_a_shared_gpu_have_equal_fields() -> None:
    bars = [line for line in lines(shared(*[1] * 70), 80) if "[" in line]
    fields = [field for bar in bars for field in bar[bar.index("[") + 1 : -1].split("|")]
    assert len(bars) > 1
    assert max(map(len, bars)) <= 80
    assert len(fields) == 71
    assert len({len(field) for field in fields}) == 1


@pytest.mark.parametrize("fault", ["XID 79", None])
def test_memory_of_a_shared_gpu_that_claims_can_not_get_now_is_not_offered(fault: str | None) -> None:
    by_memory = SharedMemory(SharingStrategy.MPS, 23 * GIB)
    cluster = MapCluster().gpu("n", 0, "NVIDIA L4", shared=by_memory, fault=fault)
    cluster.holds("team/a", "n", "gpu-0-shared", device_class="gpu-shared", gib=20)
    [bar] = [line for line in lines(cluster, 80) if line.startswith("gpu-")]
    assert bar[bar.index("[") + 1 : -1].split("|")[1].startswith("3 GiB" + ("x" if fault else "."))
    assert f"{'unavailable' if fault else 'free'}: 3 GiB" in map_as_svg(cluster.map())


def crowded() -> MapCluster:
    """Twelve slices, 30 shares, many partitions and products, and names of tenants and nodes longer than a line."""
    long = "l" * 63
    cluster = example().gpu(f"{long}.{long}", 0, "NVIDIA RTX PRO 6000 Blackwell Server Edition", fault=f"{long} {long}")
    cluster.gpu("n", 0, "NVIDIA L4", shares=30, facts={"fabric_clique": f"{long}.7"}).gpu("n", 1, "NVIDIA H200 NVL")
    cluster.holds(f"{long}/{long}", "n", "gpu-0-share-29", device_class=long * 4, shares=30)
    for start in range(7):
        cluster.holds(f"{long}/p-{start}", "n", f"gpu-1-mig-1g18gb-{start}", device_class=f"class-{start}")
    return cluster


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_longer_than_the_terminal_and_every_name_is_complete_or_marked_as_cut(width: int) -> None:
    nodes = crowded().map()
    found = click.unstyle(f"{draw_map(nodes, width)}\n\n{draw_summary(nodes, width)}")
    assert [line for line in found.splitlines() if len(line) > width] == []
    [shares] = re.findall(r"NVIDIA L4\n.*?(gpu-0 .*?)n  NVIDIA H200", found, re.DOTALL)
    assert len(re.findall(r"L l?~|\.\.\.", shares)) == 30
    assert "~ name cut off: -o json has it" in found
    words = "".join(found.split())
    for text in (
        f"{'l' * 63}.{'l' * 63}",
        "l" * 252,
        "stranded:free,buttoosmallorbadlyplacedforwhatisrequested",
        "FREEPARTITION-",
    ):
        assert text in words


@pytest.mark.parametrize("draw", [lambda nodes: draw_map(nodes, None), draw_summary])
def test_without_a_terminal_texts_and_rows_of_the_table_are_not_broken(draw: Callable[..., str]) -> None:
    lines = click.unstyle(draw(crowded().map())).splitlines()
    assert any(len(line) > 130 for line in lines)
    assert not any(line.startswith(" " * 8 + "N") for line in lines)


def test_a_narrow_terminal_still_shows_every_slice() -> None:
    [bar] = [line for line in lines(MapCluster().gpu("n", 0), 10) if line.startswith("gpu-")]
    assert bar.count("...") == 8


def test_a_claim_is_named_with_its_namespace_if_that_fits() -> None:
    cluster = (
        MapCluster()
        .gpu("n", 0)
        .holds("team/serve", "n", "gpu-0-mig-1g10gb-0")
        .holds("team/c", "n", "gpu-0-mig-3g40gb-4")
    )
    [bar] = [line for line in lines(cluster, 100) if line.startswith("gpu-")]
    assert "[A serve--" in bar
    assert "|A team/c--" in bar


def test_classes_differ_by_colour_on_a_terminal_and_by_letter_everywhere() -> None:
    cluster = MapCluster()
    for number, name in enumerate(("gpu-training", "gpu-inference", "gpu-dev")):
        cluster.gpu("n", number).holds(f"t/{number}", "n", f"gpu-{number}", device_class=name)
    nodes = cluster.map()
    assert classes_of(nodes) == ["gpu-dev", "gpu-inference", "gpu-training"]
    drawn = draw_map(nodes, None)
    for mark, colour, claim in zip("ABC", COLOURS, ("t/2", "t/1", "t/0"), strict=False):
        styled = click.style(f"{mark} {claim}", fg=colour, reverse=True).removesuffix("\x1b[0m")
        assert styled in drawn
    legend = click.unstyle(drawn).splitlines()[-2]
    assert legend.split("   ") == ["held, by class:  A  gpu-dev", " B  gpu-inference", " C  gpu-training"]


def test_faults_cordons_overlaps_and_lost_devices_are_explained_below_their_gpu() -> None:
    cluster = MapCluster().node("n", {"spec": {"cordoned": ["n/1 fan on Friday"]}})
    cluster.gpu("n", 0, fault="XID 79").gpu("n", 1).gpu("n", 2)
    cluster.holds("t/a", "n", "gpu-2").holds("t/b", "n", "gpu-2-mig-1g10gb-0", "gpu-7")
    found = [line.strip() for line in lines(cluster)]
    assert found[found.index("XID 79") - 1].startswith("gpu-0")
    assert found[found.index("cordon requested: fan on Friday") - 1].startswith("gpu-1")
    assert "gpu-2 and gpu-2-mig-1g10gb-0 are both held, but overlap" in found
    assert "gpu-7 is held by t/b, but the node reports no such GPU" in found


@pytest.mark.parametrize("what", ["unprepared", "unreleased"])
def test_monitors_that_their_node_can_not_prepare_or_release_are_listed_below_its_gpus(what: str) -> None:
    cluster = MapCluster().gpu("n", 0).gpu("m", 0).holds("t/watch", "n", "gpu-0-monitor", device_class="gpu-monitor")
    assert not any("t/watch" in line for line in lines(cluster))
    found = lines(cluster.fails("t/watch", "n", "Node", "no space", what))
    [place] = [number for number, line in enumerate(found) if "claim t/watch: node n can't" in line]
    assert found[place - 1].startswith("gpu-0")
    assert found[place].endswith("no space")
    node = next(node for node in cluster.map() if node.name == "n")
    assert [holder.device_class for holder in node.failed_monitors] == ["gpu-monitor"]


def test_nvlink_cliques_are_named_by_the_numbers_of_their_gpus() -> None:
    cluster = MapCluster()
    for number, clique in enumerate(["a", "a", "b", "b", "a", None, "c"]):
        cluster.gpu("n", number, facts={"nvlink_clique": clique, "fabric_clique": "cluster.7"})
    assert lines(cluster)[0].endswith("NVLink 0-1,4 2-3  fabric cluster.7")


def test_two_products_of_a_node_are_two_groups_and_a_node_without_gpus_says_so() -> None:
    found = lines(MapCluster().gpu("n", 0).gpu("n", 1, "NVIDIA L4").node("silent"))
    assert [line for line in found if line.startswith(("n ", "silent"))] == [
        "n  NVIDIA H100 80GB HBM3",
        "n  NVIDIA L4",
        "silent  has not reported its GPUs",
    ]


def test_without_any_gpu_there_is_a_sentence() -> None:
    assert draw_map([], 80) == "No GPU."
    assert "0 nodes; 0 GPUs" in draw_summary([])


def test_the_summary_counts_unusual_nodes_and_shows_parts_of_slices() -> None:
    cluster = example().node("closed", unschedulable=True).gpu("closed", 0)
    cluster.gpu("closed", 1, shares=3).holds("t/x", "closed", "gpu-1-share-0", shares=3)
    head, _, _, row = click.unstyle(draw_summary(cluster.map())).splitlines()
    assert head == "3 nodes, 1 cordoned; 10 GPUs, 1 cordoned or faulty"
    assert "31.67" in row


@pytest.mark.parametrize("draw", [lambda nodes: click.unstyle(draw_map(nodes, 100)), map_as_svg])
def test_hostile_names_leave_no_control_character(draw: object) -> None:
    drawn: str = draw(hostile().map())  # type: ignore[operator]
    assert [letter for letter in drawn if not letter.isprintable() and letter != "\n"] == []
    assert "script" in drawn


def test_hostile_names_stay_text_in_the_image() -> None:
    found = texts(map_as_svg(hostile().map()))
    assert any("<script>" in text for text in found)


@given(st.lists(st.sampled_from(["full", "mig-3g40gb-0", "mig-1g10gb-4", "share-0", "share-1"]), max_size=3))
def test_every_holder_is_in_both_drawings_once(held: list[str]) -> None:
    cluster = MapCluster()
    for number, device in enumerate(held):
        name = f"gpu-{number}" if device == "full" else f"gpu-{number}-{device}"
        cluster.gpu("n", number, shares=2).holds(f"t/x{number}", "n", name, shares=2 if "share" in device else 1)
    nodes = cluster.map()
    found = texts(map_as_svg(nodes))
    drawn = click.unstyle(draw_map(nodes, 120))
    for number in range(len(held)):
        assert found.count(f"t/x{number}") == 1
        assert drawn.count(f"t/x{number}") == 1


def test_the_image_has_a_field_for_every_device_and_slice() -> None:
    cluster = MapCluster().gpu("n", 0).gpu("n", 1, foreign=1).holds("t/a", "n", "gpu-0-mig-3g40gb-0")
    cluster.situation.wants(request())
    image = ElementTree.fromstring(map_as_svg(cluster.map()))  # noqa: S314
    looks = [each.get("class") for each in image.iter("{http://www.w3.org/2000/svg}rect")]
    assert looks[0] == "held class-0"
    assert looks[1:5] == ["free"] * 4
    assert looks.count("unavailable") == 2  # with the legend
    assert texts(map_as_svg(cluster.map())).count("foreign") == 1


def test_a_claim_that_its_node_can_not_prepare_is_named_below_its_gpu_once() -> None:
    cluster = MapCluster().gpu("n", 0).fails("team/a", "n")
    cluster.holds("team/a", "n", "gpu-0-mig-1g10gb-0", "gpu-0-mig-1g10gb-1").holds("team/b", "n", "gpu-0-mig-1g10gb-2")
    nodes = cluster.map()
    said = "claim team/a: node n can't prepare it since 2026-11-26T00:00:00Z, because of its GPU: NVML: 999"
    assert draw_map(nodes, None).count(said) == 1
    assert map_as_svg(nodes).count(escape(said)) == 1
