"""The one image of the cluster: Debian's static busybox as an OCI archive, made here, because there is no registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
BUSYBOX_IMAGE = "docker.io/tessera/busybox:local"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""What Linux and what Go call the same machine."""
SLEEP_FOREVER = ["/bin/sleep", "2147483647"]


def busybox_archive(busybox: Path = BUSYBOX) -> bytes:
    """An OCI image archive named BUSYBOX_IMAGE, the same bytes for the same busybox.

    Without a command it sleeps, so it serves as the pause image, too. Its stop signal is SIGKILL: a shell as process
    1 ignores SIGTERM, and every deleted pod would last its whole grace period. A test that needs SIGTERM says so with
    the container's ``lifecycle.stopSignal``.
    """
    layer = _layer(busybox)
    config = _json(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": SLEEP_FOREVER, "StopSignal": "SIGKILL"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": BUSYBOX_IMAGE}
    files = {f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (layer, config, manifest)}
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [entry]})
    files["oci-layout"] = _json({"imageLayoutVersion": "1.0.0"})
    return _tar({name: (content, 0o644) for name, content in files.items()}, {})


def _layer(busybox: Path) -> bytes:
    listed = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True)
    links = {f"bin/{applet}": "busybox" for applet in listed.stdout.split() if applet != "busybox"}
    passwd = b"root:x:0:0:root:/:/bin/sh\n"
    files = {"bin/busybox": (busybox.read_bytes(), 0o755), "etc/passwd": (passwd, 0o644)}
    return _tar(files, links, folders=("bin", "etc", "proc", "sys", "dev", "run", "tmp"))


def _tar(files: dict[str, tuple[bytes, int]], links: dict[str, str], folders: tuple[str, ...] = ()) -> bytes:
    """A tar of these, with no times or owners in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for folder in folders:
            archive.addfile(_member(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
        for name, (content, mode) in files.items():
            member = _member(name, tarfile.REGTYPE, mode)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = _member(name, tarfile.SYMTYPE, 0o777)
            member.linkname = target
            archive.addfile(member)
    return buffer.getvalue()


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode = kind, mode
    return member


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}
