"""Trace files: records to lines as they come, and lines back to records."""

from __future__ import annotations

import os
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
from pytest_negativa.storage.jsonl import LineWriter
from pytest_negativa.storage.system import read_regular

_decode = msgspec.json.Decoder(AnyTraceRecord).decode


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
        data = read_regular(path)
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
