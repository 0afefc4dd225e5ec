"""Trees in which mounts, immutable files or other users stand in the way."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import IS_ROOT
from tests.support.made_site import ONE, TWO, Made
from tests.support.mounts import bind, in_namespace, read_only
from tests.support.sites import digests, wrong_files
from tests.support.slim_rows import undo_all

pytestmark = needs_compiler


def slim(site: Made, aside: Path) -> dict[str, SlimRow]:
    options = SlimOptions(keep_originals=aside)
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=options)
    return {row.path: row for row in slim_trees(request).rows}


def check(site: Made) -> set[SlimStatus]:
    return {row.status for tree in scan((site.folder,)) for row in check_tree(tree)}


@in_namespace
def test_names_on_both_sides_of_a_mount(site: Made, tmp_path: Path) -> None:
    """No link leads over a mount's edge, even on one file system."""
    inner = site.folder / "inner"
    inner.mkdir()
    os.link(site.two, inner / "linked.so")
    before = digests(site.folder)
    with bind(inner):
        for status in (SlimStatus.SLIMMED, SlimStatus.ALREADY):
            assert slim(site, tmp_path / "originals")[TWO].status is status
            after = digests(site.folder)
            assert after["inner/linked.so"] == after[TWO] != before[TWO]
            assert check(site) == {SlimStatus.SOUND}
        # As a run leaves it that is killed between the two names.
        (inner / "linked.so").unlink()
        (inner / "linked.so").write_bytes((tmp_path / "originals" / before[TWO]).read_bytes())
        assert undo_all(site)[TWO].status is SlimStatus.UNDONE
        assert digests(site.folder) == before
        assert list(site.folder.rglob(".*")) == []


@in_namespace
def test_a_folder_that_is_mounted_twice_in_the_tree(site: Made, tmp_path: Path) -> None:
    inner = site.folder / "inner"
    inner.mkdir()
    with bind(site.two.parent, inner):
        before = digests(site.folder)
        rows = slim(site, tmp_path / "originals")
        assert rows[TWO].status is SlimStatus.SLIMMED
        assert rows[TWO].notes == ()
        assert check(site) == {SlimStatus.SOUND}
        undo_all(site)
        assert digests(site.folder) == before


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
        pytest.skip("no right to make a file immutable, or not on this file system")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def assert_all_but_two(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    before = digests(site.folder)
    rows = slim(site, tmp_path / "originals")
    assert rows[ONE].status is SlimStatus.SLIMMED
    assert rows[TWO].status is SlimStatus.FAILED
    fault.check(str(rows[TWO].detail))
    assert digests(site.folder)[TWO] == before[TWO]
    assert list(site.folder.rglob(".*")) == []
    assert check(site) == {SlimStatus.SOUND}
    assert wrong_files(site.folder) == []
    undo_all(site)
    assert digests(site.folder) == before


@pytest.mark.planted_fault(
    "a file is mounted over a library of the folder to slim", says="Device or resource busy"
)
@in_namespace
def test_a_library_that_is_a_mount(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    with bind(site.two):
        assert_all_but_two(site, tmp_path, fault)


@pytest.mark.planted_fault("a library is immutable (chattr +i)", says="Operation not permitted")
def test_an_immutable_library(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    with immutable(site.two):
        assert_all_but_two(site, tmp_path, fault)


@pytest.mark.planted_fault(
    "a name of a slimmed file, left by a killed run, can't be replaced",
    says="cannot be replaced: Read-only file system",
)
@in_namespace
def test_one_name_of_a_file_cannot_be_replaced(
    site: Made, tmp_path: Path, fault: PlantedFault
) -> None:
    """The others are in order, and undo says what it can't do."""
    inner = site.folder / "inner"
    inner.mkdir()
    linked = inner / "linked.so"
    os.link(site.two, linked)
    before = digests(site.folder)
    slim(site, tmp_path / "originals")
    linked.unlink()
    linked.write_bytes((tmp_path / "originals" / before[TWO]).read_bytes())
    with read_only(inner):
        rows = slim(site, tmp_path / "originals")
        fault.check(str(rows[TWO].detail))
        assert rows[ONE].status is SlimStatus.ALREADY
        row = undo_all(site)[TWO]
        assert row.status is SlimStatus.FAILED
        assert "Read-only file system" in str(row.detail)
    assert undo_all(site)[TWO].status is SlimStatus.UNDONE
    assert digests(site.folder) == before


@pytest.mark.planted_fault(
    "the manifest of a slimmed folder is gone, and undo is asked for",
    says="was slimmed, and no manifest here has its original",
)
def test_undo_without_the_manifest(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    slim(site, tmp_path / "originals")
    after = digests(site.folder)
    manifest = site.folder / MANIFEST_NAME
    saved = manifest.read_bytes()
    manifest.unlink()
    rows = undo_all(site)
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(
        (ONE, TWO), SlimStatus.FAILED
    )
    fault.check(str(rows[ONE].detail))
    manifest.write_bytes(saved)
    assert digests(site.folder) == after
    # The library alone has its manifest above.
    [row] = undo_trees((site.two,))
    assert str(row.detail).endswith(f"negativa slim undo {site.folder}")
    assert digests(site.folder) == after


def state_of(path: Path) -> tuple[object, ...]:
    status = path.stat()
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, attributes


@pytest.mark.skipif(not IS_ROOT, reason="only root gives files away")
def test_owner_modes_and_attributes(site: Made, tmp_path: Path) -> None:
    """A library that is read-only, set-user-id, and has a capability and an ACL."""
    os.chown(site.two, 1234, 1235)
    site.two.chmod(0o6444)
    # linux/posix_acl_xattr.h: user and mask may read; linux/capability.h: CAP_NET_RAW, version 2.
    entries = ((1, 6, -1), (2, 4, 4321), (4, 4, -1), (16, 4, -1), (32, 0, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(site.two, "user.note", b"x")
        os.setxattr(site.one, "system.posix_acl_access", acl)
        capability = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
        os.setxattr(site.one, "security.capability", capability)
    except OSError as e:
        pytest.skip(f"no such attributes here: {e}")
    before = state_of(site.one), state_of(site.two)
    slim(site, tmp_path / "originals")
    assert (state_of(site.one), state_of(site.two)) == before
    undo_all(site)
    assert (state_of(site.one), state_of(site.two)) == before


def test_two_trees_that_share_files(site: Made, tmp_path: Path) -> None:
    """As installers link packages into environments: neither tree changes with the other."""
    other = Made(tmp_path / "other", site.lock, site.lock_file)
    subprocess.run(["cp", "-al", site.folder, other.folder], check=True)
    before = digests(other.folder)
    slim(site, tmp_path / "originals")
    assert digests(other.folder) == before
    slim(other, tmp_path / "originals")
    after = digests(other.folder)
    undo_all(site)
    assert digests(site.folder) == before
    assert digests(other.folder) == after
    undo_all(other)
    assert digests(other.folder) == before
    assert undo_all(other) == {}
