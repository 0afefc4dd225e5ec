"""Environments of conda: what ``conda doctor`` reads follows the libraries."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.tree import scan_folder
from tests.support.made_site import ONE, Made

SITE = "lib/python3.12/site-packages"
RECORD = f"{SITE}/gpu_code-1.0.dist-info/RECORD"
LINK = "lib/libone.so"


def write(prefix: Path, name: str, *files: str) -> None:
    """A package's file as conda writes it (``PrefixRecord.dump``)."""
    paths = []
    for file in files:
        path = prefix / file
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        kind = "softlink" if path.is_symlink() else "hardlink"
        size = path.lstat().st_size
        paths.append(
            {
                "_path": file,
                "path_type": kind,
                "sha256": sha256,
                "sha256_in_prefix": sha256,
                "size_in_bytes": size,
            }
        )
    document = {
        "build": "0",
        "files": files,
        "name": name,
        # No entry, though it has that word.
        "noarch": {"type": "_path"},
        "paths_data": {"paths": paths, "paths_version": 1},
        "version": "1.0",
    }
    (prefix / f"conda-meta/{name}-1.0-0.json").write_text(json.dumps(document, indent=2))


@pytest.fixture
def prefix(site: Made, tmp_path: Path) -> Path:
    prefix = tmp_path / "prefix"
    shutil.copytree(site.folder, prefix / SITE)
    (prefix / "conda-meta").mkdir()
    (prefix / LINK).symlink_to(prefix / SITE / ONE)
    (prefix / "lib/notes.txt").write_text("\n")
    write(prefix, "gpu-code", f"{SITE}/{ONE}", RECORD, LINK, "lib/notes.txt")
    write(prefix, "gpu-code-dev", LINK)
    (prefix / "conda-meta/damaged.json").write_text("{")
    return prefix


def metadata(prefix: Path) -> dict[str, bytes]:
    files = [*(prefix / "conda-meta").iterdir(), prefix / RECORD]
    return {path.name: path.read_bytes() for path in files}


def altered(prefix: Path) -> list[str]:
    """As ``find_altered_packages`` of conda's altered_files.py."""
    return [
        one["_path"]
        for path in (prefix / "conda-meta").glob("*-0.json")
        for one in json.loads(path.read_text())["paths_data"]["paths"]
        if hashlib.sha256((prefix / one["_path"]).read_bytes()).hexdigest()
        != one["sha256_in_prefix"]
    ]


@pytest.mark.parametrize("folder", ["", "lib", SITE])
def test_from_slim_to_undo(site: Made, prefix: Path, tmp_path: Path, folder: str) -> None:
    before, library = metadata(prefix), prefix / SITE / ONE
    size = library.stat().st_size
    options = SlimOptions(keep_originals=tmp_path / "kept")
    report = slim_trees(SlimRequest((prefix / folder,), site.lock, options=options))
    assert not report.failed and library.stat().st_size < size
    assert altered(prefix) == []
    after = metadata(prefix)
    assert {name for name in before if after[name] != before[name]} == {
        "gpu-code-1.0-0.json",
        "gpu-code-dev-1.0-0.json",
        "RECORD",
    }
    entry, record, link, _ = json.loads(after["gpu-code-1.0-0.json"])["paths_data"]["paths"]
    assert entry["size_in_bytes"] == library.stat().st_size and record["_path"] == RECORD
    # Of the link's own size nothing changed, nor of the package's own digests.
    assert link["size_in_bytes"] == (prefix / LINK).lstat().st_size
    assert entry["sha256"] != entry["sha256_in_prefix"]
    assert {row.status for row in check_tree(scan_folder(prefix / folder))} == {SlimStatus.SOUND}

    undo_trees([prefix / folder])
    assert library.stat().st_size == size
    assert metadata(prefix) == before


def test_owner(prefix: Path) -> None:
    library = prefix / "lib/libhost.so"
    library.write_bytes(b"")
    write(prefix, "host-code", "lib/libhost.so")
    found = Owners().of(str(library))
    assert (found.path, found.distribution, found.version) == ("lib/libhost.so", "host-code", "1.0")
    advice = scan_folder(prefix / "lib").how_to_reinstall("libhost.so")
    assert advice == "install it again: conda install --force-reinstall --no-deps host-code=1.0"
