"""The one image of the cluster: Debian's static busybox as an OCI archive, made here, because there is no registry."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.image import oci
from tests.image.architecture import native

BUSYBOX = Path("/bin/busybox")
BUSYBOX_IMAGE = "docker.io/tessera/busybox:local"
SLEEP_FOREVER = ["/bin/sleep", "2147483647"]
FOLDERS = {"bin": 0o755, "etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "tmp": 0o1777}


def busybox_archive(busybox: Path = BUSYBOX) -> bytes:
    """An OCI image archive named BUSYBOX_IMAGE, the same bytes for the same busybox.

    Without a command it sleeps, so it serves as the pause image, too. Its stop signal is SIGKILL: a shell as process
    1 ignores SIGTERM, and every deleted pod would last its whole grace period. A test that needs SIGTERM says so with
    the container's ``lifecycle.stopSignal``.
    """
    config = {"Env": ["PATH=/bin"], "Cmd": SLEEP_FOREVER, "StopSignal": "SIGKILL"}
    return oci.Image.of([oci.Layer.plain(_layer(busybox))], config, native()).archive([BUSYBOX_IMAGE])


def _layer(busybox: Path) -> bytes:
    listed = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True)
    links = {f"bin/{applet}": "busybox" for applet in listed.stdout.split() if applet != "busybox"}
    passwd = b"root:x:0:0:root:/:/bin/sh\n"
    return oci.tar({"bin/busybox": (busybox.read_bytes(), 0o755), "etc/passwd": (passwd, 0o644)}, links, FOLDERS)
