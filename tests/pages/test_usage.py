"""Touched pages: from logs to libraries, to unions, to rows."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.pages import (
    FileKey,
    HostFile,
    HostFiles,
    HostLibrary,
    HostReport,
    HostRow,
    HostUsage,
)
from pytest_negativa.models.spans import PAGE_SIZE, Span, union
from pytest_negativa.pages.functions import FunctionStarts, functions_within, summarize
from pytest_negativa.pages.gather import (
    add_touched,
    describe,
    gather,
    identify,
    unite,
)
from pytest_negativa.pages.page_logs import LoggedLibrary
from pytest_negativa.pages.page_watch import read_processor
from pytest_negativa.reporting.pages import render_host_report
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import LOST_NAME, Run
from tests.support.compiling import compile_shared, needs_compiler
from tests.support.paged import compile_paged, symbols_of


def test_the_library_that_writes_the_trace_is_left_whole() -> None:
    """It touches other pages in a proof, where it writes other records."""
    path = os.path.realpath(msgspec._core.__file__)
    file = identify(key_of(Path(path)))
    assert isinstance(file, HostFile)
    library = describe(file, LoggedLibrary(file.file, True, (), ()))
    assert library.unwatched == "the tracer uses it, too"


PAGES = st.frozensets(st.integers(0, 20), max_size=10)


@st.composite
def usages(draw: st.DrawFn) -> HostUsage:
    libraries = tuple(
        HostLibrary(
            sha256=sha256,
            size=100 * PAGE_SIZE,
            build_id=None,
            paths=(f"/{draw(st.sampled_from('xy'))}/{sha256}.so",),
            watched=(Span(0, 21 * PAGE_SIZE),),
            touched=union(Span(p * PAGE_SIZE, (p + 1) * PAGE_SIZE) for p in draw(PAGES)),
            unwatched=draw(st.sampled_from((None, None, "its code is relocated"))),
        )
        for sha256 in draw(st.sets(st.sampled_from("abc")))
    )
    return HostUsage(
        processors=(draw(st.sampled_from(("A", "B"))),),
        processes={draw(st.sampled_from(("r1", "r2"))): draw(st.integers(1, 3))},
        libraries=libraries,
        incomplete=draw(st.sampled_from(((), ("one",), ("one", "two")))),
    )


@given(usages(), usages(), usages())
def test_a_union_does_not_depend_on_order_or_grouping(
    first: HostUsage, second: HostUsage, third: HostUsage
) -> None:
    whole = unite([first, second, third])
    assert unite([unite([first, second]), third]) == whole
    assert unite([third, unite([second, first])]) == whole
    assert unite([whole, first, whole]) == whole


def test_a_union_counts_the_processes_of_a_run_once() -> None:
    usage = HostUsage(
        processors=(),
        processes={"b": 2},
        libraries=(),
        incomplete=(),
    )
    other = replace(usage, processes={"a": 1})
    assert summarize(unite([usage, other, unite([usage, other])])).processes == 3


@given(usages(), usages())
def test_a_union_loses_no_page(first: HostUsage, second: HostUsage) -> None:
    united = {library.sha256: library for library in unite([first, second]).libraries}
    for library in itertools.chain(first.libraries, second.libraries):
        whole = united[library.sha256]
        assert union((*whole.touched, *library.touched)) == whole.touched
        assert library.unwatched is None or whole.unwatched is not None
        assert set(library.paths) <= set(whole.paths)


def test_what_a_proof_touched_is_of_the_run(tmp_path: Path) -> None:
    run, processor = Run(tmp_path), "X"
    run.page_logs.mkdir()
    (run.page_logs / LOST_NAME).write_bytes(bytes(4))
    write_record(run.page_log_files, HostFiles(processor=processor))
    library = HostLibrary(
        sha256="a" * 64,
        size=PAGE_SIZE,
        build_id=None,
        paths=("/a.so",),
        watched=(Span(0, PAGE_SIZE),),
        touched=(Span(0, PAGE_SIZE),),
    )
    found = HostUsage(
        processors=(processor,),
        processes={"001-verify": 2},
        libraries=(library,),
        incomplete=("a full disk",),
        failed=("001-verify: 1 test failed",),
    )
    add_touched(run, found, 1)
    later = replace(library, touched=(Span(PAGE_SIZE, 2 * PAGE_SIZE),))
    add_touched(run, replace(found, libraries=(later,)), 2)
    [united] = unite([found, replace(found, libraries=(later,))]).libraries
    own = replace(found, processes={run.run_id: 0}, libraries=(united,), incomplete=(), failed=())
    assert gather(run) == own
    # Also when it is read again, or copied elsewhere.
    run.page_log_files.unlink()
    assert gather(run) == own


def test_processors_are_listed_each_once() -> None:
    usage = HostUsage(
        processors=("A",),
        processes={"r": 1},
        libraries=(),
        incomplete=(),
    )
    other = replace(usage, processors=("B",))
    assert unite([other, usage, usage]).processors == ("A", "B")
    (text,) = render_host_report(summarize(unite([other, usage])), top=0)
    assert " on A, B." in text


def test_counts_of_functions_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = HostRow(
        path="/lib/libcublasLt.so.13",
        size=500_000_000,
        watched=400_000_000,
        touched=2_000_000,
        functions=123_456,
        touched_functions=1_234,
        unwatched=None,
    )
    report = HostReport(
        run_ids=("r",),
        processors=("A",),
        processes=1,
        libraries=(row,),
        incomplete=(),
    )
    _, table = render_host_report(report, top=0)
    assert "touched at most" not in table and "functions" not in table
    assert max(map(len, table.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "100")
    _, table = render_host_report(report, top=0)
    assert "functions" in table and "touched at most" in table


@given(
    st.lists(st.integers(0, 100), unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=5),
)
def test_functions_are_counted_once(starts: list[int], sizes: list[tuple[int, int]]) -> None:
    spans = union(Span(start, start + size) for start, size in sizes)
    ends = [*starts[1:], sys.maxsize]
    expected = sum(
        any(start < span.end and end > span.start for span in spans)
        for start, end in zip(starts, ends, strict=False)
    )
    table = FunctionStarts(50, [start - 50 for start in starts])
    assert sum(map(len, functions_within(table, [(s.start, s.end) for s in spans]))) == expected


def key_of(path: Path) -> FileKey:
    return FileKey.of(str(path), FileState.of(path.stat()))


def one_library(
    file: HostFile, path: Path, watched: tuple[Span, ...] = (), touched: tuple[Span, ...] = ()
) -> HostUsage:
    return HostUsage(
        processors=(read_processor(),),
        processes={"r": 1},
        libraries=(
            HostLibrary(
                sha256=file.sha256,
                size=file.file.size,
                build_id=file.build_id,
                paths=(str(path),),
                watched=watched,
                touched=touched,
            ),
        ),
        incomplete=(),
    )


@needs_compiler
def test_a_file_that_was_replaced_has_no_content(tmp_path: Path) -> None:
    library = compile_paged(tmp_path)
    key = key_of(library)
    assert isinstance(identify(key), HostFile)
    shutil.copy(library, tmp_path / "other")
    (tmp_path / "other").rename(library)
    assert identify(key) == f"{library}: was replaced after it was loaded"
    library.unlink()
    assert "libpaged.so" in str(identify(key))


@needs_compiler
@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-Wl,--build-id=none",)], ids=["build-id", "none"])
def test_a_known_digest_holds_until_the_file_changes(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    library = compile_shared("pages/library.c", tmp_path / "libpaged.so", *flags)
    key = key_of(library)
    found = identify(key)
    assert isinstance(found, HostFile) and (found.build_id is None) == bool(flags)
    ctime_ns = library.stat().st_ctime_ns
    state = FileState.of(library.stat())
    digests: dict[tuple[str, FileState | None], str | None] = {(key.path, state): "known"}
    assert identify(key, digests) == replace(found, sha256="known")
    # The same size and modification time.
    data = library.read_bytes()
    library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(library, ns=(key.mtime_ns, key.mtime_ns))
    while library.stat().st_ctime_ns == ctime_ns:  # the kernel's clock ticks
        os.utime(library, ns=(key.mtime_ns, key.mtime_ns))
    changed = identify(key, digests)
    assert isinstance(changed, HostFile) and changed.sha256 == sha256_of(str(library))


def sha256_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@needs_compiler
def test_functions_on_touched_pages_are_an_upper_bound(tmp_path: Path) -> None:
    library = compile_paged(tmp_path)
    names = {name: at for at, name in symbols_of(library).items()}
    found = identify(key_of(library))
    assert isinstance(found, HostFile)
    usage = one_library(
        found,
        library,
        watched=(Span(names["first_page"], names["last_page"]),),
        touched=(Span(names["in_main"], names["in_main"] + PAGE_SIZE),),
    )
    (row,) = summarize(usage).libraries
    table = subprocess.run(["readelf", "-wF", library], capture_output=True, text=True).stdout
    assert row.functions == table.count(" FDE ")
    # Ten pages of one function are watched, and one of them is touched.
    assert row.functions is not None
    assert row.touched_functions == row.functions - len(names) + 2
    # A library that is gone still has its bytes.
    library.unlink()
    (row,) = summarize(usage).libraries
    assert (row.touched, row.functions) == (PAGE_SIZE, None)


def test_an_unknown_processor(tmp_path: Path) -> None:
    assert read_processor(tmp_path / "none") == "unknown"
    (tmp_path / "cpuinfo").write_text("model name\t: X 1\nflags\t\t: sse2 avx\n\nmodel name: Y\n")
    assert read_processor(tmp_path / "cpuinfo") == "X 1"
