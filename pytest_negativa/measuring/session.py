"""A measurement: turns on original and slim libraries, medians and spread, checks, exit status.

A program runs on its original libraries and on slim ones in turns. Both variants run under the
same auditors. The original's table of replacements is empty, so only the content of the libraries
differs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_negativa.devices import has_gpu
from pytest_negativa.errors import OptionError, refusing
from pytest_negativa.measuring.files import cached_bytes, evict, measure_sizes
from pytest_negativa.measuring.sampler import (
    Gpus,
    MeasureError,
    first_result_library,
    run_sampled,
)
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.measurement import (
    Comparison,
    Loading,
    LoadingResult,
    Measurement,
    RunFigures,
    Summary,
    Variant,
)
from pytest_negativa.models.settings import Settings
from pytest_negativa.pages.auditors import AUDIT_VARIABLE
from pytest_negativa.processes.programs import adopt_orphans
from pytest_negativa.processes.redirect import (
    copy_path,
    make_table,
    read_logs,
    redirect_environment,
    why_unsupported,
    write_table,
)
from pytest_negativa.reporting.measurement import FIGURES
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import RunsFolder
from pytest_negativa.storage.system import read_head

_TAIL_LINES = 15

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """Request for a measurement.

    Attributes:
        command: the program; its output goes to files.
        copies: the folder of the copies, each under its original's real path.
        folder: the folder for logs and tables; it is created.
        pairs: how many runs of each variant count, for each way of loading.
        loadings: which ways of loading.
        cold: evict the libraries from the page cache before every run.
        environ: the program's environment.
        cwd: the program's folder; None: the current folder.
    """

    command: tuple[str, ...]
    copies: Path
    folder: Path
    pairs: int = 5
    loadings: tuple[Loading, ...] = (Loading.LAZY, Loading.EAGER)
    cold: bool = False
    environ: Mapping[str, str]
    cwd: Path | None = None


def measure(request: MeasureRequest, say: Say) -> Measurement:
    """Run the program on both variants in turns, and compare.

    For each way of loading, the first pair of runs warms up and does not count. Before it, the
    libraries are evicted from the page cache. Pairs begin with the original and with the slim
    libraries alternately (ABBA), so a machine that slows down steadily favours neither.

    Args:
        say: shows a line of progress.

    Raises:
        NegativaError: a variant can't be made, or the runs can't be compared in any way of
            loading. A run can't be started, two runs ended with different exit statuses, or a
            slim run loaded originals.
    """
    if shutil.which(request.command[0], path=request.environ.get("PATH")) is None:
        raise MeasureError(f"{request.command[0]}: not found, or not an executable file")
    if (reason := why_unsupported()) is not None:
        raise MeasureError(f"copies can't take the place of libraries here: {reason}")
    return _Experiment(request, find_copies(request.copies), say).run()


def find_copies(root: Path) -> tuple[str, ...]:
    """The originals of the ELF files below a folder of copies.

    Raises:
        OptionError: there are no copies, or one has no original.
    """
    root = root.resolve()
    found = []
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file() or read_head(path, 4) != ELF_MAGIC:
            continue
        original = Path("/") / path.relative_to(root)
        if not original.is_file():
            raise OptionError(
                f"{path}: the copy of {original}, which does not exist; expected the copy of "
                "/a/b.so at ROOT/a/b.so"
            )
        found.append(os.path.realpath(original))
    if not found:
        raise OptionError(
            f"{root}: no copies of libraries here; make some with negativa reconstruct"
        )
    return tuple(sorted(found))


class _Experiment:
    def __init__(self, request: MeasureRequest, originals: tuple[str, ...], say: Say) -> None:
        self._request = request
        self._root = os.path.realpath(request.copies)
        self._originals = originals
        self._say = say
        self._gpus = Gpus()
        self._files = {
            Variant.ORIGINAL: [Path(path) for path in originals],
            Variant.SLIM: [Path(copy_path(self._root, path)) for path in originals],
        }
        self._tables = {
            Variant.ORIGINAL: request.folder / "original.table",
            Variant.SLIM: request.folder / "slim.table",
        }
        self._runs: list[RunFigures] = []

    def run(self) -> Measurement:
        created = time.time_ns()
        write_table(make_table(self._root, ()), self._tables[Variant.ORIGINAL])
        write_table(make_table(self._root, self._originals), self._tables[Variant.SLIM])
        adopts = adopt_orphans()
        results = tuple(map(self._run_all, self._request.loadings))
        if all(result.failure is not None for result in results):
            raise MeasureError("\n".join(dict.fromkeys(r.failure or "" for r in results)))
        self._say("negativa: measuring sizes")
        original, slim = (
            measure_sizes(tuple(zip(self._originals, self._files[variant], strict=True)))
            for variant in (Variant.ORIGINAL, Variant.SLIM)
        )
        return Measurement(
            command=self._request.command,
            copies_root=self._root,
            libraries=self._originals,
            created_ns=created,
            pairs=self._request.pairs,
            cold=self._request.cold,
            devices=self._gpus.names,
            original=original,
            slim=slim,
            results=results,
            runs=tuple(self._runs),
            notes=self._notes(adopts_orphans=adopts),
        )

    def _run_all(self, loading: Loading) -> LoadingResult:
        """All runs with one way of loading. A failure does not affect the other way."""
        try:
            for pair in range(self._request.pairs + 1):
                order = (Variant.ORIGINAL, Variant.SLIM)
                for variant in order if pair % 2 else reversed(order):
                    self._run_once(variant, loading, pair)
        except MeasureError as e:
            return LoadingResult(loading=loading, status=None, comparisons=(), failure=str(e))
        runs = self._runs_with(loading)
        return LoadingResult(
            loading=loading, status=runs[0].status, comparisons=tuple(compare(runs))
        )

    def _runs_with(self, loading: Loading) -> list[RunFigures]:
        return [run for run in self._runs if run.loading is loading]

    def _run_once(self, variant: Variant, loading: Loading, pair: int) -> None:
        run = RunFigures(variant=variant, loading=loading, warm_up=pair == 0, pair=pair)
        name = _name(run)
        evicting = run.warm_up or self._request.cold
        left = None
        if evicting:
            evict(self._files[variant])
            left = cached_bytes(self._files[variant])
        logs = self._request.folder / f"{name}.redirect"
        with refusing(logs, "created", MeasureError):
            logs.mkdir(parents=True)
        output = self._request.folder / f"{name}.log"
        sampled = run_sampled(
            run,
            self._request.command,
            self._environment(variant, loading, logs),
            output=output,
            first_result=self._request.folder / f"{name}.first-result",
            cwd=self._request.cwd,
            gpus=self._gpus,
        )
        copies = self._copies_loaded(variant, logs, name, sampled.status, output)
        figures = replace(
            sampled,
            cached_bytes=cached_bytes(self._files[variant]) if evicting else None,
            left_cached_bytes=left,
            copies=copies,
        )
        self._check(figures, output)
        self._runs.append(figures)
        self._say(f"negativa: {name}: {figures.wall_s:.2f} s, exit status {figures.status}")

    def _environment(self, variant: Variant, loading: Loading, logs: Path) -> dict[str, str]:
        environ = {**self._request.environ, "CUDA_MODULE_LOADING": loading.value.upper()}
        environ.update(redirect_environment(environ, self._tables[variant], logs))
        observer = first_result_library()
        if observer is not None:
            # The first of the auditors: first_result.c says why.
            environ[AUDIT_VARIABLE] = f"{observer}:{environ[AUDIT_VARIABLE]}"
        return environ

    def _copies_loaded(
        self, variant: Variant, logs: Path, name: str, status: int, output: Path
    ) -> int:
        """Number of copies that the run mapped.

        Raises:
            MeasureError: the run loaded originals or no copy, or its logs are incomplete.
        """
        if variant is Variant.ORIGINAL:
            return 0
        copies: set[str] = set()
        for process in read_logs(logs):
            who = f"{name}: process {process.pid} ({process.executable})"
            copies |= process.copies
            for path, opened in sorted(process.originals):
                raise MeasureError(
                    f"{who} loaded the original {path} (as {opened}) though there is a copy: the "
                    "run measures nothing"
                )
            for problem in process.problems:
                raise MeasureError(f"{who}: the libraries that it loaded are unknown: {problem}")
        if not copies:
            raise MeasureError(
                f"{name}: no process of the command loaded any of the {len(self._files[variant])} "
                f"copies in {self._root}: the run measures nothing; exit status {status}, "
                f"output in {output}, its end:\n{_tail(output)}"
            )
        return len(copies)

    def _check(self, figures: RunFigures, output: Path) -> None:
        first = next(iter(self._runs_with(figures.loading)), figures)
        if figures.status != first.status:
            raise MeasureError(
                f"{figures.loading.value} loading: exit status {first.status} in "
                f"{_name(first)}, {figures.status} in {_name(figures)}: runs that end differently "
                f"can't be compared; output of the latter in {output}, its end:\n{_tail(output)}"
            )

    def _notes(self, *, adopts_orphans: bool) -> tuple[str, ...]:
        """Remarks on all runs."""
        runs, gpus = self._runs, self._gpus
        observer = first_result_library()
        failed = sorted({run.status for run in runs} - {0})
        notes = (
            (not adopts_orphans, "this system does not show processes whose parent ended"),
            (gpus.missing, gpus.missing),
            (
                not (gpus.missing or gpus.names),
                "GPU memory and energy are not measured: NVML shows no GPU",
            ),
            (any(run.outlived for run in runs), "processes that outlived the command were ended"),
            (
                any(run.left_cached_bytes for run in runs),
                "some pages of the libraries could not be evicted from the page cache: another "
                "process has them mapped",
            ),
            *(
                (True, f"runs ended with exit status {status}; output in {self._request.folder}")
                for status in failed
            ),
            (
                gpus.names and all(run.gpu_process_bytes is None for run in runs),
                "NVML shows no process of the command (a container has its own process ids, or the "
                "command used no GPU): GPU memory is that of whole devices, less what they used "
                "before",
            ),
            (
                gpus.names,
                "energy is that of whole devices, including idle power and other programs",
            ),
            (
                observer is None,
                "the time to the first GPU result is not measured: its library was not built "
                "(install a C compiler and reinstall pytest-negativa)",
            ),
            (
                observer and all(run.first_result_s is None for run in runs),
                "no run waited for a result of a GPU",
            ),
            (
                all(run.cached_bytes is None for run in runs),
                "the page cache is not measured: the kernel does not report it (Linux 6.5 and "
                "later do), or the libraries belong to another user",
            ),
            (
                len({run.copies for run in runs if run.variant is Variant.SLIM}) > 1,
                "not every run on slim libraries loaded the same number of copies",
            ),
        )
        return tuple(note for holds, note in notes if holds and note)


def _name(run: RunFigures) -> str:
    return f"{run.loading.value}-{run.pair or 'warm-up'}-{run.variant.value}"


def _tail(path: Path) -> str:
    lines = path.read_bytes()[-4096:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread of at least one value."""
    return Summary(
        runs=len(values),
        median=statistics.median(values),
        minimum=min(values),
        maximum=max(values),
    )


def compare(runs: Sequence[RunFigures]) -> Iterator[Comparison]:
    """Compare both variants by every figure that all runs have.

    The page cache is compared in the runs whose libraries had been evicted, which may be the
    warm-up alone. All other figures are compared in the runs that count.
    """
    counted = [run for run in runs if not run.warm_up]
    for figure in FIGURES:
        wanted = counted
        if figure == "cached_bytes" and all(run.cached_bytes is None for run in counted):
            wanted = [run for run in runs if run.warm_up]
        values = [(run, getattr(run, figure)) for run in wanted]
        if not values or any(value is None for _, value in values):
            continue
        original = {run.pair: value for run, value in values if run.variant is Variant.ORIGINAL}
        slim = {run.pair: value for run, value in values if run.variant is Variant.SLIM}
        before, after = summarize(tuple(original.values())), summarize(tuple(slim.values()))
        pairs = [slim[pair] / value for pair, value in original.items() if value]
        yield Comparison(
            figure=figure,
            original=before,
            slim=after,
            ratio=after.median / before.median if before.median else None,
            pair_ratios=(min(pairs), max(pairs)) if pairs else None,
            overlap=before.minimum <= after.maximum and after.minimum <= before.maximum,
        )


def make_request(
    command: Sequence[str],
    settings: Settings,
    *,
    copies: Path | None = None,
    loading: str | None = None,
    **options: Any,
) -> MeasureRequest:
    """A request for a measurement into a new folder.

    Args:
        copies: the folder with the slim libraries; None: that of a proof or of reconstruct.
        loading: ``lazy``, ``eager`` or ``both``; None: both, or lazy without a GPU, where they
            don't differ.
        options: further fields of the request.

    Raises:
        OptionError: there are no slim libraries.
    """
    runs = RunsFolder(Path(settings.directory))
    copies = copies or runs.copies
    if not copies.is_dir():
        raise OptionError(
            f"{copies}: no slim libraries here; make some with pytest --negativa "
            "--negativa-verify, or with negativa reconstruct"
        )
    if loading is None:
        loading = "both" if has_gpu() else "lazy"
    runs.make()
    return MeasureRequest(
        command=tuple(command),
        copies=copies,
        folder=runs.new_measurement(),
        loadings=tuple(Loading) if loading == "both" else (Loading(loading),),
        **options,
    )


def measure_and_write(request: MeasureRequest) -> Measurement:
    """Measure, with a line to stderr for each run, and write the measurement into its folder.

    Raises:
        NegativaError: see ``measure``; or the file can't be written.
    """
    measurement = measure(request, _say)
    write_record(request.folder / "measurement.json", measurement, indent=1)
    return measurement


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
