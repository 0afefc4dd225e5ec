"""Runs that are combined: what a new run says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.combine import copy_traces, prove_by_parts, read_part
from pytest_negativa.errors import StoreError
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import MarkKind, Run, RunsFolder, find_traces
from tests.support.sites import verdict_of
from tests.support.traces import header, records, write


def test_a_run_has_all_traces_or_none(tmp_path: Path) -> None:
    """A plan of it would call code unused that the others need."""
    names = ("first", "second")
    for name in names:
        write(tmp_path / name, header(run_id=name), records("k"))
    parts = [read_part(str(tmp_path / name), RunsFolder(tmp_path)) for name in names]
    find_traces(tmp_path / "second")[0].unlink()
    target = Run(tmp_path / "combined")

    with pytest.raises(StoreError, match=r"second.*cannot be copied"):
        copy_traces(parts, target, PathRules({}))

    assert target.is_empty


@pytest.mark.parametrize("mark", ["failed", "incomplete"])
def test_the_traces_of_a_marked_run_are_that_run(tmp_path: Path, mark: MarkKind) -> None:
    runs, run = RunsFolder(tmp_path), Run(tmp_path / "shard")
    write(traces := run.trace_dir, header(), records("k"))
    assert read_part(str(traces), runs).run == Run(traces)
    run.mark(mark, "why")
    assert read_part(str(traces), runs).run == run


@pytest.mark.parametrize("mark", ["failed", "incomplete"])
def test_a_session_that_did_not_run_all_its_tests_is_a_bad_run(
    tmp_path: Path, mark: MarkKind
) -> None:
    """An error that ends pytest in a test leaves a trace with an end."""
    write(tmp_path / "shard" / "trace", header(), records("k"))
    Run(tmp_path / "shard").mark(mark, "an error ended the session in test_a")
    part = read_part(str(tmp_path / "shard"), RunsFolder(tmp_path))
    assert part.failure == "an error ended the session in test_a"


def test_what_healing_gave_back_is_kept_at_each_path_of_the_library() -> None:
    any_of = LibraryIdentity(path="", size=1, build_id=None, soname=None, mtime_ns=0)
    libraries = [
        replace(any_of, path=path, sha256=digest)
        for path, digest in (("/a", "1"), ("/b", "1"), ("/a", "2"), ("/c", "2"), ("/d", "3"))
    ]
    need = Need(library="/a", sha256="1", spans=(Span(1, 2),), witness=Witness.TOUCHED)
    assert [one.path for one in libraries if need.is_of(one)] == ["/a", "/b", "/a"]
    gone = replace(need, library="/gone")
    assert [one.path for one in libraries if gone.is_of(one)] == ["/a", "/b"]
    unknown = replace(need, sha256=None)
    assert [one.path for one in libraries if unknown.is_of(one)] == ["/a", "/a"]
    assert not unknown.is_of(replace(libraries[-1], sha256=None))


def test_a_part_that_proved_cpu_code_alone_proves_no_plan(tmp_path: Path) -> None:
    part, united = (Run(tmp_path / name) for name in ("part", "united"))
    for run in part, united:
        run.make()
    write_record(part.verdict_file, verdict_of())
    assert prove_by_parts(united, (), [part]) is None and not united.verdict_file.exists()
