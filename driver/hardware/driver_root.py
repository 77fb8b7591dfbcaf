"""Finding files below the driver root: "/" on a host with a driver, a directory where the driver is in a container."""

from __future__ import annotations

from pathlib import Path

LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
)

LINKS = 40
"""Links followed for one path, as many as Linux follows (path_resolution(7))."""


def resolve_inside(root: Path, name: str) -> str | None:
    """What ``name`` is below ``root`` once every link is followed as if ``root`` were "/"; None where it dangles.

    A link with an absolute target means the host's (or the driver container's) root, which this process
    sees elsewhere; the runtime would follow it from a root of its own.
    """
    todo, done, links = list(reversed(Path(name).parts)), Path(), 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done.parent
        elif (root / done / part).is_symlink():
            links += 1
            if links > LINKS:
                return None
            target = (root / done / part).readlink()
            done = Path() if target.is_absolute() else done
            todo += reversed(target.relative_to("/").parts if target.is_absolute() else target.parts)
        else:
            done /= part
    return str(done) if (root / done).exists() else None
