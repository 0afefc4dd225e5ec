"""Trace files: records to lines as they come, and lines back to records."""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path

import msgspec

from pytest_negativa.errors import StoreError
from pytest_negativa.models.trace import (
    TRACE_VERSION,
    AnyTraceRecord,
    EndRecord,
    Header,
    ProcessTrace,
)
from pytest_negativa.storage.system import Host

SUFFIX = ".jsonl"

_decode = msgspec.json.Decoder(AnyTraceRecord).decode


def trace_file_name(run_id: str, pid: int) -> str:
    """A name no other process uses, not even a later one with the same pid."""
    return f"{run_id}.{pid}.{os.urandom(4).hex()}{SUFFIX}"


class LineWriter:
    """Appends records to a new file, each a line of JSON in a single ``write``.

    ``O_APPEND`` and one write a line: threads don't mix lines, and what was written is in
    the kernel's hands, so that SIGKILL takes nothing back. No lock: a callback may come while
    another one of the same thread runs (garbage collection may unload a module).

    Raises:
        StoreError: the file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = Host.open(
                str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except OSError as e:
            raise StoreError(f"{path}: cannot be created: {e.strerror}") from e
        self._write = partial(Host.write, self._fd)
        self._encode = msgspec.json.Encoder().encode
        # A forked child inherits the handle; what it does is not this process's doing.
        this = weakref.ref(self)

        def forked() -> None:
            writer = this()
            if writer is not None:
                writer.abandon()

        os.register_at_fork(after_in_child=forked)

    def write(self, record: msgspec.Struct) -> None:
        """Append a record. Never raises, for callers are callbacks: see ``failure``."""
        line = self._encode(record) + b"\n"
        try:
            written = self._write(line)
        except OSError as e:
            self.failure = self.failure or f"{self.path}: cannot be written: {e.strerror}"
            return
        if written != len(line):
            self.failure = self.failure or f"{self.path}: cannot be written: disk full?"

    def abandon(self) -> None:
        """Close this process's handle; in a forked child, which must not write here."""
        if self._fd >= 0:
            Host.close(self._fd)
        # Whatever still comes fails with EBADF instead of landing in another file.
        self._fd = -1
        self._write = partial(Host.write, -1)

    close = abandon


class TraceWriter(LineWriter):
    """Writes the trace file of a process.

    Raises:
        StoreError: the file can't be created.
    """

    def __init__(self, path: Path, header: Header) -> None:
        super().__init__(path)
        self.header = header
        self.write(header)

    def write(self, record: msgspec.Struct) -> None:
        """Append a record; never raises.

        A trace that lost a line gets no end either, and so doesn't count as complete.
        """
        if self.failure is None or not isinstance(record, EndRecord):
            super().write(record)


def read_trace(path: str | os.PathLike[str]) -> ProcessTrace:
    """Read a trace file. Damage is no error: ``problems`` tells what was lost.

    Raises:
        StoreError: the file can't be opened or read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise StoreError(f"{os.fspath(path)}: cannot be read: {e.strerror}") from e
    lines = data.split(b"\n")
    torn = bool(lines.pop())
    if not lines:
        problem = "empty: the process was killed before it could say anything"
        return _unreadable(path, problem, torn)
    version = _version(lines[0])
    if version is not None and version != TRACE_VERSION:
        problem = (
            f"trace of format version {version}, this pytest-negativa reads {TRACE_VERSION}; "
            "record it again"
        )
        return _unreadable(path, problem, torn)
    records: list[AnyTraceRecord] = []
    problems: list[str] = []
    header: Header | None = None
    for number, line in enumerate(lines, 1):
        try:
            record = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            problems.append(f"line {number}: {e}")
            continue
        if not isinstance(record, Header):
            records.append(record)
        elif number == 1:
            header = record
        else:
            problems.append(f"line {number}: a second header; are two traces in one file?")
    if header is None and not problems:
        problems.append("line 1: no header")
    return ProcessTrace(
        path=os.fspath(path),
        header=header,
        records=tuple(records),
        torn=torn,
        problems=tuple(problems),
    )


def _unreadable(path: str | os.PathLike[str], problem: str, torn: bool) -> ProcessTrace:
    return ProcessTrace(
        path=os.fspath(path), header=None, records=(), torn=torn, problems=(problem,)
    )


class _Versioned(msgspec.Struct):
    format_version: int


def _version(line: bytes) -> int | None:
    """The format version alone: the rest of another version's header may look any way."""
    try:
        return msgspec.json.decode(line, type=_Versioned).format_version
    except msgspec.DecodeError:
        return None
