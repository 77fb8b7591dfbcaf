"""Minimum amounts of memory slightly above the memory of a profile or GPU: ``40Gi`` excludes 3g.40gb with 40448Mi.

Profile names and advertised GPU sizes are rounded. A bound has a finding if the selectors reject a device with its real
memory and accept the same device with the requested memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from deviceclasses.cel import nodes
from deviceclasses.cel.engine import Program, from_slice_device
from deviceclasses.cel.library.quantity import parse_quantity
from deviceclasses.cel.nodes import Expr, calls_of_literals
from deviceclasses.cel.parser import parse
from deviceclasses.cel.values import EvaluationError
from deviceclasses.lint.findings import Issue, Severity
from deviceclasses.lint.selectors.attribute_catalogue import published_sample
from driver.config.strict_schema import shown
from driver.model.offer import DeviceKind
from driver.simulator.products import find_product, product_names
from driver.slices.attributes import NO_PROFILE

JUST_ABOVE = Fraction(106, 100)
"""The largest quotient of such a bound and the memory below it: 1g.5gb has 4.75 GiB."""

MIB, GIB = 1 << 20, 1 << 30


class MemorySize(NamedTuple):
    """The memory of a partition, a full or a shared GPU of one product; ``profile`` is ``none`` for GPUs.

    Claims of a shared GPU can have a little less: what the driver and the MPS server take is not known here.
    """

    kind: DeviceKind
    product: str
    architecture: str
    profile: str
    memory_mib: int

    @property
    def what(self) -> str:
        if self.kind is DeviceKind.SHARED:
            return f"a shared {self.product}"
        return self.profile if self.kind is DeviceKind.PARTITION else f"a full {self.product}"

    def is_meant_by(self, bound: Fraction) -> bool:
        """Whether ``bound``, in bytes, is slightly above the memory, or the number in the name of the profile."""
        memory, in_name = self.memory_mib * MIB, re.search(r"\.(\d+)gb", self.profile)
        named = in_name is not None and bound == int(in_name[1]) * GIB
        return memory < bound and (named or bound <= memory * JUST_ABOVE)


@cache
def memory_sizes() -> tuple[MemorySize, ...]:
    """The sizes of the products that the simulator knows."""
    sizes = []
    for product in filter(None, map(find_product, product_names())):
        partitions = [(DeviceKind.PARTITION, profile.name, profile.memory_mib) for profile in product.profiles]
        gpus = [(kind, NO_PROFILE, product.memory_mib) for kind in (DeviceKind.FULL, DeviceKind.SHARED)]
        for kind, profile, memory_mib in [*gpus, *partitions]:
            sizes.append(MemorySize(kind, product.name, product.architecture, profile, memory_mib))
    return tuple(dict.fromkeys(sizes))


def memory_bound_issues(place: str, program: Program, earlier: Sequence[Program], driver: str) -> Iterator[Issue]:
    """Warnings about bounds of a selector; ``earlier`` are those that the scheduler evaluates before it."""
    if ("capacity", driver, "memory") not in program.reads:
        return
    for text in dict.fromkeys(_quantities(parse(program.expression))):
        try:
            bound = parse_quantity(text).value
        except EvaluationError:
            continue
        missed = [
            size
            for size in memory_sizes()
            if size.is_meant_by(bound)
            and _selects((*earlier, program), size, str(int(bound) + 1), driver)
            and not _selects((*earlier, program), size, f"{size.memory_mib}Mi", driver)
        ]
        if missed:
            yield Issue(place, shown(text), _left_out(missed), Severity.WARNING)


def requested_memory_issues(place: str, amount: str, programs: Sequence[Program], driver: str) -> Iterator[Issue]:
    """Warnings about the memory in ``capacity.requests`` of a request, whose devices ``programs`` select."""
    try:
        bound = parse_quantity(amount).value
    except EvaluationError:
        return
    selected = [size for size in memory_sizes() if _selects(programs, size, f"{size.memory_mib}Mi", driver)]
    missed = [size for size in selected if size.is_meant_by(bound)]
    if missed:
        yield Issue(place, shown(amount), _left_out(missed), Severity.WARNING)
    elif selected and all(size.memory_mib * MIB < bound for size in selected):
        largest = max(selected, key=lambda size: size.memory_mib)
        message = f"no device of a known GPU that is selected has so much: {largest.what} has {largest.memory_mib}Mi"
        yield Issue(place, shown(amount), message, Severity.WARNING)


def _left_out(missed: Sequence[MemorySize]) -> str:
    """The message about the largest of the devices that have a little less than a bound."""
    largest = max(missed, key=lambda size: size.memory_mib)
    alike = [size for size in missed if size.what == largest.what]
    least, most = min(size.memory_mib for size in alike), largest.memory_mib
    amount = f"{most}Mi" if least == most else f"{least}Mi to {most}Mi, depending on the GPU"
    return f"leaves out {largest.what}, which has {amount}; {least * MIB // GIB}Gi includes it"


def _quantities(root: Expr) -> Iterator[str]:
    """The literals from which an expression makes quantities."""
    for call in calls_of_literals(root):
        if call.function == "quantity" and isinstance(call.arguments[0], nodes.Literal):
            yield str(call.arguments[0].value)


def _selects(programs: Iterable[Program], size: MemorySize, memory: str, driver: str) -> bool:
    """Whether all selectors accept a device like ``size``, but with that much memory."""
    sample: dict[str, Any] = published_sample(size.kind, size.profile)
    sample["attributes"] |= {"productName": {"string": size.product}, "architecture": {"string": size.architecture}}
    sample["capacity"]["memory"] = {"value": memory}
    device = from_slice_device(driver, sample)
    return all(program.verdict(device) is True for program in programs)
