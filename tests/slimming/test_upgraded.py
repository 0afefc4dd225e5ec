"""Undoing where the distribution was upgraded, removed, or is another one's, too."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.tree import scan
from tests.support.compacting import build, gpu_code, needs_compiler
from tests.support.made_site import DEBUG, ONE, TWO, Made
from tests.support.sites import digest_field, lock_of, make_wheel, pip_install, wrong_files
from tests.support.slim_rows import undo_all

pytestmark = needs_compiler

FAST = SlimOptions()


@pytest.fixture
def slimmed(site: Made, tmp_path: Path) -> Made:
    """Slimmed, with its originals kept."""
    options = replace(FAST, keep_originals=tmp_path / "originals")
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    return site


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with a newer version of the distribution."""
    new = tmp_path_factory.mktemp("newer")
    one = build(new / "one", name="libone.so.1", fatbin=gpu_code(7), extra=DEBUG)
    two = build(new / "two", name="libtwo.so", fatbin=gpu_code(8))
    wheel = make_wheel(new, "gpu-code", "2.0", {ONE: one, TWO: two}, "host-code")
    pip_install(new / "site", wheel)
    return new / "site"


@pytest.fixture
def upgraded(slimmed: Made, newer: Path) -> Made:
    """The slimmed site with the newer version in its place."""
    shutil.rmtree(slimmed.info)
    for path in newer.iterdir():
        if path.is_dir():
            shutil.copytree(path, slimmed.folder / path.name, dirs_exist_ok=True)
    return slimmed


@pytest.mark.slow
def test_a_newer_version_stays(upgraded: Made) -> None:
    before = upgraded.one.read_bytes()
    row = undo_all(upgraded)[ONE]
    assert row.status is SlimStatus.LEFT
    assert "another one was installed since: RECORD has its digest" in (row.detail or "")
    assert upgraded.one.read_bytes() == before
    # Should the old version come back, its original is still known.
    assert ONE in load_manifest(upgraded.folder).slimmed


@pytest.mark.parametrize("record", [True, False])
def test_a_newer_version_that_is_slim_stays(upgraded: Made, record: bool) -> None:
    """Slimmed by the path of its folder, so that the first manifest knows nothing of it."""
    lock = lock_of(upgraded.one)
    slim_trees(SlimRequest(paths=(upgraded.one.parent,), lock=lock, options=FAST))
    if not record:
        shutil.rmtree(upgraded.folder / "gpu_code-2.0.dist-info")
    before = upgraded.one.read_bytes()
    row = undo_all(upgraded)[ONE]
    assert row.status is SlimStatus.LEFT
    assert ("RECORD" if record else "another file took its place") in (row.detail or "")
    assert upgraded.one.read_bytes() == before
    assert wrong_files(upgraded.folder) == []


def test_a_damaged_newer_version_stays(upgraded: Made) -> None:
    slim_trees(SlimRequest(paths=(upgraded.one.parent,), lock=lock_of(upgraded.one), options=FAST))
    with upgraded.one.open("r+b") as file:
        file.seek(upgraded.one.stat().st_size // 2)
        file.write(bytes(8192))
    before = upgraded.one.read_bytes()
    row = undo_all(upgraded)[ONE]
    assert row.status is SlimStatus.LEFT
    assert "another file took its place" in (row.detail or "")
    assert upgraded.one.read_bytes() == before


def test_nothing_comes_back_of_a_removed_distribution(slimmed: Made) -> None:
    slimmed.one.unlink()
    shutil.rmtree(slimmed.info)
    assert check_tree(scan((slimmed.folder,))[0])[0].status is SlimStatus.DIFFERENT
    row = undo_all(slimmed)[ONE]
    assert row.status is SlimStatus.LEFT
    assert "no longer installed" in (row.detail or "")
    assert not slimmed.one.exists()


def test_same_size_and_time_are_not_the_same_file(slimmed: Made) -> None:
    """Where all files get the same time, as from a reproducible build."""
    status = slimmed.one.stat()
    newer = bytes(status.st_size)
    slimmed.one.write_bytes(newer)
    os.utime(slimmed.one, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert undo_all(slimmed)[ONE].status is SlimStatus.LEFT
    assert slimmed.one.read_bytes() == newer


def test_two_distributions_that_have_one_file(site: Made, tmp_path: Path) -> None:
    """Both RECORD files name the original again, also the one that was wrong before."""
    other = site.folder / "host_code-2.0.dist-info" / "RECORD"
    other.write_text(other.read_text() + f"{ONE},sha256=of-another-build,17\n")
    first = site.info / "RECORD"
    before = first.read_bytes()
    original = digest_field(site.one.read_bytes())
    options = replace(FAST, keep_originals=tmp_path / "originals")
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    field = digest_field(site.one.read_bytes())
    assert field in first.read_text() and field in other.read_text()
    assert undo_all(site)[ONE].status is SlimStatus.UNDONE
    assert first.read_bytes() == before
    assert original in other.read_text()


def test_one_name_of_two_has_the_original_again(site: Made) -> None:
    """RECORD has the digest of the result that is made of it, under another key."""
    other = site.two.with_name("zz.so")
    os.link(site.two, other)
    record, original = site.info / "RECORD", site.two.read_bytes()
    lines = record.read_text()
    record.write_text(lines + f"gpu/lib/zz.so,{digest_field(original)},{len(original)}\n")
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST)
    slim_trees(request)
    site.two.unlink()
    other.unlink()
    other.write_bytes(original)
    slim_trees(request)
    assert other.read_bytes() != original
    assert f"gpu/lib/zz.so,{digest_field(other.read_bytes())}," in record.read_text()
