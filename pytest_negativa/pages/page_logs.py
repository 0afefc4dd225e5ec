"""Logs of ``pages/watch.c``: their format, lost libraries, misses.

A log is a file of chunks of 64 KiB, or of more where a record needs more. Records follow each
other; a size of 0 means that the next record starts with the next chunk. All numbers are little
endian::

    u32 size          of the record, a multiple of 8
    u32 kind          1: the process, 2: a library, 4: holes of a library with a spare, 5: GPU code
                      of a library, 6: constants of a library
    u32 flags         1: it can't be watched; of constants: how many processes have the library and
                      did not note their pages
    u32 major, minor  of the device
    u32 ranges
    u64 inode         of a process: its id
    u64 file size
    i64 time          of the file's modification, or of the process's start, ns since 1970
    u32 path length, offset of the bits in the record
    (u64 start, end)  for each range: addresses in the ELF file, whole pages
    path
    bits              one for each page, set: the process touched it

The record of holes is about the original of the library: its size, and offsets in it for addresses.
The library's name has the place of the path, with the original's SHA-256 behind it. Behind the
bits, at the next multiple of 8, each page has a u16: bits 0-11 where in the page the first touch
was, 12: it was an instruction fetch, 15: the page did not come back beside another one.

The record of GPU code is that of a library, but for its ranges: they are offsets in the file.

The record of constants is like that of its library. It has the bits of the pages that were in
memory when processes ended.

A forked child shares the records of its parent, and has a log of its own for what it loads.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError, no_such_file, refusing
from pytest_negativa.models.pages import FileKey
from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.models.spans import size as size_of
from pytest_negativa.pages.misses import Miss, Misses
from pytest_negativa.storage.runs import LOST_NAME, PAGES_SUFFIX, files_in
from pytest_negativa.storage.system import read_regular

_CHUNK = 64 << 10
_RECORD = struct.Struct("<6IQQq2I")
_RANGE = struct.Struct("<QQ")
_PROCESS, _LIBRARY, _HOLES, _GPU_CODE, _CONSTANTS = 1, 2, 4, 5, 6
_DIGEST = 32
_SEEN, _FETCHED = 1 << 15, 1 << 12
_UNWATCHED = 1
# Shared in pages/watch/log.h.
_STARTS = struct.Struct("<4xI" + 9 * "384s")
_SHELL_COMMAND = re.compile(rb"\S*sh -\w*c ")


@dataclass(frozen=True, slots=True)
class LoggedLibrary:
    """A library that a process loaded.

    Attributes:
        file: by its real path, and as ``stat`` has it.
        watched: whether touched pages were recorded; of constants, by all processes.
        ranges: first and end address, in the ELF file, of what was watched; offsets of GPU code.
        pages: addresses of the touched pages, sorted.
    """

    file: FileKey
    watched: bool
    ranges: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoggedProcess:
    """A process, and the libraries that it loaded.

    Attributes:
        misses: what came back to libraries with a spare, if only that was recorded.
        gpu_code: libraries with GPU code.
        constants: read-only data of the libraries.
    """

    pid: int
    executable: str
    started_ns: int
    libraries: tuple[LoggedLibrary, ...]
    misses: tuple[Misses, ...] = ()
    gpu_code: tuple[LoggedLibrary, ...] = ()
    constants: tuple[LoggedLibrary, ...] = ()


def count_lost(folder: Path) -> int:
    """Number of libraries that the processes could not record.

    Raises:
        StoreError: the file can't be read.
    """
    return int.from_bytes(_read(folder / LOST_NAME)[:4], "little")


def _read(path: Path) -> bytes:
    with refusing(path, "read"):
        return read_regular(path, follow=False)


def unwatched_programs(folder: Path) -> Iterator[str]:
    """Command lines of programs that processes started without the environment of the trace.

    Only of programs that loaded libraries where they were watched, by name: ldconfig, which
    ``ctypes.util`` starts so, loads none. Of a shell's commands, nobody knows. Path and words are
    cut off at 383 bytes. The last item counts the programs that the file had no room for.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a file can't be read.
    """
    data = _read(folder / LOST_NAME)
    count, *starts = _STARTS.unpack_from(data) if len(data) >= _STARTS.size else (0,)
    logs = read_page_logs(folder) if count else ()
    watched = {_name(os.fsencode(one.executable)) for one in logs if one.libraries}
    for start in starts[:count]:
        program, _, command = start.partition(b"\0")[0].partition(b"\n")
        is_shell = _SHELL_COMMAND.match(command) is not None
        if is_shell or not watched.isdisjoint(map(_name, (program, *_shebang(program)))):
            yield command.decode("utf-8", "backslashreplace")
    if count > len(starts):
        yield f"{count - len(starts):,} other programs"


def _name(program: bytes) -> bytes:
    """The name of a program without its folder and version: ``python``."""
    return program.rpartition(b"/")[2].rstrip(b".0123456789")


def _shebang(program: bytes) -> list[bytes]:
    """The words in the first line of a script, such as env and Python (execve(2))."""
    path = os.fsdecode(program)
    with contextlib.suppress(OSError), Path(shutil.which(path) or path).open("rb") as file:
        if (line := file.readline(256)).startswith(b"#!"):
            return line[2:].split()
    return []


def read_page_logs(folder: Path) -> tuple[LoggedProcess, ...]:
    """Read the logs of all processes, in the order of their names.

    Raises:
        NegativaError: a log is damaged.
        StoreError: a log can't be read.
    """
    found = map(_read_log, files_in(folder, PAGES_SUFFIX))
    return tuple(process for process in found if process is not None)


def read_misses(paths: Iterable[Path]) -> list[Misses]:
    """Pages that came back to libraries with a spare, added up by the content of the original.

    Args:
        paths: logs, and folders of logs.

    Raises:
        NegativaError: a log is damaged, or is empty.
        OptionError: there is no such file or folder.
        StoreError: a log can't be read.
    """
    found: dict[bytes, Misses] = {}
    for path in paths:
        if not path.exists():
            raise no_such_file(path, "see negativa misses --attach-env")
        for log in files_in(path, PAGES_SUFFIX) if path.is_dir() else [path]:
            if (process := _read_log(log)) is None:
                raise NegativaError(
                    f"{log}: has no record: its process was killed when it began, or somebody "
                    "truncated the file; delete it"
                )
            for misses in process.misses:
                before = found.get(misses.original)
                found[misses.original] = before + misses if before else misses
    return sorted(found.values(), key=lambda misses: (misses.name, misses.original))


def _read_log(path: Path) -> LoggedProcess | None:
    """The process of a log; None if it was killed before its first record."""
    data = _read(path)
    with contextlib.suppress(ValueError, struct.error):
        return _parse(data)
    raise NegativaError(f"{path}: not a log of touched pages, or a damaged one")


def _parse(data: bytes) -> LoggedProcess | None:
    process: LoggedProcess | None = None
    libraries: defaultdict[int, list[LoggedLibrary]] = defaultdict(list)
    misses: list[Misses] = []
    if len(data) % _CHUNK:
        raise ValueError("a part of a chunk: somebody truncated it")
    for at in _iter_records(data):
        record_size, kind, flags, major, minor, count, inode, size, time_ns, length, bits = (
            _RECORD.unpack_from(data, at)
        )
        ranges_at = at + _RECORD.size
        path_at = ranges_at + count * _RANGE.size
        path = data[path_at : path_at + length].decode("utf-8", "surrogateescape")
        if kind == _PROCESS:
            process = LoggedProcess(inode, path, time_ns, ())
        elif kind in (_LIBRARY, _GPU_CODE, _CONSTANTS):
            ranges = _parse_ranges(data, ranges_at, count)
            if bits * 8 + size_of(ranges) // PAGE_SIZE > record_size * 8:
                raise ValueError("the record can't hold the bits of its ranges")
            libraries[kind].append(
                LoggedLibrary(
                    file=FileKey(path, os.makedev(major, minor), inode, size, time_ns),
                    watched=flags == 0 if kind == _CONSTANTS else not flags & _UNWATCHED,
                    ranges=ranges,
                    pages=tuple(_iter_pages(ranges, data[at + bits : at + record_size])),
                )
            )
        elif kind == _HOLES:
            ranges = _parse_ranges(data, ranges_at, count)
            original = data[path_at + length : path_at + length + _DIGEST]
            pages_of_holes = _parse_holes(ranges, data[at + bits : at + record_size])
            missed = dict(sorted(pages_of_holes))
            misses.append(Misses(path, original, size, missed, bool(flags & _UNWATCHED)))
        else:
            raise ValueError(f"a record of kind {kind}")
    if process is None:
        if libraries or misses:
            raise ValueError("no record of the process")
        return None
    return dataclasses.replace(
        process,
        libraries=tuple(libraries[_LIBRARY]),
        misses=tuple(misses),
        gpu_code=tuple(libraries[_GPU_CODE]),
        constants=tuple(libraries[_CONSTANTS]),
    )


def _parse_ranges(data: bytes, at: int, count: int) -> tuple[tuple[int, int], ...]:
    ranges = tuple(_RANGE.unpack_from(data, at + i * _RANGE.size) for i in range(count))
    if any(start % PAGE_SIZE or end % PAGE_SIZE or start > end for start, end in ranges):
        raise ValueError("a range has no whole pages")
    return ranges


def _parse_holes(ranges: Sequence[tuple[int, int]], data: bytes) -> Iterator[tuple[int, Miss]]:
    """The pages that came back, by their number."""
    count = size_of(ranges) // PAGE_SIZE
    words_at = -(-count // 64) * 8
    if words_at + 2 * count > len(data):
        raise ValueError("the record can't hold the pages of its holes")
    bits = int.from_bytes(data[: -(-count // 8)], "little")
    words = array.array("H", data[words_at : words_at + 2 * count])
    numbers = itertools.chain.from_iterable(
        range(s // PAGE_SIZE, e // PAGE_SIZE) for s, e in ranges
    )
    for page, word, bit in zip(numbers, words, f"{bits:0{count}b}"[::-1], strict=False):
        if bit == "1":
            first = page * PAGE_SIZE + (word & (PAGE_SIZE - 1))
            yield page, Miss(int(bool(word & _SEEN)), first, bool(word & _FETCHED))


def _iter_records(data: bytes) -> Iterator[int]:
    at = 0
    while at + _RECORD.size <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if size == 0:
            at = (at // _CHUNK + 1) * _CHUNK
        elif size < _RECORD.size or size % 8 or at + size > len(data):
            raise ValueError(f"a record of {size} bytes")
        else:
            yield at
            at += size


def _iter_pages(ranges: Sequence[tuple[int, int]], bits: bytes) -> Iterator[int]:
    pages = int.from_bytes(bits, "little")
    for start, end in ranges:
        count = (end - start) // PAGE_SIZE
        lowest_first = f"{pages & ((1 << count) - 1):b}"[::-1]
        pages >>= count
        for run in re.finditer("1+", lowest_first):
            yield from range(
                start + run.start() * PAGE_SIZE, start + run.end() * PAGE_SIZE, PAGE_SIZE
            )
