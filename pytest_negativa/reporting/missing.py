"""The unused kernels of the project's own libraries, for the terminal: the tests to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.settings import Reports
from pytest_negativa.reporting.text import cut_middle, printable
from pytest_negativa.reporting.units import format_share


def render_missing(
    coverage: Sequence[LibraryCoverage], options: Reports, width: int = 0
) -> Iterator[str]:
    """A paragraph for each library, its unused kernels by source file; ``width`` 0: no limit."""
    if not coverage:
        yield "No library of the project's own was loaded, so there is no kernel coverage."
    spell = demangle if options.demangle else str
    for library in coverage:
        run, kernels = library.run_kernels, len(library.kernels)
        name = printable(Path(library.path).name)
        lines = [
            f"{name}: {run:,} of {kernels:,} kernels {library.word} ({format_share(run, kernels)})"
        ]
        missing = sorted((k for k in library.kernels if not k.is_run), key=_place)
        top = options.top or len(missing)
        file: str | None = ""
        for kernel in missing[:top]:
            if kernel.file != file:
                file = kernel.file
                lines.append(
                    f"  {cut_middle(printable(file or 'without line information'), width - 2)}"
                )
            line = f"{kernel.line:>6}  " if kernel.line else " " * 4
            lines.append(line + cut_middle(printable(spell(kernel.name)), width - len(line)))
        if len(missing) > top:
            lines.append(f"    and {len(missing) - top:,} more")
        yield "\n".join(lines)


def _place(kernel: KernelCoverage) -> tuple[str, int, str]:
    return kernel.file or "", kernel.line or 0, kernel.name
