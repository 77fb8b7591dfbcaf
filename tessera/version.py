"""``tessera version``: the versions of this command, of the API server, and of Tessera's pods."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

import click
import msgspec

from driver.errors import ApiError, EnvironmentFault
from driver.kube.client import KubeClient
from driver.kube.get_and_list import read_all
from driver.kube.types import ObjectMeta
from tessera.cluster_options import UNKNOWN, client_of, package_version, with_kubeconfig
from tessera.tables_and_drawings import columns, counted, printable, show, with_output

PACKAGES = ("tessera-dra", "nvidia-ml-py", "kubernetes", "grpcio")
PODS = "/api/v1/pods"
OF_TESSERA = {"labelSelector": "app.kubernetes.io/name=tessera"}


class PodImage(msgspec.Struct, frozen=True):
    image: str = ""


class PodImages(msgspec.Struct, frozen=True):
    containers: tuple[PodImage, ...] = ()


class PodWithImages(msgspec.Struct, frozen=True):
    """A pod with the images of its containers only."""

    metadata: ObjectMeta
    spec: PodImages = PodImages()


@click.command()
@click.option("--client", "client_only", is_flag=True, help="Do not ask the cluster.")
@with_kubeconfig
@with_output("text", "json")
def version(*, client_only: bool, kubeconfig: Path | None, output: str) -> None:
    """Show the versions of this command, of Kubernetes, and the images of Tessera's pods.

    What can't be read is named, and is no failure. `tessera status` says whether the versions fit together.

    \b
    Examples:
      tessera version
      tessera version --client -o json
    """
    lines = [("this command", "Python", platform.python_version())]
    lines += [("this command", package, package_version(package)) for package in PACKAGES]
    if not client_only:
        lines += _in_cluster(kubeconfig)
    content = [{"where": where, "what": what, "version": number} for where, what, number in lines]
    rows = [[where, printable(what), printable(number)] for where, what, number in lines]
    show(output, content, columns(["WHERE", "WHAT", "VERSION"], rows))


def _in_cluster(kubeconfig: Path | None) -> list[tuple[str, str, str]]:
    try:
        client = client_of(kubeconfig, "tessera-version")
        return [("cluster", "Kubernetes", str(client.get_object("/version").get("gitVersion", UNKNOWN)))] + [
            ("cluster", *image) for image in _images(client)
        ]
    except (ApiError, EnvironmentFault) as error:
        return [("cluster", UNKNOWN, str(error))]


def _images(client: KubeClient) -> list[tuple[str, str]]:
    """Each image of Tessera's pods, and how many pods run it."""
    try:
        pods = list(read_all(client, PODS, PodWithImages, OF_TESSERA))
    except (ApiError, msgspec.MsgspecError) as error:
        return [("images", f"{UNKNOWN}: {error}")]
    images = Counter(pod.spec.containers[0].image for pod in pods if pod.spec.containers)
    return [(f"image of {counted(count, 'pod')}", image) for image, count in sorted(images.items())]
