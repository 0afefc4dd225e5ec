"""What a run found to the tables of the HTML report."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.analysis import AnalyzedLibrary, ReportContents
from pytest_negativa.models.library import CodeBlock
from pytest_negativa.models.page import (
    AlikeRow,
    CopyRow,
    ElementRow,
    HistoryRow,
    HostRow,
    KernelRow,
    LaunchRow,
    Page,
    TestRow,
    TextIndex,
)
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.trace import Context
from pytest_negativa.reporting.rows import describe_part, describe_proof

MOST_ELEMENTS = 150_000
"""Rows of elements in a page; beyond them, the smallest are grouped."""

MOST_KERNELS = 250_000
"""Rows of kernels in a page; beyond them, the unused kernels with the least code are left out."""


MOST_LAUNCHES = 150_000
"""Rows of launches by range in a page; if there are more, launches are by test alone."""

MOST_ALIKE = 64
"""Tests that a page compares by CPU code; beyond them, so many modules."""


def build_page(
    contents: ReportContents,
    *,
    most_elements: int = MOST_ELEMENTS,
    most_kernels: int = MOST_KERNELS,
    most_launches: int = MOST_LAUNCHES,
) -> Page:
    """Turn maps, plans and usage into the tables of a page.

    Args:
        contents: what the run found.
        most_elements, most_kernels, most_launches: limits of the tables.
    """
    return _Builder(contents).build(most_elements, most_kernels, most_launches)


class _Texts:
    """The table in which a page holds each text once."""

    def __init__(self) -> None:
        self._indices: dict[str, TextIndex] = {}

    def index(self, text: str | None) -> TextIndex:
        return -1 if text is None else self._indices.setdefault(text, len(self._indices))

    def all(self) -> tuple[str, ...]:
        return tuple(self._indices)


class _Builder:
    def __init__(self, contents: ReportContents) -> None:
        self._contents = contents
        self._texts = _Texts()
        self._tests: dict[TextIndex, tuple[TextIndex, int]] = {}
        self._test_rows: dict[TextIndex, int] = {}

    def build(self, most_elements: int, most_kernels: int, most_launches: int) -> Page:
        contents = self._contents
        report = contents.report
        rows = {row.path: number for number, row in enumerate(report.libraries)}
        for test in self._contents.tests:
            milliseconds = round(1000 * test.duration)
            self._test(test.nodeid, self._texts.index(test.outcome.value), milliseconds)
        elements: list[ElementRow] = []
        kernels: list[KernelRow] = []
        copies: list[CopyRow] = []
        for library in sorted(self._contents.libraries, key=lambda a: rows[a.plan.library.path]):
            self._add(library, rows[library.plan.library.path], elements, kernels, copies)
        left_out = max(0, len(kernels) - most_kernels)
        elements, numbers = _grouped(elements, most_elements)
        kernels, copies = _largest(kernels, copies, most_kernels)
        launches = self._launches(kernels)
        if left_out_ranges := len(launches) > most_launches:
            launches = self._launches(kernels, by_range=False)
        totals = self._totals()
        alike, by_module, left_out_modules = self._alike()
        return Page(
            report=_without_kernels(report),
            part=None if report.part is None else describe_part(report.part),
            proof=None if report.proof is None else describe_proof(report.proof),
            unused_reasons=tuple(reason.value for reason in UnusedReason),
            elements=tuple(elements),
            kernels=tuple(
                k._replace(element=numbers[k.element] if k.element >= 0 else -1) for k in kernels
            ),
            copies=tuple(CopyRow(kernel, numbers[element]) for kernel, element in copies),
            launches=tuple(launches),
            tests=tuple(
                TestRow(name, *self._tests[name], *totals.get(row, (0, 0)))
                for name, row in self._test_rows.items()
            ),
            history=self._history(),
            host=self._host(),
            alike=alike,
            host_incomplete=()
            if (host := contents.host) is None
            else (*host.incomplete, *host.failed),
            texts=self._texts.all(),
            left_out_kernels=left_out,
            left_out_ranges=left_out_ranges,
            alike_by_module=by_module,
            left_out_alike=left_out_modules,
        )

    def _add(
        self,
        library: AnalyzedLibrary,
        row: int,
        elements: list[ElementRow],
        kernels: list[KernelRow],
        copies: list[CopyRow],
    ) -> None:
        plan, library_map, index = library.plan, library.library_map, self._texts.index
        blocks = _blocks(library)
        regions: dict[int, int] = {}
        first = {use.name: self._phase(use.first) for use in plan.used_kernels}
        wanted = first | dict.fromkeys(plan.unused_kernels, -1)
        found: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for decision in plan.decisions:
            section, block = blocks[decision.start]
            region = -1 if block.region is None else regions.setdefault(block.anchor, len(regions))
            for kernel in library_map.kernels_of(block.content):
                if kernel.name in wanted:
                    found.setdefault(kernel.name, []).append(len(elements))
                    sizes[kernel.name] = max(sizes.get(kernel.name, 0), kernel.code_size or 0)
            elements.append(
                ElementRow(
                    row,
                    index(section),
                    index(block.kind.value),
                    index("unknown" if plan.is_files else str(block.arch)),
                    region,
                    decision.start,
                    decision.size,
                    index(decision.reason),
                    index(decision.detail),
                    1,
                )
            )
        # Neighbours in this order share most of their text.
        for name in sorted(wanted, key=demangle):
            places = found.get(name, [-1])
            copies += [CopyRow(len(kernels), place) for place in places[1:]]
            kernels.append(
                KernelRow(
                    row,
                    index(demangle(name)),
                    index(name) if wanted[name] >= 0 else -1,
                    sizes.get(name, 0),
                    wanted[name],
                    places[0],
                )
            )

    def _phase(self, context: Context) -> int:
        """The row of the test in which something was used, or of the phase of the session."""
        return self._test(context.nodeid or str(context))

    def _test(self, name: str, outcome: TextIndex = -1, milliseconds: int = 0) -> int:
        text = self._texts.index(name)
        self._tests.setdefault(text, (outcome, milliseconds))
        return self._test_rows.setdefault(text, len(self._test_rows))

    def _launches(self, kernels: Sequence[KernelRow], *, by_range: bool = True) -> list[LaunchRow]:
        by_name: defaultdict[TextIndex, list[int]] = defaultdict(list)
        for number, kernel in enumerate(kernels):
            if kernel.first >= 0:
                by_name[kernel.mangled].append(number)
        counts: defaultdict[tuple[int, int, TextIndex], list[int]] = defaultdict(lambda: [0, 0])
        usage = self._contents.usage
        for name, launched in usage.iter_launches():
            test = self._phase(usage.contexts[launched.context])
            ranges = " > ".join(usage.ranges_of(launched)) or None
            around = self._texts.index(ranges) if by_range else -1
            for kernel_number in by_name[self._texts.index(name)]:
                row = counts[kernel_number, test, around]
                row[0] += launched.count
                row[1] += launched.gpu_ns or 0
        return [
            LaunchRow(kernel, test, count, gpu_ns, around)
            for (kernel, test, around), (count, gpu_ns) in counts.items()
        ]

    def _totals(self) -> dict[int, tuple[int, int]]:
        """Launches and GPU time in ns by row of the test."""
        totals: dict[int, tuple[int, int]] = {}
        usage = self._contents.usage
        for _, launched in usage.iter_launches():
            test = self._phase(usage.contexts[launched.context])
            count, gpu_ns = totals.get(test, (0, 0))
            totals[test] = count + launched.count, gpu_ns + (launched.gpu_ns or 0)
        return totals

    def _history(self) -> tuple[HistoryRow, ...]:
        return tuple(
            HistoryRow(
                self._texts.index(report.run_id),
                report.code_bytes,
                report.unused_bytes,
                sum(row.kernels for row in report.libraries),
                sum(row.used_kernels for row in report.libraries),
            )
            for report in self._contents.history
        )

    def _host(self) -> tuple[HostRow, ...]:
        host = self._contents.host
        return tuple(
            HostRow(
                self._texts.index(library.paths[0]), library.watched_bytes, library.touched_bytes
            )
            for library in (() if host is None else host.libraries)
            if library.unwatched is None
        )

    def _alike(self) -> tuple[tuple[AlikeRow, ...], bool, int]:
        """The tests or modules; whether they are modules; and how many more there are."""
        of_tests = self._contents.functions
        by_module = len(of_tests) > MOST_ALIKE
        groups: defaultdict[str, int] = defaultdict(int)
        for test, functions in of_tests.items():
            groups[test.partition("::")[0] if by_module else test] |= functions
        shown = sorted(groups.items())[:MOST_ALIKE]
        pairs = itertools.combinations_with_replacement(shown, 2)
        index = self._texts.index
        rows = tuple(
            AlikeRow(index(left), index(right), (of_left & of_right).bit_count())
            for (left, of_left), (right, of_right) in pairs
        )
        return rows, by_module, len(groups) - len(shown)


def _without_kernels(report: RunReport) -> RunReport:
    """The report without the names that the page has in tables."""
    rows = (replace(row, first_uses=(), unused_kernels=()) for row in report.libraries)
    return replace(report, libraries=tuple(rows), coverage=())


def _blocks(library: AnalyzedLibrary) -> Mapping[int, tuple[str, CodeBlock]]:
    return {
        block.start: (section.name, block)
        for section in library.library_map.sections
        for block in section.iter_code()
    }


def _grouped(elements: list[ElementRow], most: int) -> tuple[list[ElementRow], Sequence[int]]:
    """At most about ``most`` rows, the smallest in groups; and the new row of each old one."""
    if len(elements) <= most:
        return elements, range(len(elements))
    by_size = sorted(range(len(elements)), key=lambda number: -elements[number].size)
    alone = set(by_size[:most])
    rows: list[ElementRow] = []
    groups: dict[tuple[int, ...], int] = {}
    numbers: list[int] = []
    for number, element in enumerate(elements):
        if number in alone:
            numbers.append(len(rows))
            rows.append(element)
            continue
        key = (element.library, element.section, element.kind, element.arch, element.reason)
        if (row := groups.get(key)) is None:
            groups[key] = row = len(rows)
            rows.append(element._replace(region=-1, detail=-1))
        else:
            group = rows[row]
            rows[row] = group._replace(size=group.size + element.size, members=group.members + 1)
        numbers.append(row)
    return rows, numbers


def _largest(
    kernels: list[KernelRow], copies: list[CopyRow], most: int
) -> tuple[list[KernelRow], list[CopyRow]]:
    """The used kernels, and of the others those with the most code, at most ``most`` in all."""
    if len(kernels) <= most:
        return kernels, copies
    order = sorted(
        range(len(kernels)), key=lambda number: (kernels[number].first < 0, -kernels[number].size)
    )
    kept = {old: new for new, old in enumerate(sorted(order[:most]))}
    return [kernels[old] for old in kept], [CopyRow(kept[k], e) for k, e in copies if k in kept]
