"""Results of a run: the use, the map and the plan of each library."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.report import RunReport, RuntimeCode
from pytest_negativa.models.trace import Usage


@dataclass(frozen=True, slots=True)
class AnalyzedLibrary:
    """A library with GPU code, and the decisions about it.

    Attributes:
        coverage: of its kernels; None if it is no library of the project's own.
        distribution, version: what installed it, if that is known.
    """

    library_map: LibraryMap
    plan: LibraryPlan
    coverage: LibraryCoverage | None = None
    distribution: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that is known at the end of a run.

    Attributes:
        usage: what was traced.
        libraries: the libraries with GPU code that the settings select.
        runtime: code that was compiled at run time, or came from a compiler's cache.
        unreadable: libraries that could not be mapped, and why.
        warnings: globs that matched nothing, and the like.
        unchecked: those of them for which limits check less than the settings ask for.
    """

    usage: Usage
    libraries: tuple[AnalyzedLibrary, ...]
    runtime: tuple[RuntimeCode, ...]
    unreadable: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportContents:
    """Input of all renderers of a run's report.

    Attributes:
        report: the rows, which every format shows.
        libraries: what the rows were made from; empty for an older run without plans.
        usage: what was traced.
        tests: how the run's tests ended; empty if no pytest session ran.
        history: the reports of the saved runs, the oldest first.
        host: what the run touched of CPU code; None if that was not traced.
        host_proof: what the last verdict says of it, in words; None without one.
        next_command: what a user types next; None if nobody asked.
    """

    report: RunReport
    libraries: tuple[AnalyzedLibrary, ...]
    usage: Usage
    tests: tuple[TestResult, ...] = ()
    history: tuple[RunReport, ...] = ()
    host: HostUsage | None = None
    host_proof: str | None = None
    next_command: str | None = None
