"""How long our CEL engine takes: for one device unlike all before, and for a fleet against many classes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deviceclasses.cel.engine import CelDevice, Program, compile_selector, from_slice_device
from driver.simulator.description import load_description
from tests.support.chart import class_texts
from tests.support.published import DRIVER, devices_in, discover, slices_of

NODE = "dgx-h100"
DEVICES = 33_600
"""Of 150 nodes or so, each offering all that its eight GPUs could be."""
CLASSES = 20
SHAPES = 1000
CLASS = f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"]'


def new_shape_ms() -> float:
    """Median milliseconds from a decoded device of a slice to the verdict, on devices that are all different."""
    program = compile_selector(
        f'{CLASS}.type == "mig" && device.attributes["{DRIVER}"].uuid != "" && '
        f'device.capacity["{DRIVER}"].memory.compareTo(quantity("10Gi")) >= 0'
    )
    one = next(iter(_devices()))
    times = []
    for index in range(SHAPES):
        changed = {**one, "attributes": {**one["attributes"], "uuid": {"string": f"GPU-{index}"}}}
        began = time.perf_counter()
        program.verdict(from_slice_device(DRIVER, changed))
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def fleet_s() -> float:
    """Seconds for 20 classes on 33,600 devices, programs that remember nothing yet; reading the slices is left out."""
    fleet = _fleet()
    programs = _programs()
    began = time.perf_counter()
    verdicts = [[program.verdict(device) for device in fleet] for program in programs]
    taken = time.perf_counter() - began
    answered = [sum(isinstance(each, bool) for each in of_program) for of_program in verdicts]
    # Classes of other products' profiles rightly match none.
    if answered != [DEVICES] * CLASSES or not any(True in of_program for of_program in verdicts):
        raise RuntimeError(f"{DEVICES} devices, but {answered} verdicts")
    return taken


def _programs() -> list[Program]:
    """The workload classes, and more of the same kind."""
    classes = [yaml.safe_load(text) for text in class_texts().values()]
    texts = [each["cel"]["expression"] for item in classes for each in item["spec"]["selectors"]]
    sizes = [f'device.capacity["{DRIVER}"].memory.compareTo(quantity("{size}Gi")) >= 0' for size in range(1, CLASSES)]
    return [compile_selector(text) for text in [*texts, *sizes][:CLASSES]]


def _devices() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from devices_in(slices_of(NODE, discover(load_description(NODE), Path(folder))))


def _fleet() -> list[CelDevice]:
    """Devices of many nodes: each has a UUID and an address of its own."""
    of_one_node = list(_devices())
    fleet = []
    for index in range(DEVICES):
        device = of_one_node[index % len(of_one_node)]
        own = {"uuid": {"string": f"GPU-{index}"}}
        fleet.append(from_slice_device(DRIVER, {**device, "attributes": {**device["attributes"], **own}}))
    return fleet
