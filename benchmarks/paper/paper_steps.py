"""Runs ``negativa`` for one workload, and gathers the files that it writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace
from paper_catalog import Workload
from paper_records import FUNCTIONS, PAGES, RESULTS, USED_KERNELS, Step, write_json

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.measurement import Loading
from pytest_negativa.models.pages import HostLibrary
from pytest_negativa.pages.functions import summarize, touched_functions
from pytest_negativa.pages.gather import require_usage
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import RunsFolder

WORK = "work"
"""The folder, in the output, of traces, plans and copies: gigabytes."""

_NEGATIVA = (sys.executable, "-c", "from pytest_negativa.cli.main import main; main()")
_TAIL_LINES = 3
_TAIL_LENGTH = 240
# One that hangs must not take the others' time.
_STEP_LIMIT_S = 1800.0
_QUICK_STEP_LIMIT_S = 180.0
_GRACE_S = 5.0


class Runner:
    """One workload's steps, in folders of its own.

    Each step's output goes to ``results/WORKLOAD/STEP.log``; only exit statuses and files are
    looked at.
    """

    def __init__(
        self, workload: Workload, output: Path, *, quick: bool, device: str, together: bool
    ) -> None:
        self.workload = workload
        self.steps: list[Step] = []
        self._results = output / RESULTS / workload.name
        self._work = output / WORK / workload.name
        self._runs = self._work / "runs"
        # The others use the same libraries meanwhile.
        self._opened = ("--opened-originals", "*") if together else ()
        self._limit = _QUICK_STEP_LIMIT_S if quick else _STEP_LIMIT_S
        steps = workload.quick if quick else workload.full
        self._command = (
            sys.executable,
            str(workload.path),
            workload.mode,
            *("--device", device, "--steps", str(steps)),
            *("--result", str(self._work / "result.json")),
        )

    @property
    def measurable(self) -> bool:
        """Whether compacted copies are there."""
        return (self._results / "verdict-compacted.json").is_file()

    def prepare(self) -> None:
        """Trace, plan, and verify on both kinds of copies; the compacted ones stay.

        Problems go to ``steps``, and don't keep the other workloads from being run.
        """
        try:
            self._prepare()
        except (OSError, NegativaError) as e:
            self.steps.append(
                Step(workload=self.workload.name, name="prepare", status=1, problem=str(e))
            )

    def _prepare(self) -> None:
        self._results.mkdir(parents=True, exist_ok=True)
        self._work.mkdir(parents=True, exist_ok=True)
        self._trace_pages()
        traced = self._step("debloat", *self._folder, "debloat", "--", *self._command)
        run = RunsFolder(self._runs).find()
        if not self._gather(run.report_file, "report.json", "debloat") or not traced:
            return
        used = {plan.library.path: [k.name for k in plan.used_kernels] for plan in load_plans(run)}
        write_json(self._results / USED_KERNELS, used)
        for copies in ("overwritten", "compacted"):
            name = f"verify-{copies}"
            # The second verification must not leave the first one's verdict to be gathered.
            run.verdict_file.unlink(missing_ok=True)
            self._step(name, *self._folder, "verify", "--copies", copies, *self._opened)
            self._gather(run.verdict_file, f"verdict-{copies}.json", name)

    def _trace_pages(self) -> None:
        """CPU code has a trace of its own: it must not slow the others down."""
        folder = self._work / "cpu-runs"
        if self._step("trace-cpu", "--dir", str(folder), "trace", "--cpu", "--", *self._command):
            usage = require_usage(RunsFolder(folder).find())
            names = {library.sha256: Path(library.paths[0]).name for library in usage.libraries}
            functions: dict[str, list[int]] = {}
            for library in usage.libraries:
                if library.unwatched is None and (found := _touched_functions(library)):
                    functions.setdefault(names[library.sha256], []).extend(found)
            write_json(self._results / PAGES, summarize(usage))
            (self._results / FUNCTIONS).write_bytes(msgspec.json.encode(functions))

    def measure(self, loading: Loading, pairs: int) -> None:
        """Measure on the copies that are there."""
        name = self.name_of(loading)
        before = self._measurements()
        self._step(
            name,
            *self._folder,
            "measure",
            *("--slim-dir", str(RunsFolder(self._runs).copies)),
            *("--runs", str(pairs), "--loading", loading.value),
            *("--", *self._command),
        )
        found = sorted(self._measurements() - before)
        if found:
            self._gather(found[-1], f"measurement-{loading.value}.json", name)

    @staticmethod
    def name_of(loading: Loading) -> str:
        """The name of the step that measures."""
        return f"measure-{loading.value}"

    def leave_out(self, name: str, reason: str) -> None:
        self.steps.append(Step(workload=self.workload.name, name=name, problem=reason))

    def forget(self, name: str) -> None:
        """Forget that a step was left out."""
        self.steps = [step for step in self.steps if step.name != name]

    @property
    def _folder(self) -> tuple[str, str]:
        return "--dir", str(self._runs)

    def _measurements(self) -> set[Path]:
        return set(self._runs.glob("measure/*/measurement.json"))

    def _step(self, name: str, *arguments: str) -> bool:
        log = self._results / f"{name}.log"
        start = time.monotonic()
        late = False
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*_NEGATIVA, *arguments],
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                # Also where the benchmark is interrupted.
                if process.returncode is None:
                    status = _end(process)
        seconds = time.monotonic() - start
        problem = None
        if status != 0:
            ended = f"ended after {self._limit:.0f} s, " if late else ""
            problem = f"{ended}exit status {status}: {_last_words(log)} (see {log.name})"
        self.steps.append(
            Step(
                workload=self.workload.name,
                name=name,
                seconds=seconds,
                status=status,
                problem=problem,
            )
        )
        note = "" if problem is None else f": {problem}"
        sys.stderr.write(f"{self.workload.name}: {name} {seconds:.1f} s{note}\n")
        return status == 0

    def _gather(self, path: Path, name: str, step: str) -> bool:
        if path.is_file():
            shutil.copyfile(path, self._results / name)
            return True
        last = self.steps[-1]
        # A step that failed has said why.
        if last.problem is None:
            reason = f"no {path.name} was written (see {step}.log)"
            self.steps[-1] = replace(last, problem=reason)
        return False


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a process and its group; what it watches over in other groups it ends itself."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _last_words(log: Path) -> str:
    """The last words of a log, for the list of problems: for people, nothing is read from it."""
    lines = log.read_text(errors="replace").split("\n")
    told = [line.strip() for line in lines if line.strip()]
    return " / ".join(told[-_TAIL_LINES:])[-_TAIL_LENGTH:] if told else "no output"


def _touched_functions(library: HostLibrary) -> list[int]:
    """The addresses of the functions on touched pages."""
    if (known := touched_functions(library)) is None:
        return []
    starts, found = known
    return [starts[number] for numbers in found for number in numbers]
