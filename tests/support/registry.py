"""A registry on this machine, and the programs with which a workflow publishes to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.harness.addresses import is_free
from tests.harness.waiting import wait_for
from tests.image.architecture import native
from tests.image.debian import Apt, link_merged, unpack

PACKAGES = ("docker-registry", "libassuan0", "libdevmapper1.02.1", "libgpg-error0", "libgpgme11", "skopeo")
"""With the libraries of skopeo that not every machine has."""
HOST, PORT = "127.0.0.1", 5000
REGISTRY = f"{HOST}:{PORT}"
READY_S = 30.0
COMMAND_S = 120.0

HELM = f"""#!{sys.executable}
import sys, helm_python
match sys.argv[1:]:
    case "push", file, remote:
        helm_python.push(file, remote, plain_http=True)
    case "show", "values", file:
        print(helm_python.show(file, output_format="values"))
    case unknown:
        sys.exit(f"helm {{unknown}}")
"""
"""In place of the program helm, which Debian 12 does not have."""


class Registry:
    """A registry that keeps its content in ``folder``, where its programs are, too."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._root = folder / "root"
        self._root.mkdir()
        link_merged(self._root)
        debs = cache / "registry"
        for archive in Apt(debs, native()).ready(PACKAGES):
            unpack(debs / archive.file, self._root)
        helm = self._root / "usr/bin/helm"
        helm.write_text(HELM)
        helm.chmod(0o755)
        containers = folder / ".config/containers"
        containers.mkdir(parents=True)
        (containers / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        (containers / "registries.conf").write_text(f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n')

    @contextmanager
    def serve(self) -> Iterator[None]:
        """The registry serves at REGISTRY."""
        config = self._folder / "registry.yml"
        storage = {"filesystem": {"rootdirectory": str(self._folder / "storage")}}
        config.write_text(yaml.safe_dump({"version": 0.1, "storage": storage, "http": {"addr": REGISTRY}}))
        command = [str(self._root / "usr/bin/docker-registry"), "serve", str(config)]
        with (
            (self._folder / "registry.log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as process,
        ):
            try:
                wait_for(lambda: not is_free(HOST, PORT), READY_S, "the registry serves")
                yield
            finally:
                process.terminate()

    def run(self, script: str, folder: Path, environment: Mapping[str, str]) -> str:
        """What the script prints, run by bash in ``folder`` with skopeo and helm at hand."""
        [libraries] = (self._root / "usr/lib").glob("*-linux-gnu")
        settings = {
            "HOME": str(self._folder),
            "PATH": f"{self._root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(libraries),
            "CONTAINERS_REGISTRIES_CONF": str(self._folder / ".config/containers/registries.conf"),
        }
        command = ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=folder, env={**settings, **environment}, capture_output=True, text=True, timeout=COMMAND_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
