"""Slimming of installed libraries by a lock: what is replaced, and what is left as it was."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.errors import OptionError, ReconstructError, StoreError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.gpucode.payload import unpack
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Cubin, LibraryMap, Scope
from pytest_negativa.models.lock import LeftOut, Lock
from pytest_negativa.models.plan import TrimmedCubin
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.models.spans import Span
from pytest_negativa.pages.note import why_no_stub
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming import slim as engine
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from tests.support.builders import ElementSpec, build_region
from tests.support.compacting import SHAPES, build, content, image, needs_compiler, read, run_loaded
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, IS_ROOT
from tests.support.made_site import HOST, ONE, PLAIN_NAME, TWO, Made
from tests.support.sites import (
    digest_field,
    digests,
    lock_of,
    snapshot,
    verdict_of,
    wrong_files,
)
from tests.support.slim_rows import statuses
from tests.support.usages import library_usage, usage_of

pytestmark = needs_compiler

FAST = SlimOptions()


def run(site: Made, options: SlimOptions = FAST, **request: object) -> SlimReport:
    request.setdefault("lock", site.lock)
    request.setdefault("paths", (site.folder,))
    return slim_trees(SlimRequest(options=options, **request))  # type: ignore[arg-type]


def row_of(report: SlimReport, name: str) -> SlimRow:
    [row] = [row for row in report.rows if row.path == name]
    return row


def test_libraries_of_the_lock_get_smaller_and_the_rest_stays(site: Made) -> None:
    before = digests(site.folder)
    report = run(site, SlimOptions())
    assert statuses(report.rows) == {ONE: SlimStatus.SLIMMED, TWO: SlimStatus.SLIMMED}
    assert not report.failed
    after = digests(site.folder)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {ONE, TWO, "gpu_code-1.0.dist-info/RECORD"}
    assert set(after) - set(before) == {MANIFEST_NAME}
    for row in report.rows:
        assert row.after == (site.folder / row.path).stat().st_size < row.before // 2
    assert wrong_files(site.folder) == []


def test_slimmed_library_works(site: Made, tmp_path: Path) -> None:
    before = image(site.one)
    run(site)
    facts = run_loaded(site.one, before, tmp_path / "dump")
    assert facts["catches 1"] == len("thrown in the library")


@pytest.mark.slow
def test_pip_is_content(site: Made) -> None:
    run(site)
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    shown = subprocess.run(
        [*pip, "show", "-f", "gpu-code"], env=environment, capture_output=True, text=True
    )
    assert ONE in shown.stdout
    listed = subprocess.run(
        [*pip, "list", "--path", str(site.folder)], capture_output=True, text=True, check=True
    )
    assert {"gpu-code", "host-code", "unrelated"} <= set(listed.stdout.split())


def test_second_run_does_nothing(site: Made) -> None:
    run(site, strip_others=True)
    before = digests(site.folder)
    report = run(site, strip_others=True)
    assert statuses(report.rows) == {
        ONE: SlimStatus.ALREADY,
        TWO: SlimStatus.ALREADY,
        HOST: SlimStatus.ALREADY,
        PLAIN_NAME: SlimStatus.LEFT,
    }
    assert digests(site.folder) == before


def test_same_input_gives_the_same_bytes(site: Made, installed: Made, tmp_path: Path) -> None:
    run(site)
    other = tmp_path / "other"
    shutil.copytree(installed.folder, other)
    run(site, replace(FAST, jobs=3), paths=(other,))
    assert digests(other) == digests(site.folder)


def test_dry_run_writes_nothing(site: Made) -> None:
    before = snapshot(site.folder)
    report = run(site, replace(FAST, dry_run=True), strip_others=True)
    assert snapshot(site.folder) == before
    assert statuses(report.rows)[ONE] is SlimStatus.WOULD_SLIM
    done = run(site, strip_others=True)
    real = {SlimStatus.SLIMMED: SlimStatus.WOULD_SLIM}
    assert [(r.path, r.status, r.after, r.detail) for r in report.rows] == [
        (r.path, real.get(r.status, r.status), r.after, r.detail) for r in done.rows
    ]


def test_nothing_slimmed_and_nothing_known_leaves_no_manifest(
    site: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written before files are replaced; here no file can be."""

    def refuse(staged: Path, *arguments: object, **options: object) -> None:
        raise ReconstructError(f"{staged}: cannot be replaced")

    monkeypatch.setattr(engine, "replace_all", refuse)
    assert run(site).failed
    assert not (site.folder / MANIFEST_NAME).exists()


def test_only_libraries_of_the_lock_and_what_it_requires_are_stripped(site: Made) -> None:
    before = digests(site.folder)
    report = run(site, strip_others=True)
    # What hardly gets smaller stays, and so does a distribution that nobody here needs.
    assert row_of(report, HOST).status is SlimStatus.SLIMMED
    assert row_of(report, PLAIN_NAME).status is SlimStatus.LEFT
    after = digests(site.folder)
    assert after["other/libother.so"] == before["other/libother.so"]
    assert after["unrelated-3.0.dist-info/RECORD"] == before["unrelated-3.0.dist-info/RECORD"]
    assert wrong_files(site.folder) == []


def test_archs_are_for_what_the_lock_does_not_have(site: Made, tmp_path: Path) -> None:
    """By its own recipe each: the second library is known by the lock alone as a neighbour."""
    lock = msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1])
    run(site, lock=lock, devices=(ComputeCapability(9, 0),))
    elements = [e for e in read(site.two).iter_code() if e.kind is not ElementKind.UNKNOWN]
    assert {str(e.arch) for e in elements} == {"sm_90"}
    assert len(elements) == 2 * len(SHAPES)
    expected = site.one.read_bytes()
    assert site.host.read_bytes() == (site.folder / "other/libother.so").read_bytes()
    before = snapshot(site.folder)
    again = run(site, lock=lock, devices=(ComputeCapability(9, 0),))
    assert set(statuses(again.rows).values()) == {SlimStatus.ALREADY}
    assert snapshot(site.folder) == before
    site_of_lock_alone = tmp_path / "alone" / "libone.so.1"
    site_of_lock_alone.parent.mkdir()
    site_of_lock_alone.write_bytes((site.lock_file.parent / "site-packages" / ONE).read_bytes())
    run(site, lock=lock, paths=(site_of_lock_alone,))
    assert site_of_lock_alone.read_bytes() == expected


def test_symbols_stay_if_asked_for(site: Made) -> None:
    names = subprocess.run(["readelf", "-SW", site.one], capture_output=True, text=True).stdout
    assert ".symtab" in names
    run(site, replace(FAST, strip=False))
    names = subprocess.run(["readelf", "-SW", site.one], capture_output=True, text=True).stdout
    assert ".symtab" in names


def test_another_file_of_the_name_is_left_alone(site: Made) -> None:
    with site.one.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    before = digests(site.folder)[ONE]
    report = run(site, strip_others=True)
    row = row_of(report, ONE)
    assert row.status is SlimStatus.DIFFERENT
    assert "gpu-code 1.0" in (row.detail or "")
    assert row_of(report, TWO).status is SlimStatus.SLIMMED
    assert digests(site.folder)[ONE] == before
    assert not report.failed


@pytest.mark.parametrize("how", ["different", "missing"])
def test_required_and_not_there_is_an_error_before_anything_is_written(
    site: Made, how: str
) -> None:
    if how == "missing":
        site.two.unlink()
    else:
        site.two.write_bytes(site.two.read_bytes() + b"\0")
    before = snapshot(site.folder)
    report = run(site, require=True)
    assert report.failed and report.stopped
    assert snapshot(site.folder) == before
    expected = SlimStatus.MISSING if how == "missing" else SlimStatus.DIFFERENT
    assert statuses(report.rows) == {TWO: expected}


def test_required_and_slimmed_before_is_there(site: Made) -> None:
    run(site)
    assert not run(site, require=True).failed


def test_found_by_digest_under_any_name(site: Made) -> None:
    elsewhere = site.folder / "deep" / "er" / "libanything.so"
    elsewhere.parent.mkdir(parents=True)
    site.one.rename(elsewhere)
    report = run(site)
    assert statuses(report.rows)["deep/er/libanything.so"] is SlimStatus.SLIMMED


def test_every_copy_of_a_library_is_slimmed(site: Made) -> None:
    copy = site.folder / "copy.so"
    copy.write_bytes(site.one.read_bytes())
    report = run(site)
    assert statuses(report.rows)["copy.so"] is statuses(report.rows)[ONE] is SlimStatus.SLIMMED
    assert copy.read_bytes() == site.one.read_bytes()


def test_hard_links_stay_together(site: Made) -> None:
    os.link(site.one, site.folder / "gpu/other_name.so")
    report = run(site)
    assert row_of(report, ONE).others == 1
    assert site.one.samefile(site.folder / "gpu/other_name.so")
    assert site.one.stat().st_nlink == 2
    assert site.one.stat().st_size == row_of(report, ONE).after


def test_names_outside_of_the_folder_are_told_of(site: Made, tmp_path: Path) -> None:
    outside = tmp_path / "cache.so"
    os.link(site.one, outside)
    before = outside.read_bytes()
    report = run(site)
    assert outside.read_bytes() == before
    assert any("1 hard link outside" in note for note in row_of(report, ONE).notes)


def test_symbolic_links_lead_to_the_new_file(site: Made) -> None:
    link = site.one.with_name("libone.so")
    link.symlink_to(site.one.name)
    (site.folder / "alias").symlink_to("gpu")
    report = run(site)
    assert len(report.rows) == 2
    assert link.is_symlink() and link.samefile(site.one)
    assert (site.folder / "alias").is_symlink()


def test_mode_and_times_stay(site: Made) -> None:
    site.one.chmod(0o444)
    os.utime(site.one, ns=(10**18, 10**18 + 5))
    before = site.one.stat()
    run(site)
    after = site.one.stat()
    assert stat.S_IMODE(after.st_mode) == 0o444
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_size < before.st_size


def test_attributes_stay(site: Made) -> None:
    try:
        os.setxattr(site.one, "user.note", b"mine")
    except OSError:
        pytest.skip("no extended attributes here")
    run(site)
    assert os.getxattr(site.one, "user.note") == b"mine"


@pytest.mark.skipif(not IS_ROOT, reason="only root gives files away")
def test_owner_stays(site: Made) -> None:
    os.chown(site.one, 1234, 4321)
    run(site)
    assert (site.one.stat().st_uid, site.one.stat().st_gid) == (1234, 4321)


@pytest.mark.skipif(IS_ROOT, reason="root may write anywhere")
def test_folder_that_is_read_only(site: Made) -> None:
    before = digests(site.folder)
    site.one.parent.chmod(0o555)
    try:
        report = run(site)
    finally:
        site.one.parent.chmod(0o755)
    assert report.failed
    assert row_of(report, ONE).status is SlimStatus.FAILED
    assert "Permission denied" in (row_of(report, ONE).detail or "")
    after = digests(site.folder)
    assert {name: after[name] for name in before} == before


def test_processes_keep_what_they_have_open(site: Made) -> None:
    before = site.one.read_bytes()
    with site.one.open("rb") as file:
        run(site)
        assert file.read() == before
    assert site.one.read_bytes() != before


@pytest.mark.planted_fault(
    "A library to slim has an archive behind its ELF image, which a program finds from the end.",
    says="in no section or segment and end the file",
)
def test_library_with_an_archive_stays(site: Made, fault: PlantedFault) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("model.txt", "weights")
    with site.one.open("ab") as opened:
        opened.write(archive.getvalue())
    before = site.one.read_bytes()
    lock = lock_of(site.one, site.two)
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=lock, options=FAST))
    row = row_of(report, ONE)
    assert row.status is SlimStatus.LEFT
    fault.check(row.detail or "")
    assert site.one.read_bytes() == before
    assert zipfile.ZipFile(site.one).read("model.txt") == b"weights"
    assert row_of(report, TWO).status is SlimStatus.SLIMMED


def test_record_without_the_line_or_no_record(site: Made) -> None:
    record = site.info / "RECORD"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if not line.startswith(ONE)))
    (site.folder / "host_code-2.0.dist-info/RECORD").unlink()
    before = digests(site.folder)
    # Without a RECORD nobody knows that the library is that distribution's.
    report = run(site, strip_others=True)
    assert not report.failed
    assert HOST not in statuses(report.rows)
    assert row_of(report, ONE).status is SlimStatus.SLIMMED
    assert ONE not in record.read_text()
    changed = set(digests(site.folder).items()) ^ set(before.items())
    assert {name for name, _ in changed} == {
        ONE, TWO, MANIFEST_NAME, "gpu_code-1.0.dist-info/RECORD",
    }  # fmt: skip


def test_record_is_mended_by_the_next_run(site: Made) -> None:
    record = site.info / "RECORD"
    original = record.read_bytes()
    run(site)
    done = record.read_bytes()
    record.write_bytes(original)
    assert wrong_files(site.folder)
    run(site)
    assert record.read_bytes() == done


def test_another_recipe_needs_the_original(site: Made) -> None:
    run(site)
    before = digests(site.folder)
    more = lock_of_original(site, {1, 2, 6})
    report = run(site, lock=more)
    assert report.failed
    assert row_of(report, ONE).status is SlimStatus.FAILED
    assert "its original was not kept" in (row_of(report, ONE).detail or "")
    assert digests(site.folder) == before


def test_stripped_before_is_no_fault(site: Made) -> None:
    """No GPU code is gone, so whatever a lock needs is there."""
    with site.one.open("ab") as file:
        file.write(bytes(100_000))
    stripped = msgspec.structs.replace(
        site.lock,
        libraries=(),
        left_out=(LeftOut(path=ONE, distribution="gpu-code", version="1.0", reason="x"),),
    )
    report = run(site, lock=stripped, strip_others=True)
    assert row_of(report, ONE).status is SlimStatus.SLIMMED
    again = run(site, lock=stripped, devices=(ComputeCapability(9, 0),))
    assert not again.failed
    assert row_of(again, ONE).status is SlimStatus.LEFT
    assert "was slimmed, and its original was not kept" in (row_of(again, ONE).detail or "")


def test_another_recipe_stops_where_all_is_required(site: Made) -> None:
    run(site, lock=msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1]))
    before = snapshot(site.folder)
    more = lock_of_original(site, {1, 2, 6})
    libraries = (*more.libraries, *site.lock.libraries[1:])
    report = run(site, lock=msgspec.structs.replace(more, libraries=libraries), require=True)
    assert report.stopped
    assert snapshot(site.folder) == before


def test_another_recipe_starts_from_the_original(site: Made, tmp_path: Path) -> None:
    options = replace(FAST, keep_originals=tmp_path / "originals")
    run(site, options)
    small = site.one.stat().st_size
    more = lock_of_original(site, {1, 2, 6, 7})
    report = run(site, options, lock=more)
    assert row_of(report, ONE).status is SlimStatus.SLIMMED
    assert site.one.stat().st_size > small
    assert wrong_files(site.folder) == []
    # What takes its place is what slimming the original would have made.
    fresh = tmp_path / "fresh" / "libone.so.1"
    fresh.parent.mkdir()
    [aside] = [
        p for p in (tmp_path / "originals").iterdir() if p.name == site.lock.libraries[0].sha256
    ]
    fresh.write_bytes(aside.read_bytes())
    run(site, lock=more, paths=(fresh,))
    assert fresh.read_bytes() == site.one.read_bytes()


@pytest.mark.parametrize("way", ["original", "spare"])
def test_an_original_of_which_nothing_may_go_any_more_comes_back(
    site: Made, tmp_path: Path, way: str
) -> None:
    """Its slim file lacks code that the lock keeps now."""
    before, status = digests(site.folder), site.one.stat()
    spare = SpareTarget(tmp_path / "spares") if way == "spare" else None
    if spare is not None and (reason := why_no_stub()) is not None:
        pytest.skip(reason)
    kept = tmp_path / "originals" if way == "original" else None
    options = replace(FAST, keep_originals=kept, spare=spare)
    run(site, options)
    small = site.one.stat().st_size
    # Nothing worth while would go, for symbols and debug information stay as well.
    options = replace(options, strip=False)
    all_but_one = lock_of_original(site, set(range(1, 100)))
    dry = row_of(run(site, replace(options, dry_run=True), lock=all_but_one), ONE)
    assert dry.status is SlimStatus.WOULD_UNDO and site.one.stat().st_size == small
    report = run(site, options, lock=all_but_one)
    row = row_of(report, ONE)
    assert not report.failed and row.status is SlimStatus.UNDONE
    assert (row.before, row.after) == (dry.before, dry.after) == (small, status.st_size)
    assert "saves only" in (row.detail or "") or "nothing to remove" in (row.detail or "")
    assert site.one.stat().st_mtime_ns == status.st_mtime_ns
    assert site.one.stat().st_mode == status.st_mode
    assert wrong_files(site.folder) == []
    assert ONE not in load_manifest(site.folder).slimmed
    again = run(site, options, lock=all_but_one)
    assert not again.failed and row_of(again, ONE).status is SlimStatus.LEFT
    undo_trees((site.folder,))
    assert digests(site.folder) == before


@pytest.mark.parametrize("then", ["slim", "undo"])
@pytest.mark.parametrize("how", ["killed", "full disk"])
@pytest.mark.parametrize("way", ["original", "spare"])
def test_an_original_is_back_and_its_line_in_record_is_not(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, how: str, then: str
) -> None:
    if way == "spare" and (reason := why_no_stub()) is not None:
        pytest.skip(reason)
    before, manifest = digests(site.folder), site.folder / MANIFEST_NAME
    spare = SpareTarget(tmp_path / "spares") if way == "spare" else None
    kept = tmp_path / "originals" if way == "original" else None
    options = replace(FAST, keep_originals=kept, spare=spare)
    run(site, options)
    found = b""

    def fail(*_: object) -> None:
        nonlocal found
        found = manifest.read_bytes()
        raise StoreError("RECORD: cannot be written: No space left on device")

    options = replace(options, strip=False)
    all_but_one = lock_of_original(site, set(range(1, 100)))
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "finish", fail)
        with pytest.raises(StoreError, match="No space"):
            run(site, options, lock=all_but_one)
    if how == "killed":
        manifest.write_bytes(found)
    assert wrong_files(site.folder) == [ONE]
    if then == "slim":
        run(site, options, lock=all_but_one)
        assert wrong_files(site.folder) == []
    undo_trees((site.folder,))
    assert digests(site.folder) == before


def lock_of_original(site: Made, kept: set[int]) -> Lock:
    """A lock for the first library that keeps other elements."""
    folder = site.lock_file.parent / "site-packages"
    return lock_of(folder / ONE, is_kept=kept.__contains__)


def test_tests_names_change_nothing(site: Made) -> None:
    run(site)
    libraries = tuple(
        msgspec.structs.replace(
            library,
            kept=tuple(
                msgspec.structs.replace(code, detail="another test") for code in library.kept
            ),
        )
        for library in site.lock.libraries
    )
    report = run(site, lock=msgspec.structs.replace(site.lock, libraries=libraries))
    assert statuses(report.rows)[ONE] is SlimStatus.ALREADY


def test_reinstalled_library_is_slimmed_again(site: Made, installed: Made) -> None:
    run(site)
    slimmed = digests(site.folder)
    site.one.unlink()
    site.one.write_bytes(installed.one.read_bytes())
    (site.info / "RECORD").write_bytes((installed.info / "RECORD").read_bytes())
    report = run(site)
    assert statuses(report.rows) == {ONE: SlimStatus.SLIMMED, TWO: SlimStatus.ALREADY}
    assert digests(site.folder)[ONE] == slimmed[ONE]
    assert wrong_files(site.folder) == []


def test_copied_tree_is_known(site: Made, tmp_path: Path) -> None:
    """As by an image build, which may give files other times."""
    run(site)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", site.folder, copy], check=True)
    report = run(site, paths=(copy,))
    assert set(statuses(report.rows).values()) == {SlimStatus.ALREADY}


def test_compacted_and_no_manifest(site: Made) -> None:
    run(site)
    (site.folder / MANIFEST_NAME).unlink()
    report = run(site)
    row = row_of(report, ONE)
    assert row.status is SlimStatus.FAILED
    assert (row.detail or "").endswith("no manifest here has its original; install it again")
    assert run(site, require=True).failed


@pytest.mark.parametrize("nested", ["below", "above"])
def test_the_manifest_is_that_of_another_folder(site: Made, nested: str) -> None:
    """What the lock needs may be gone, and nothing here tells."""
    folders = (site.folder, site.folder / "gpu")
    first, second = folders if nested == "below" else reversed(folders)
    run(site, paths=(first,))
    before = digests(site.folder)
    report = run(site, paths=(second,))
    assert report.failed
    assert {row.status for row in report.rows} == {SlimStatus.FAILED}
    for row in report.rows:
        assert f"or slim {first}, which has its manifest" in (row.detail or "")
    after = digests(site.folder)
    assert {name: after[name] for name in before} == before


def test_another_version_that_the_manifest_knows_is_no_problem(site: Made) -> None:
    run(site)
    libraries = tuple(
        msgspec.structs.replace(library, sha256=f"{number}" * 64)
        for number, library in enumerate(site.lock.libraries)
    )
    report = run(site, lock=msgspec.structs.replace(site.lock, libraries=libraries))
    assert set(statuses(report.rows).values()) == {SlimStatus.DIFFERENT}
    assert not report.failed


def test_single_files(site: Made) -> None:
    before = digests(site.folder)
    lock = msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1])
    report = run(site, lock=lock, paths=(site.one,))
    assert statuses(report.rows) == {"libone.so.1": SlimStatus.SLIMMED}
    after = digests(site.folder)
    assert after[TWO] == before[TWO]
    assert wrong_files(site.folder) == []


def test_folder_inside_of_a_site(site: Made) -> None:
    run(site, paths=(site.folder / "gpu",))
    assert (site.folder / "gpu" / MANIFEST_NAME).exists()
    assert wrong_files(site.folder) == []


def test_folders_around_a_site(site: Made, tmp_path: Path) -> None:
    """As a venv or a conda prefix."""
    report = run(site, paths=(tmp_path,))
    assert f"site-packages/{ONE}" in statuses(report.rows)
    assert wrong_files(site.folder) == []


def test_paths_that_make_no_sense(site: Made) -> None:
    with pytest.raises(OptionError, match="no such file"):
        run(site, paths=(site.folder / "missing",))
    with pytest.raises(OptionError, match="is in"):
        run(site, paths=(site.folder, site.folder / "gpu"))
    with pytest.raises(OptionError, match="kept in the folder"):
        run(site, replace(FAST, keep_originals=site.folder / "originals"))


def test_lock_of_a_release_that_found_other_elements(site: Made) -> None:
    library = site.lock.libraries[0]
    fewer = msgspec.structs.replace(library, elements=library.elements - 1)
    before = digests(site.folder)[ONE]
    report = run(site, lock=msgspec.structs.replace(site.lock, libraries=(fewer,)))
    assert report.failed
    assert "another release" in (row_of(report, ONE).detail or "")
    assert digests(site.folder)[ONE] == before


def test_manifests_that_are_refused(site: Made) -> None:
    run(site)
    manifest = site.folder / MANIFEST_NAME
    document = json.loads(manifest.read_bytes())

    def changed(**values: object) -> str:
        entry = {**document["slimmed"][ONE], **values}
        return json.dumps({**document, "slimmed": {**document["slimmed"], ONE: entry}})

    for text, problem in (
        ("{", "was truncated.* if it is damaged, copy it from a backup, or move it away"),
        (changed(original="/a\0b"), "a zero byte"),
        (changed(spare="/a\\\0/b"), "a zero byte"),
        (changed(mtime_ns=2**63), "not a manifest"),
        (json.dumps({**document, "format": 8}), "format 8"),
        (manifest.read_text().replace(f'"{ONE}"', '"../../etc/passwd"'), "not below its folder"),
        (manifest.read_text().replace(f'"{ONE}"', '"/etc/passwd"'), "not below its folder"),
    ):
        manifest.write_text(text)
        before = snapshot(site.folder)
        with pytest.raises(StoreError, match=problem):
            run(site)
        assert snapshot(site.folder) == before


def lock_with_unknown(site: Made) -> Lock:
    first, *others = site.lock.libraries
    digest = hashlib.sha256(b"unknown").hexdigest()
    unknown = msgspec.structs.replace(first, sha256=digest, path="gone/libgone.so")
    return msgspec.structs.replace(site.lock, libraries=(unknown, *others))


class TestCheck:
    def test_sound(self, site: Made) -> None:
        run(site)
        [tree] = scan((site.folder,))
        assert {row.status for row in check_tree(tree)} == {SlimStatus.SOUND}

    @pytest.mark.parametrize("kept", [False, True])
    def test_kernel_code_that_is_zeroed(self, site: Made, tmp_path: Path, kept: bool) -> None:
        aside = tmp_path / "aside" if kept else None
        run(site, replace(FAST, keep_originals=aside))
        data = bytearray(site.one.read_bytes())
        [where] = [i for i in [len(data) // 2] if any(data[i : i + 8192])]
        data[where : where + 8192] = bytes(8192)
        site.one.write_bytes(data)
        [row] = [row for row in check_tree(scan((site.folder,))[0]) if row.path == ONE]
        assert row.status is SlimStatus.CHANGED
        assert "differs from what was written; " in (row.detail or "")
        assert "install it again" in (row.detail or "")
        assert ("slim undo" in (row.detail or "")) is kept

    def test_library_that_is_cut_or_gone(self, site: Made) -> None:
        run(site)
        os.truncate(site.one, site.one.stat().st_size // 2)
        site.two.unlink()
        found = {row.path: row.status for row in check_tree(scan((site.folder,))[0])}
        assert found == {ONE: SlimStatus.CHANGED, TWO: SlimStatus.GONE}

    def test_original_and_another_release_are_no_damage(self, site: Made, installed: Made) -> None:
        run(site)
        record = site.info / "RECORD"
        site.one.write_bytes(installed.one.read_bytes())
        newer = b"a newer release"
        site.two.write_bytes(newer)
        lines = record.read_text().splitlines()
        new_line = f"{TWO},{digest_field(newer)},{len(newer)}"
        record.write_text("\n".join(new_line if x.startswith(TWO) else x for x in lines) + "\n")
        found = {row.path: row.status for row in check_tree(scan((site.folder,))[0])}
        assert found == {ONE: SlimStatus.DIFFERENT, TWO: SlimStatus.DIFFERENT}

    def test_without_manifest_by_record(self, site: Made) -> None:
        run(site)
        (site.folder / MANIFEST_NAME).unlink()
        assert {r.status for r in check_tree(scan((site.folder,))[0])} == {SlimStatus.SOUND}
        with site.one.open("r+b") as file:
            file.seek(site.one.stat().st_size // 2)
            file.write(b"other")
        found = {row.path: row.status for row in check_tree(scan((site.folder,))[0])}
        assert found == {ONE: SlimStatus.CHANGED, TWO: SlimStatus.SOUND}

    def test_library_that_another_tool_has_damaged(self, site: Made) -> None:
        run(site)
        # As of a tool that can't count: fewer program headers than there were.
        data = bytearray(site.one.read_bytes())
        data[56:58] = (4).to_bytes(2, "little")
        site.one.write_bytes(data)
        [tree] = scan((site.folder,))
        damaged = [row for row in check_tree(tree) if row.status is SlimStatus.CHANGED]
        assert [row.path for row in damaged] == [ONE]
        assert "differs from what was written" in (damaged[0].detail or "")

    def test_record_that_says_something_else(self, site: Made, installed: Made) -> None:
        run(site)
        (site.info / "RECORD").write_bytes((installed.info / "RECORD").read_bytes())
        [tree] = scan((site.folder,))
        damaged = {row.path for row in check_tree(tree) if row.status is SlimStatus.DAMAGED}
        assert damaged == {ONE, TWO}

    def test_writes_nothing(self, site: Made) -> None:
        run(site)
        before = snapshot(site.folder)
        check_tree(scan((site.folder,))[0])
        assert snapshot(site.folder) == before


def test_map_of_the_fixture_has_what_the_lock_says(site: Made) -> None:
    assert len(site.lock.libraries[0].kept) == 2
    assert site.lock.libraries[0].elements == len(list(read(site.one).iter_code()))


def test_functions_of_cubins_that_stay(tmp_path: Path) -> None:
    """At kernel granularity the lock names what stays of a cubin; its other code is filled."""
    source = read_library(BIN / "libcallgraph.so", Scope())
    [section] = [s for s in source.sections if s.name == ".nv_fatbin"]
    code = (BIN / "libcallgraph.so").read_bytes()[section.span.start : section.span.end]
    specs = [ElementSpec(content=content(200_000, 9), arch=80)]
    library = build(tmp_path / "built", fatbin=code + build_region(specs), ldata=b"")
    request = MapRequest(scope=Scope(devices=("9.0",)), with_map=True, with_digest=True)
    [mapped] = map_libraries([library], request)
    assert mapped.library_map is not None
    regions = mapped.library_map.iter_regions()
    region = next(r for r in regions if any(e.content for e in r.elements))
    usage = usage_of(library_usage(mapped.library_map, {region.span.start: ("calls_shared",)}))
    located = locate_library(mapped.library_map, usage.libraries[0], usage)
    policy = KeepPolicy(granularity="kernel")
    plan = plan_library(located, (ComputeCapability(9, 0),), policy)
    planned = AnalyzedLibrary(mapped.library_map, plan)
    lock = make_lock("run", [planned], verdict_of(planned), Owners().of)
    [trimmed] = plan.trimmed
    before = unpacked(library, trimmed.start)

    report = slim_trees(SlimRequest(paths=(library,), lock=lock, options=FAST))

    assert [row.status for row in report.rows] == [SlimStatus.SLIMMED], report.rows
    after_map = read_slimmed(library)
    [left] = [e for e in after_map.iter_code() if e.kind is ElementKind.CUBIN]
    after = unpacked(library, left.payload.start)
    assert len(after) == len(before)
    for unused in trimmed.unused:
        assert after[unused.start : unused.end] == b"\1" * unused.size
    for function in code_of(mapped.library_map, trimmed):
        assert after[function.start : function.end] == before[function.start : function.end]


def code_of(library_map: LibraryMap, trimmed: TrimmedCubin) -> list[Span]:
    """Where the functions lie that stay of a cubin."""
    [cubin] = [e.content for e in library_map.iter_code() if e.payload.start == trimmed.start]
    assert isinstance(cubin, Cubin)
    found = [
        Span(f.offset_in_cubin, f.offset_in_cubin + f.code_size)
        for f in (*cubin.kernels, *cubin.device_functions)
        if library_map.names[f.name] in trimmed.kept
    ]
    assert found
    return found


def read_slimmed(library: Path) -> LibraryMap:
    """A region of a slimmed library may have a hole."""
    request = MapRequest(scope=Scope(headers_only=True), with_map=True, slimmed=True)
    [mapped] = map_libraries([library], request)
    assert mapped.library_map is not None
    return mapped.library_map


def unpacked(library: Path, payload_start: int) -> bytes:
    found = read_slimmed(library)
    [element] = [e for e in found.iter_code() if e.payload.start == payload_start]
    stored = library.read_bytes()[payload_start : payload_start + element.stored_size]
    return unpack(stored, element.compression, element.unpacked_size)
