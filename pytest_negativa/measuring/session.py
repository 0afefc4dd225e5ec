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
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.devices import has_gpu
from pytest_negativa.errors import OptionError, refusing
from pytest_negativa.measuring.files import cached_bytes, evict, measure_sizes
from pytest_negativa.measuring.sampler import (
    FIRST_RESULT,
    Gpus,
    MeasureError,
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


def measure(
    command: tuple[str, ...],
    settings: Settings,
    *,
    copies: Path | None,
    loading: str | None,
    pairs: int,
    cold: bool,
) -> tuple[Measurement, Path]:
    """Run a program on both variants in turns, compare, and write the measurement.

    For each way of loading, the first pair of runs warms up and does not count. Before it, the
    libraries are evicted from the page cache. Pairs begin with the original and with the slim
    libraries alternately (ABBA), so a machine that slows down steadily favours neither. Each run is
    a line on stderr.

    Args:
        copies: the folder with the slim libraries, each under its original's real path; None: that
            of a proof or of reconstruct.
        loading: ``lazy``, ``eager`` or ``both``; None: both, or lazy without a GPU, where they
            don't differ.
        pairs: how many runs of each variant count, for each way of loading.
        cold: evict the libraries from the page cache before every run.

    Returns:
        The measurement, and its new folder, which also has the program's output.

    Raises:
        OptionError: there are no slim libraries.
        NegativaError: a variant can't be made, or the runs can't be compared in any way of
            loading. A run can't be started, two runs ended with different exit statuses, or a
            slim run loaded originals. Or the file can't be written.
    """
    runs = RunsFolder(Path(settings.directory))
    copies = copies or runs.copies
    if not copies.is_dir():
        raise OptionError(
            f"{copies}: no slim libraries here; make some with pytest --negativa "
            "--negativa-verify, or with negativa reconstruct"
        )
    if shutil.which(command[0]) is None:
        raise MeasureError(f"{command[0]}: not found, or not an executable file")
    if (reason := why_unsupported()) is not None:
        raise MeasureError(f"copies can't take the place of libraries here: {reason}")
    if loading is None:
        loading = "both" if has_gpu() else "lazy"
    loadings = tuple(Loading) if loading == "both" else (Loading(loading),)
    runs.make()
    folder = runs.new_measurement()
    measurement = _Experiment(command, copies, folder, pairs=pairs, cold=cold).run(loadings)
    write_record(folder / "measurement.json", measurement, indent=1)
    return measurement, folder


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
    def __init__(
        self, command: tuple[str, ...], copies: Path, folder: Path, *, pairs: int, cold: bool
    ) -> None:
        self._command = command
        self._folder = folder
        self._pairs = pairs
        self._cold = cold
        self._root = os.path.realpath(copies)
        self._originals = originals = find_copies(copies)
        self._gpus = Gpus()
        self._files = {
            Variant.ORIGINAL: [Path(path) for path in originals],
            Variant.SLIM: [Path(copy_path(self._root, path)) for path in originals],
        }
        self._tables = {
            Variant.ORIGINAL: folder / "original.table",
            Variant.SLIM: folder / "slim.table",
        }
        self._runs: list[RunFigures] = []

    def run(self, loadings: Sequence[Loading]) -> Measurement:
        created = time.time_ns()
        write_table(self._tables[Variant.ORIGINAL], self._root, ())
        write_table(self._tables[Variant.SLIM], self._root, self._originals)
        adopt_orphans()
        results = tuple(map(self._run_all, loadings))
        if all(result.failure is not None for result in results):
            raise MeasureError("\n".join(dict.fromkeys(r.failure or "" for r in results)))
        _say("negativa: measuring sizes")
        original, slim = (
            measure_sizes(tuple(zip(self._originals, self._files[variant], strict=True)))
            for variant in (Variant.ORIGINAL, Variant.SLIM)
        )
        return Measurement(
            command=self._command,
            copies_root=self._root,
            libraries=self._originals,
            created_ns=created,
            pairs=self._pairs,
            cold=self._cold,
            devices=self._gpus.names,
            original=original,
            slim=slim,
            results=results,
            runs=tuple(self._runs),
            notes=self._notes(),
        )

    def _run_all(self, loading: Loading) -> LoadingResult:
        """All runs with one way of loading. A failure does not affect the other way."""
        try:
            for pair in range(self._pairs + 1):
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
        evicting = run.warm_up or self._cold
        left = None
        if evicting:
            evict(self._files[variant])
            left = cached_bytes(self._files[variant])
        logs = self._folder / f"{name}.redirect"
        with refusing(logs, "created", MeasureError):
            logs.mkdir(parents=True)
        output = self._folder / f"{name}.log"
        sampled = run_sampled(
            run,
            self._command,
            self._environment(variant, loading, logs),
            output=output,
            first_result=self._folder / f"{name}.first-result",
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
        _say(f"negativa: {name}: {figures.wall_s:.2f} s, exit status {figures.status}")

    def _environment(self, variant: Variant, loading: Loading, logs: Path) -> dict[str, str]:
        environ = {**os.environ, "CUDA_MODULE_LOADING": loading.value.upper()}
        environ.update(redirect_environment(environ, self._tables[variant], logs))
        # The first of the auditors: first_result.c says why.
        environ[AUDIT_VARIABLE] = f"{FIRST_RESULT}:{environ[AUDIT_VARIABLE]}"
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

    def _notes(self) -> tuple[str, ...]:
        """Remarks on all runs."""
        runs, gpus = self._runs, self._gpus
        failed = sorted({run.status for run in runs} - {0})
        notes = (
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
                (True, f"runs ended with exit status {status}; output in {self._folder}")
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
                all(run.first_result_s is None for run in runs),
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


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
