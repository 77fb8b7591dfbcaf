"""OCI image archives: layers, a configuration and an index in one tar, the same bytes for the same content.

Format: github.com/opencontainers/image-spec, "image-layout".
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.image.architecture import Architecture
from tests.image.tree import walk

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
GZIP_LEVEL = 6


@dataclass(frozen=True)
class Layer:
    """A layer as it is kept (``blob``) and the digest of its tar (``diff_id``), which differ where it is compressed."""

    blob: bytes
    diff_id: str
    media_type: str = LAYER_TYPE

    @classmethod
    def plain(cls, tar: bytes) -> Layer:
        return cls(tar, digest(tar))

    @classmethod
    def compressed(cls, tar: bytes) -> Layer:
        return cls(gzip.compress(tar, GZIP_LEVEL, mtime=0), digest(tar), f"{LAYER_TYPE}+gzip")


@dataclass(frozen=True)
class Image:
    """An image of one architecture, or an index of several.

    descriptor   of its manifest or index: media type, digest, size, platform
    blobs        its content by digest
    """

    descriptor: Mapping[str, Any]
    blobs: Mapping[str, bytes]

    @classmethod
    def of(cls, layers: Sequence[Layer], config: Mapping[str, Any], architecture: Architecture) -> Image:
        """An image of these layers; ``config`` is what the specification calls so: Entrypoint, Env and the like."""
        platform = {"architecture": architecture.name, "os": "linux"}
        diff_ids = [layer.diff_id for layer in layers]
        image = to_json({**platform, "config": dict(config), "rootfs": {"type": "layers", "diff_ids": diff_ids}})
        manifest = to_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": _descriptor(CONFIG_TYPE, image),
                "layers": [_descriptor(layer.media_type, layer.blob) for layer in layers],
            }
        )
        blobs = (*(layer.blob for layer in layers), image, manifest)
        return cls(
            {**_descriptor(MANIFEST_TYPE, manifest), "platform": platform}, {digest(blob): blob for blob in blobs}
        )

    @classmethod
    def index(cls, images: Sequence[Image]) -> Image:
        """An index of images of different architectures."""
        manifests = [image.descriptor for image in images]
        content = to_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests})
        blobs = {name: blob for image in images for name, blob in image.blobs.items()}
        return cls(_descriptor(INDEX_TYPE, content), {**blobs, digest(content): content})

    @classmethod
    def read(cls, archive: bytes) -> Image:
        """The image in an archive without names, as ``archive`` makes it."""
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            files = {member.name: content.read() for member in members if (content := members.extractfile(member))}
        [descriptor] = json.loads(files.pop("index.json"))["manifests"]
        return cls(descriptor, {digest(blob): blob for name, blob in files.items() if name.startswith("blobs/")})

    @property
    def digest(self) -> str:
        return str(self.descriptor["digest"])

    def only(self, image: Image) -> Image:
        """This index with the content of one of its images: what containerd has after it pulled that image."""
        return Image(self.descriptor, {**image.blobs, self.digest: self.blobs[self.digest]})

    def archive(self, names: Iterable[str]) -> bytes:
        """An archive of this image under ``names``, as containerd imports it."""
        entries = [{**self.descriptor, "annotations": _named(name)} for name in names] or [dict(self.descriptor)]
        files = {f"blobs/sha256/{name.removeprefix('sha256:')}": blob for name, blob in self.blobs.items()}
        files["index.json"] = to_json({"schemaVersion": 2, "manifests": entries})
        files["oci-layout"] = to_json({"imageLayoutVersion": "1.0.0"})
        return tar({name: (content, 0o644) for name, content in files.items()})


def tar(
    files: Mapping[str, tuple[bytes, int]],
    links: Mapping[str, str] | None = None,
    folders: Mapping[str, int] | None = None,
) -> bytes:
    """A tar of folders (by mode), files (content and mode) and links, with no times or owners in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        for folder, mode in (folders or {}).items():
            out.addfile(_member(folder, tarfile.DIRTYPE, mode))
        for name, (content, mode) in files.items():
            member = _member(name, tarfile.REGTYPE, mode)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = _member(name, tarfile.SYMTYPE, 0o777)
            member.linkname = target
            out.addfile(member)
    return buffer.getvalue()


def tar_of(root: Path) -> bytes:
    """A tar of everything below ``root``."""
    files, links, folders = {}, {}, {}
    for path in walk(root):
        name = str(path.relative_to(root))
        if path.is_symlink():
            links[name] = str(path.readlink())
        elif path.is_dir():
            folders[name] = path.stat().st_mode & 0o7777
        else:
            files[name] = (path.read_bytes(), path.stat().st_mode & 0o7777)
    return tar(files, links, folders)


def to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode = kind, mode
    return member


def _named(name: str) -> dict[str, str]:
    """What containerd, and what others read."""
    return {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(blob), "size": len(blob)}
