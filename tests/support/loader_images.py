"""Images as small as can be whose loaders look for libraries where those of well-known images do.

Their program looks for libcuda.so.1, says where the loader has found it or what the loader says, and sleeps. They are
made of the C libraries of this machine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.harness.packages import Package
from tests.image import oci
from tests.image.architecture import native

MUSL = (Package("musl-tools", (Path("/usr/bin/musl-gcc"),)),)
"""Alpine's C library, with a compiler for it."""

TRIPLET = "x86_64-linux-gnu"
LIBC = Path(f"/lib/{TRIPLET}/libc.so.6")
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
MUSL_LOADER = Path("/lib/ld-musl-x86_64.so.1")

PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  const char *(*version)(void) = library ? (const char *(*)(void))dlsym(library, "stub_version") : NULL;
  Dl_info place;
  if (version && dladdr((void *)version, &place))
    printf("%s in %s\n", version(), place.dli_fname);
  else
    printf("%s\n", dlerror());
  fflush(stdout);
  for (;;) pause();
}
"""

STUB = r"""
#include <gnu/libc-version.h>
const char *stub_version(void) { gnu_get_libc_version(); return "stub of libcuda"; }
"""
"""The real library needs glibc, too."""

DEBIAN_PLACES = b"".join(
    directory + b"\0"
    for directory in (b"/lib/x86_64-linux-gnu/", b"/usr/lib/x86_64-linux-gnu/", b"/lib/", b"/usr/lib/")
)
"""The directories in the loader of Debian's glibc."""

RED_HAT_PLACES = b"".join(
    directory + b"\0"
    for directory in (b"/lib64/" + b"./" * 7 + b"/", b"/usr/lib64/" + b"./" * 7 + b"/", b"/-/-/", b"/usr/-/-/")
)
"""Those of Red Hat's, each as long as the one that it replaces."""


def compile_stub(target: Path) -> None:
    """Compile a libcuda of this machine's glibc."""
    _compile(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"], STUB, target)


def debian(root: Path) -> None:
    """/lib is a link, and the loader has a cache of ldconfig."""
    distroless(root)
    _merge(root, "lib", "lib64")
    (root / "etc").mkdir()
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True)


def distroless(root: Path) -> None:
    """Debian's C library, and nothing else: no cache, no ldconfig, no shell."""
    _compile(["gcc"], PROGRAM, root / "usr/bin/find-cuda")
    _copy(root, LIBC, f"lib/{TRIPLET}/libc.so.6")
    _copy(root, LOADER, "lib64/ld-linux-x86-64.so.2")


def ubi(root: Path) -> None:
    """Libraries are in /usr/lib64, where the loader looks; there is no ldconfig."""
    distroless(root)
    (root / f"lib/{TRIPLET}/libc.so.6").rename(root / "lib64/libc.so.6")
    shutil.rmtree(root / "lib")
    loader = root / "lib64/ld-linux-x86-64.so.2"
    assert len(DEBIAN_PLACES) == len(RED_HAT_PLACES)
    assert DEBIAN_PLACES in loader.read_bytes()
    loader.write_bytes(loader.read_bytes().replace(DEBIAN_PLACES, RED_HAT_PLACES))
    _merge(root, "lib64")


def alpine(root: Path) -> None:
    """The C library is musl, for which NVIDIA builds no driver libraries."""
    _compile(["musl-gcc"], PROGRAM, root / "usr/bin/find-cuda")
    _copy(root, MUSL_LOADER, "lib/ld-musl-x86_64.so.1")


def archive(make: Callable[[Path], None], name: str, root: Path, library_path: str = "") -> bytes:
    """An OCI image archive of what ``make`` puts into ``root``. ``library_path``: the image's LD_LIBRARY_PATH."""
    make(root)
    environment = [f"LD_LIBRARY_PATH={library_path}"] if library_path else []
    config = {"Entrypoint": ["/usr/bin/find-cuda"], "Env": environment, "StopSignal": "SIGKILL"}
    return oci.Image.of([oci.Layer.plain(oci.tar_of(root))], config, native()).archive([name])


def _compile(command: list[str], source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, "-x", "c", "-", "-o", str(target)], input=source, text=True, check=True)


def _copy(root: Path, source: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, root / name)


def _merge(root: Path, *names: str) -> None:
    """Move directories into /usr, and link to them."""
    for name in names:
        (root / name).rename(root / "usr" / name)
        (root / name).symlink_to(f"usr/{name}")
