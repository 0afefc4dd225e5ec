"""The data of the HTML report: a run's report, and everything below its rows, as columns.

A run has 50,000 elements and 80,000 kernels, so each table is a record of columns of equal length.
Texts stand once in ``Page.texts``, and columns refer to them by index (``TextIndex``).
"""

from __future__ import annotations

from pytest_negativa.models.base import Record
from pytest_negativa.models.report import RunReport

TextIndex = int
Column = tuple[int, ...]


class ElementColumns(Record, frozen=True, kw_only=True):
    """Elements and frames, by library and offset.

    Attributes:
        library: index into ``RunReport.libraries``.
        section, kind, arch: texts.
        region: number of the region in its library, from 0; -1 for a frame.
        start: file offset.
        size: bytes in the file.
        reason: text of a ``KeepReason`` or ``UnusedReason``.
        detail: text that says more of the reason; -1 without.
        members: 1, or how many small elements of one library, arch and reason are in this row.
    """

    library: Column
    section: Column
    kind: Column
    arch: Column
    region: Column
    start: Column
    size: Column
    reason: Column
    detail: Column
    members: Column


class KernelColumns(Record, frozen=True, kw_only=True):
    """Kernels that the run's devices could load, by library and name.

    Attributes:
        library: index into ``RunReport.libraries``.
        name: text, demangled.
        mangled: text; -1 for an unused kernel. All mangled names would double the page.
        size: bytes of its largest code in an unpacked cubin; 0 for PTX.
        first: index of the test that used it first; -1 if unused.
        element: index of the first element that holds it; -1 if none was read.
    """

    library: Column
    name: Column
    mangled: Column
    size: Column
    first: Column
    element: Column


class CopyColumns(Record, frozen=True, kw_only=True):
    """Further elements that hold a kernel: indices into both tables."""

    kernel: Column
    element: Column


class TestColumns(Record, frozen=True, kw_only=True):
    """Tests, and the phases of the session in which something was used first.

    Attributes:
        name: text, the node id or the phase.
        outcome: text; -1 for a phase or if it is unknown.
        milliseconds: duration of all phases of the test.
        launches, nanoseconds: of all kernels, those of no library included, and their GPU time.
    """

    __test__ = False

    name: Column
    outcome: Column
    milliseconds: Column
    launches: Column
    nanoseconds: Column


class LaunchColumns(Record, frozen=True, kw_only=True):
    """Launches of a kernel in a test and range; empty if the trace recorded look-ups alone.

    Attributes:
        nanoseconds: GPU time of all of them; 0 if it is unknown.
        ranges: text, names of the NVTX ranges from the outermost on; -1 outside of ranges.
    """

    kernel: Column
    test: Column
    count: Column
    nanoseconds: Column
    ranges: Column


class HostColumns(Record, frozen=True, kw_only=True):
    """CPU code of libraries whose pages were traced. Sizes in bytes.

    Attributes:
        path: text.
        watched, touched: see ``HostLibrary``.
    """

    path: Column
    watched: Column
    touched: Column


class AlikeColumns(Record, frozen=True, kw_only=True):
    """Each two tests whose CPU code was told apart, and each with itself; modules if they are many.

    Attributes:
        left, right: text, node ids.
        shared: how many functions both touched at most.
    """

    left: Column
    right: Column
    shared: Column


class HistoryColumns(Record, frozen=True, kw_only=True):
    """Saved runs, the oldest first. Sizes in bytes.

    Attributes:
        run: text, the run's id.
    """

    run: Column
    code_bytes: Column
    unused_bytes: Column
    kernels: Column
    used_kernels: Column


class Page(Record, frozen=True, kw_only=True):
    """Everything that the HTML report shows.

    Attributes:
        report: without what has columns here.
        part: which part of the tests the plan is for, as a sentence; None: for all that ran.
        proof: the last verdict on the run as a sentence; None if there is none.
        unused_reasons: those values of ``reason`` that call an element unused.
        texts: each text once.
        host_incomplete: why more CPU code may have been touched.
        left_out_kernels: unused kernels of a very large run that have no row.
        left_out_ranges: the launches of a very large run are by test alone.
        alike_by_module: ``alike`` compares modules.
        left_out_alike: modules that ``alike`` lacks, the last ones by name.
    """

    report: RunReport
    part: str | None
    proof: str | None
    unused_reasons: tuple[str, ...]
    texts: tuple[str, ...]
    elements: ElementColumns
    kernels: KernelColumns
    copies: CopyColumns
    tests: TestColumns
    launches: LaunchColumns
    history: HistoryColumns
    host: HostColumns
    alike: AlikeColumns
    host_incomplete: tuple[str, ...]
    left_out_kernels: int
    left_out_ranges: bool
    alike_by_module: bool
    left_out_alike: int
