"""The detector without a GPU: replays a recorded trace; tests and libraries that differ.

Nothing is traced. The detector writes all records of the recording into a trace of this process,
whatever tests run. A recording has only the first use of each kernel, so a part of it would miss
kernels that earlier tests had used. The recording's contexts are compared with this session's tests
by node id, and its libraries are searched on this machine.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import (
    AnyTraceRecord,
    Context,
    ContextRecord,
    DeviceRecord,
    EndRecord,
    Header,
    ImageRecord,
    LaunchRecord,
    LibraryRecord,
    Replay,
    Role,
    TracedLibrary,
    WarningRecord,
)
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.results import load_digests
from pytest_negativa.storage.runs import TRACE_SUFFIX, find_traces
from pytest_negativa.storage.system import System
from pytest_negativa.tracing.detector import TraceError
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.tracing.trace_files import TraceReader, TraceWriter, read_trace

_MAX_NAMED = 5
# More than a trace has.
_IDS = 1 << 32


class Recording:
    """The readable traces of a folder.

    Args:
        folder: of the traces.
        paths: rules for the paths of their libraries.

    Raises:
        TraceError: the folder holds no trace, or none that can be read.
        StoreError: its file of digests can't be read.
    """

    def __init__(self, folder: Path, paths: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.paths = PathRules(paths or {})
        found = tuple(map(read_trace, find_traces(folder)))
        self.traces = tuple(t for t in found if t.header is not None)
        self.digests = load_digests(folder)
        self.unreadable = tuple(
            f"{t.path}: {problem}" for t in found if t.header is None for problem in t.problems
        )
        if not found:
            raise TraceError(
                f"{folder}: no recorded trace to replay, expected *{TRACE_SUFFIX} files"
            )
        if not self.traces:
            raise TraceError(f"no recorded trace can be replayed: {'; '.join(self.unreadable)}")

    @functools.cached_property
    def tests(self) -> frozenset[str]:
        """The node ids that something was recorded in."""
        return frozenset(
            record.context.nodeid
            for record in self._records()
            if isinstance(record, ContextRecord) and record.context.nodeid is not None
        )

    @property
    def level(self) -> TraceLevel:
        """The level of the recording, by what it has of each kernel."""
        launches = [record for record in self._records() if isinstance(record, LaunchRecord)]
        if any(launch.ranges for launch in launches):
            return TraceLevel.RANGE
        return TraceLevel.LAUNCH if launches else TraceLevel.LOOKUP

    def _records(self) -> Iterator[AnyTraceRecord]:
        return (record for trace in self.traces for record in trace.records)

    @property
    def replay(self) -> Replay:
        """Device and time of the recording."""
        names = {
            f"{record.device.name} (compute capability {record.device.compute_capability})"
            for record in self._records()
            if isinstance(record, DeviceRecord)
        }
        return Replay(
            device=", ".join(sorted(names)) or "an unknown device",
            recorded_ns=min(trace.header.start_ns for trace in self.traces if trace.header),
        )


class ReplayDetector:
    """Writes a recording again. See ``Detector``."""

    def __init__(self, writer: TraceWriter, recording: Recording) -> None:
        self._writer = writer
        self._recording = recording
        self._tests_here: set[str] = set()
        # Libraries that GPU code was loaded from: (path of the trace, id).
        self._used: set[tuple[str, int | None]] = set()
        self._stopped = False

    def start(self) -> None:
        self._used = {
            (trace.path, record.library)
            for trace in self._recording.traces
            for record in trace.records
            if isinstance(record, ImageRecord)
        }
        for number, trace in enumerate(self._recording.traces):
            self._write(trace, number * _IDS)
        for problem in self._recording.unreadable:
            self.warn("trace-unreadable", problem, incomplete=True)

    def _write(self, trace: TraceReader, first_id: int) -> None:
        """Write a trace's records with ids of their own, from ``first_id``."""
        assert trace.header is not None
        for record in trace.records:
            if isinstance(record, EndRecord):
                continue
            moved = _move_ids(record, first_id)
            if isinstance(record, LibraryRecord) and isinstance(moved, LibraryRecord):
                library = self._recording.digests.get(record.library, record.library)
                here = replace(library, path=self._recording.paths.apply(library.path))
                root = self._recording.paths.apply(trace.header.root)
                found = relocate(here, root, self._writer.header.root, sys.path)
                if found is None and (trace.path, record.id) not in self._used:
                    # The other machine's C library and the like: no GPU code was loaded from it.
                    continue
                if found is None:
                    self.warn(
                        "library-not-here",
                        f"{record.library.path}: the recorded library isn't on this machine; what "
                        "was used of it can't be located",
                    )
                moved = replace(moved, library=found or record.library)
            self._writer.write(moved)
        for problem in _lost_parts(trace, trace.header):
            self.warn("trace-damaged", f"{trace.path}: {problem}", incomplete=True)

    def set_context(self, context: Context) -> None:
        if context.nodeid is not None:
            self._tests_here.add(context.nodeid)

    def drain(self) -> None:
        pass

    def pause(self, reason: str) -> None:
        pass

    def resume(self) -> None:
        pass

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        self._writer.write(WarningRecord(code=code, text=text, incomplete=incomplete))

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        absent = sorted(self._recording.tests - self._tests_here)
        # A worker runs a part of the tests by design; its controller hears of all of them.
        if absent and self._writer.header.role is not Role.WORKER:
            named = ", ".join(absent[:_MAX_NAMED]) + (", ..." if len(absent) > _MAX_NAMED else "")
            tests = "1 recorded test" if len(absent) == 1 else f"{len(absent)} recorded tests"
            self.warn("replay-partial", f"{tests} did not run here: {named}")
        self._writer.write(EndRecord(time_ns=System.time_ns()))
        self._writer.close()


def _lost_parts(trace: TraceReader, header: Header) -> Iterator[str]:
    """Parts that a recording lacks.

    A test may kill a process that it started. Any other process ends its trace, so without an
    end there was more of it.
    """
    yield from trace.problems
    if header.role is Role.SAMPLE:
        yield "the recording is a sample of a process outside of tests; combine it with a run"
    if header.lost:
        yield "the recording lacks a record that could not be written"
    if trace.torn:
        yield "the last line is torn: the end of the recording is lost"
    elif header.role.runs_tests and not any(
        isinstance(record, EndRecord) for record in trace.records
    ):
        yield "the recording has no end: it was interrupted, or its last lines are lost"


def _move_ids(record: AnyTraceRecord, first: int) -> AnyTraceRecord:
    """The record with its ids moved up by ``first``."""
    ids = {
        name: value + first
        for name in ("id", "context", "image", "library")
        if isinstance(value := getattr(record, name, None), int)
    }
    return replace(record, **ids)


def relocate(
    library: TracedLibrary, old_root: str, new_root: str, packages: Sequence[str]
) -> TracedLibrary | None:
    """This machine's copy of a library that another machine traced.

    Looked for below the project's root, then as a file of an installed package, then at its
    old path. A file may be that library if its size and build id are the same. Without a build id
    it must have a digest, which is compared when the file is planned.
    """
    if library.size is None or library.build_id is library.sha256 is None:
        return None
    candidates = []
    if library.path.startswith(old_root.rstrip("/") + "/"):
        candidates.append(os.path.join(new_root, library.path[len(old_root.rstrip("/")) + 1 :]))
    if library.package_path is not None:
        candidates += [os.path.join(folder, library.package_path) for folder in packages if folder]
    candidates.append(library.path)
    for candidate in candidates:
        found = identify_library(os.path.realpath(candidate))
        if (found.size, found.build_id) == (library.size, library.build_id):
            return replace(found, sha256=library.sha256 or found.sha256)
    return None
