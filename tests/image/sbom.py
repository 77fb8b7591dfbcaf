"""What the image is made of, as CycloneDX JSON (version 1.6, see cyclonedx.org)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.image.debian import Package
from tests.image.wheels import Distribution

PLACE = "usr/share/sbom/tessera.cdx.json"
"""In the image."""
PRODUCT = "tessera-dra"


def bill(packages: Sequence[Package], distributions: Sequence[Distribution]) -> str:
    """The bill of materials as JSON text.

    A Debian package has the SHA-256 of its archive. A Python distribution has none: uv, which checked that its wheel is
    one of those in the lock, doesn't say which; its RECORD in the image has a hash of every file.
    """
    product = next(each for each in distributions if each.name == PRODUCT)
    components = [*map(_debian, packages), *(_python(each) for each in distributions if each != product)]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**_python(product), "type": "application"}},
        "components": components,
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _debian(package: Package) -> dict[str, Any]:
    purl = f"pkg:deb/debian/{package.name}@{package.version}?arch={package.architecture}&distro=debian-12"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        # Debian's own statement is a text for each file; it stays in the image.
        "properties": [{"name": "tessera:licence-file", "value": f"/usr/share/doc/{package.name}/copyright"}],
    }


def _python(distribution: Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{distribution.name}@{distribution.version}"
    licences = [{"license": {"name": distribution.licence}}] if distribution.licence else []
    return {
        "type": "library",
        "bom-ref": purl,
        "name": distribution.name,
        "version": distribution.version,
        "purl": purl,
        "licenses": licences,
    }
