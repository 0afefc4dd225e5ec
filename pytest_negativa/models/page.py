"""The data of the HTML report: a run's report, and tables of everything below its rows.

A run has 50,000 elements and 80,000 kernels. So texts stand once in ``Page.texts``, and rows refer
to them by index (``TextIndex``).
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_negativa.models.base import Record
from pytest_negativa.models.report import RunReport

TextIndex = int


class ElementRow(NamedTuple):
    """An element or frame; rows are by library and offset.

    Attributes:
        library: index into ``RunReport.libraries``.
        section, kind, arch: texts.
        region: number of the region in its library, from 0; -1 for a frame.
        start: file offset.
        size: bytes in the file.
        reason: text of a ``KeepReason`` or ``UnusedReason``.
        detail: text that says more of the reason; -1 without.
        name: text, its source file or largest kernel, demangled; else its region's; -1 for neither.
    """

    library: int
    section: int
    kind: int
    arch: int
    region: int
    start: int
    size: int
    reason: int
    detail: int
    name: int


class KernelRow(NamedTuple):
    """A kernel that the run's devices could load; rows are by library and name.

    Attributes:
        library: index into ``RunReport.libraries``.
        name: text, demangled.
        mangled: text; -1 for an unused kernel. All mangled names would double the page.
        size: bytes of its largest code in an unpacked cubin; 0 for PTX.
        first: index of the test that used it first; -1 if unused.
        element: index of the first element that holds it; -1 if none was read.
        file: text, its source file; -1 if unknown.
        line: the first line of its code in the file; 0 if unknown.
    """

    library: int
    name: int
    mangled: int
    size: int
    first: int
    element: int
    file: int
    line: int


class CopyRow(NamedTuple):
    """A further element that holds a kernel: indices into both tables."""

    kernel: int
    element: int


class TestRow(NamedTuple):
    """A test, or a phase of the session in which something was used first.

    Attributes:
        name: text, the node id or the phase.
        outcome: text; -1 for a phase or if it is unknown.
        milliseconds: duration of all phases of the test.
        launches, nanoseconds: of all kernels, those of no library included, and their GPU time.
    """

    name: int
    outcome: int
    milliseconds: int
    launches: int
    nanoseconds: int


class LaunchRow(NamedTuple):
    """Launches of a kernel in a test and range; empty if the trace recorded look-ups alone.

    Attributes:
        times: how often it was launched.
        nanoseconds: GPU time of all of them; 0 if it is unknown.
        ranges: text, names of the NVTX ranges from the outermost on; -1 outside of ranges.
    """

    kernel: int
    test: int
    times: int
    nanoseconds: int
    ranges: int


class HostRow(NamedTuple):
    """CPU code of a library whose pages were traced. Sizes in bytes.

    Attributes:
        path: text.
        watched, touched: see ``HostLibrary``.
    """

    path: int
    watched: int
    touched: int


class AlikeRow(NamedTuple):
    """Two tests whose CPU code was told apart, or one and itself; modules if they are many.

    Attributes:
        left, right: text, node ids.
        shared: how many functions both touched at most.
    """

    left: int
    right: int
    shared: int


class HistoryRow(NamedTuple):
    """A saved run; the oldest is first. Sizes in bytes.

    Attributes:
        run: text, the run's id.
    """

    run: int
    code_bytes: int
    unused_bytes: int


class Page(Record, frozen=True, kw_only=True):
    """Everything that the HTML report shows.

    Attributes:
        report: without what has tables here.
        part: which part of the tests the plan is for, as a sentence; None: for all that ran.
        proof: the last verdict on the run as a sentence; None if there is none.
        host_proof: the same of CPU code.
        facts: names and values of the run: project, date, command, GPU, driver, distributions.
        next_command: what a user types next; None if it is unknown.
        own: indices of the libraries that the project builds itself.
        unused_reasons: those values of ``reason`` that call an element unused.
        texts: each text once.
        host_incomplete: why more CPU code may have been touched.
        left_out_ranges: the launches of a very large run are by test alone.
        alike_by_module: ``alike`` compares modules.
        left_out_alike: modules that ``alike`` lacks, the last ones by name.
    """

    report: RunReport
    part: str | None
    proof: str | None
    host_proof: str | None
    facts: tuple[tuple[str, str], ...]
    next_command: str | None
    own: tuple[int, ...]
    unused_reasons: tuple[str, ...]
    texts: tuple[str, ...]
    elements: tuple[ElementRow, ...]
    kernels: tuple[KernelRow, ...]
    copies: tuple[CopyRow, ...]
    tests: tuple[TestRow, ...]
    launches: tuple[LaunchRow, ...]
    history: tuple[HistoryRow, ...]
    host: tuple[HostRow, ...]
    alike: tuple[AlikeRow, ...]
    host_incomplete: tuple[str, ...]
    left_out_ranges: bool
    alike_by_module: bool
    left_out_alike: int
