"""The chart as a package that names the image of its release by digest: the same bytes for the same content."""

from __future__ import annotations

import gzip
from pathlib import Path

import helm_python
import yaml

from driver.errors import EnvironmentFault
from tests.image import oci, tree
from tests.image.recipe import PROJECT

CHART = PROJECT / "deploy" / "tessera"
GZIP_LEVEL = 9


def package(repository: str, digest: str, version: str) -> bytes:
    """The packaged chart, whose values name this image; raises EnvironmentFault if the chart is of another version.

    Not by ``helm package``, which writes the time of the build into it.
    """
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for field in ("version", "appVersion"):
        if metadata[field] != version:
            raise EnvironmentFault(
                f"deploy/tessera/Chart.yaml: {field} is {metadata[field]}, the project's version is {version}; "
                "make them equal"
            )
    files = {str(path.relative_to(CHART)): path.read_bytes() for path in tree.walk(CHART) if path.is_file()}
    values = _replaced(files["values.yaml"].decode(), "  repository: tessera\n", f"  repository: {repository}\n")
    files["values.yaml"] = _replaced(values, '  digest: ""\n', f"  digest: {digest}\n").encode()
    content = oci.tar({f"{CHART.name}/{name}": (blob, 0o644) for name, blob in files.items()})
    return gzip.compress(content, GZIP_LEVEL, mtime=0)


def images(file: Path) -> set[str]:
    """The images of all pods that a packaged chart installs, as Helm renders it; raises EnvironmentFault."""
    try:
        texts = helm_python.Chart.load(file).render({}, name="tessera", namespace="tessera")
    except helm_python.HelmError as error:
        raise EnvironmentFault(f"{file}: {error}") from error
    objects = [
        item for name, text in texts.items() if name.endswith(".yaml") for item in yaml.safe_load_all(text) if item
    ]
    pods = [item["spec"]["template"]["spec"] for item in objects if "template" in item.get("spec", {})]
    return {container["image"] for pod in pods for container in pod["containers"]}


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise EnvironmentFault(f"deploy/tessera/values.yaml: {text.count(old)} lines are {old.strip()!r}; 1 is needed")
    return text.replace(old, new)
