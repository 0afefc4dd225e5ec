"""Kernel coverage as text: the table of own kernels, and ``terminal-missing``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.settings import Reports
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import cut_middle, printable
from pytest_negativa.reporting.units import and_more, format_share

# What a narrow terminal does without: templates, tests.
_DROP = (4, 5, 1)


def render_coverage(
    libraries: Sequence[LibraryCoverage], options: Reports, width: int = 0
) -> Iterator[str]:
    """A table of the project's own kernels, by source file or namespace; ``width`` 0: no limit."""
    covered = [library for library in libraries if library.kernels]
    if not covered:
        return
    rows = []
    for library in covered:
        name = Path(library.path).name
        rows.append(_row(name, library.kernels))
        groups = [(name or "(no namespace)", found) for name, found in library.groups().items()]
        rows += first_rows(groups, options.top, itemgetter(0), _group_row)
    word = "run" if all(library.counted for library in covered) else "looked up"
    total = _row("total", [kernel for library in covered for kernel in library.kernels])
    yield format_table(
        "lrrrrr",
        ("kernel coverage", "kernels", word, "share", "templates", "tests"),
        rows,
        total=total if len(covered) > 1 else None,
        width=width,
        drop=_DROP,
    )


def _group_row(name: str, groups: Sequence[tuple[str, Sequence[KernelCoverage]]]) -> list[str]:
    return _row(f"- {name}", [kernel for _, kernels in groups for kernel in kernels])


def _row(name: str, kernels: Sequence[KernelCoverage]) -> list[str]:
    run = sum(kernel.is_run for kernel in kernels)
    return [
        name,
        f"{len(kernels):,}",
        f"{run:,}",
        format_share(run, len(kernels)),
        f"{len({(kernel.scope, kernel.template) for kernel in kernels}):,}",
        f"{len({run.test for kernel in kernels for run in kernel.runs}):,}",
    ]


def render_missing(
    coverage: Sequence[LibraryCoverage], options: Reports, width: int = 0
) -> Iterator[str]:
    """A paragraph for each library, its unused kernels by source file; ``width`` 0: no limit."""
    if not coverage:
        yield "No library of the project's own was loaded, so there is no kernel coverage."
    for library in coverage:
        run, kernels = library.run_kernels, len(library.kernels)
        name = Path(library.path).name
        share = format_share(run, kernels)
        lines = [f"{name}: {run:,} of {kernels:,} kernels {library.word} ({share})"]
        missing = sorted((k for k in library.kernels if not k.is_run), key=_place)
        for file, found in groupby(missing[: options.top or None], attrgetter("file")):
            lines.append(f"  {file or 'without line information'}")
            lines += [f"{kernel.line or '':>6}  {demangle(kernel.name)}" for kernel in found]
        lines += and_more(len(missing), options.top, "    and {} more")
        yield "\n".join(cut_middle(printable(line), width) for line in lines)


def _place(kernel: KernelCoverage) -> tuple[str, int, str]:
    return kernel.file or "", kernel.line or 0, kernel.name
