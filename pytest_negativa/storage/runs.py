"""The folder of runs: names of files, marks, latest, fetched runs, the last good one, deletion.

A run's folder, ``.negativa/RUN/``, holds:

- ``trace/``: what each of its processes used, a file for each process; ``digests.json``: what the
  libraries held that these name.
- ``tests.jsonl``: how its tests ended; ``combined-tests.json``: the same of combined runs.
- ``usage.json``: what its traces add up to; ``trace.json``: the same, as Negativa-ML has it.
- ``cpu/``: which pages of CPU code its processes touched, a file for each process,
  ``files.json``, the contents of the libraries, and ``added-NS.json``, what each proof touched;
  ``cpu.json``: what these add up to.
- ``map/``, ``plan/``, ``spans/``: a file for each library, of one name in all three.
- ``opened.json``: which files that are GPU code themselves were opened; ``files.json``: what is
  decided about them.
- ``report.json``: what the run's report shows.
- ``failed``: why the run did not end well; absent if it did.
- ``samples``: its traces are of processes outside of any session (``Role.SAMPLE``), whatever they
  say themselves; absent for any other run.
- ``incomplete``: why code may have been used that the plans don't know of; absent if none was.
- ``verify/``: a folder for each verification, with a folder for each of its rounds.
- ``verdict.json``: the last verdict.
- ``healed.json``: what healing gave back.

The folder of a round holds ``trace/`` and ``tests.jsonl`` like that of a run; ``round.json``, which
tells its program what to do; ``redirect/``, a log for each of its processes; ``output.txt``, if its
program's output was not shown; and ``reports/``.
``.negativa/latest`` leads to the last run, and ``.negativa/reconstructed`` holds the copies of
libraries.

Every traced process imports this module when it starts, so the module imports little.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_negativa.errors import OptionError, StoreError, refusing
from pytest_negativa.storage.atomic import TEMPORARY_SUFFIX, remove_file, write_atomically
from pytest_negativa.storage.flock import held, lock, open_to_lock
from pytest_negativa.storage.handover import find_handover
from pytest_negativa.storage.urls import Url, is_url

TRACE_SUFFIX = ".jsonl"
PAGES_SUFFIX = ".pages"
REDIRECT_SUFFIX = ".log"
"""End the names of the logs that processes write, a file for each."""

LOST_NAME = "lost"
"""The file, beside logs of pages, that counts what no log has."""

_MAX_FETCHED = 64 << 30
"""Bytes that the files of a run at a URL may have together."""

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6,8}")
_DELETED_SUFFIX = ".deleted"
_DEFAULT_NAME = ".negativa"
_IGNORE_NAME = ".gitignore"
_IGNORE = b"""\
# Created by pytest-negativa: traces, plans and copies are not for version control.
*
"""


def new_run_id() -> str:
    """An id that no other run has. Ids sort by time: of a second, first come the microseconds."""
    second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
    return f"{when}-{nanoseconds // 1000:05x}{os.urandom(2).hex()[:3]}"


def is_run_id(text: str) -> bool:
    """Whether a text is the id of a run, which may be gone."""
    return _RUN_ID.fullmatch(text) is not None


def why_no_folder_for_runs(path: str) -> str | None:
    """Reason for which runs can't lie in a folder, or in a project there; None if they can."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return (
            f"{path}: this folder's name is not UTF-8, and the files of a run can't hold it; "
            "rename the folder, or run from another one"
        )
    return None


class _Place:
    """A path in the folder of a record."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, record: Any, owner: object) -> Path:
        path: Path = record.folder / self._name
        return path


MarkKind = Literal["failed", "failed-tests", "chosen-tests", "incomplete", "samples"]
"""Marks of runs: files with a reason."""


class _Mark:
    """The reason for a mark, in one line; None if the run has no such mark."""

    def __init__(self, kind: MarkKind) -> None:
        self._kind = kind

    def __get__(self, run: Run, owner: object) -> str | None:
        try:
            reason = (run.folder / self._kind).read_text("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as e:
            reason = f"{self._kind} cannot be read: {e.strerror}"
        return " ".join(reason.split()) or f"it is marked as {self._kind}"


@dataclass(frozen=True, slots=True)
class Run:
    """A traced run, a verification of one, or a round of that, by its folder."""

    folder: Path

    trace_dir = _Place("trace")
    outcomes_file = _Place("tests.jsonl")
    combined_tests_file = _Place("combined-tests.json")
    usage_file = _Place("usage.json")
    negativa_ml_file = _Place("trace.json")
    page_logs = _Place("cpu")
    page_log_files = _Place("cpu/files.json")
    host_usage_file = _Place("cpu.json")
    map_dir = _Place("map")
    plan_dir = _Place("plan")
    spans_dir = _Place("spans")
    opened_file = _Place("opened.json")
    report_file = _Place("report.json")
    verdict_file = _Place("verdict.json")
    armed_file = _Place("armed")
    healed_file = _Place("healed.json")
    round_file = _Place("round.json")
    redirect_logs = _Place("redirect")
    redirect_table = _Place("redirect.table")
    touch_logs = _Place("touches")
    output_file = _Place("output.txt")
    report_files = _Place("reports")

    failure = _Mark("failed")
    """Reason for which the run failed."""
    failed_tests = _Mark("failed-tests")
    """Number of failed tests of a trace of CPU code: they may need code that they did not reach."""
    chosen_tests = _Mark("chosen-tests")
    """The choice of tests of a trace of CPU code: other tests may need more code."""
    incomplete_reason = _Mark("incomplete")
    """Reason for which the plans may lack code that the run's processes use."""
    _samples = _Mark("samples")

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def is_empty(self) -> bool:
        """Whether the folder has nothing that a run leaves, so that it may be none."""
        return not (
            self.has_pages
            or self.outcomes_file.exists()
            or self.usage_file.exists()
            or self.report_file.exists()
            or find_traces(self.traces_folder)
            or self.plan_files()
        )

    @property
    def has_pages(self) -> bool:
        """Whether CPU code was traced."""
        return self.page_log_files.exists() or self.host_usage_file.exists()

    def make(self) -> None:
        """Make the folder for traces, and the folder for runs if it is not there.

        Raises:
            StoreError: it can't be made.
        """
        if is_run_id(self.run_id):  # else a round
            RunsFolder(self.folder.parent).make()
        with refusing(self.trace_dir, "created"):
            self.trace_dir.mkdir(parents=True, exist_ok=True)

    def hold(self) -> None:
        """Keep the run from being deleted until this process ends."""
        with contextlib.suppress(OSError):
            # Never closed: the lock ends with the process.
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock(descriptor, shared=True, wait=False)

    def delete(self) -> None:
        """Delete the run's folder. A ``latest`` that led there leads to the newest run left.

        Raises:
            StoreError: it is no run's folder, is in use, or can't be deleted.
        """
        import shutil

        runs = RunsFolder(self.folder.parent)
        if not runs.holds(self.folder):
            raise StoreError(
                f"{self}: not deleted: not the folder of a run; expected a folder such as "
                f"{runs.folder / new_run_id()}"
            )
        # A part of a run must not pass as a run, so the name goes first.
        doomed = self.folder.with_name(f".{self.run_id}{_DELETED_SUFFIX}")
        with refusing(self, "deleted"):
            with open_to_lock(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
                if not lock(folder, wait=False):
                    raise StoreError(f"{self}: not deleted: a running session uses it")
                self.folder.rename(doomed)
            runs.repair_latest()
            shutil.rmtree(doomed)

    def publish(self, url: Url) -> tuple[int, int]:
        """Send the run to a URL; see ``storage.push``.

        Raises:
            StoreError: it is no run's folder, or a file can't be read or sent.
            OptionError: the URL can't be used.
        """
        from pytest_negativa.storage.push import publish

        if not is_run_id(self.run_id):
            raise StoreError(
                f"{self}: not the folder of a run; expected a folder such as {new_run_id()}"
            )
        self.hold()
        found = (path for path in self.folder.rglob("*") if path.is_file())
        files = {
            path.relative_to(self.folder).as_posix(): path
            for path in found
            if not path.is_symlink() and not path.name.endswith(TEMPORARY_SUFFIX)
        }
        return publish(self.run_id, files, url)

    def new_trace_file(self) -> Path:
        """A file for this process's trace. No other process uses the name, not even a later one
        with the same pid.
        """
        name = f"{self.run_id}.{os.getpid()}.{os.urandom(4).hex()}{TRACE_SUFFIX}"
        return self.trace_dir / name

    def trace_files(self) -> tuple[Path, ...]:
        """The traces that the run's processes have written so far."""
        return find_traces(self.trace_dir)

    def require_traces(self) -> tuple[Path, ...]:
        """The run's traces, or those of a folder that holds nothing else.

        Raises:
            StoreError: there is none.
        """
        self.require_gpu_trace()
        found = find_traces(self.traces_folder)
        if not found:
            where = f"here or in its folder {self.trace_dir.name}"
            latest = RunsFolder(self.folder).latest
            hint = f"; its last run is {latest}" if latest.is_dir() else ""
            raise StoreError(f"no trace files (*{TRACE_SUFFIX}) {where}{hint}", self)
        return found

    def require_gpu_trace(self) -> None:
        """Refuse a run of CPU code alone.

        Raises:
            StoreError: it is one.
        """
        if (reason := self._why_no_gpu_trace()) is not None:
            raise StoreError(reason, self)

    def _why_no_gpu_trace(self) -> str | None:
        if not self.has_pages or self.trace_files():
            return None
        return (
            "only CPU code was traced; to prove it, add --cpu (of pytest: --negativa-cpu); show it "
            f"with: negativa pages --run {shlex.quote(str(self))}"
        )

    @property
    def traces_folder(self) -> Path:
        """The folder with the traces: a recording has no other files."""
        return self.trace_dir if self.trace_files() else self.folder

    @property
    def gpu_page_logs(self) -> Path | None:
        """The folder with logs of touched pages of GPU code; None if none was watched."""
        return next((logs for logs in (self.page_logs, self.touch_logs) if logs.is_dir()), None)

    def remove_untraced(self) -> None:
        """Remove the folder of a run in which no process left a trace."""
        import shutil

        if not self.has_pages:
            shutil.rmtree(self.folder, ignore_errors=True)

    def plan_files(self) -> tuple[Path, ...]:
        """The plans, by name; none before ``negativa locate``.

        Raises:
            StoreError: their folder can't be listed.
        """
        return files_in(self.plan_dir, ".json")

    def new_verification(self) -> Run:
        """A folder, not made yet, for a verification: its verdict, and a folder for each round."""
        return Run(self.folder / "verify" / new_run_id())

    @property
    def is_good(self) -> bool:
        """Whether something is planned from it, and from all of it."""
        marks = (self.failure, self.incomplete_reason)
        return not any(marks) and not self.has_samples and bool(self.plan_files())

    def mark(self, kind: MarkKind, reason: str | None) -> None:
        """Note the reason for a mark; None takes the mark away.

        Raises:
            StoreError: it can't be noted.
        """
        path = self.folder / kind
        if reason is None:
            remove_file(path)
        else:
            write_atomically(path, f"{reason}\n".encode(errors="backslashreplace"))

    @property
    def has_samples(self) -> bool:
        """Whether its traces are of processes outside of any session."""
        return self._samples is not None

    def make_latest(self) -> None:
        """Make ``latest``, beside the run's folder, lead to it.

        A run that a test of another session made does not take the place of that session's run.

        Raises:
            StoreError: the link can't be written.
        """
        outer = find_handover(os.environ)
        if (
            outer is not None
            and outer.outer_folder != str(self)
            and Path(outer.outer_runs).resolve() == self.folder.parent.resolve()
        ):
            return
        link = RunsFolder(self.folder.parent).latest
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        with refusing(link, "written"):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.run_id)
            temporary.replace(link)

    @property
    def locate_command(self) -> str:
        """The command that makes the run's plans."""
        return f"negativa locate --run {shlex.quote(str(self))}"

    def why_unplanned(self) -> str:
        """Reason for which nothing is planned from the run, and what to do about it."""
        again = self.locate_command
        if (failure := self.failure) is not None:
            return (
                f"{self}: nothing is planned from this run: {failure}; "
                f"{RunsFolder(self.folder.parent).advice()}"
            )
        if (reason := self.incomplete_reason) is not None:
            return (
                f"{self}: its plans may lack code that was used after the report: {reason}; plan "
                f"it again with {again}, or trace again"
            )
        if self.usage_file.exists():
            return f"{self}: no plans here: no GPU code was loaded that is looked at"
        if (reason := self._why_no_gpu_trace()) is not None:
            return f"{self}: {reason}"
        if self.trace_dir.is_dir():
            return f"{self}: no plans here; make them with {again}"
        return f"{self}: no plans here, nor a trace; expected the folder of a run"


@dataclass(frozen=True, slots=True)
class RunsFolder:
    """The folder for all runs: ``.negativa``, or what the option ``directory`` says."""

    folder: Path

    latest = _Place("latest")
    copies = _Place("reconstructed")
    pytest_cache = _Place("cache")

    def make(self) -> None:
        """Make the folder, with a ``.gitignore``, if it is not there.

        A folder ``.negativa`` that has no ``.gitignore`` gets one, too. A folder of another name,
        which a link may lead to, is the user's.

        Raises:
            StoreError: it can't be made.
        """
        if (problem := why_no_folder_for_runs(str(self.folder))) is not None:
            raise StoreError(problem)
        ignore = self.folder / _IGNORE_NAME
        is_ours = not self.folder.is_dir() or self.folder.resolve().name == _DEFAULT_NAME
        if is_ours and not os.path.lexists(ignore):
            # The first of several processes writes it; all write the same.
            write_atomically(ignore, _IGNORE)

    def holds(self, folder: Path) -> bool:
        """Whether a folder here is a run's, by its name."""
        is_ours = is_run_id(folder.name) and folder.is_dir() and not folder.is_symlink()
        return is_ours and folder.parent == self.folder

    def runs(self) -> tuple[Run, ...]:
        """All runs, the newest first."""
        with contextlib.suppress(OSError):
            # Their names begin with the time.
            found = sorted(filter(self.holds, self.folder.iterdir()), reverse=True)
            return tuple(map(Run, found))
        return ()

    def repair_latest(self) -> None:
        """Let ``latest`` lead to the newest run if it leads nowhere; without a run, remove it.

        Raises:
            OSError, StoreError: the link can't be written.
        """
        if self.latest.is_symlink() and not self.latest.exists():
            self.latest.unlink()
            for run in self.runs()[:1]:
                run.make_latest()

    def new_run(self) -> Run:
        """A run with a new id, whose folder is not made yet."""
        return Run(self.folder / new_run_id())

    def fetch(self, url: Url) -> Run:
        """The run that lies at a URL. It is fetched into a folder here, unless it is here already.

        Without a last run here, it becomes that one.

        Raises:
            StoreError: it can't be fetched, or the run of that id here is another one.
            OptionError: the URL can't be used.
        """
        from tempfile import TemporaryDirectory

        from pytest_negativa.storage.push import fetch, is_there, load_manifest

        manifest = load_manifest(url)
        if not is_run_id(manifest.name):
            raise StoreError(f"{url}: is no run, but {manifest.name!r}")
        run = Run(self.folder / manifest.name)
        self.make()
        with held(self.folder):
            if not run.folder.exists():
                # A part of a run must not pass as a run.
                with (
                    refusing(run, "created"),
                    TemporaryDirectory(dir=self.folder, prefix=".fetched-") as part,
                ):
                    fetch(url, manifest, Path(part, "run"), max_bytes=_MAX_FETCHED)
                    Path(part, "run").rename(run.folder)
                if not self.latest.is_symlink():
                    run.make_latest()
                return run
        for file in manifest.files:
            if not is_there(run.folder / file.path, file):
                raise StoreError(
                    f"{url}: not fetched: {run} has another {file.path}; use that run, or delete "
                    f"it first: negativa runs --delete {run.run_id}"
                )
        return run

    def new_measurement(self) -> Path:
        """A folder, not made yet, for the files of a measurement."""
        return self.folder / "measure" / new_run_id()

    def find(self, named: str | None = None) -> Run:
        """The named run, else the last one; by its own name, which messages are to say.

        Args:
            named: a run's folder, its id, or its URL, see ``fetch``.

        Raises:
            OptionError: there is no such run, or the URL can't be used.
            StoreError: it can't be fetched.
        """
        if named is None:
            if self.latest.is_dir():
                return Run(self.latest.resolve())
            if self.latest.is_symlink():
                gone = f"{self.latest}: leads to {self.latest.readlink()}, which is gone"
                raise OptionError(f"{gone}; {self.advice()}")
            raise OptionError(
                f"{self.latest}: no traced run here; make one with pytest --negativa, or with "
                "negativa debloat -- COMMAND"
            )
        if is_url(named):
            return self.fetch(Url(named))
        for folder in (Path(named), self.folder / named):
            if named and folder.is_dir():
                return Run(folder.resolve())
        raise OptionError(
            "no such run", named or repr(named), f"negativa runs lists those in {self.folder}"
        )

    def advice(self) -> str:
        """Remedy without a good last run."""
        good = next((run for run in self.runs() if run.is_good), None)
        if good is None:
            return "trace again"
        named = f"--run {shlex.quote(str(good))}"
        return f"trace again, or take the last good run: {named} (with pytest: --negativa-run)"


def fetch_to_combine(url: Url, folder: Path) -> Run:
    """Fetch what combining needs of a run at a URL.

    Args:
        url: of the run.
        folder: here; it is not there yet.

    Raises:
        StoreError: it can't be fetched.
        OptionError: the URL can't be used.
    """
    from pytest_negativa.storage.push import fetch, load_manifest

    run = Run(folder)
    unused = {run.map_dir.name, run.spans_dir.name, "verify"}
    fetch(
        url,
        load_manifest(url),
        folder,
        max_bytes=_MAX_FETCHED,
        wanted=lambda path: path.partition("/")[0] not in unused,
    )
    return run


def run_at(folder: Path) -> Run:
    """The run in a folder, or the one that a folder ``trace`` is of: the marks lie beside it."""
    above = Run(folder.resolve().parent)
    if above.trace_dir != folder.resolve() or not above.trace_files():
        return Run(folder)
    marks = (above.failure, above.incomplete_reason, above.has_samples)
    is_run = is_run_id(above.run_id) or any(marks) or above.healed_file.exists()
    return above if is_run else Run(folder)


def holds_samples(folder: Path) -> bool:
    """Whether the traces in a folder are samples, see ``Run.has_samples``."""
    return Run(folder.absolute().parent).has_samples


def digests_in(folder: Path) -> Path:
    """The file of digests beside the traces in a folder."""
    return folder / "digests.json"


def find_traces(folder: Path) -> tuple[Path, ...]:
    """The trace files in a folder.

    Raises:
        StoreError: it can't be listed.
    """
    return files_in(folder, TRACE_SUFFIX)


def files_in(folder: Path, suffix: str) -> tuple[Path, ...]:
    """The files with a suffix; none if there is no such folder.

    Raises:
        StoreError: it can't be listed.
    """
    with (
        refusing(folder, "listed"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
    ):
        return tuple(path for path in sorted(folder.iterdir()) if path.name.endswith(suffix))
    return ()
