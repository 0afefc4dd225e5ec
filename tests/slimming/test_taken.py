"""Another process takes the place of a library while slim or undo works: its file stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path

import pytest

from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming import slim as engine
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import Slimmer, slim_trees, undo_trees
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.made_site import ONE, TWO, Made
from tests.support.sites import digests, wrong_files

pytestmark = needs_compiler

FAST = SlimOptions()
NEWER = b"the library of a newer version"


def by_rename(path: Path, data: bytes = NEWER) -> None:
    """As conda and package managers of systems install."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


def by_writing(path: Path) -> None:
    """As a build does; time and size may be the same."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(NEWER)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_name_that_is_removed_before_it_gets_the_result(
    site: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = site.folder / "gpu/other_name.so"
    os.link(site.one, other)
    original = site.one.read_bytes()
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST)
    slim_trees(request)
    # As if a killed run had left the second name; then an uninstaller removes it.
    by_rename(other, original)
    before_each(monkeypatch, Slimmer, "run", other.unlink)
    report = slim_trees(request)
    [row] = (row for row in report.rows if row.status is SlimStatus.FAILED)
    assert row.path == "gpu/lib/libone.so.1"
    assert not other.exists()


def by_half(path: Path) -> None:
    """As pip installs: the old file goes, and the new one grows."""
    path.unlink()
    path.write_bytes(NEWER[:5])


def by_link(path: Path) -> None:
    """A link took the place; what it leads to is another's file."""
    store = path.with_name("store.so")
    store.write_bytes(NEWER)
    path.unlink()
    path.symlink_to(store)


UPGRADES = [by_rename, by_writing, by_half, by_link]


def slim(site: Made, options: SlimOptions = FAST) -> SlimReport:
    return slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))


def before_each(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, act: Callable[[], None]
) -> None:
    """Act once, right before a function is called the first time."""
    real = getattr(module, name)
    waiting = [act]

    def called(*arguments: object, **options: object) -> object:
        if waiting:
            waiting.pop()()
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, called)


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".*"))


@pytest.mark.planted_fault(
    "pip upgrades a library between the moment that slim reads it and the moment it replaces it.",
    says="another file took its place while negativa worked, so it was left as it is",
)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_upgrade_before_the_rename_stays(
    site: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: PlantedFault,
    upgrade: Callable[[Path], None],
    kept: bool,
) -> None:
    # The larger one is the first.
    before_each(monkeypatch, engine, "replace_all", lambda: upgrade(site.one))
    before = digests(site.folder)
    options = replaced(FAST, keep_originals=tmp_path / "originals") if kept else FAST
    report = slim(site, options)
    rows = {row.path: row for row in report.rows}
    assert rows[ONE].status is SlimStatus.FAILED
    fault.check(rows[ONE].detail or "")
    if upgrade is not by_writing:
        assert site.one.read_bytes().startswith(NEWER[:5])
    assert site.one.is_symlink() == (upgrade is by_link)
    assert ONE not in load_manifest(site.folder).slimmed
    assert digests(site.folder)[TWO] != before[TWO]
    assert hidden(site.folder) == []


def test_a_library_that_was_uninstalled_stays_away(
    site: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each(monkeypatch, engine, "replace_all", site.one.unlink)
    rows = {row.path: row for row in slim(site).rows}
    assert "it was removed while negativa worked" in (rows[ONE].detail or "")
    assert not site.one.exists()
    assert hidden(site.folder) == []


@pytest.mark.planted_fault(
    "pip upgrades a library in the middle of negativa slim undo.",
    says="another file took its place while negativa worked",
)
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_undo_leaves_an_upgrade(
    site: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: PlantedFault,
    upgrade: Callable[[Path], None],
) -> None:
    slim(site, replaced(FAST, keep_originals=tmp_path / "originals"))
    before_each(monkeypatch, engine, "replace_all", lambda: upgrade(site.one))
    rows = {row.path: row for row in undo_trees((site.folder,))}
    assert rows[ONE].status is SlimStatus.FAILED
    fault.check(rows[ONE].detail or "")
    if upgrade is not by_writing:
        assert site.one.read_bytes().startswith(NEWER[:5])
    assert rows[TWO].status is SlimStatus.UNDONE
    assert hidden(site.folder) == []


def test_undo_replaces_no_library_that_came_back(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slim(site, replaced(FAST, keep_originals=tmp_path / "originals"))
    site.one.unlink()
    before_each(monkeypatch, engine, "replace_all", lambda: by_rename(site.one))
    rows = {row.path: row for row in undo_trees((site.folder,))}
    assert rows[ONE].status is SlimStatus.FAILED
    assert site.one.read_bytes() == NEWER


@pytest.mark.planted_fault(
    "The library is upgraded right before slim keeps its original.",
    says="another file took its place while negativa worked",
)
def test_only_the_original_is_kept_as_original(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: PlantedFault
) -> None:
    before_each(monkeypatch, engine, "keep_original", lambda: by_rename(site.one))
    options = replaced(FAST, keep_originals=tmp_path / "originals")
    rows = {row.path: row for row in slim(site, options).rows}
    fault.check(rows[ONE].detail or "")
    [library] = [row for row in site.lock.libraries if row.path == ONE]
    assert not (tmp_path / "originals" / library.sha256).exists()
    assert site.one.read_bytes() == NEWER


def test_a_result_that_cannot_be_replaced_keeps_its_entry(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slimmed anew from its kept original, and taken meanwhile."""
    options = replaced(FAST, keep_originals=tmp_path / "originals")
    slim(site, options)
    before = load_manifest(site.folder).slimmed
    before_each(monkeypatch, engine, "replace_all", lambda: by_rename(site.one))
    assert slim(site, replaced(options, strip=False)).failed
    assert load_manifest(site.folder).slimmed[ONE] == before[ONE]


@pytest.mark.planted_fault(
    "pip writes a RECORD anew while slim changes its lines.",
    says="RECORD was replaced while negativa worked",
)
def test_record_that_was_replaced(
    site: Made, monkeypatch: pytest.MonkeyPatch, fault: PlantedFault
) -> None:
    from pytest_negativa.errors import StoreError
    from pytest_negativa.installed import record as records

    record = site.info / "RECORD"
    newer = record.read_bytes() + b"another.py,,\n"
    before_each(monkeypatch, records, "_update", lambda: by_rename(record, newer))
    with pytest.raises(StoreError) as caught:
        slim(site)
    fault.check(str(caught.value))
    assert record.read_bytes() == newer
    monkeypatch.undo()
    assert not slim(site).failed
    assert wrong_files(site.folder) == []
