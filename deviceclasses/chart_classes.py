"""The DeviceClasses of the Helm chart."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from driver.config.flag_values import DEFAULT_DRIVER, NVIDIA_DRIVER
from driver.config.libyaml_loader import YamlLoader, read_yaml

FULL_GPU, ANY_PARTITION, SHARE_OF_GPU, MONITORS = "gpu-training", "gpu-inference", "gpu-dev", "gpu-monitor"
SHARED_GPU = "gpu-shared"
"""Names of classes; a class for partitions of one profile has a name of its own."""

MANIFESTS = files("deviceclasses") / "manifests"


def profile_classes() -> dict[str, str]:
    """The name of the class for partitions of one profile, by profile. Not every profile of a GPU has one."""
    return {profile: f"{ANY_PARTITION}-{profile.replace('.', '-')}" for profile in _cards_by_profile()}


def chart_classes(driver: str = DEFAULT_DRIVER) -> list[dict[str, Any]]:
    """The classes as the chart renders them for a driver of this name (templates/classes.yaml)."""
    texts = [file.read_text("utf-8") for file in MANIFESTS.iterdir() if Path(file.name).suffix == ".yaml"]
    template = (MANIFESTS / "partitions" / "class.yaml.in").read_text("utf-8")
    names = profile_classes()
    for profile, cards in _cards_by_profile().items():
        texts.append(template.replace("NAME", names[profile]).replace("PROFILE", profile).replace("CARDS", cards))
    if driver == NVIDIA_DRIVER:  # full GPUs of NVIDIA's DRA driver have no profile
        texts = [text.replace("].profile ==", '].?profile.orValue("") ==') for text in texts]
    # The API group of the parameters has the same name as the default driver and stays.
    rendered = (
        text.replace(f'"{DEFAULT_DRIVER}"', f'"{driver}"').replace(f"driver: {DEFAULT_DRIVER}\n", f"driver: {driver}\n")
        for text in texts
    )
    return [content for text in rendered for content in yaml.load_all(text, YamlLoader) if isinstance(content, dict)]


def _cards_by_profile() -> dict[str, str]:
    """The products that have a profile, as the description of its class names them."""
    cards: dict[str, str] = read_yaml((MANIFESTS / "partitions" / "profiles.yaml").read_text("utf-8"))
    return cards
