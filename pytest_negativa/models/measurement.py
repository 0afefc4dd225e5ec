"""Costs of a program on its original libraries and on slim ones: runs, and their sums."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import Record, Versioned


class Variant(str, enum.Enum):
    """Libraries that the program was given."""

    ORIGINAL = "original"
    SLIM = "slim"


class Loading(str, enum.Enum):
    """CUDA_MODULE_LOADING, see "Lazy Loading" in the CUDA Programming Guide."""

    LAZY = "lazy"
    EAGER = "eager"


class RunFigures(Record, frozen=True, kw_only=True):
    """One run of the program. A figure that isn't known is None; see ``Measurement.notes``.

    Memory of the process tree is read every 20 ms; a shorter peak is missed.

    Attributes:
        variant: the libraries that the program got.
        loading: the way of loading.
        warm_up: whether the run warms up and doesn't count.
        pair: number of its pair, from 1; 0 is the warm-up.
        status: exit status, negative for a signal.
        wall_s: from the start of the program to its end.
        first_result_s: from the start of the program until a process of it first learned that the
            GPU had finished something: a call of the driver that waits or asks succeeded after a
            kernel or graph was launched.
        peak_rss_bytes: highest sum of the resident sets of all processes at one time. Shared
            pages count for each process. At least ``root_max_rss_bytes``.
        peak_pss_bytes: highest sum of the proportional sets, in which shared pages count once;
            read when the resident sets are at a new high.
        root_max_rss_bytes: ``ru_maxrss`` of the program's first process, which the kernel counts
            without gaps. None if it does not exceed the measuring process's own, from which the
            kernel starts to count.
        gpu_process_bytes: highest sum of the GPU memory of the program's processes, by NVML.
        gpu_device_bytes: highest GPU memory in use on all devices, less the memory in use before
            the start. It includes other programs' memory.
        energy_mj: energy of all devices in millijoules, including idle power and other programs.
        cached_bytes: bytes of the variant's libraries in the page cache at the end. Only in runs
            before which they were evicted: what the program touched, and the kernel's read-ahead.
        left_cached_bytes: bytes that could not be evicted, because another process maps them.
        copies: how many of the copies were mapped by any process.
        processes: how many processes were seen.
        outlived: how many of them still ran after the program's end, and were ended.
    """

    variant: Variant
    loading: Loading
    warm_up: bool
    pair: int
    status: int = 0
    wall_s: float = 0.0
    first_result_s: float | None = None
    peak_rss_bytes: int | None = None
    peak_pss_bytes: int | None = None
    root_max_rss_bytes: int | None = None
    gpu_process_bytes: int | None = None
    gpu_device_bytes: int | None = None
    energy_mj: int | None = None
    cached_bytes: int | None = None
    left_cached_bytes: int | None = None
    copies: int = 0
    processes: int = 0
    outlived: int = 0


class Summary(Record, frozen=True, kw_only=True):
    """Values of one figure in several runs.

    Attributes:
        runs: how many.
        median: of the values.
        minimum: the smallest value.
        maximum: the largest value.
    """

    runs: int
    median: float
    minimum: float
    maximum: float


class Comparison(Record, frozen=True, kw_only=True):
    """One figure on both variants, the warm-up runs left out.

    Attributes:
        figure: the name of a field of ``RunFigures``.
        original: the original libraries.
        slim: the slim ones.
        ratio: slim median through original median; None if the latter is 0.
        pair_ratios: lowest and highest ratio of the two runs of a pair.
        overlap: the ranges from minimum to maximum have values in common, so that these runs
            don't show a difference.
    """

    figure: str
    original: Summary
    slim: Summary
    ratio: float | None
    pair_ratios: tuple[float, float] | None
    overlap: bool


class LoadingResult(Record, frozen=True, kw_only=True):
    """Sums of the runs with one way of loading.

    Attributes:
        loading: the way of loading.
        status: the exit status that all runs had in common; None if they had none.
        comparisons: one for each figure that both variants have.
        failure: why these runs can't be compared; then there are no comparisons.
    """

    loading: Loading
    status: int | None
    comparisons: tuple[Comparison, ...]
    failure: str | None = None


class FileSizes(Record, frozen=True, kw_only=True):
    """Sizes of one variant's libraries, in bytes.

    Attributes:
        files: how many.
        apparent_bytes: their lengths.
        allocated_bytes: blocks on the disk; holes take none.
        tar_bytes: in a tar archive (POSIX.1-2001, holes written as zeros).
        tar_zstd_bytes: that archive compressed by zstd, level 3, one thread.
    """

    files: int
    apparent_bytes: int
    allocated_bytes: int
    tar_bytes: int
    tar_zstd_bytes: int


class Measurement(Versioned, Record, frozen=True, kw_only=True):
    """Results of ``negativa measure``.

    Attributes:
        command: what was run.
        copies_root: the folder with the copies; the copy of ``/a/b.so`` is ``ROOT/a/b.so``.
        libraries: real paths of the originals.
        created_ns: when it began, nanoseconds since the epoch.
        pairs: how many pairs were run for each way of loading, without the warm-up.
        cold: the libraries were evicted from the page cache before every run.
        devices: names of the GPUs, by NVML.
        original, slim: sizes of the libraries.
        results: one for each way of loading.
        runs: every run, in the order they were made.
        notes: what a reader should know.
    """

    command: tuple[str, ...]
    copies_root: str
    libraries: tuple[str, ...]
    created_ns: int
    pairs: int
    cold: bool
    devices: tuple[str, ...]
    original: FileSizes
    slim: FileSizes
    results: tuple[LoadingResult, ...]
    runs: tuple[RunFigures, ...]
    notes: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons for which comparisons failed."""
        return tuple(r.failure for r in self.results if r.failure is not None)
