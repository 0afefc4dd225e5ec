"""What lies beside that which is slimmed, checked or put back stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.tree import scan
from tests.support.made_site import ONE, Made
from tests.support.sites import digests, planned_of, verdict_of


def slim_at(*paths: Path, made: Made, originals: Path | None) -> None:
    options = SlimOptions(keep_originals=originals)
    slim_trees(SlimRequest(paths=paths, lock=made.lock, options=options))


def test_one_library_after_the_other(site: Made, tmp_path: Path) -> None:
    for path in (site.one, site.two):
        slim_at(path, made=site, originals=tmp_path / "originals")
    assert len(load_manifest(site.one.parent).slimmed) == 2


def test_undo_of_one_library_is_of_one(site: Made, tmp_path: Path) -> None:
    slim_at(site.one, site.two, made=site, originals=tmp_path / "originals")
    two = site.two.read_bytes()
    [tree] = scan((site.one,))
    assert [row.status for row in check_tree(tree)] == [SlimStatus.SOUND]
    assert [row.status for row in undo_trees((site.one,))] == [SlimStatus.UNDONE]
    assert site.two.read_bytes() == two
    assert list(load_manifest(site.one.parent).slimmed) == [site.two.name]


def test_kept_originals_are_not_slimmed(site: Made, tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    slim_at(site.folder, made=site, originals=originals)
    before = digests(originals)
    slim_at(tmp_path, made=site, originals=None)
    assert digests(originals) == before


def test_a_damaged_kept_original_is_replaced(site: Made, tmp_path: Path) -> None:
    originals = tmp_path / "originals"
    data = site.one.read_bytes()
    slim_at(site.folder, made=site, originals=originals)
    name = next(library.sha256 for library in site.lock.libraries if library.path == ONE)
    kept = originals / name
    kept.unlink()
    kept.write_bytes(bytes(len(data)))
    site.one.unlink()
    site.one.write_bytes(data)
    slim_at(site.folder, made=site, originals=originals)
    assert kept.read_bytes() == data


def test_undo_replaces_no_link(site: Made, tmp_path: Path) -> None:
    slim_at(site.folder, made=site, originals=tmp_path / "originals")
    site.one.unlink()
    site.one.symlink_to(site.two)
    undo_trees((site.folder,))
    assert site.one.is_symlink()


def test_undo_writes_through_no_linked_folder(site: Made, tmp_path: Path) -> None:
    slim_at(site.folder, made=site, originals=tmp_path / "originals")
    store = tmp_path / "store"
    os.rename(site.folder / "gpu", store)
    other = store / "lib" / site.one.name
    other.unlink()
    other.write_bytes(b"another version, shared by others")
    (site.folder / "gpu").symlink_to(store)
    undo_trees((site.folder,))
    assert other.read_bytes() == b"another version, shared by others"


def test_a_missing_library_takes_no_other_ones_file(site: Made) -> None:
    first = next(library for library in site.lock.libraries if library.path == ONE)
    gone = msgspec.structs.replace(first, path="a/libone.so.1", sha256="1" * 64)
    lock = msgspec.structs.replace(site.lock, libraries=(gone, first))
    options = SlimOptions()
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=lock, options=options))
    assert {row.path: row.status for row in report.rows}[ONE] is SlimStatus.SLIMMED


def test_a_copy_that_needs_more_keeps_the_library_out_of_the_lock(site: Made) -> None:
    other = site.folder / "other" / site.one.name
    shutil.copy2(site.one, other)
    proved, needed = planned_of(site.one), planned_of(other, lambda _: True)
    two = planned_of(site.two)
    lock = make_lock("run", [proved, needed, two], verdict_of(proved, needed, two), Owners().of)
    assert [Path(library.path).name for library in lock.libraries] == [site.two.name]
    assert any("has the same bytes" in row.reason for row in lock.left_out)
