"""Plans of libraries that a run had under several paths, or that changed since."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.models.analysis import Analysis
from pytest_negativa.models.trace import AnyTraceRecord, LibraryRecord
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.tracing.merge import hash_libraries, merge_traces
from tests.support.analyses import region_starts, settings
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, MULTIARCH
from tests.support.traces import header, records, write


def traced(library: Path, region: int | None) -> list[AnyTraceRecord]:
    """The records of a process that had a library mapped, and used a region of it."""
    start = 0 if region is None else region_starts(library)[region]
    found = records(offset=start)[: 2 if region is None else None]
    record = LibraryRecord(id=1, library=identify_library(str(library)))
    return [record if isinstance(r, LibraryRecord) else r for r in found]


def run_of(folder: Path, **uses: tuple[Path, int | None]) -> Run:
    """A run with a process for each library: the region that it used, if any."""
    run = Run(folder)
    for pid, (library, region) in enumerate(uses.values(), 1):
        write(run.trace_dir, header(pid), traced(library, region))
    return run


def planned(folder: Path, *runs: Run) -> Analysis:
    traces = [path for run in runs for path in run.trace_files()]
    return analyze(merge_traces(traces), settings(folder))


def loaded(analysis: Analysis) -> list[int]:
    """How many elements each library keeps because the run loaded them."""
    return [
        sum(d.reason == "loaded" for d in library.plan.decisions) for library in analysis.libraries
    ]


def notes(analysis: Analysis) -> str:
    return " ".join(note for library in analysis.libraries for note in library.plan.notes)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return Path(shutil.copy(MULTIARCH, folder / "lib.so"))


def test_three_paths_of_one_content_have_one_plan(tmp_path: Path, library: Path) -> None:
    link, copy, gone = (tmp_path / name for name in ("link.so", "copy.so", "gone.so"))
    os.link(library, link)
    shutil.copy(library, copy)
    shutil.copy(library, gone)
    run = run_of(tmp_path / "run", a=(library, 0), b=(link, None), c=(copy, None), d=(gone, 2))
    gone.unlink()
    found = planned(tmp_path, run)
    assert len(found.libraries) == 3 and loaded(found) == [2, 2, 2]
    assert not notes(found)
    used = {library.plan.used_kernels for library in found.libraries}
    assert len(used) == 1


@pytest.mark.planted_fault(
    "a test replaces a library by another one while the suite runs",
    says="two libraries were at",
)
def test_a_library_that_a_test_replaces(tmp_path: Path, library: Path, fault: PlantedFault) -> None:
    copy = Path(shutil.copy(library, tmp_path / "copy.so"))
    run = run_of(tmp_path / "run", a=(library, 0), b=(copy, None))
    shutil.copy(BIN / "libnames.so", tmp_path / "new")
    (tmp_path / "new").replace(library)
    found = planned(tmp_path, run)
    fault.check(notes(found))
    assert len(found.libraries) == 2
    assert not any(not d.kept for library in found.libraries for d in library.plan.decisions)


@pytest.mark.planted_fault(
    "a test writes into a library that is mapped, and the size stays the same",
    says="was written or removed since GPU code was loaded from it",
)
def test_a_library_that_a_test_writes_to(
    tmp_path: Path, library: Path, fault: PlantedFault
) -> None:
    run = run_of(tmp_path / "run", a=(library, 0))
    with library.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    found = planned(tmp_path, run)
    fault.check(notes(found))
    assert all(d.kept for d in found.libraries[0].plan.decisions)


@pytest.mark.planted_fault(
    "a library without a build id is installed anew between two runs that are combined",
    says="so whether it was this library is unknown",
)
def test_a_run_is_combined_after_its_library_was_installed_anew(
    tmp_path: Path, library: Path, fault: PlantedFault
) -> None:
    """The digests of the first run serve: nothing else tells that the file was the same."""
    nameless = tmp_path / "nameless.so"
    data = library.read_bytes().replace(b"\x03\0\0\0GNU\0", b"\x03\0\0\0XXX\0")
    runs = []
    for number in range(2):
        nameless.unlink(missing_ok=True)
        nameless.write_bytes(data)
        assert identify_library(str(nameless)).build_id is None
        run = run_of(tmp_path / f"run-{number}", a=(nameless, number))
        for trace in run.trace_files():
            forget_digest(trace)
        if number == 0:
            hash_libraries(run)
        runs.append(run)
    assert loaded(planned(tmp_path, *runs)) == [2]
    (runs[0].trace_dir / "digests.json").unlink()
    fault.check(notes(planned(tmp_path, *runs)))


def test_runs_of_two_containers_have_one_library(tmp_path: Path, library: Path) -> None:
    elsewhere = Path(shutil.copy(library, tmp_path / "elsewhere.so"))
    runs = [run_of(tmp_path / "one", a=(elsewhere, 0)), run_of(tmp_path / "two", a=(library, 2))]
    told: list[tuple[int, int]] = []
    hash_libraries(runs[0], lambda *bytes_done: told.append(bytes_done))
    size = elsewhere.stat().st_size
    assert told == [(size, size)]
    elsewhere.unlink()
    found = planned(tmp_path, *runs)
    assert loaded(found) == [2] and not notes(found)
    # The other container had another library at this path.
    other = Path(shutil.copy(BIN / "libnames.so", elsewhere))
    assert "two libraries were at" in notes(
        planned(tmp_path, *runs, run_of(tmp_path / "c", a=(other, 0)))
    )


def forget_digest(trace: Path) -> None:
    """Remove the digest that a small library gets at first sight."""
    trace.write_text(re.sub(r',"sha256":"[0-9a-f]{64}"', "", trace.read_text()))


@pytest.mark.planted_fault(
    "A program maps a library from within an archive that is not compressed.",
    says="libs.zip: GPU code was loaded from within this file, which is no library",
)
def test_a_library_in_an_archive_may_be_any(
    tmp_path: Path, library: Path, fault: PlantedFault
) -> None:
    archive = tmp_path / "libs.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(library, "lib.so")
    run = Run(tmp_path / "run")
    offset = archive.read_bytes().index(b"\x7fELF") + region_starts(library)[0]
    record = LibraryRecord(id=1, library=identify_library(str(archive)))
    inside = [record if isinstance(r, LibraryRecord) else r for r in records("k", offset=offset)]
    write(run.trace_dir, header(1), traced(library, 1))
    write(run.trace_dir, header(2), inside)
    found = planned(tmp_path, run)
    fault.check(notes(found))
    assert all(d.kept for d in found.libraries[0].plan.decisions)
    archive.unlink()
    found = planned(tmp_path, run)
    assert "libs.zip: GPU code was loaded from within this file, which is gone" in notes(found)
