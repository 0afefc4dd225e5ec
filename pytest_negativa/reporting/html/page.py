"""Tables of the HTML report, from a report's contents; at most 150,000 launches."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.analysis import AnalyzedLibrary, ReportContents
from pytest_negativa.models.library import Element, LibraryMap
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.spans import size
from pytest_negativa.models.trace import Context, Usage
from pytest_negativa.reporting.html.pack import COLUMNS, Page
from pytest_negativa.reporting.rows import describe_proof

MOST_LAUNCHES = 150_000
"""Rows of launches by range in a page; if there are more, launches are by test alone."""


def build_page(contents: ReportContents, *, most_launches: int = MOST_LAUNCHES) -> Page:
    """Turn maps, plans and usage into the tables of a page."""
    return _Builder(contents).build(most_launches)


class _Builder:
    def __init__(self, contents: ReportContents) -> None:
        self._contents = contents
        self._texts: dict[str, int] = {}
        self._tests: dict[int, tuple[int, int]] = {}
        self._test_rows: dict[int, int] = {}
        self._tables: dict[str, list[tuple[int, ...]]] = {name: [] for name in COLUMNS}
        self._used: defaultdict[int, list[int]] = defaultdict(list)

    def build(self, most_launches: int) -> Page:
        contents = self._contents
        report, host = contents.report, contents.host
        rows = {row.path: number for number, row in enumerate(report.libraries)}
        for test in contents.tests:
            milliseconds = round(1000 * test.duration)
            self._test(test.nodeid, self._index(test.outcome.value), milliseconds)
        for library in sorted(contents.libraries, key=lambda a: rows[a.plan.library.path]):
            self._add(library, rows[library.plan.library.path])
        launches, totals = self._launches()
        if left_out_ranges := len(launches) > most_launches:
            launches, totals = self._launches(by_range=False)
        facts = {
            # The page has these names in tables.
            "report": replace(
                report,
                libraries=tuple(
                    replace(row, first_uses=(), unused_kernels=()) for row in report.libraries
                ),
                coverage=(),
            ),
            "proof": None if report.proof is None else describe_proof(report.proof),
            "hostProof": contents.host_proof,
            "facts": tuple(_facts(report, contents.usage)),
            "nextCommand": contents.next_command,
            # The libraries that the project builds itself.
            "own": [rows[a.plan.library.path] for a in contents.libraries if a.coverage],
            "unusedReasons": [reason.value for reason in UnusedReason],
            "hostIncomplete": () if host is None else (*host.incomplete, *host.failed),
            # The launches of a very large run are by test alone.
            "leftOutRanges": left_out_ranges,
        }
        tables = self._tables | {
            "launches": launches,
            "tests": [
                (name, *self._tests[name], *totals[row]) for name, row in self._test_rows.items()
            ],
            "history": [
                (self._index(one.run_id), one.code_bytes, one.unused_bytes)
                for one in contents.history
            ],
            "host": [
                (self._index(one.paths[0]), size(one.watched), size(one.touched))
                for one in (() if host is None else host.libraries)
                if one.unwatched is None
            ],
        }
        return Page(facts, tables, tuple(self._texts))

    def _index(self, text: str | None) -> int:
        """The number of a text, which a page holds once."""
        return -1 if text is None else self._texts.setdefault(text, len(self._texts))

    def _add(self, library: AnalyzedLibrary, row: int) -> None:
        elements, kernels = self._tables["elements"], self._tables["kernels"]
        plan, library_map, index = library.plan, library.library_map, self._index
        blocks = {
            block.payload.start: (section.name, block)
            for section in library_map.sections
            for block in section.iter_code()
        }
        regions: dict[int, int] = {}
        first = {use.name: self._phase(use.first) for use in plan.used_kernels}
        wanted = first | dict.fromkeys(plan.unused_kernels, -1)
        found: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        covered = () if library.coverage is None else library.coverage.kernels
        places = {kernel.name: (kernel.file, kernel.line or 0) for kernel in covered}
        main = _main_kernels(library_map, blocks.values())
        for decision in plan.decisions:
            section, block = blocks[decision.start]
            region = -1 if block.region is None else regions.setdefault(block.anchor, len(regions))
            for kernel in library_map.kernels_of(block.content):
                if kernel.name in wanted:
                    found.setdefault(kernel.name, []).append(len(elements))
                    sizes[kernel.name] = max(sizes.get(kernel.name, 0), kernel.code_size or 0)
            elements.append(
                (
                    row,
                    index(section),
                    index(block.kind.value),
                    index("unknown" if plan.is_files else str(block.arch)),
                    region,
                    decision.start,
                    decision.size,
                    index(decision.reason),
                    index(decision.detail),
                    index(self._name(main.get(decision.start), places)),
                )
            )
        # Neighbours in this order share most of their text.
        for name in sorted(wanted, key=demangle):
            held, *more = found.get(name, [-1])
            self._tables["copies"] += [(len(kernels), element) for element in more]
            file, line = places.get(name, (None, 0))
            shown, mangled = index(demangle(name)), -1
            if wanted[name] >= 0:
                mangled = index(name)
                self._used[mangled].append(len(kernels))
            size = sizes.get(name, 0)
            kernels.append((row, shown, mangled, size, wanted[name], held, index(file), line))

    def _name(self, kernel: str | None, places: Mapping[str, tuple[str | None, int]]) -> str | None:
        """Name of an element for people, by its largest kernel."""
        return None if kernel is None else places.get(kernel, (None, 0))[0] or demangle(kernel)

    def _phase(self, context: Context) -> int:
        """The row of the test in which something was used, or of the phase of the session."""
        return self._test(context.nodeid or str(context))

    def _test(self, name: str, outcome: int = -1, milliseconds: int = 0) -> int:
        text = self._index(name)
        self._tests.setdefault(text, (outcome, milliseconds))
        return self._test_rows.setdefault(text, len(self._test_rows))

    def _launches(
        self, *, by_range: bool = True
    ) -> tuple[list[tuple[int, ...]], Mapping[int, Sequence[int]]]:
        """The launches, and their number and GPU time in ns by row of the test."""
        counts: defaultdict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])
        totals: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        usage = self._contents.usage
        for name, launched in usage.iter_launches():
            test = self._phase(usage.contexts[launched.context])
            ranges = " > ".join(usage.ranges_of(launched)) or None
            around = self._index(ranges) if by_range else -1
            kernels = self._used[self._index(name)]
            for row in (totals[test], *(counts[kernel, test, around] for kernel in kernels)):
                row[0] += launched.count
                row[1] += launched.gpu_ns or 0
        rows: list[tuple[int, ...]] = [
            (kernel, test, count, gpu_ns, around)
            for (kernel, test, around), (count, gpu_ns) in counts.items()
        ]
        return rows, totals


def _main_kernels(
    library_map: LibraryMap, blocks: Iterable[tuple[str, Element]]
) -> Mapping[int, str]:
    """The largest kernel of each element, by its offset; if its own are unknown, its region's."""
    largest: dict[int, tuple[int, str]] = {}
    anchors = {}
    for _, block in blocks:
        anchors[block.payload.start] = block.anchor
        for kernel in library_map.kernels_of(block.content):
            size = kernel.code_size or 0, kernel.name
            largest[block.payload.start] = max(largest.get(block.payload.start, size), size)
    of_region: dict[int, tuple[int, str]] = {}
    for start, size in largest.items():
        of_region[anchors[start]] = max(of_region.get(anchors[start], size), size)
    known = {start: of_region.get(anchor) for start, anchor in anchors.items()} | largest
    return {start: size[1] for start, size in known.items() if size is not None}


def _facts(report: RunReport, usage: Usage) -> Iterator[tuple[str, str]]:
    """Names and values of what the run was."""
    # The process that began first started the others.
    for header in sorted((one.header for one in usage.processes), key=lambda h: h.start_ns)[:1]:
        yield "Project", Path(header.root).name
        yield "Date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.start_ns / 1e9))
        program, *words = header.argv or (header.executable,)
        yield "Command", shlex.join([Path(program).name, *words])
    for device in usage.devices[:1]:
        yield "GPU", ", ".join(report.devices)
        yield "Driver", ", ".join(filter(None, (device.driver_version, device.cuda)))
    rows = [row for row in report.libraries if row.distribution is not None]
    if named := sorted({f"{row.distribution} {row.version or ''}".strip() for row in rows}):
        yield "Analysed", ", ".join(named)
