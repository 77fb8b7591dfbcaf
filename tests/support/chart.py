"""Tessera's Helm chart: what it installs, and installing it. Helm's own code renders it in this process, offline.

``python -m tests.support.chart [VALUES]`` prints what a release with these values has (``make manifests``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from driver.model.plan import PATH
from tests.harness.cluster import Cluster
from tests.harness.waiting import wait_for
from tests.support.features import has
from tests.support.rights import wait_granted

CHART = Path(__file__).parents[2] / "deploy" / "tessera"

EVENTS_OF_ONE_CLAIM = "kubectl events --for resourceclaim/NAME -n NAMESPACE"
EVENTS_OF_ALL_CLAIMS = "kubectl get events -A --field-selector involvedObject.kind=ResourceClaim"
"""How docs and notes tell people to find out why a pod waits."""

RELEASE = "tessera"
HOOK = "helm.sh/hook:"
SERVED_S = 60.0
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tessera"}}

Object = dict[str, Any]
Values = Mapping[str, Any]

MUTATING = '(.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")'
"""How the chart finds out whether the API server can change claims when they are created."""

NO_PROCESS: Values = {"nodePlugin": {"enabled": False}, "controller": {"enabled": False}}

ANY_SIZE: Values = {"admission": {"maxDevices": 0, "maxPartitions": 0}}
"""No limit of the devices that one claim may ask for."""


def install(cluster: Cluster, values: Values | None = None) -> None:
    """All that helm installs but the pods: most tests run node plugins and controllers as processes of their own.

    Returns when the API server serves plans and knows the rights, which it learns some time after it has stored them.
    """
    objects = rendered({**NO_PROCESS, **(values or {})}, mutating=has(cluster, "mutating policies"))
    cluster.apply([NAMESPACE, *objects])
    wait_for(lambda: cluster.api.get(PATH), SERVED_S, "plans are served")
    wait_granted(cluster, objects)


def rendered(values: Values | None = None, namespace: str = "tessera", *, mutating: bool = False) -> list[Object]:
    """Every object of a release with these values, template by template; ``mutating``: see MUTATING.

    Raises helm_python.HelmError for values that the chart refuses.
    """
    texts = manifests(values, namespace, mutating=mutating).values()
    return [each for text in texts for each in yaml.load_all(text, _LOADER) if each is not None]


def manifests(values: Values | None = None, namespace: str = "tessera", *, mutating: bool = False) -> dict[str, str]:
    """The rendered text of every template that makes objects, by its name, in alphabetical order."""
    files = sorted(_render(values, namespace, mutating=mutating).items())
    return {Path(file).name: text for file, text in files if file.endswith(".yaml") and HOOK not in text}


def class_texts() -> dict[str, str]:
    """The rendered text of every DeviceClass with its comments, by the name of the class."""
    texts = manifests()["classes.yaml"].split("---\n")[1:]
    return {yaml.safe_load(text)["metadata"]["name"]: text for text in texts}


def hooks(values: Values | None = None, namespace: str = "tessera") -> dict[str, str]:
    """The rendered text of the templates that helm applies at certain moments only; ``manifests`` has none of them."""
    return {Path(file).name: text for file, text in _render(values, namespace).items() if HOOK in text}


def notes(values: Values | None = None, namespace: str = "tessera") -> str:
    """What helm prints after installing."""
    return _render(values, namespace)[f"{CHART.name}/templates/NOTES.txt"]


def _render(values: Values | None, namespace: str, *, mutating: bool = False) -> dict[str, str]:
    return _chart(mutating=mutating).render(dict(values or {}), name=RELEASE, namespace=namespace)


@cache
def _chart(*, mutating: bool) -> helm_python.Chart:
    if not mutating:
        return helm_python.Chart.load(CHART)
    # Offline, helm knows only the APIs of its own libraries, which are not told which kinds they have.
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(CHART, Path(folder) / CHART.name)
        template = copy / "templates" / "admission-monitor.yaml"
        template.write_text(template.read_text().replace(MUTATING, "true"))
        return helm_python.Chart.load(copy)


_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's parser in C, where it has one: a tenth of the time."""


def main(file: str | None = None) -> None:
    try:
        values = helm_python.values_from_yaml(Path(file).read_text(encoding="utf-8")) if file else None
        texts = (yaml.safe_dump(NAMESPACE), *manifests(values).values())
    except (OSError, UnicodeDecodeError, helm_python.HelmError) as error:
        sys.exit(f"manifests: VALUES={file}: {_told(error)}")
    print("---\n".join(f"{text.strip()}\n" for text in texts if text.strip()), end="")


def _told(error: Exception) -> str:
    """Without helm's first words, which name the chart and none of the values."""
    if isinstance(error, OSError):
        return str(error.strerror)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = sorted(line.removeprefix("- ") for line in lines[1:] if line.startswith("- "))  # helm's order is chance
    return "; ".join(found) or " ".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
