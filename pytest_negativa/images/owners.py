"""Packages that own the files of a tree: RECORD, conda-meta, dpkg; links as in chroot(2).

A list may name a file by way of a link. The link is resolved as in a changed root (chroot(2)): an
absolute link starts at the tree's root, and ``..`` stops there.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Collection, Iterator

import msgspec

from pytest_negativa.images.tree import FileTree, name_and_version
from pytest_negativa.installed.conda import CondaPackage
from pytest_negativa.installed.record import RECORD, read_rows
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.image import ImagePackage, Manager

_DPKG = "var/lib/dpkg"


def find_owners(tree: FileTree, wanted: Collection[str]) -> dict[str, ImagePackage]:
    """Find the packages that installed files, as far as wheels, conda and dpkg tell.

    The claim of a wheel wins over those of conda and dpkg, which may have installed the whole
    environment that holds the wheel.

    Args:
        wanted: files, by path below the root.
    """
    listed = {path: path for path in wanted}
    listed.update((path, first) for path, first in tree.aliases.items() if first in listed)
    names = {path.rpartition("/")[2] for path in listed}
    folders: dict[str, str] = {}
    owners: dict[str, ImagePackage] = {}
    if (found := tree.conda_package) is not None:
        name, version = found
        owners = dict.fromkeys(
            wanted, ImagePackage(name=name, version=version, manager=Manager.CONDA)
        )
    for path, package in _iter_claims(tree):
        folder, _, name = path.rpartition("/")
        # An image has far more files than those that are wanted, and links take time to resolve.
        if name not in names:
            continue
        if folder not in folders:
            folders[folder] = tree.overlay.folder(folder).path
        if (real := f"{folders[folder]}/{name}".lstrip("/")) in listed:
            owners[listed[real]] = package
    return owners


def _iter_claims(tree: FileTree) -> Iterator[tuple[str, ImagePackage]]:
    """Paths and the packages that claim them; a later claim wins."""
    dpkg = tree.overlay.folder(_DPKG).path
    # Paragraphs of ``Field: value``, see deb-control(5).
    versions: dict[str, str] = {}
    for paragraph in tree.read_list(f"{dpkg}/status").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.*)$", paragraph, re.MULTILINE))
        versions[fields.get("Package", "")] = fields.get("Version", "")
    lists = sorted(tree.lists)
    for path in (p for p in lists if p.startswith(f"{dpkg}/") and p.endswith(".list")):
        yield from _iter_dpkg(tree, path, versions)
    for path in (p for p in lists if "conda-meta/" in p):
        yield from _iter_conda(tree, path)
    for path in (p for p in lists if p.endswith(f"/{RECORD}")):
        yield from _iter_wheel(tree, path)


def _iter_wheel(tree: FileTree, record: str) -> Iterator[tuple[str, ImagePackage]]:
    """Files of a RECORD ("Recording installed projects", packaging.python.org), in CSV."""
    base, _, own = record.rpartition("/")[0].rpartition("/")
    name, version = name_and_version(own)
    package = ImagePackage(name=name, version=version, manager=Manager.WHEEL)
    with contextlib.suppress(csv.Error):
        for row in read_rows(tree.read_list(record)):
            if row:
                yield f"{base}/{row[0]}" if not row[0].startswith("/") else row[0], package


def _iter_conda(tree: FileTree, path: str) -> Iterator[tuple[str, ImagePackage]]:
    """Files of conda-meta/NAME.json, listed in "files", relative to the environment."""
    base = path.rpartition("/")[0].rpartition("/")[0]
    with contextlib.suppress(*UNDECODABLE):
        listed = msgspec.json.decode(tree.read_list(path), type=CondaPackage)
        package = ImagePackage(name=listed.name, version=listed.version, manager=Manager.CONDA)
        yield from ((f"{base}/{file}", package) for file in listed.files)


def _iter_dpkg(
    tree: FileTree, path: str, versions: dict[str, str]
) -> Iterator[tuple[str, ImagePackage]]:
    """Files of info/PACKAGE[:ARCH].list, a path of the image each line; see dpkg-query(1)."""
    name = path.rpartition("/")[2].removesuffix(".list").partition(":")[0]
    package = ImagePackage(name=name, version=versions.get(name, ""), manager=Manager.DPKG)
    for line in tree.read_list(path).splitlines():
        yield line, package
