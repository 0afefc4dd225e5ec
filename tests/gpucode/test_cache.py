"""The cache of maps: never another answer than reading, whatever happens to its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest, map_libraries
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.summary import summarize
from pytest_negativa.models.library import Scope
from tests.support.libraries import BIN, MULTIARCH, make_large, without_build_id

ALL = MapRequest(scope=Scope(), with_map=True)
HEADERS = MapRequest(scope=Scope(headers_only=True), with_map=True)
LIMIT = 1 << 30


def for_device(text: str, *, headers_only: bool = False, with_map: bool = False) -> MapRequest:
    return MapRequest(
        scope=Scope(headers_only=True) if headers_only else Scope(devices=(text,)),
        devices=(ComputeCapability.parse(text),),
        with_map=with_map,
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return make_large(MULTIARCH, tmp_path / "lib.so")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> MapCache:
    return MapCache(folder, LIMIT)


def one(path: Path, request: MapRequest, cache: MapCache | None) -> MappedLibrary:
    (mapped,) = map_libraries([path], request, cache)
    assert mapped.error is None
    return mapped


def same(left: MappedLibrary, right: MappedLibrary) -> bool:
    return (left.summary, left.library_map) == (right.summary, right.library_map)


@pytest.mark.parametrize(
    "request_",
    [
        ALL,
        HEADERS,
        MapRequest(scope=Scope()),
        MapRequest(scope=Scope(calls=False), with_map=True),
        for_device("9.0"),
        for_device("9.0", with_map=True),
        for_device("9.0", headers_only=True),
    ],
)
def test_hit_equals_miss(library: Path, cache: MapCache, request_: MapRequest) -> None:
    fresh = one(library, request_, None)
    first = one(library, request_, cache)
    second = one(library, request_, cache)
    assert (first.cached, second.cached) == (False, True)
    assert same(fresh, first)
    assert same(fresh, second)


def test_small_libraries_are_not_kept(cache: MapCache, folder: Path) -> None:
    one(MULTIARCH, ALL, cache)
    assert not folder.exists()


def test_map_of_everything_does_not_answer_for_less(library: Path, cache: MapCache) -> None:
    """What is printed must not depend on what somebody asked before."""
    one(library, ALL, cache)
    without_calls = MapRequest(scope=Scope(calls=False), with_map=True)
    for request in (for_device("9.0"), HEADERS, without_calls, ALL):
        found = one(library, request, cache)
        assert found.cached is (request is ALL)
        assert same(found, one(library, request, None))


def test_headers_of_one_device_are_not_shown_for_another(library: Path, cache: MapCache) -> None:
    one(library, for_device("9.0", headers_only=True), cache)
    for request in (for_device("8.6", headers_only=True), HEADERS):
        found = one(library, request, cache)
        # The map serves any device, its summary does not.
        assert found.cached
        assert same(found, one(library, request, None))


def entry(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def damage(data: bytes, how: str) -> bytes:
    head = len(data) - len(_second_frame(data))

    def flip(position: int) -> bytes:
        return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

    return {
        "empty": b"",
        "cut in header": data[:5],
        "cut in head": data[: head // 2],
        "head alone": data[:head],
        "cut in body": data[:-5],
        "bit in magic": flip(0),
        "bit in length": flip(5),
        "bit in head": flip(head // 2),
        "bit in checksum": flip(head - 1),
        "bit in body": flip(len(data) - 10),
        "not ours": b"\x7fELF" * 1000,
        "zeros": bytes(len(data)),
    }[how]


def _second_frame(data: bytes) -> bytes:
    first = zstandard.ZstdDecompressor().decompressobj()
    first.decompress(data)
    return first.unused_data


@pytest.mark.parametrize("with_map", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "cut in header",
        "cut in head",
        "head alone",
        "cut in body",
        "bit in magic",
        "bit in length",
        "bit in head",
        "bit in checksum",
        "bit in body",
        "not ours",
        "zeros",
    ],
)
def test_damaged_entry_is_made_again(
    library: Path, cache: MapCache, folder: Path, how: str, with_map: bool
) -> None:
    request = MapRequest(scope=Scope(), with_map=with_map)
    fresh = one(library, request, cache)
    sound = entry(folder).read_bytes()
    entry(folder).write_bytes(damage(sound, how))
    assert same(one(library, request, cache), fresh)
    with_whole_map = one(library, ALL, cache)
    assert same(with_whole_map, one(library, ALL, None))
    assert same(one(library, ALL, cache), with_whole_map)
    assert entry(folder).read_bytes() == sound


def test_changed_library_of_same_size_and_time(library: Path, cache: MapCache) -> None:
    before = library.stat()
    one(library, ALL, cache)
    # Timestamps of files tick every few milliseconds.
    time.sleep(0.05)
    first_arch = 8336 + 0x1C
    with library.open("r+b") as file:
        file.seek(first_arch)
        file.write((70).to_bytes(4, "little"))
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = library.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    found = one(library, ALL, cache)
    assert not found.cached
    assert found.library_map is not None
    assert str(next(found.library_map.iter_code()).arch) == "sm_70"


def test_renamed_library_gets_its_own_path(library: Path, cache: MapCache, tmp_path: Path) -> None:
    one(library, ALL, cache)
    other = tmp_path / "other.so"
    other.hardlink_to(library)
    found = one(other, ALL, cache)
    assert found.library_map is not None
    assert found.summary is not None
    assert found.library_map.library.path == found.summary.path == str(other)


class TestKey:
    @staticmethod
    def key(path: Path, cache: MapCache) -> str:
        with ByteSource(path) as source:
            # So that only content can make the difference.
            source.state = replace(source.state, mtime_ns=0, ctime_ns=0, inode=0)
            return cache.key(source, read_host_elf(source).build_id)

    def test_build_id_stands_for_the_content(self, library: Path, cache: MapCache) -> None:
        first = self.key(library, cache)
        assert first == self.key(library, cache)
        with library.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        assert self.key(library, cache) == first

    def test_without_build_id_all_bytes_count(self, library: Path, cache: MapCache) -> None:
        without_build_id(library)
        assert read_library(library, Scope()).library.build_id is None
        first = self.key(library, cache)
        assert first == self.key(library, cache)
        with library.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        assert self.key(library, cache) != first

    def test_newer_reader_finds_no_old_entries(
        self, library: Path, cache: MapCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = self.key(library, cache)
        monkeypatch.setattr("pytest_negativa.gpucode.cache._READER_VERSION", 1000)
        assert self.key(library, cache) != before


class TestLimit:
    @staticmethod
    def save(cache: MapCache, key: str) -> None:
        library_map = read_library(MULTIARCH, Scope())
        cache.save(key, library_map, summarize(library_map))
        # The order of use is the order of modification times, which tick.
        time.sleep(0.02)

    def test_used_longest_ago_goes_first(self, folder: Path) -> None:
        self.save(MapCache(folder, LIMIT), "a")
        size = entry(folder).stat().st_size
        cache = MapCache(folder, 5 * size // 2)
        self.save(cache, "b")
        assert cache.load_map("a", Scope()) is not None
        time.sleep(0.02)
        self.save(cache, "c")
        cache.keep_limit()
        assert sorted(p.name[:2] for p in folder.iterdir()) == ["a.", "c."]

    def test_what_alone_is_too_large_is_not_kept(self, folder: Path) -> None:
        self.save(cache := MapCache(folder, 10), "a")
        cache.keep_limit()
        assert list(folder.iterdir()) == []

    def test_other_files_are_left_alone(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "README").write_bytes(bytes(100))
        self.save(cache := MapCache(folder, 10), "a")
        cache.keep_limit()
        assert [p.name for p in folder.iterdir()] == ["README"]


LOOP = """
import random
import sys
from pathlib import Path
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.models.library import Scope
from msgspec.structs import replace

folder, limit, *libraries = sys.argv[1:]
request = MapRequest(scope=Scope(), with_map=True)
cache = MapCache(Path(folder), int(limit))
paths = list(map(Path, libraries))
expected = {m.path: m.library_map for m in map_libraries(paths, request, None)}
hits = 0
for _ in range(25):
    # In one order for ever, what is needed next would always be what was dropped last.
    random.shuffle(paths)
    for mapped in map_libraries(paths, request, cache):
        assert mapped.error is None
        assert mapped.library_map == expected[mapped.path]
        hits += mapped.cached
    cache.keep_limit()
print(hits)
"""


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path: Path, folder: Path) -> None:
    names = ("libmultiarch.so", "libcallgraph.so", "libframes.so")
    libraries = [make_large(BIN / name, tmp_path / name) for name in names]
    # Room for two of the three: each process drops what the other one wrote.
    for library in libraries:
        one(library, ALL, MapCache(tmp_path / "sizes", LIMIT))
    limit = sum(sorted(p.stat().st_size for p in (tmp_path / "sizes").iterdir())[-2:])
    command = [sys.executable, "-c", LOOP, str(folder), str(limit), *map(str, libraries)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert int(out) > 0
    left = list(folder.iterdir())
    assert sum(p.stat().st_size for p in left) <= limit
    assert all(p.suffix == ".map" for p in left)


class TestFolder:
    def test_cannot_be_made(self, library: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        cache = MapCache(tmp_path / "file" / "cache", LIMIT)
        assert same(one(library, ALL, cache), one(library, ALL, None))

    def test_read_only_still_serves(
        self, library: Path, cache: MapCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one(library, ALL, cache)

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "utime", refuse)
        assert one(library, ALL, cache).cached

    def test_entry_is_a_folder(self, library: Path, cache: MapCache, folder: Path) -> None:
        one(library, ALL, cache)
        path = entry(folder)
        path.unlink()
        path.mkdir()
        assert same(one(library, ALL, cache), one(library, ALL, None))


def test_what_killed_writers_left_is_dropped_as_entries_are(folder: Path) -> None:
    folder.mkdir()
    old, new = folder / ".old.tmp", folder / ".new.tmp"
    for path in (old, new):
        path.write_bytes(b"half a map")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)

    MapCache(folder, 15).keep_limit()

    assert not old.exists()
    assert new.exists()
