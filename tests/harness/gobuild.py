"""Building the programs of a cluster from their Go modules: what to build, and how.

Each group has a go.mod of its own, because the three don't share a dependency graph; all Kubernetes programs are one
``go build``, which compiles their common packages once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from driver.errors import EnvironmentFault
from tests.harness.progress import Part, Progress
from tests.harness.versions import KubernetesRelease

KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet", "kubectl")
CONTAINERD_PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2")
PROGRAMS = (*KUBERNETES_PROGRAMS, "etcd", *CONTAINERD_PROGRAMS)

FAILURE_LINES = 25
"""Lines of go's own output shown when it fails: errors of the compiler come last."""


@dataclass(frozen=True)
class Group:
    """Programs built together. ``packages`` maps each to its import path; ``usual_s`` is on 2 cores, nothing cached.

    ``replaced`` maps modules to folders that are used instead of them.
    """

    title: str
    module: str
    version: str
    packages: dict[str, str]
    stamps: dict[str, str]
    usual_s: float
    tags: str = ""
    replaced: Mapping[str, Path] = field(default_factory=dict)


class Download(NamedTuple):
    """Where a module lies in Go's own cache, which is read-only."""

    source: Path
    go_mod: Path


def groups(release: KubernetesRelease) -> tuple[Group, ...]:
    """What to build for ``release``, in order. The stamps make ``--version`` of each program tell the truth."""
    major, minor, _ = release.kubernetes.split(".", 2)
    version = {"gitVersion": f"v{release.kubernetes}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
    holders = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    containerd = "github.com/containerd/containerd/v2"
    return (
        Group(
            title=f"Kubernetes {release.kubernetes}",
            module="k8s.io/kubernetes",
            version=f"v{release.kubernetes}",
            packages={name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES_PROGRAMS},
            stamps={f"{holder}.{name}": value for holder in holders for name, value in version.items()},
            usual_s=660,
        ),
        Group(
            title=f"etcd {release.etcd}",
            module="go.etcd.io/etcd/server/v3",
            version=f"v{release.etcd}",
            packages={"etcd": "go.etcd.io/etcd/server/v3"},
            stamps={},
            usual_s=45,
        ),
        Group(
            title=f"containerd {release.containerd}",
            module=containerd,
            version=f"v{release.containerd}",
            packages={name: f"{containerd}/cmd/{name}" for name in CONTAINERD_PROGRAMS},
            stamps={f"{containerd}/version.Version": f"v{release.containerd}"},
            usual_s=90,
        ),
    )


def library_version(kubernetes: str) -> str:
    """The version in which the libraries of a Kubernetes version are published: v0.37.1 for "v1.37.1" or "1.37.1"."""
    return f"v0.{kubernetes.removeprefix('v').split('.', 1)[1]}"


def go_mod(group: Group, upstream: str) -> str:
    """The go.mod for building ``group``, given the module's own go.mod.

    Kubernetes replaces its libraries by ``./staging/...``, which works only inside its own tree: as a dependency
    each needs the published version instead, 0.<minor>.<patch> for Kubernetes 1.<minor>.<patch>.
    """
    lines = re.findall(r"^(?:go|godebug) .+$", upstream, re.MULTILINE)
    staged = re.findall(r"^\s*(?:replace\s+)?(\S+) => \./staging/", upstream, re.MULTILINE)
    library = library_version(group.version)
    name = group.module.split("/")[1]
    text = [f"module tessera.local/{name}", "", *lines, f"require {group.module} {group.version}"]
    if staged:
        instead = {module: f"{module} {library}" for module in staged} | {**group.replaced}
        text += ["replace (", *(f"\t{module} => {other}" for module, other in instead.items()), ")"]
    return "\n".join(text) + "\n"


def build(group: Group, go: Path, workspace: Path, output: Path, progress: Progress) -> None:
    """Build every program of ``group`` into the folder ``output``, using ``workspace`` for go.mod and the log.

    Raises EnvironmentFault with the end of go's output and the path of the whole log.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    log = workspace / "build.log"
    programs = ", ".join(group.packages)
    with progress.part(f"building {group.title} ({programs})", group.usual_s) as part, log.open("w") as handle:
        upstream = download(group.module, group.version, go).go_mod.read_text()
        (workspace / "go.mod").write_text(go_mod(group, upstream))
        stamps = [f"-X {name}={value}" for name, value in group.stamps.items()]
        command = [str(go), "build", "-v", "-trimpath", "-tags", group.tags, "-ldflags", " ".join(["-s -w", *stamps])]
        command += ["-o", f"{output}/", *group.packages.values()]
        if _run(command, workspace, handle.fileno(), lambda: _tick(part, log)) != 0:
            raise EnvironmentFault(_failure(group, log))
    _name_programs(group, output)


def _name_programs(group: Group, output: Path) -> None:
    """``go build`` names a program after the last element of its path, "server" for etcd (v3 is skipped)."""
    for program, package in group.packages.items():
        element = re.sub(r"/v\d+$", "", package).rsplit("/", 1)[1]
        if element != program:
            (output / element).rename(output / program)


def _environment() -> dict[str, str]:
    return {**os.environ, "GOFLAGS": "-mod=mod", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}


def download(module: str, version: str, go: Path) -> Download:
    """Download a module into Go's own cache. Raises EnvironmentFault with go's output."""
    command = [str(go), "mod", "download", "-json", f"{module}@{version}"]
    answer = subprocess.run(command, cwd="/", env=_environment(), capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise EnvironmentFault(f"{module} {version} could not be downloaded:\n{answer.stderr}{answer.stdout}".rstrip())
    found = json.loads(answer.stdout)
    return Download(Path(found["Dir"]), Path(found["GoMod"]))


def _run(command: list[str], workspace: Path, output: int, tick: Callable[[], None]) -> int:
    """Run go in a session of its own, so that whatever ends us ends its compilers too; return its exit status."""
    process = subprocess.Popen(
        command, cwd=workspace, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
    try:
        while process.poll() is None:
            tick()
            time.sleep(0.2)
        return process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _tick(part: Part, log: Path) -> None:
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("go: ")]
    part.tick(f"{len(lines)} packages compiled" if lines else "downloading modules")


def _failure(group: Group, log: Path) -> str:
    last = "\n".join(log.read_text(errors="replace").splitlines()[-FAILURE_LINES:])
    return f"{group.title} could not be built; the whole output is in {log}; it ends:\n{last}"
