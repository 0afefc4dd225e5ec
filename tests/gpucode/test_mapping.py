"""Many libraries: in order or in processes, each with its own error."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.gpucode import mapping
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.elf import HostElf
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.workers import LocalProcesses
from pytest_negativa.models.library import LibraryMap, Scope
from tests.support.compacting import plan_of
from tests.support.libraries import (
    IS_ROOT,
    MULTIARCH,
    PLAIN,
    SHARED_OBJECTS,
    make_large,
    without_build_id,
)
from tests.support.slimmed import compact, read, rows

ALL = MapRequest(scope=Scope(), with_map=True)
ONE, TWO = LocalProcesses(1), LocalProcesses(2)
DIGEST = MapRequest(scope=Scope(), with_map=True, with_digest=True)


def test_processes_give_what_one_process_gives() -> None:
    alone = {m.path: m for m in map_libraries(SHARED_OBJECTS, ALL, workers=ONE)}
    together = {
        m.path: m for m in map_libraries(SHARED_OBJECTS, ALL, workers=TWO, min_parallel_size=0)
    }
    assert len(together) == len(SHARED_OBJECTS)
    assert together == alone


@pytest.mark.parametrize("jobs", [1, 2])
def test_broken_library_stops_no_other(tmp_path: Path, jobs: int) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(MULTIARCH.read_bytes()[:5000])
    gone = tmp_path / "gone.so"
    paths = [broken, MULTIARCH, gone, tmp_path, PLAIN]
    found = {
        m.path: m
        for m in map_libraries(paths, ALL, workers=LocalProcesses(jobs), min_parallel_size=0)
    }
    assert {path for path, m in found.items() if m.error is None} == {MULTIARCH, PLAIN}
    assert "section headers end at" in str(found[broken].error)
    assert str(found[gone].error) == f"{gone}: cannot be opened: No such file or directory"
    assert str(found[tmp_path].error) == f"{tmp_path}: is a directory, expected a regular file"


class _Deadly(MapCache):
    """Ends the process that unpickles it."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGKILL,)


def test_process_that_dies() -> None:
    found = list(
        map_libraries([MULTIARCH, PLAIN], ALL, _Deadly(), workers=TWO, min_parallel_size=0)
    )
    assert sorted(str(m.error) for m in found) == [
        f"{path}: not read: a process died (out of memory?); try --jobs 1"
        for path in (MULTIARCH, PLAIN)
    ]


def test_path_that_is_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/lib\xff.so"))
    path.write_bytes(MULTIARCH.read_bytes())
    (mapped,) = map_libraries([path], ALL)
    assert str(mapped.error) == (
        f"{tmp_path}/lib\\xff.so: not read: the path is not UTF-8; rename it"
    )


def test_known_library_whose_path_is_no_longer_utf8(tmp_path: Path) -> None:
    """Renaming a folder above it leaves all that the cache goes by as it was."""
    cache = MapCache(tmp_path / "cache", 1 << 30)
    folder = tmp_path / "folder"
    folder.mkdir()
    library = make_large(MULTIARCH, folder / "lib.so")
    assert [m.error for m in map_libraries([library], ALL, cache)] == [None]
    renamed = folder.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    (mapped,) = map_libraries([Path(renamed, "lib.so")], ALL, cache)
    assert "the path is not UTF-8" in str(mapped.error)


def test_library_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(MULTIARCH.read_bytes() + bytes(1 << 20))

    def map_and_change(source: ByteSource, host: HostElf, scope: Scope) -> LibraryMap:
        library_map = map_library(source, host, scope)
        os.utime(library, ns=(0, 0))
        return library_map

    monkeypatch.setattr(mapping, "map_library", map_and_change)
    (mapped,) = map_libraries([library], ALL, MapCache(tmp_path / "cache", 1 << 30))
    assert mapped.error is None
    assert not (tmp_path / "cache").exists()


def digest_of(path: Path, request: MapRequest, cache: MapCache | None = None) -> str | None:
    (mapped,) = map_libraries([path], request, cache)
    assert mapped.library_map is not None
    return mapped.library_map.library.sha256


@pytest.mark.parametrize("jobs", [1, 2])
def test_digests(jobs: int) -> None:
    """Of libraries with GPU code, where they are asked for."""
    paths = [MULTIARCH, PLAIN]
    found = {
        m.path: m.library_map.library.sha256
        for m in map_libraries(paths, DIGEST, workers=LocalProcesses(jobs), min_parallel_size=0)
        if m.library_map is not None
    }
    assert found == {MULTIARCH: hashlib.sha256(MULTIARCH.read_bytes()).hexdigest(), PLAIN: None}
    assert digest_of(MULTIARCH, ALL) is None


def test_digest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who doesn't ask for it doesn't get it."""
    library = make_large(MULTIARCH, tmp_path / "lib.so")
    expected = hashlib.sha256(library.read_bytes()).hexdigest()
    cache = MapCache(tmp_path / "cache", 1 << 30)
    assert digest_of(library, ALL, cache) is None
    assert digest_of(library, DIGEST, cache) == expected
    monkeypatch.setattr(mapping, "map_library", None)
    monkeypatch.setattr(ByteSource, "sha256", None)
    assert digest_of(library, DIGEST, cache) == expected
    assert digest_of(library, ALL, cache) is None


@pytest.mark.parametrize("how", ["written to", "replaced", "gone"])
def test_no_digest_of_a_library_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Map and digest could be of two files."""
    library = make_large(MULTIARCH, tmp_path / "lib.so")

    def map_and_change(source: ByteSource, host: HostElf, scope: Scope) -> LibraryMap:
        library_map = map_library(source, host, scope)
        if how == "written to":
            with library.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"!")
            os.utime(library, ns=(0, library_map.library.mtime_ns))
        else:
            library.rename(tmp_path / "earlier.so")
            if how == "replaced":
                make_large(MULTIARCH, library)
        return library_map

    monkeypatch.setattr(mapping, "map_library", map_and_change)
    assert digest_of(library, DIGEST, MapCache(tmp_path / "cache", 1 << 30)) is None
    monkeypatch.undo()
    if how != "gone":
        now = hashlib.sha256(library.read_bytes()).hexdigest()
        assert digest_of(library, DIGEST, MapCache(tmp_path / "cache", 1 << 30)) == now


COUNTING = """
import sys
from pathlib import Path

from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.models.library import Scope

library, folder = sys.argv[1:]
opened = parsed = 0

def count_open(event, arguments):
    global opened
    opened += event == "open" and str(arguments[0]) == library

def count_parse(frame, event, _):
    global parsed
    parsed += event == "call" and frame.f_code is read_host_elf.__code__

sys.addaudithook(count_open)
sys.setprofile(count_parse)
request = MapRequest(Scope(), with_map=True, with_digest=True, slimmed=True)
(mapped,) = map_libraries([Path(library)], request, MapCache(Path(folder), 1 << 30))
sys.setprofile(None)
print(opened, parsed, mapped.error, mapped.cached, mapped.removed is not None)
"""


def counts(library: Path, cache: Path) -> str:
    """What it takes to map a library: how often it is opened, and its tables are parsed."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, os.path.realpath(library), cache],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("build_id", [True, False])
def test_a_library_is_opened_and_parsed_once(tmp_path: Path, build_id: bool) -> None:
    library = make_large(MULTIARCH, tmp_path / "lib.so")
    if not build_id:
        without_build_id(library)
    assert counts(library, tmp_path / "cache") == "1 1 None False False"
    assert counts(library, tmp_path / "cache") == "1 1 None True False"


def test_a_slimmed_library_is_opened_and_parsed_once(tmp_path: Path) -> None:
    before = read(MULTIARCH)
    compact(before, plan_of(before, lambda number: number == 2), tmp_path / "small.so")
    library = make_large(tmp_path / "small.so", tmp_path / "lib.so")
    assert counts(library, tmp_path / "cache") == "1 1 None False True"


@pytest.mark.skipif(IS_ROOT, reason="root may read anything")
def test_library_that_may_not_be_read(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(MULTIARCH.read_bytes())
    library.chmod(0)
    (mapped,) = map_libraries([library], ALL)
    assert str(mapped.error) == f"{library}: cannot be opened: Permission denied"


@pytest.mark.parametrize("kept", [0, 21])
def test_slimmed_library_is_read_for_those_who_ask(tmp_path: Path, kept: int) -> None:
    """Others get an error: offsets in such a file are nothing that a plan could be made of."""
    before = read(MULTIARCH)
    plan = plan_of(before, lambda number: number < kept)
    small = tmp_path / "small.so"
    compact(before, plan, small)
    (mapped,) = map_libraries([small], ALL)
    if kept:
        assert (mapped.library_map, mapped.summary, mapped.removed) == (None, None, None)
        assert "slimmed by negativa slim, so nothing is planned for it" in str(mapped.error)
    else:
        # Nothing is left to plan for.
        assert mapped.error is None
        assert mapped.library_map is not None and not mapped.library_map.sections

    cache = MapCache(tmp_path / "cache", 1 << 30)
    large = make_large(small, tmp_path / "large.so")
    request = MapRequest(scope=Scope(), with_map=True, with_digest=True, slimmed=True)
    for path in (small, large, large):
        (mapped,) = map_libraries([path], request, cache)
        assert mapped.library_map is not None and mapped.summary is not None
        assert rows(mapped.library_map) == rows(before, plan)
        assert mapped.summary.elements == kept
        assert mapped.removed is not None and mapped.removed.size_before == before.library.size
        if kept:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert mapped.library_map.library.sha256 == digest
        assert not mapped.cached


def test_slimmed_libraries_in_processes(tmp_path: Path) -> None:
    before = read(MULTIARCH)
    compact(before, plan_of(before, lambda number: number == 2), tmp_path / "small.so")
    paths = [tmp_path / "small.so", MULTIARCH, PLAIN]
    request = MapRequest(scope=Scope(), with_map=True, slimmed=True)
    alone = {m.path: m for m in map_libraries(paths, request, workers=ONE)}
    together = map_libraries(paths, request, workers=TWO, min_parallel_size=0)
    assert {m.path: m for m in together} == alone
    assert [m.path for m in alone.values() if m.removed is not None] == paths[:1]


def test_code_is_unpacked_where_other_code_was() -> None:
    """A command that reads libraries asks the system once for the memory of unpacked code."""
    script = """
import resource
from pytest_negativa.gpucode.workers import open_workers

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with open_workers(None, warn=print):
    before = faults()
    for size in range(1, 21):
        b"x" * (size << 20)
print((faults() - before) * resource.getpagesize() >> 20)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 60  # MiB, of 210
