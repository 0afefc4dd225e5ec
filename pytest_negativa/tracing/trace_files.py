"""Trace files: records to lines as they come, and back; torn, damaged and growing files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.trace import (
    AnyTraceRecord,
    EndRecord,
    Header,
    Role,
)
from pytest_negativa.storage.jsonl import LineWriter, is_torn
from pytest_negativa.storage.runs import holds_samples
from pytest_negativa.storage.system import System, open_regular

_LOST = b"true }"
"""Overwrites the end of a header, which is ``false}``."""

_MOST_PROBLEMS = 100

decode_record = msgspec.json.Decoder(AnyTraceRecord).decode
"""A record from its line."""


class TraceWriter(LineWriter):
    """Writes the trace file of a process.

    Raises:
        StoreError: the file can't be created.
    """

    def __init__(self, path: Path, header: Header) -> None:
        super().__init__(path)
        # As long as this process lives, and no longer.
        self.header = replace(header, locked=_lock(self._fd, fcntl.LOCK_EX), lost=False)
        self._lost_at = len(self._encode(self.header)) - len(_LOST)
        self.write(self.header)

    def fail(self, problem: str) -> None:
        """Write nothing more, no end either, and mark the header."""
        with contextlib.suppress(OSError):
            fd = self._fd if self.is_open() else System.open(str(self.path), os.O_WRONLY)
            # pwrite(2), bugs: with O_APPEND it appends.
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            try:
                os.pwrite(fd, _LOST, self._lost_at)
            except OSError:
                # An empty file tells the same, and making it needs no space.
                os.ftruncate(fd, 0)
            if fd != self._fd:
                System.close(fd)
        super().fail(problem)


class TraceReader:
    """Reads a trace file record by record. Damage is no error: ``problems`` tells what was lost.

    Attributes:
        path: the file.
        header: None if the first line can't be read; nothing else is read then if the file has
            another format. Of a sample if the folder holds samples.
        is_running: the process held its lock before the file was read.
        torn: the last line was cut off, as if a process is killed in its write.
        problems: lines that could not be read; what they said is lost. This and ``torn`` are
            complete when all records were read.
        records: all of them, if ``read_trace`` read the file.

    Raises:
        StoreError: the file can't be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.torn = False
        self.records: tuple[AnyTraceRecord, ...] = ()
        self.problems: list[str] = []
        self.header: Header | None = None
        with refusing(self.path, "read"), open_regular(path) as file:
            # Before reading: what a process that is gone had written is all there.
            self.is_running = not _lock(file.fileno(), fcntl.LOCK_SH)
            first = file.readline()
        self._is_ours = self._read_header(first)

    def __iter__(self) -> Iterator[AnyTraceRecord]:
        """The records after the header; to be called once."""
        if not self._is_ours:
            return
        try:
            with open_regular(self.path) as file:
                for number, line in enumerate(file, 1):
                    if is_torn(line):
                        self.torn = True
                    elif number > 1 and (record := self._decode(number, line)) is not None:
                        yield record
        except OSError as e:
            self.problems.append(f"cannot be read any further: {e.strerror}")

    def _read_header(self, line: bytes) -> bool:
        """Read the first line; whether the others can be read."""
        if is_torn(line):
            self.torn = bool(line)
            self.problems.append("empty: the process was killed before it could say anything")
            return False
        try:
            record = decode_record(line)
        except msgspec.ValidationError as e:
            self.problems.append(f"line 1: not a header of this release: {e}; record it again")
            return False
        except UNDECODABLE as e:
            self.problems.append(f"line 1: {e}")
            return True
        if isinstance(record, Header):
            is_sample = holds_samples(Path(self.path).parent)
            self.header = replace(record, role=Role.SAMPLE) if is_sample else record
        else:
            self.problems.append("line 1: no header")
        return True

    def _decode(self, number: int, line: bytes) -> AnyTraceRecord | None:
        try:
            record: AnyTraceRecord = decode_record(line)
            if not isinstance(record, Header):
                return record
            problem = "a second header; are two traces in one file?"
        except UNDECODABLE as e:
            problem = str(e)
        # A hostile file has as many as it likes, and one is enough to keep all code.
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"line {number}: {problem}")
        return None


def read_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Read a trace file as a whole, see ``TraceReader``.

    Raises:
        StoreError: the file can't be opened or read.
    """
    reader = TraceReader(path)
    reader.records = tuple(reader)
    return reader


def end_former_program(paths: Iterable[Path]) -> None:
    """End the trace of the program that this process was before ``execv`` replaced it.

    Every record is written before the driver's call returns, so nothing is lost. ``execv`` closes
    the file and keeps the process id.

    Raises:
        StoreError: a trace can't be read.
        OSError: a trace can't be written.
    """
    end = msgspec.json.encode(EndRecord(time_ns=System.time_ns())) + b"\n"
    for path in paths:
        trace = read_trace(path)
        own = trace.header is not None and trace.header.pid == os.getpid()
        if (
            own
            and not trace.is_running
            and not any(isinstance(r, EndRecord) for r in trace.records)
        ):
            with path.open("ab") as file:
                file.write(end)


def require_ended(paths: Iterable[Path]) -> None:
    """Refuse to copy traces that still grow: nothing would tell it by the copies.

    Raises:
        StoreError: a process is still running.
        OSError: a trace can't be opened.
    """
    for path in paths:
        with open_regular(path) as file:
            if not _lock(file.fileno(), fcntl.LOCK_SH):
                raise StoreError(f"{path}: its process is still running; wait for its end")


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
