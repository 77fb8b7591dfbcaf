"""What the rules need to know of the driver and of the classes that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deviceclasses.passing import may_select
from deviceclasses.requests import Request, parameters_of, selectors_of, text
from driver.config.opaque import devices_for
from driver.model.device import DeviceKind


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """Of a class that exists: its selectors, the kinds of devices that it may give, and whether shares are meant.

    ``gives`` is empty where none of ours is given, or nobody knows.
    """

    selectors: tuple[str, ...]
    gives: frozenset[DeviceKind]
    shares: bool


UNKNOWN = ClassFacts((), frozenset(), shares=False)


@dataclass(frozen=True, slots=True)
class Known:
    """The driver's name, and classes by name."""

    driver: str
    classes: Mapping[str, ClassFacts]

    def facts(self, request: Request) -> ClassFacts:
        """Of the class that ``request`` asks for."""
        return self.classes.get(request.class_name, UNKNOWN)


def known_of(classes: Sequence[Mapping[str, Any]], driver: str) -> Known:
    """``classes``: the objects; of several with one name the last counts."""
    return Known(driver, {name_of(each): _facts(settings_of(each, "spec"), driver) for each in classes})


def _facts(spec: Mapping[str, Any], driver: str) -> ClassFacts:
    selectors = tuple(expression for _, expression in selectors_of(spec, ""))
    served = [devices_for(opaque.get("parameters")) for _, _, opaque in parameters_of(spec, driver)]
    meant, selected = frozenset[DeviceKind]().union(*served), may_select(selectors, driver)
    # Who writes parameters for one kind of device means that kind, whatever else the selectors let pass.
    return ClassFacts(selectors, selected & meant if meant else selected, frozenset({DeviceKind.SHARE}) in served)


def settings_of(content: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """What stands at a dotted path; empty where nothing, or no object, does."""
    for field in path.split("."):
        found = content.get(field)
        content = found if isinstance(found, Mapping) else {}
    return content


def name_of(content: Mapping[str, Any]) -> str:
    metadata = content.get("metadata")
    if not isinstance(metadata, Mapping):
        return "without a name"
    name = text(metadata, "name") or text(metadata, "generateName") or "without a name"
    namespace = text(metadata, "namespace")
    return f"{namespace}/{name}" if namespace else name
