"""Layers of a container image that is saved in a folder or a tar archive.

Formats: "Image Layout Specification" and "Image Layer Filesystem Changeset" of the OCI; the older
format of ``docker save``, whose ``manifest.json`` names the layers.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.archive_kinds import DOCKER_LIST, OCI_INDEX, has_image_list
from pytest_negativa.images.archives import (
    Entry,
    OnProblem,
    Part,
    iter_archive,
    iter_tar,
)
from pytest_negativa.images.overlay import MAX_LINKS
from pytest_negativa.models.archive import Member
from pytest_negativa.models.base import UNDECODABLE

# Names of Docker, Podman, skopeo, containerd, BuildKit, kaniko, Bazel and Jib.
_IMAGE_FILES = re.compile(
    r"blobs/\S+|(manifest|index|config)\.json|oci-layout|repositories"
    r"|(sha256:)?[0-9a-f]{64}(\.json|\.tar|\.tar\.gz|/(layer\.tar|json|VERSION))?"
)
_DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]{32,}")
_MAX_JSON = 4 << 20
_MAX_JSONS = 256 << 20
_MAX_DEPTH = 4
_OCI_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct):
    digest: str
    platform: _Platform | None = None
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
    """An image that is saved in a folder or a tar archive.

    Attributes:
        path: real path of the folder or archive.
        layers: their names in it, the lowest first.
        members: where the files of an archive lie; empty for a folder, and for a compressed one.
        is_folder: whether it is a folder.
    """

    path: Path
    layers: tuple[str, ...]
    members: Mapping[str, Member]
    is_folder: bool


@dataclass(slots=True)
class _Listing:
    """The files of an image: the small ones with their content, all with their places."""

    texts: dict[str, bytes] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


def find_image(path: Path) -> Image | None:
    """The image in a folder or a tar archive; None if there is none.

    Raises:
        FormatError: there are several, or its description is damaged.
    """
    if path.is_dir():
        return _image_of(path.resolve(), _list_folder(path), is_folder=True)
    listing, left = _Listing(), _MAX_JSONS
    for entry in iter_archive(path, lambda problem: None):
        if not _IMAGE_FILES.fullmatch(entry.name):
            return None
        listing.names.add(entry.name)
        if entry.target is not None:
            listing.links[entry.name] = entry.target
        if entry.member is not None:
            listing.members[entry.name] = entry.member
        if entry.size <= min(_MAX_JSON, left) and entry.head[:1] in (b"{", b"["):
            left -= entry.size
            listing.texts[entry.name] = (
                bytes(entry.read()) if entry.member is None else _read(entry.member)
            )
    return _image_of(path.resolve(), listing, is_folder=False)


def _read(member: Member) -> bytes:
    with ByteSource(member.archive) as source:
        return source.read(member.start, member.packed_size)


def _list_folder(path: Path) -> _Listing:
    listing = _Listing()
    blobs = [p for p in path.glob("blobs/*/*") if p.is_file()] if has_image_list(path) else []
    for file in itertools.chain((path / DOCKER_LIST, path / OCI_INDEX), blobs):
        if file.is_file() and file.stat().st_size <= _MAX_JSON:
            listing.texts[file.relative_to(path).as_posix()] = file.read_bytes()
    return listing


def _image_of(path: Path, listing: _Listing, *, is_folder: bool) -> Image | None:
    is_oci = (path / "oci-layout").is_file() if is_folder else "oci-layout" in listing.names
    try:
        if (text := listing.texts.get(DOCKER_LIST)) is not None:
            saved = msgspec.json.decode(text, type=list[_Saved])
            if is_folder and not (saved or is_oci):
                return None
            layers = _docker_layers(path, saved)
        elif OCI_INDEX in listing.texts and is_oci:
            index = msgspec.json.decode(listing.texts[OCI_INDEX], type=_Manifest)
            layers = _oci_layers(path, index, listing)
        else:
            return None
    except UNDECODABLE as e:
        # Any folder may have a manifest.json.
        if is_folder and not is_oci:
            return None
        raise FormatError(path, None, f"the description of the image is damaged: {e}") from e
    layers = [_follow(name, listing.links) for name in layers]
    for name in layers:
        there = (path / name).is_file() if is_folder else name in listing.names
        if not _IMAGE_FILES.fullmatch(name) or ".." in name.split("/") or not there:
            raise FormatError(path, None, f"layer {name} is not in it; save the image again")
    return Image(path, tuple(layers), listing.members, is_folder)


def _follow(name: str, links: Mapping[str, str]) -> str:
    """Docker saved a layer that several images have once, and links to it: ../ID/layer.tar."""
    target = links.get(name)
    return name if target is None else target.removeprefix("../")


def _docker_layers(path: Path, images: list[_Saved]) -> list[str]:
    if len(images) != 1:
        names = ", ".join((i.repo_tags or ["without a tag"])[0] for i in images) or "none"
        raise FormatError(
            path, None, f"holds {len(images)} images ({names}), expected 1; save one image alone"
        )
    return images[0].layers


def _oci_layers(path: Path, index: _Manifest, listing: _Listing) -> list[str]:
    found = list(_iter_manifests(path, index, listing, _MAX_DEPTH, set()))
    if len(found) > 1:
        here = _OCI_MACHINES.get(platform.machine(), platform.machine())
        ours = [one for one in found if one[0] is not None and one[0].architecture == here]
        found = ours or found
    if len(found) != 1:
        names = ", ".join(f"{p.os}/{p.architecture}" if p else "unknown" for p, _ in found)
        raise FormatError(
            path,
            None,
            f"holds {len(found)} images ({names or 'none'}), expected 1; save one image alone",
        )
    return [_blob(path, layer) for layer in found[0][1].layers]


def _iter_manifests(
    path: Path, index: _Manifest, listing: _Listing, depth: int, seen: set[str]
) -> Iterator[tuple[_Platform | None, _Manifest]]:
    for one in index.manifests:
        # An image with several tags is listed several times. A crafted index may list itself.
        if one.digest in seen:
            continue
        seen.add(one.digest)
        # Attestations of BuildKit, which are no images.
        if (one.platform and one.platform.os == "unknown") or "vnd.docker.reference.type" in (
            one.annotations or ()
        ):
            continue
        text = listing.texts.get(_blob(path, one))
        # An index may name the images of other platforms, which were not saved.
        if text is None or not depth:
            continue
        manifest = msgspec.json.decode(text, type=_Manifest)
        if manifest.manifests:
            yield from _iter_manifests(path, manifest, listing, depth - 1, seen)
        else:
            yield one.platform, manifest


def _blob(path: Path, descriptor: _Descriptor) -> str:
    if not _DIGEST.fullmatch(descriptor.digest):
        raise FormatError(path, None, f"{descriptor.digest!r} in the image's index is no digest")
    return "blobs/" + descriptor.digest.replace(":", "/")


def iter_layers(image: Image, on_problem: OnProblem) -> Iterator[tuple[int, Iterator[Entry]]]:
    """The number of each layer (0 is the lowest) and its files, in any order.

    The files of a layer must be taken before the next layer is.

    Raises:
        FormatError: a layer is damaged, or can't be read.
    """
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(image.layers):
        numbers.setdefault(name, []).append(number)
    # The same layer twice: the upper one counts.
    last = {name: found[-1] for name, found in numbers.items()}
    if image.is_folder:
        for name, number in last.items():
            with ByteSource(image.path / name) as source:
                part = Part(source)
                yield number, iter_tar(part, source.path, source.path, on_problem, folders=True)
    elif image.members:
        with ByteSource(image.path) as source:
            for name, number in last.items():
                member = image.members[name]
                part = Part(source, member.start, member.packed_size)
                label = f"{image.path}/{name}"
                yield number, iter_tar(part, label, source.path, on_problem, folders=True)
    else:
        for entry in iter_archive(image.path, on_problem):
            if entry.name in last:
                label = f"{image.path}/{entry.name}"
                stream = entry.stream()
                yield last[entry.name], iter_tar(stream, label, None, on_problem, folders=True)


def resolve_links(path: str, target_of: Callable[[str], str | None]) -> str | None:
    """Resolve the symbolic links in a path as in a changed root; None for a loop of links.

    Parts of the path that don't exist stay as they are.

    Args:
        path: below the root.
        target_of: returns the text of a link, and None for a path that is no link.
    """
    waiting = list(reversed(PurePosixPath(path).parts))
    found: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "/":
            found = []
        elif part == "..":
            del found[-1:]
        elif (target := target_of("/".join((*found, part)))) is None:
            found.append(part)
        else:
            links += 1
            if links > MAX_LINKS:
                return None
            waiting += reversed(PurePosixPath(target).parts)
    return "/".join(found)
