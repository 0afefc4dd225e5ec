"""Layers of saved container images (OCI, docker save): the platform, manifests, their limits.

OCI: "Image Layout Specification" and "Image Layer Filesystem Changeset"; an ``index.json`` leads to
the layers. The older format of ``docker save`` has a ``manifest.json`` that names the layers.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archive_kinds import DOCKER_LIST, OCI_INDEX, ArchiveKind, kind_at
from pytest_negativa.images.archives import (
    Entry,
    File,
    OnProblem,
    SourceStream,
    iter_archive,
    iter_tar,
)
from pytest_negativa.images.overlay import Link
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.base import UNDECODABLE

# Names of Docker, Podman, skopeo, containerd, BuildKit, kaniko, Bazel and Jib.
_IMAGE_FILES = re.compile(
    r"blobs/\S+|(manifest|index|config)\.json|oci-layout|repositories"
    r"|(sha256:)?[0-9a-f]{64}(\.json|\.tar|\.tar\.gz|/(layer\.tar|json|VERSION))?"
)
_DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]{32,}")
_MAX_JSON = 4 << 20
_MAX_JSONS = 256 << 20
# Where these files are in a folder.
_FOLDERS = ("*", "*/*", "blobs/*/*")
_OCI_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class _Descriptor(msgspec.Struct):
    digest: str
    platform: dict[str, Any] | None = None
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct):
    """An image manifest, or an index of manifests."""

    manifests: list[_Descriptor] = []
    layers: list[_Descriptor] = []


class _Saved(msgspec.Struct, rename="pascal"):
    """An image in the list of ``docker save``."""

    layers: list[str]
    repo_tags: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A saved image, in a folder or a tar archive.

    Attributes:
        path: real path of the folder or archive.
        places: its files; None for one that can be read in passing alone.
        texts: the small files of JSON.
        links: links to files.
        layers: names of the layers, the lowest first.
    """

    path: Path
    places: dict[str, Path | Member | None] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()


def is_container(path: Path) -> bool:
    """Whether a path is an archive, or a folder with a saved image.

    Raises:
        FormatError: it is such a folder, and damaged.
    """
    if (path / OCI_INDEX).is_file() or (path / DOCKER_LIST).is_file():
        return find_image(path) is not None
    return kind_at(path) is not None


def find_image(path: Path) -> Image | None:
    """The image in a folder or a tar archive; None if there is none.

    Raises:
        FormatError: there are several, or its description is damaged.
    """
    if kind_at(path) is ArchiveKind.ZIP:
        return None
    image, left = Image(path.resolve()), _MAX_JSONS
    entries = _iter_folder(path) if path.is_dir() else iter_archive(path, lambda problem: None)
    for name, node in entries:
        if node is not None and not _IMAGE_FILES.fullmatch(name):
            return None
        if isinstance(node, Link):
            image.links[name] = node.target
        if isinstance(node, File):
            image.places[name] = node.place
            if node.size <= min(_MAX_JSON, left) and node.head[:1] in (b"{", b"["):
                left -= node.size
                with node.open(name) as source:
                    image.texts[name] = source.read(0, source.size)
    # Any folder may have a manifest.json.
    layers = _find_layers(image, is_sure=not path.is_dir())
    return None if layers is None else replace(image, layers=layers)


def _iter_folder(path: Path) -> Iterator[Entry]:
    """The files of an image in a folder, which may have others."""
    for file in itertools.chain.from_iterable(map(path.glob, _FOLDERS)):
        name = file.relative_to(path).as_posix()
        if _IMAGE_FILES.fullmatch(name) and file.is_file():
            with ByteSource(file) as source:
                yield name, File(source.size, source.read(0, min(1, source.size)), file)


def _find_layers(image: Image, *, is_sure: bool) -> tuple[str, ...] | None:
    """The names of the layers; None if it is no image after all.

    Args:
        is_sure: whether what looks like an image is one.
    """
    is_oci = "oci-layout" in image.places
    try:
        if DOCKER_LIST in image.texts:
            saved = msgspec.json.decode(image.texts[DOCKER_LIST], type=list[_Saved])
            images = [((one.repo_tags or ["without a tag"])[0], one.layers) for one in saved]
        elif OCI_INDEX in image.texts and is_oci:
            index = msgspec.json.decode(image.texts[OCI_INDEX], type=_Manifest)
            images = _oci_images(image, index)
        else:
            return None
    except UNDECODABLE as e:
        if not (is_sure or is_oci):
            return None
        raise FormatError(image.path, None, f"the description of the image is damaged: {e}") from e
    if not (images or is_sure or is_oci):
        return None
    if len(images) != 1:
        shown = ", ".join(name for name, _ in images) or "none"
        problem = f"holds {len(images)} images ({shown}), expected 1; save one image alone"
        raise FormatError(image.path, None, problem)
    [(_, layers)] = images
    # Docker saved a layer that several images have once, and links to it: ../ID/layer.tar.
    found = [image.links.get(name, name).removeprefix("../") for name in layers]
    for name, found_name in zip(layers, found, strict=True):
        if found_name not in image.places:
            raise FormatError(image.path, None, f"layer {name} is not in it; save the image again")
    return tuple(found)


def _oci_images(image: Image, index: _Manifest) -> list[tuple[str, list[str]]]:
    """The images for this machine if there are any: the platform of each, and its layers."""
    found = list(_iter_manifests(image, index, set()))
    here = _OCI_MACHINES.get(platform.machine(), platform.machine())
    if len(found) > 1:
        found = [one for one in found if one[0] and one[0].get("architecture") == here] or found
    return [
        (
            f"{p.get('os', '')}/{p.get('architecture', '')}" if p else "unknown",
            [_blob(image, layer) for layer in manifest.layers],
        )
        for p, manifest in found
    ]


def _iter_manifests(
    image: Image, index: _Manifest, seen: set[str]
) -> Iterator[tuple[dict[str, Any] | None, _Manifest]]:
    for one in index.manifests:
        # An image with several tags is listed several times. A crafted index may list itself.
        if one.digest in seen:
            continue
        seen.add(one.digest)
        # Attestations of BuildKit, which are no images.
        is_unknown = one.platform is not None and one.platform.get("os") == "unknown"
        if is_unknown or "vnd.docker.reference.type" in (one.annotations or ()):
            continue
        text = image.texts.get(_blob(image, one))
        # An index may name the images of other platforms, which were not saved.
        if text is None:
            continue
        manifest = msgspec.json.decode(text, type=_Manifest)
        if manifest.manifests:
            yield from _iter_manifests(image, manifest, seen)
        else:
            yield one.platform, manifest


def _blob(image: Image, descriptor: _Descriptor) -> str:
    if not _DIGEST.fullmatch(descriptor.digest):
        raise FormatError(
            image.path, None, f"{descriptor.digest!r} in the image's index is no digest"
        )
    return "blobs/" + descriptor.digest.replace(":", "/")


def iter_layers(image: Image, on_problem: OnProblem) -> Iterator[tuple[int, Iterator[Entry]]]:
    """The number of each layer (0 is the lowest) and its entries, in any order.

    The entries of a layer must be taken before the next layer is.

    Raises:
        FormatError: a layer is damaged, or can't be read.
    """
    # The same layer twice: the upper one counts.
    last = {name: number for number, name in enumerate(image.layers)}
    for name, number in last.items():
        if (place := image.places[name]) is not None:
            with ByteSource(place.archive if isinstance(place, Member) else place) as source:
                layer = source
                if isinstance(place, Member):
                    layer = source.window(place.start, place.packed_size)
                yield number, iter_tar(SourceStream(layer), f"{image.path}/{name}", on_problem)
    is_streamed = any(image.places[name] is None for name in last)
    for name, file in iter_archive(image.path, on_problem) if is_streamed else ():
        if name in last and isinstance(file, File) and file.stream is not None:
            yield last[name], iter_tar(file.stream, f"{image.path}/{name}", on_problem)
