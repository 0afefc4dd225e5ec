"""Pages of CPU code that the processes of a run touched: the record ``cpu.json``."""

from __future__ import annotations

from typing import NamedTuple

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.spans import Span, minus, union


class FileKey(NamedTuple):
    """A file as it was when a process loaded it; ``path`` is empty if it was not found."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, state: FileState) -> FileKey:
        """The key of a file in a state."""
        return cls(path, state.device, state.inode, state.size, state.mtime_ns)


class HostFile(Record, frozen=True, kw_only=True):
    """The content of a file that was loaded, as long as it could be read.

    Attributes:
        file: as it was loaded.
        sha256: of its bytes.
        build_id: hex of the GNU build id, if it has one.
        segments: address, file offset and size in the file of each loaded segment.
        original: of a copy whose GPU code alone differs: the path of the original, whose content
            ``sha256`` and ``build_id`` are; else None.
    """

    file: FileKey
    sha256: str
    build_id: str | None
    segments: tuple[tuple[int, int, int], ...]
    original: str | None = None


class HostFiles(Versioned, Record, frozen=True, kw_only=True):
    """The file ``cpu/files.json``: what logs of touched pages refer to.

    Attributes:
        processor: model of the CPU on which code was traced. Libraries choose code by its features.
        files: those that processes loaded.
    """

    processor: str
    files: tuple[HostFile, ...] = ()


class HostLibrary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The code of one library, known by its content. Spans are file offsets. Pages have 4 KiB.

    Attributes:
        sha256: of the file.
        size: of the file in bytes.
        build_id: hex of the GNU build id, if it has one.
        paths: real paths where it was loaded from.
        watched: what was traced: whole pages of code and of unwind tables.
        touched: the touched pages of it.
        unwatched: why it could not be traced, so that all of it counts as touched; else None.
        unread: pages of data that no process had in memory at its end; none, if a process
            ended without noting them.
    """

    sha256: str
    size: NonNegative
    build_id: str | None
    paths: tuple[str, ...]
    watched: tuple[Span, ...]
    touched: tuple[Span, ...]
    unwatched: str | None = None
    unread: tuple[Span, ...] = ()

    @property
    def untouched(self) -> tuple[Span, ...]:
        """The spans that were watched and not touched."""
        return tuple(minus(self.watched, self.touched))

    @property
    def unused(self) -> tuple[Span, ...]:
        """The pages that may leave: untouched code and unread data; none if it was not watched."""
        return union((*self.untouched, *self.unread)) if self.unwatched is None else ()


class HostUsage(Versioned, Record, frozen=True, kw_only=True):
    """CPU code that the processes of one or several runs touched.

    A library that is not listed was not traced. The main programs, libc and the dynamic loader
    never are.

    Attributes:
        processors: models of the CPUs on which they ran, sorted.
        processes: by run, sorted: how many processes were traced.
        libraries: sorted by their first path.
        incomplete: why processes may have touched more than is known; all code counts as used.
        failed: runs in which tests failed, though all ended; these tests may need more code.
        chosen: runs of a choice of tests; other tests may need more code.
    """

    processors: tuple[str, ...]
    processes: dict[str, int]
    libraries: tuple[HostLibrary, ...]
    incomplete: tuple[str, ...]
    failed: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()


class HostRow(Record, frozen=True, kw_only=True):
    """One library in a report. Sizes in bytes.

    Attributes:
        path: one of its paths.
        size: of the file.
        watched, touched: code and unwind tables in whole pages, and the touched pages of it.
        functions: how many functions its unwind tables name; None if they are not known.
        touched_functions: how many of them lie on touched pages: at most so many were called.
        unwatched: why it was not traced; None if it was.
    """

    path: str
    size: int
    watched: int
    touched: int
    functions: int | None
    touched_functions: int | None
    unwatched: str | None


class HostReport(Versioned, Record, frozen=True, kw_only=True):
    """CPU code that a run touched: for people and for ``negativa pages --json``.

    Attributes:
        run_ids: the runs.
        processors: models of the CPUs on which they ran.
        processes: how many processes were traced.
        libraries: the most untouched bytes first.
        incomplete: why more may have been touched.
        failed, chosen: see ``HostUsage``.
    """

    run_ids: tuple[str, ...]
    processors: tuple[str, ...]
    processes: int
    libraries: tuple[HostRow, ...]
    incomplete: tuple[str, ...]
    failed: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
