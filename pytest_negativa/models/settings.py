"""Settings in the shape of ``negativa.yaml``, as all code gets them; ``analysis.limits`` compares.

They hold plain values only and can travel to the workers of pytest-xdist. They have no defaults:
types, defaults and help are in the table of options, ``settings.options``.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

import msgspec

from pytest_negativa.models.base import NonNegative, Record
from pytest_negativa.models.outcomes import Aspect

_Limit = TypeVar("_Limit")


class TraceLevel(str, enum.Enum):
    """Detail of a trace."""

    LOOKUP = "lookup"
    LAUNCH = "launch"
    RANGE = "range"

    @property
    def counts_launches(self) -> bool:
        """Whether the trace has each launch."""
        return self is not TraceLevel.LOOKUP


class PtxPolicy(str, enum.Enum):
    """PTX that is kept beside the cubins, for devices newer than any of them."""

    OFF = "off"
    NEWEST = "newest"
    ALL = "all"


class ReportFormat(str, enum.Enum):
    """Format of a report; ``reporting.formats`` has the renderer."""

    TERMINAL = "terminal"
    TERMINAL_MISSING = "terminal-missing"
    GITHUB = "github"
    JSON = "json"
    MARKDOWN = "markdown"
    LCOV = "lcov"
    COBERTURA = "cobertura"
    HTML = "html"
    BASELINE = "baseline"


class Report(Record, frozen=True, kw_only=True):
    """One report.

    Attributes:
        format: see there.
        path: absolute, ``-``, or a URL; None for a report without a file.
    """

    format: ReportFormat
    path: str | None


class Libraries(Record, frozen=True, kw_only=True):
    """Libraries that are analysed; without ``include``, all with GPU code."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]


class Keep(Record, frozen=True, kw_only=True):
    """GPU code that is never planned as unused, whether the tests use it or not."""

    kernels: tuple[str, ...]
    libraries: tuple[str, ...]
    archs: tuple[str, ...]
    ptx: PtxPolicy


class Granularity(str, enum.Enum):
    """Unit that a plan can call unused: whole elements, or also kernels inside kept elements."""

    ELEMENT = "element"
    KERNEL = "kernel"


class Trace(Record, frozen=True, kw_only=True):
    """Settings of the trace."""

    level: TraceLevel
    children: bool
    replay: str | None


class CopyKind(str, enum.Enum):
    """Form of a plan's copies."""

    OVERWRITTEN = "overwritten"
    COMPACTED = "compacted"


class Verify(Record, frozen=True, kw_only=True):
    """Settings of a proof, and of healing if the proof fails.

    Attributes:
        copies: what the tests run on.
        rerun: how often tests that differ run on the originals, at most; None: see the option.
        timeout: seconds; see the option.
        tolerate: in what equal outcomes of a test may differ.
        opened_originals: globs of libraries and commands; see ``settings.globs.matches_command``.
    """

    copies: CopyKind
    rerun: NonNegative | None
    timeout: NonNegative | None
    tolerate: tuple[Aspect, ...]
    opened_originals: tuple[str, ...]


class Reports(Record, frozen=True, kw_only=True):
    """Settings of reports."""

    formats: tuple[Report, ...]
    top: NonNegative


class Limits(Record, Generic[_Limit], frozen=True, kw_only=True):
    """A limit over all libraries, and limits of single ones; the first glob that matches counts."""

    overall: _Limit | None
    libraries: dict[str, _Limit]

    def __bool__(self) -> bool:
        return self.overall is not None or bool(self.libraries)


class Coverage(Record, frozen=True, kw_only=True):
    """Libraries whose kernels are covered, and the least percentage of them that tests run."""

    libraries: tuple[str, ...]
    fail_under: Limits[float]


class Thresholds(Record, frozen=True, kw_only=True):
    """Limits over all analysed libraries; a session that crosses one exits with 1."""

    max_unused_percent: Limits[float]
    min_used_kernels: Limits[int]
    max_gpu_code: Limits[int]


class GrowthLimit(Record, frozen=True, kw_only=True):
    """The most that a figure may grow since the baseline.

    Attributes:
        figure: ``size``, ``code``, ``unused`` (bytes) or ``new-kernels-untested``.
        limit: in bytes, kernels, or percent of the baseline.
    """

    figure: str
    limit: float
    is_percent: bool


class Compare(Record, frozen=True, kw_only=True):
    """Limits of growth since a baseline."""

    baseline: str | None
    fail: Limits[tuple[GrowthLimit, ...]]


class Settings(Record, frozen=True, kw_only=True):
    """All options of a session or a command as they are in force; paths are absolute.

    Attributes:
        enabled: whether the session is traced.
        verifying, healing: whether its plan is verified, and healed.
        run: the folder of the traced run to verify; None: the last one.
        config: the file that was read, if there is one.
        directory: the folder for runs.
        paths: paths here, by globs on paths of other machines.
        require_gpu: whether a run without GPU code on a GPU fails.
        no_jit: whether a run that compiled GPU code fails.
        cpu: whether CPU code is traced, too.
        cache_dir: the folder for the maps of libraries between sessions; None without a home.
        sources: by the option's name (``"keep.ptx"``), where its value comes from: the flag, the
            variable or ``FILE:LINE:COLUMN``; empty for a default.
    """

    enabled: bool
    verifying: bool
    healing: bool
    run: str | None
    config: str | None
    directory: str
    paths: dict[str, str]
    libraries: Libraries
    keep: Keep
    granularity: Granularity
    require_gpu: bool
    no_jit: bool
    cpu: bool
    trace: Trace
    verify: Verify
    reports: Reports
    coverage: Coverage
    thresholds: Thresholds
    compare: Compare
    cache_dir: str | None
    sources: dict[str, str]

    @property
    def untraced_failure(self) -> str | None:
        """Reason for which a run without any trace must fail; None if it may pass."""
        # A runner that lost its GPU must not pass as one that keeps the thresholds.
        if self.require_gpu:
            return "a GPU is required (require_gpu)"
        return "the limits can't be checked" if self.has_limits else None

    @property
    def has_limits(self) -> bool:
        """Whether there is anything that a run can cross."""
        return (
            any(msgspec.structs.astuple(self.thresholds))
            or self.no_jit
            or bool(self.coverage.fail_under)
            or self.compare.baseline is not None
        )
