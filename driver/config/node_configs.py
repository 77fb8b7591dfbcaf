"""Settings by node: named configurations in one ConfigMap, each for the nodes that its selector matches.

The flags of ``tessera node`` are the defaults, and a configuration replaces those that it names. A node takes the one
that its label ``CONFIG_LABEL`` names; without the label, the first whose ``nodeSelector`` matches its labels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from driver.config.flag_values import matching, one_of
from driver.config.strict_schema import Fault, shown
from driver.config.suggestions import meant
from driver.errors import UsageError
from driver.model.gpu_settings import GpuSelection, SharedProfiles, parse_layouts, parse_share_counts, parse_shared
from driver.model.plan import PUBLISH_VALUES

NODE_CONFIGS = "tessera-node-configs"
"""The ConfigMap, in the namespace of the release."""

CONFIGS_KEY = "configs.json"
"""Its key: a JSON list of configurations."""

CONFIG_LABEL = "gpu.tessera.dev/config"
"""Label of a Node: the name of its configuration. It takes precedence over the selectors."""

PARSERS: Mapping[str, Callable[[str], Any]] = {
    "include_gpus": GpuSelection.parse,
    "exclude_gpus": GpuSelection.parse,
    "mig_gpus": GpuSelection.parse,
    "shares": parse_share_counts,
    "shared": parse_shared,
    "shares_only": GpuSelection.parse,
    "compute_instances": SharedProfiles.parse,
    "memory_hook": one_of("auto", "none"),
    "framework_variables": one_of("none", "jax", "pytorch", "jax,pytorch"),
    "publish": one_of(*PUBLISH_VALUES),
    "layout": parse_layouts,
    "existing_partitions": one_of("ignore", "publish"),
    "neighbours": one_of("refuse", "exclude"),
}
"""The flags of ``tessera node`` that a configuration may replace, with the parsers of their values (ValueError)."""

LIVE_SETTINGS = frozenset({"publish"})
"""The settings whose change needs no restart of the plugin."""

REVISION_LENGTH = 12

_check_name = matching(
    re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"),
    "the value of a label: at most 63 letters, digits, -, _ and ., such as a100-shared",
)


def _as_field(flag: str) -> str:
    first, *words = flag.split("_")
    return "".join([first, *(word.capitalize() for word in words)])


SETTING_FIELDS = {_as_field(flag): flag for flag in PARSERS}
"""Flags by the names that settings have in a configuration: ``sharesOnly``."""

CONFIG_FIELDS = ("name", "nodeSelector", "settings")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One configuration, or none of them: then ``name`` is empty and the flags apply.

    name           as the label CONFIG_LABEL has it
    settings       values as flags have them, by flag of PARSERS
    node_selector  labels of the nodes that take it; None: only those whose label names it
    """

    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] | None = None

    @property
    def revision(self) -> str:
        """Differs if the settings differ that are in force only after a restart of the plugin."""
        lasting = sorted((flag, value) for flag, value in self.settings.items() if flag not in LIVE_SETTINGS)
        return hashlib.sha256(msgspec.json.encode(lasting)).hexdigest()[:REVISION_LENGTH]

    def selects(self, labels: Mapping[str, str]) -> bool:
        selector = self.node_selector
        return selector is not None and all(labels.get(key) == value for key, value in selector.items())


NO_CONFIG = NodeConfig()


def read_configs(text: str) -> tuple[NodeConfig, ...]:
    """Read the JSON list of a ConfigMap; empty text: none. Raises UsageError with path and value of every fault."""
    content, faults = config_faults(text)
    if faults:
        raise UsageError(f"{NODE_CONFIGS}: {'; '.join(map(str, faults))}")
    return tuple(
        NodeConfig(
            config["name"],
            {SETTING_FIELDS[name]: value for name, value in (config.get("settings") or {}).items()},
            config.get("nodeSelector"),
        )
        for config in content
    )


def config_faults(text: str) -> tuple[Any, Sequence[Fault]]:
    """The decoded list of a ConfigMap, and all its faults; None if it can't be decoded."""
    try:
        content = msgspec.json.decode(text) if text.strip() else []
    except (msgspec.MsgspecError, RecursionError) as error:
        return None, [Fault(CONFIGS_KEY, "", str(error))]
    return content, list(_faults_of_configs(content))


def chosen_config(configs: Sequence[NodeConfig], labels: Mapping[str, str]) -> NodeConfig:
    """The configuration of a node with these ``labels``. Raises UsageError if its label names none."""
    name = labels.get(CONFIG_LABEL)
    if name is None:
        return next((config for config in configs if config.selects(labels)), NO_CONFIG)
    names = [config.name for config in configs]
    if name not in names:
        raise UsageError(
            f"label {CONFIG_LABEL}={name}: no such configuration; accepted: {', '.join(names) or 'none'}"
            f"{meant(name, names)}"
        )
    return configs[names.index(name)]


def _faults_of_configs(content: object) -> Iterator[Fault]:
    """All faults of a decoded list of configurations."""
    if not isinstance(content, list):
        yield Fault("nodeConfigs", shown(content), "must be a list of objects with name, nodeSelector and settings")
        return
    names: set[str] = set()
    for at, config in enumerate(content):
        path = f"nodeConfigs[{at}]"
        if not isinstance(config, dict):
            yield Fault(path, shown(config), f"must be an object with fields {', '.join(CONFIG_FIELDS)}")
            continue
        yield from _faults_of_config(config, path)
        name = config.get("name")
        if isinstance(name, str):
            if name in names:
                yield Fault(f"{path}.name", shown(name), "another configuration has that name")
            names.add(name)


def _faults_of_config(config: Mapping[str, Any], path: str) -> Iterator[Fault]:
    for name, value in config.items():
        if name not in CONFIG_FIELDS:
            accepted = f"no such field; accepted: {', '.join(CONFIG_FIELDS)}{meant(name, CONFIG_FIELDS)}"
            yield Fault(f"{path}.{name}", shown(value), accepted)
    yield from _faults_of_value(_check_name, f"{path}.name", config.get("name"))
    selector, settings = config.get("nodeSelector"), config.get("settings")
    if selector is not None and not _has_strings(selector):
        yield Fault(f"{path}.nodeSelector", shown(selector), "must be an object: labels with their values as strings")
    if settings is not None and not isinstance(settings, dict):
        yield Fault(f"{path}.settings", shown(settings), f"must be an object with fields {', '.join(SETTING_FIELDS)}")
        return
    for name, value in (settings or {}).items():
        where = f"{path}.settings.{name}"
        if name in SETTING_FIELDS:
            yield from _faults_of_value(PARSERS[SETTING_FIELDS[name]], where, value)
        else:
            accepted = f"accepted: {', '.join(SETTING_FIELDS)}{meant(name, SETTING_FIELDS)}"
            yield Fault(where, shown(value), f"no such setting; {accepted}")


def _faults_of_value(parse: Callable[[str], object], path: str, value: object) -> Iterator[Fault]:
    if not isinstance(value, str):
        yield Fault(path, "" if value is None else shown(value), "must be a string")
        return
    try:
        parse(value)
    except ValueError as error:
        yield Fault(path, shown(value), str(error))


def _has_strings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
