"""Merges traces into one ``Usage``: what a torn one may lack, 10 s for running processes."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pytest_negativa.errors import StoreError
from pytest_negativa.models.trace import (
    LAUNCHES_CUT,
    PROCESS_UNTRACED,
    UNENDED,
    AnyTraceRecord,
    Context,
    ContextRecord,
    DataKind,
    DataRecord,
    Device,
    DeviceRecord,
    EndRecord,
    EnumerationRecord,
    FirstUse,
    GapEndRecord,
    GapRecord,
    Header,
    ImageForm,
    ImageRecord,
    ImageUse,
    KernelRecord,
    LaunchRecord,
    LaunchRow,
    LibraryRecord,
    LibraryUsage,
    Phase,
    Refusal,
    RefusalRecord,
    Role,
    TracedLibrary,
    Usage,
    UsageProcess,
    UsageWarning,
    WarningRecord,
)
from pytest_negativa.storage.results import load_digests, save_digests
from pytest_negativa.storage.runs import Run, holds_samples
from pytest_negativa.tracing.libraries import hash_library
from pytest_negativa.tracing.trace_files import TraceReader

K = TypeVar("K")

STILL_RUNNING = "still-running"
"""Code of the lack that a traced child has not ended."""

PATIENCE = 10.0
"""Seconds to wait for children; many end when their parent does, which closes their pipes."""

_POLL = 0.2

# Lacks that concern the libraries that the process had mapped, all of which its trace lists when
# it ends. Any other lack (tracing could not begin, lines are lost) concerns every library.
_OF_LISTED_LIBRARIES = frozenset({"gap", "image-unknown", "name-unreadable"})

# Lacks by which a process was not traced, or not to its end. Of a sample that says nothing new.
_OF_TIME = PROCESS_UNTRACED | {"gap", "trace-lost"}


def merge_traces(
    paths: Iterable[str | os.PathLike[str]], *, running: Collection[int] = ()
) -> Usage:
    """Read trace files, and the digests of libraries that lie beside them, and merge them.

    A file that can't be read makes the usage incomplete. It is no error: the others still count.

    Args:
        running: ids of pytest processes that still run; their traces need no end.
    """
    merger = _Merger(running)
    files = tuple(map(Path, paths))
    for folder in dict.fromkeys(path.parent for path in files):
        try:
            merger.digests.update(load_digests(folder))
        except StoreError as e:
            merger.mark_incomplete("digests-unreadable", str(e), None)
    traces = []
    for path in files:
        try:
            traces.append(TraceReader(path))
        except StoreError as e:
            merger.mark_unreadable(path, e.beside(path))
    for trace in sorted(traces, key=_start):
        merger.add(trace)
    return merger.usage()


def merge_when_ended(
    find_traces: Callable[[], Iterable[Path]],
    *,
    seconds: float = PATIENCE,
    running: Collection[int] = (),
) -> Usage:
    """Merge traces once the traced children have ended, see ``merge_traces``.

    Args:
        find_traces: returns the files; called again after waiting.
        seconds: how long to wait; what still runs then is a lack.
    """
    deadline = time.monotonic() + seconds
    while True:
        usage = merge_traces(find_traces(), running=running)
        still_run = any(lack.code == STILL_RUNNING for lack in usage.incomplete)
        if not still_run or time.monotonic() > deadline:
            return usage
        time.sleep(_POLL)


def hash_libraries(
    run: Run, on_done: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the digests of the files that GPU code was loaded from, if they did not change since.

    Args:
        run: has traces.
        on_done: told of the bytes that were read, and of all.

    Raises:
        StoreError: the digests can't be written.
    """
    usage = merge_traces(run.trace_files())
    used = [library.library for library in usage.libraries if library.images]
    total = sum(library.size or 0 for library in used)
    hashed: list[TracedLibrary] = []
    with ThreadPoolExecutor() as pool:
        for library in pool.map(hash_library, used):
            hashed.append(library)
            on_done(sum(one.size or 0 for one in hashed), total)
    save_digests(run.trace_dir, hashed)


def _start(trace: TraceReader) -> tuple[bool, int, int, str]:
    """Orders traces the same on every machine, whatever folders they lie in."""
    header, name = trace.header, Path(trace.path).name
    return (True, 0, 0, name) if header is None else (False, header.start_ns, header.pid, name)


# Path and offset of an image; None, None for one that lies in no file.
_Place = tuple[str | None, int | None]

# When something was first seen: (time of the context's first event, process, place in the
# file, context id). Kernels carry no time of their own, the order of the lines is enough.
_When = tuple[int, int, int, int]


@dataclass(slots=True)
class _Image:
    """An image while its uses are collected; values are the first sighting of each.

    A fleet has thousands of processes, so ``processes`` is a bit for each.
    """

    forms: dict[ImageForm, _When] = field(default_factory=dict)
    calls: dict[str, _When] = field(default_factory=dict)
    kernels: dict[str, _When] = field(default_factory=dict)
    data: set[tuple[str, DataKind]] = field(default_factory=set)
    enumerations: dict[str, _When] = field(default_factory=dict)
    processes: int = 0
    prelinked: set[int] = field(default_factory=set)
    size: int = 0


@dataclass(slots=True)
class _Library:
    path: str
    images: defaultdict[int, _Image] = field(default_factory=lambda: defaultdict(_Image))
    processes: int = 0


class _Merger:
    """Takes traces in order, one at a time, and builds the usage."""

    def __init__(self, running: Collection[int]) -> None:
        self.digests: dict[TracedLibrary, TracedLibrary] = {}
        self._running = running
        self._run_ids: set[str] = set()
        self.devices: set[Device] = set()
        # Processes that loaded images, and those that named their devices.
        self.loading: set[int] = set()
        self.with_devices: set[int] = set()
        self._libraries: dict[TracedLibrary, _Library] = {}
        self.memory: defaultdict[str, _Image] = defaultdict(_Image)
        self._processes: list[UsageProcess] = []
        self._contexts: dict[Context, int] = {}
        # Count and nanoseconds by context and number of the ranges, by name.
        self._launches: defaultdict[str, dict[tuple[int, int], tuple[int, int | None]]]
        self._launches = defaultdict(dict)
        self._ranges: dict[tuple[str, ...], int] = {(): 0}
        self._refusals: dict[tuple[_Place, str, str | None], tuple[_When, int]] = {}
        self._warnings: list[UsageWarning] = []
        self._incomplete: list[UsageWarning] = []
        self._headers: list[Header] = []

    def add(self, trace: TraceReader) -> None:
        path, process = Path(trace.path), len(self._processes)
        if trace.header is None:
            for problem in trace.problems:
                self.mark_unreadable(path, problem)
            return
        self._run_ids.add(trace.header.run_id)
        self._headers.append(trace.header)
        self._processes.append(_TraceMerger(self, trace, process).merge(trace.header))
        for problem in trace.problems:
            self.mark_incomplete("trace-damaged", f"{path}: {problem}", process)
        self._check_end(trace, trace.header, process)

    def mark_unreadable(self, path: Path, problem: str) -> None:
        unreadable = UsageWarning(code="trace-unreadable", text=f"{path}: {problem}", process=None)
        # Such as of a process that found the disk full.
        is_sample = holds_samples(path.parent)
        (self._warnings if is_sample else self._incomplete).append(unreadable)

    def _check_end(self, trace: TraceReader, header: Header, process: int) -> None:
        """Mark a trace that may lack what its process used at last.

        Records are written before the driver's call returns. So a child that is gone, and whose
        writes all succeeded, lost nothing, however it died. A process that runs tests has an end,
        unless it was killed or its trace could not be written: tests are missing.
        """
        if header.lost:
            text = (
                "a record could not be written: is the disk full, or a quota reached? Or did a "
                "test close all descriptors?"
            )
            self.mark_incomplete("trace-lost", text, process)
        elif header.role is Role.CHILD and not self._processes[process].ended:
            if self._processes[process].counts_launches:
                text = "it was killed, or left without an end: its last launches are not counted"
                self._warnings.append(UsageWarning(code=LAUNCHES_CUT, text=text, process=process))
            if trace.is_running:
                self.mark_incomplete(STILL_RUNNING, "it is still running", process)
            elif not header.locked:
                text = "its trace has no end, and nothing tells whether it has ended"
                self.mark_incomplete("end-unknown", text, process)
        if header.role.runs_tests and not self._processes[process].ended:
            lacks = (
                ", but for its last launches" if self._processes[process].counts_launches else ""
            )
            text = f"it did not end by itself; what it had done until then is in the trace{lacks}"
            self.mark_incomplete(UNENDED, text, process)

    def still_runs(self, header: Header) -> bool:
        """Whether it is the trace of a process that runs; a child may have the same id.

        Ids repeat in other namespaces (pid_namespaces(7)), and after the last number.
        """
        return header.pid in self._running and header.role in (Role.SOLO, Role.CONTROLLER)

    def context(self, context: Context) -> int:
        return self._contexts.setdefault(context, len(self._contexts))

    def library(self, library: TracedLibrary, process: int) -> _Library:
        known = self.digests.get(library, library)
        found = self._libraries.setdefault(known, _Library(known.path))
        found.processes |= 1 << process
        return found

    def launches(self, record: LaunchRecord, context: int) -> None:
        key = (context, self._ranges.setdefault(record.ranges, len(self._ranges)))
        of_kernel = self._launches[record.name]
        count, gpu_ns = of_kernel.get(key, (0, 0))
        known = None if gpu_ns is None or record.gpu_ns is None else gpu_ns + record.gpu_ns
        of_kernel[key] = (count + record.count, known)

    def refuse(self, record: RefusalRecord, place: _Place, when: _When) -> None:
        key = (place, record.call, record.name)
        self._refusals[key] = min(self._refusals.get(key, (when, record.code)), (when, record.code))

    def warn(self, warning: WarningRecord, process: int) -> None:
        if warning.incomplete:
            self.mark_incomplete(warning.code, warning.text, process)
        else:
            self._warnings.append(
                UsageWarning(code=warning.code, text=warning.text, process=process)
            )

    def mark_incomplete(self, code: str, text: str, process: int | None) -> None:
        if process is not None and self._headers[process].role is Role.SAMPLE and code in _OF_TIME:
            self._warnings.append(UsageWarning(code=code, text=f"a sample: {text}", process=None))
            return
        self._incomplete.append(UsageWarning(code=code, text=text, process=process))

    def _scoped(self, lack: UsageWarning) -> UsageWarning:
        """The same lack; without its process if it concerns libraries that its trace lacks."""
        if lack.process is None:
            return lack
        process = self._processes[lack.process]
        header = process.header
        # A sample lists only the libraries that GPU code came from.
        lists_all = process.ended and header.role is not Role.SAMPLE
        if lists_all and lack.code in _OF_LISTED_LIBRARIES:
            return lack
        name = header.worker or Path(header.executable).name
        text = f"process {header.pid} ({name}): {lack.text}"
        return UsageWarning(code=lack.code, text=text, process=None)

    def usage(self) -> Usage:
        for library, found in self._libraries.items():
            if library.size is None and found.images:
                # Nothing tells which library it was, so it may be any.
                self.mark_incomplete(
                    "library-gone",
                    f"{library.path}: GPU code was loaded from this file after it had been deleted "
                    "or replaced, so which library it was is unknown",
                    None,
                )
        if self.devices:
            for process in sorted(self.loading - self.with_devices):
                self.mark_incomplete("devices-unknown", "nothing tells its devices", process)
        whole = {n for n, head in enumerate(self._headers) if head.role is not Role.SAMPLE}
        if self.devices and whole and not whole & self.with_devices:
            # Alone, such a session makes nothing unused. With samples it must not, either.
            self.mark_incomplete("devices-unknown", "samples alone tell their devices", None)
        compiled = {
            sha256
            for sha256, image in self.memory.items()
            if image.forms.keys() & {ImageForm.PTX, ImageForm.LINKED}
        }
        memory = {
            sha256: self._use(image, sha256=sha256, size=image.size)
            for sha256, image in sorted(self.memory.items())
        }
        return Usage(
            run_ids=tuple(sorted(self._run_ids)),
            devices=tuple(sorted(self.devices, key=lambda d: (d.compute_capability, d.uuid))),
            libraries=tuple(
                LibraryUsage(
                    library=library,
                    images=tuple(
                        self._use(image, offset=offset, prelinked=tuple(sorted(image.prelinked)))
                        for offset, image in sorted(found.images.items())
                    ),
                    processes=_members(found.processes),
                )
                for library, found in sorted(self._libraries.items(), key=lambda i: i[0].path)
            ),
            memory_images=tuple(memory[s] for s in memory if s not in compiled),
            compiled=tuple(memory[s] for s in memory if s in compiled),
            contexts=tuple(self._contexts),
            processes=tuple(self._processes),
            launches=self._kernel_launches(),
            ranges=tuple(sorted(filter(None, self._ranges))),
            warnings=_distinct(self._warnings),
            incomplete=_distinct(map(self._scoped, self._incomplete)),
            replay=next((h.replay for h in self._headers if h.replay), None),
            refusals=tuple(
                Refusal(
                    call=call, code=code, first=_first(when), path=path, offset=offset, name=name
                )
                for ((path, offset), call, name), (when, code) in sorted(
                    self._refusals.items(), key=lambda item: item[1]
                )
            ),
        )

    def _kernel_launches(self) -> dict[str, tuple[LaunchRow, ...]]:
        # Numbers in the usage by those here. No ranges come first, and have none in the usage.
        numbers = {met: n for n, (_, met) in enumerate(sorted(self._ranges.items()), -1)}
        launches = {}
        for name, found in sorted(self._launches.items()):
            rows = sorted((context, numbers[met], *of) for (context, met), of in found.items())
            launches[name] = tuple(
                LaunchRow(context, count, gpu_ns, None if ranges < 0 else ranges)
                for context, ranges, count, gpu_ns in rows
            )
        return launches

    @staticmethod
    def _use(image: _Image, **place: Any) -> ImageUse:
        return ImageUse(
            **place,
            form=min(image.forms, key=lambda form: form.value),
            calls=tuple(sorted(image.calls)),
            kernels={name: _first(when) for name, when in sorted(image.kernels.items())},
            data=tuple(sorted(name for name, kind in image.data if kind is not _FUNCTION)),
            functions=tuple(sorted(name for name, kind in image.data if kind is _FUNCTION)),
            enumerated_by=tuple(sorted(image.enumerations)),
            first=_first(min(image.calls.values())),
            processes=_members(image.processes),
        )


_FUNCTION = DataKind.UNIFIED_FUNCTION
# Records that name other records by their ids.
_Use = (
    ImageRecord
    | KernelRecord
    | DataRecord
    | EnumerationRecord
    | RefusalRecord
    | LaunchRecord
    | GapRecord
)
_USES = frozenset(get_args(_Use))


class _TraceMerger:
    """Feeds the records of one trace to the merger as they are read, with their ids resolved."""

    def __init__(self, merger: _Merger, trace: TraceReader, process: int) -> None:
        self._merger = merger
        self._trace = trace
        self._process = process
        # By id in the trace.
        self._contexts: dict[int, ContextRecord] = {}
        self._libraries: dict[int | None, _Library] = {}
        self._loads: dict[int | None, ImageRecord] = {}
        self._images: dict[int, _Image] = {}
        self._unknown: dict[int, set[str]] = {}
        self._ended_gaps: set[int] = set()
        self._context: Context | None = None
        self._dangling: set[str] = set()
        self._ended = False
        self._counts_launches = False

    def merge(self, header: Header) -> UsageProcess:
        """Read the trace to its end.

        Args:
            header: of the trace.
        """
        late: list[tuple[int, Any]] = []  # a use each
        for place, record in enumerate(self._trace):
            # Threads write side by side: a line may refer to one that comes later. There may be a
            # million launches, which refer to their context alone.
            if type(record) is LaunchRecord and record.context in self._contexts:
                self._add(record, place)
            elif type(record) in _USES:
                late.append((place, record))
            else:
                self._note(record)
        for place, record in sorted(late, key=lambda use: not isinstance(use[1], ImageRecord)):
            self._add(record, place)
        self._report()
        return UsageProcess(
            header=header,
            trace=Path(self._trace.path).name,
            ended=self._ended or self._merger.still_runs(header),
            torn=self._trace.torn,
            counts_launches=self._counts_launches,
            last=self._context,
        )

    def _note(self, record: AnyTraceRecord) -> None:
        """Take in a record that refers to no other."""
        if isinstance(record, ContextRecord):
            self._context = record.context
            self._merger.context(record.context)
            self._contexts.setdefault(record.id, record)
        elif isinstance(record, LibraryRecord):
            self._libraries[record.id] = self._merger.library(record.library, self._process)
        elif isinstance(record, DeviceRecord):
            self._merger.devices.add(record.device)
            self._merger.with_devices.add(self._process)
        elif isinstance(record, WarningRecord):
            self._merger.warn(record, self._process)
        elif isinstance(record, GapEndRecord):
            self._ended_gaps.add(record.id)
        elif isinstance(record, EndRecord):
            self._ended = True

    def _add(self, record: _Use, place: int) -> None:
        if isinstance(record, GapRecord):
            self._add_gap(record)
        elif isinstance(record, LaunchRecord):
            self._counts_launches = True
            self._merger.launches(record, self._when(record.context, place)[3])
        elif isinstance(record, ImageRecord):
            self._add_image(record, self._when(record.context, place))
        elif isinstance(record, RefusalRecord):
            load = self._loads.get(record.image, record)
            library = self._libraries.get(load.library)
            where = None if library is None else library.path, load.offset
            self._merger.refuse(record, where, self._when(record.context, place))
        else:
            self._add_use(record, place)

    def _when(self, context: int, place: int) -> _When:
        if context not in self._contexts:
            self._dangling.add(f"context {context}")
            self._contexts[context] = ContextRecord(
                id=context, context=Context(phase=Phase.PROCESS), time_ns=0
            )
        found = self._contexts[context]
        return (found.time_ns, self._process, place, self._merger.context(found.context))

    def _add_image(self, record: ImageRecord, when: _When) -> None:
        self._merger.loading.add(self._process)
        self._loads[record.id] = record
        if record.offset is not None:
            library = self._libraries.get(record.library)
            if library is None:
                self._dangling.add(f"library {record.library}")
                return
            image = library.images[record.offset]
        elif record.sha256 is not None:
            image = self._merger.memory[record.sha256]
            image.size = record.size or image.size
        else:
            self._unknown[record.id] = {record.call}
            return
        self._images[record.id] = image
        _note(image.forms, record.form, when)
        _note(image.calls, record.call, when)
        image.processes |= 1 << self._process
        image.prelinked.update(record.prelinked)

    def _add_use(self, record: KernelRecord | DataRecord | EnumerationRecord, place: int) -> None:
        image = self._images.get(record.image)
        if image is None:
            if record.image in self._unknown:
                what = record.call if isinstance(record, EnumerationRecord) else record.name
                self._unknown[record.image].add(what)
            else:
                self._dangling.add(f"image {record.image}")
            return
        when = self._when(record.context, place)
        if isinstance(record, KernelRecord):
            _note(image.kernels, record.name, when)
        elif isinstance(record, DataRecord):
            image.data.add((record.name, record.kind))
        else:
            _note(image.enumerations, record.call, when)

    def _add_gap(self, record: GapRecord) -> None:
        where = Phase.PROCESS.value
        if (found := self._contexts.get(record.context)) is not None:
            where = found.context.nodeid or found.context.phase.value
        what = "was off" if record.id in self._ended_gaps else "went off and stayed so"
        self._merger.mark_incomplete(
            "gap", f"{where}: the detector {what}: {record.reason}", self._process
        )

    def _report(self) -> None:
        for uses in self._unknown.values():
            text = "an image that could not be recognised was used: " + ", ".join(sorted(uses))
            self._merger.mark_incomplete("image-unknown", text, self._process)
        if self._dangling:
            text = f"{self._trace.path}: nothing tells what these are: " + ", ".join(
                sorted(self._dangling)
            )
            self._merger.mark_incomplete("trace-damaged", text, self._process)


def _note(seen: dict[K, _When], key: K, when: _When) -> None:
    known = seen.get(key)
    if known is None or when < known:
        seen[key] = when


def _members(bits: int) -> tuple[int, ...]:
    """The numbers of the bits that are set."""
    return tuple(index for index, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def _first(when: _When) -> FirstUse:
    return FirstUse(process=when[1], context=when[3], time_ns=when[0])


def _distinct(warnings: Iterable[UsageWarning]) -> tuple[UsageWarning, ...]:
    return tuple(sorted(set(warnings), key=lambda w: (w.code, w.text, str(w.process))))
