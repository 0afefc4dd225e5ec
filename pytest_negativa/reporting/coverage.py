"""Kernel coverage as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.settings import Reports
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.units import format_share

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
        groups = list(library.groups())
        shown = groups if not options.top else groups[: options.top]
        rows += [_row(f"- {group.name or '(no namespace)'}", group.kernels) for group in shown]
        if rest := [kernel for group in groups[len(shown) :] for kernel in group.kernels]:
            rows.append(_row(f"- {len(groups) - len(shown)} more", rest))
    word = "run" if all(library.counted for library in covered) else "looked up"
    headers = ("kernel coverage", "kernels", word, "share", "templates", "tests")
    total = _row("total", [kernel for library in covered for kernel in library.kernels])
    yield format_table(
        "lrrrrr",
        headers,
        rows,
        total=total if len(covered) > 1 else None,
        width=width,
        drop=_DROP,
    )


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
