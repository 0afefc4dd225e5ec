"""What the benchmark writes down itself, and what it reads of what ``negativa`` wrote.

``DIR/benchmark.json`` tells what was run; ``DIR/results/WORKLOAD/`` has, for each workload, copies
of the files that ``negativa`` wrote: ``report.json``, ``verdict-overwritten.json``,
``verdict-compacted.json``, ``measurement-lazy.json`` and ``measurement-eager.json``; and the used
kernels of the plans, by library, in ``used-kernels.json``; what was touched of CPU code in
``pages.json``, and the functions on touched pages, by library, in ``functions.json``. A file may be
absent: its step failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_negativa.models.measurement import Comparison, Loading, LoadingResult, Measurement
from pytest_negativa.models.pages import HostReport
from pytest_negativa.models.report import LibraryRow, RunReport
from pytest_negativa.models.verdict import ProvedLibrary, Verdict

BENCHMARK_FILE = "benchmark.json"
RESULTS = "results"
USED_KERNELS = "used-kernels.json"
PAGES = "pages.json"
FUNCTIONS = "functions.json"

_T = TypeVar("_T")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was run for a workload, or why it was not.

    Attributes:
        status: its exit status, negative for a signal; None if it was left out.
        problem: what went wrong, and where to read on.
    """

    workload: str
    name: str
    seconds: float = 0.0
    status: int | None = None
    problem: str | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether no time was left for it."""
        return self.status is None


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """What was run. ``skipped`` gives the reason for each workload that wasn't."""

    workloads: tuple[str, ...]
    skipped: dict[str, str]
    versions: dict[str, str]
    quick: bool
    pairs: int
    seconds: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Figures:
    """What is known of one workload."""

    name: str
    report: RunReport | None
    verdicts: Mapping[str, Verdict]
    measurements: tuple[Measurement, ...]
    used_kernels: Mapping[str, tuple[str, ...]]
    pages: HostReport | None
    functions: Mapping[str, tuple[int, ...]]

    @property
    def libraries(self) -> tuple[LibraryRow, ...]:
        """Those with GPU code."""
        return () if self.report is None else self.report.libraries

    @property
    def compacted(self) -> Mapping[str, ProvedLibrary]:
        """By path, from the verification on compacted copies."""
        verdict = self.verdicts.get("compacted")
        return {} if verdict is None else {row.path: row for row in verdict.libraries}

    def loading_results(self) -> dict[Loading, LoadingResult]:
        return {result.loading: result for m in self.measurements for result in m.results}


def comparison_of(result: LoadingResult, *figures: str) -> Comparison | None:
    """The first of the figures that was measured."""
    by_name = {comparison.figure: comparison for comparison in result.comparisons}
    return next((by_name[figure] for figure in figures if figure in by_name), None)


def read_benchmark(folder: Path) -> Benchmark:
    found = _read(folder / BENCHMARK_FILE, Benchmark)
    if found is None:
        raise SystemExit(f"{folder}: no {BENCHMARK_FILE} here; expected the results of a benchmark")
    return found


def read_figures(folder: Path, name: str) -> Figures | None:
    """What is known of a workload; None if it wasn't traced."""
    here = folder / RESULTS / name
    report = _read(here / "report.json", RunReport)
    pages = _read(here / PAGES, HostReport)
    if report is None and pages is None:
        return None
    verdicts = {c: _read(here / f"verdict-{c}.json", Verdict) for c in ("overwritten", "compacted")}
    measured = [
        _read(here / f"measurement-{loading.value}.json", Measurement) for loading in Loading
    ]
    return Figures(
        name=name,
        report=report,
        verdicts={copies: v for copies, v in verdicts.items() if v is not None},
        measurements=tuple(m for m in measured if m is not None),
        used_kernels=_read(here / USED_KERNELS, dict[str, tuple[str, ...]]) or {},
        pages=pages,
        functions=_read(here / FUNCTIONS, dict[str, tuple[int, ...]]) or {},
    )


def write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def _read(path: Path, kind: type[_T]) -> _T | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as e:
        raise SystemExit(f"{path}: not what this release of the package writes: {e}") from e
