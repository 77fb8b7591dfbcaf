"""The cgroup v2 directories of pods, by the UID that the kubelet has for the pod.

Names as the kubelet and runc make them (pkg/kubelet/cm in Kubernetes): the parent of all pods is ``kubepods`` with the
cgroup driver cgroupfs, ``kubepods.slice`` with systemd, below the kubelet's ``cgroupRoot`` if it has one. With systemd
each name begins with that of its parent, and a UID has underscores instead of dashes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from driver.hardware.host_paths import HostPaths

CGROUPS = "/sys/fs/cgroup"

PARENT_OF_PODS = re.compile(r"(.+-)?kubepods(\.slice)?")
QUALITIES = ("", "burstable", "besteffort")
"""Pods of the class Guaranteed are directly below the parent of all pods."""

POD_UID = re.compile(r"[0-9a-z][0-9a-z-]*")
"""Pods from the API server have UUIDs; static pods have a hash without dashes."""

POD_CGROUP = re.compile(r"(?:.+-)?pod([0-9a-z][0-9a-z_-]*)(?:\.slice)?")

SEARCHED_LEVELS = 6
"""How deep the parent of pods is searched: a kubelet in a container has that container's cgroup above its own."""

SEARCHED_DIRECTORIES = 5000
"""Most directories of one search. Services and logins of a machine have some hundreds."""


class PodCgroups:
    """Finds the cgroups of pods; remembers the parents of pods, which stay while a kubelet lives."""

    def __init__(self, paths: HostPaths) -> None:
        self._top = paths.here(CGROUPS)
        self._parents: tuple[Path, ...] = ()

    def find(self, pod_uid: str, *, expected: bool = True) -> Path | None:
        """The directory of a pod's cgroup, as this process sees it; None if there is none.

        ``expected``: the pod has one, so that parents are searched again where it is not found.
        """
        if not POD_UID.fullmatch(pod_uid):
            return None
        cgroup = self._find_below_parents(pod_uid)
        if cgroup is None and (expected or not self._parents):
            self._parents = tuple(_parents_of_pods(self._top))
            cgroup = self._find_below_parents(pod_uid)
        return cgroup

    def uids(self) -> set[str]:
        """The UIDs of all pods that have a cgroup."""
        self._parents = self._parents or tuple(_parents_of_pods(self._top))
        children = [child for parent in self._parents for child in _directories(parent)]
        qualities = [child for child in children if child.name.removesuffix(".slice").endswith(QUALITIES[1:])]
        below = [child for quality in qualities for child in _directories(quality)]
        matches = (POD_CGROUP.fullmatch(child.name) for child in (*children, *below))
        return {match[1].replace("_", "-") for match in matches if match}

    def _find_below_parents(self, pod_uid: str) -> Path | None:
        paths = (path for parent in self._parents for path in _pod_paths(parent, pod_uid))
        return next((path for path in paths if path.is_dir()), None)


def _pod_paths(parent: Path, pod_uid: str) -> Iterator[Path]:
    """Where a pod's cgroup may be."""
    if not parent.name.endswith(".slice"):
        yield from (parent / quality / f"pod{pod_uid}" for quality in QUALITIES)
        return
    name, uid = parent.name.removesuffix(".slice"), pod_uid.replace("-", "_")
    yield parent / f"{name}-pod{uid}.slice"
    for quality in QUALITIES[1:]:
        yield parent / f"{name}-{quality}.slice" / f"{name}-{quality}-pod{uid}.slice"


def _parents_of_pods(top: Path) -> Iterator[Path]:
    """The parents of pods below ``top``, nearest first, whatever ``cgroupRoot`` is."""
    level, searched = [top], 0
    for _ in range(SEARCHED_LEVELS):
        below: list[Path] = []
        for directory in level:
            for child in _directories(directory):
                searched += 1
                if searched > SEARCHED_DIRECTORIES:
                    return
                if PARENT_OF_PODS.fullmatch(child.name):
                    yield child
                else:
                    below.append(child)
        level = below


def _directories(parent: Path) -> Iterator[Path]:
    """The directories in ``parent`` that belong to this process's user, root: in others users make what they want."""
    try:
        with os.scandir(parent) as entries:
            children = list(entries)
    except OSError:  # removed meanwhile
        return
    for child in children:
        try:
            if child.is_dir() and child.stat().st_uid == os.geteuid():
                yield Path(child.path)
        except OSError:  # removed meanwhile
            continue
