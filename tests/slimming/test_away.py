"""Libraries that are away for a while, or damaged, keep the way to their originals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.errors import StoreError
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.tree import scan
from tests.support.compacting import needs_compiler
from tests.support.made_site import ONE, TWO, Made
from tests.support.sites import digests
from tests.support.slim_rows import undo_all

pytestmark = needs_compiler

FAST = SlimOptions()


@pytest.fixture
def before(site: Made) -> dict[str, str]:
    return digests(site.folder)


@pytest.fixture
def slimmed(site: Made, before: dict[str, str], tmp_path: Path) -> Made:
    options = replace(FAST, keep_originals=tmp_path / "originals")
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    return site


def run(site: Made, **request: object) -> SlimReport:
    request.setdefault("lock", site.lock)
    return slim_trees(SlimRequest(paths=(site.folder,), options=FAST, **request))  # type: ignore[arg-type]


def close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let a folder be one that can't be listed, also for root."""
    scandir = os.scandir

    def refuse(path: str | Path) -> Iterator[os.DirEntry[str]]:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return monkeypatch


def test_a_folder_that_was_away(slimmed: Made, before: dict[str, str], tmp_path: Path) -> None:
    (slimmed.folder / "gpu").rename(tmp_path / "gpu")
    assert not run(slimmed).failed
    assert set(load_manifest(slimmed.folder).slimmed) == {ONE, TWO}
    (tmp_path / "gpu").rename(slimmed.folder / "gpu")
    assert undo_all(slimmed)[ONE].status is SlimStatus.UNDONE
    assert digests(slimmed.folder) == before


def test_originals_that_were_away_as_well(slimmed: Made, tmp_path: Path) -> None:
    (slimmed.folder / "gpu").rename(tmp_path / "gpu")
    (tmp_path / "originals").rename(tmp_path / "elsewhere")
    run(slimmed)
    assert set(load_manifest(slimmed.folder).slimmed) == {ONE, TWO}


def test_forgotten_where_no_original_is_left(slimmed: Made, tmp_path: Path) -> None:
    for path in (tmp_path / "originals").iterdir():
        path.unlink()
    slimmed.one.unlink()
    run(slimmed)
    assert set(load_manifest(slimmed.folder).slimmed) == {TWO}


def test_a_folder_that_cannot_be_listed(
    slimmed: Made, before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        close(slimmed.one.parent, context)
        for work in (lambda: run(slimmed), lambda: undo_all(slimmed)):
            with pytest.raises(StoreError, match=r"gpu/lib: cannot be listed: Permission denied"):
                work()
    assert set(load_manifest(slimmed.folder).slimmed) == {ONE, TWO}
    undo_all(slimmed)
    assert digests(slimmed.folder) == before


def test_a_damaged_library(slimmed: Made, before: dict[str, str]) -> None:
    os.truncate(slimmed.one, slimmed.one.stat().st_size // 2)
    rows = {row.path: row for row in run(slimmed).rows}
    assert (rows[ONE].status, rows[TWO].status) == (SlimStatus.SLIMMED, SlimStatus.ALREADY)
    os.truncate(slimmed.one, slimmed.one.stat().st_size // 2)
    assert undo_all(slimmed)[ONE].status is SlimStatus.UNDONE
    assert digests(slimmed.folder) == before


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("damage", ["cut", "patched"])
def test_damage_is_mended_or_told(site: Made, tmp_path: Path, damage: str, is_kept: bool) -> None:
    """The original decides: with it, the library is slimmed as if it had never been."""
    kept = ["--keep-originals", str(tmp_path / "kept")] if is_kept else ["--no-way-back"]
    words = ["slim", "--arch", "sm_80", "--force-arch", *kept, str(site.folder)]
    assert CliRunner().invoke(main, words).exit_code == 0
    whole = site.one.read_bytes()
    if damage == "cut":
        os.truncate(site.one, site.one.stat().st_size // 2)
    else:
        with site.one.open("r+b") as file:
            file.seek(site.one.stat().st_size // 2)
            file.write(bytes(8192))
    now = site.one.read_bytes()
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (0 if is_kept else 1), done.output
    assert site.one.read_bytes() == (whole if is_kept else now)
    if not is_kept:
        assert f"{ONE}: failed: was slimmed, and its original was not kept" in done.stderr
    assert ONE in load_manifest(site.folder).slimmed


def test_a_file_that_disappears_while_folders_are_listed(
    site: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    class Entries:
        def __init__(self, path: str | Path) -> None:
            self._entries = scandir(path)

        def __enter__(self) -> Entries:
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __next__(self) -> os.DirEntry[str]:
            entry = next(self._entries)
            if entry.name == "libtwo.so":
                Path(entry.path).unlink()
            return entry

    monkeypatch.setattr(os, "scandir", Entries)
    names = {name for group in scan((site.folder,))[0].groups for name in group.names}
    assert ONE in names and TWO not in names
