"""Portable copies of traces: what combining gives depends on the traces alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.analysis.combine import copy_portable
from pytest_negativa.errors import OptionError
from pytest_negativa.models.trace import LaunchRecord, LibraryRecord, Role, TracedLibrary
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.results import load_digests, save_digests
from pytest_negativa.storage.runs import Run, find_traces
from pytest_negativa.tracing.merge import merge_traces
from tests.support.traces import header, records, write

RULES = {"/builds/*/site": "/site", "/old": "/site"}


def shard(folder: Path, number: int, kernels: Sequence[str], digest: str | None) -> Path:
    """A run of one process, on a machine of its own."""
    library = TracedLibrary(
        path=f"/builds/{number % 2}/site/lib.so", size=10, inode=number, mtime_ns=number
    )
    lines = [
        replace(line, library=library) if isinstance(line, LibraryRecord) else line
        for line in records(*kernels, nodeid=f"test_{number % 3}", time_ns=number % 2)
    ]
    ranges = ((), ("outer",), ("outer", f"{number}"))
    lines += [
        LaunchRecord(name=kernel, count=number + 1, context=2, gpu_ns=number, ranges=ranges[at % 3])
        for at, kernel in enumerate(kernels, number)
    ]
    run_id = f"20260102T030405Z-{number:06x}"
    write(folder, header(7 + number % 2, run_id=run_id, start_ns=number % 2), lines)
    if digest is not None:
        save_digests(folder, [replace(library, sha256=digest)])
    return folder


def combine(parts: Sequence[Path], target: Path) -> Path:
    target.mkdir()
    for part in parts:
        digests = load_digests(part)
        for trace in find_traces(part):
            copy_portable(trace, target, digests, PathRules(RULES))
    return target


def usage_of(folder: Path) -> bytes:
    return msgspec.json.encode(merge_traces(find_traces(folder)))


def test_a_sample_does_not_pass_as_a_session(tmp_path: Path) -> None:
    """Not even by a header that is written unusually."""
    run = Run(tmp_path / "run")
    run.trace_dir.mkdir(parents=True)
    trace = write(run.trace_dir, header(7, role=Role.SOLO), records("a"))
    run.mark("samples", "made by negativa trace --attach-env")
    trace.write_bytes(trace.read_bytes().replace(b'"record":"header"', b'"record" : "header"'))
    [process] = merge_traces(find_traces(combine([run.trace_dir], tmp_path / "all"))).processes
    assert process.header.role is Role.SAMPLE


shards = st.lists(
    st.tuples(st.lists(st.sampled_from("abcd"), max_size=3), st.sampled_from([None, "1", "2"])),
    min_size=3,
    max_size=5,
)


@pytest.mark.slow
@given(shards, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_grouping_and_repetition_change_no_byte(
    contents: list[tuple[list[str], str | None]], random: st.DataObject, cut: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        parts = [
            shard(folder / f"shard-{i}", i, kernels, digest)
            for i, (kernels, digest) in enumerate(contents)
        ]
        names = (folder / f"combined-{i}" for i in itertools.count())
        expected = usage_of(combine(parts, next(names)))

        shuffled = list(parts)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        assert usage_of(combine(shuffled, next(names))) == expected
        left, right = (combine(part, next(names)) for part in (shuffled[:cut], shuffled[cut:]))
        assert usage_of(combine([right, left], next(names))) == expected
        assert usage_of(combine([left, *parts, right, left], next(names))) == expected


def test_a_library_is_one_by_its_digest_and_its_path_here(tmp_path: Path) -> None:
    parts = [shard(tmp_path / str(i), i, ["k", f"k{i}"], "1") for i in range(4)]
    usage = merge_traces(find_traces(combine(parts, tmp_path / "combined")))
    [library] = usage.libraries
    assert library.library == TracedLibrary(path="/site/lib.so", size=10, sha256="1")
    assert list(library.images[0].kernels) == ["k", "k0", "k1", "k2", "k3"]


def test_other_contents_and_unknown_ones_stay_apart(tmp_path: Path) -> None:
    digests = ("1", "2", None)
    parts = [shard(tmp_path / str(i), i, ["k"], digest) for i, digest in enumerate(digests)]
    usage = merge_traces(find_traces(combine(parts, tmp_path / "combined")))
    assert {u.library.sha256 for u in usage.libraries} == set(digests)


def test_a_damaged_line_is_found_in_the_copy(tmp_path: Path) -> None:
    part = shard(tmp_path / "part", 0, ["k"], None)
    [trace] = find_traces(part)
    trace.write_bytes(
        trace.read_bytes().replace(b'"library":{"path":', b'"library":{"path":4,"a":')
    )
    [lack, *_] = merge_traces(find_traces(combine([part], tmp_path / "combined"))).incomplete
    assert lack.code == "trace-damaged"


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("/builds/a/site/lib.so", "/site/lib.so"),
        ("/builds/a/b/site", "/site"),
        ("/builds/a/sites/lib.so", "/builds/a/sites/lib.so"),
        ("/old/site/x", "/site/site/x"),
        ("/older/x", "/older/x"),
        ("/else/builds/a/site/x", "/else/builds/a/site/x"),
    ],
)
def test_rules(path: str, here: str) -> None:
    assert PathRules(RULES).apply(path) == here


def test_a_rule_that_would_apply_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="/a/b would become /a/b/b"):
        PathRules({"/a": "/a/b"})
    assert PathRules({"/a/*": "/a/b"}).apply("/a/c/d") == "/a/b/d"
