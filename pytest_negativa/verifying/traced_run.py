"""A traced run, as verification reads it: which runs are refused, and the command to verify."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import SessionKind, SessionResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.settings import Granularity, Settings
from pytest_negativa.models.trace import PROCESS_UNTRACED, Usage
from pytest_negativa.pages.gather import with_pages
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.results import load_planned, load_usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_traces


@dataclass(frozen=True, slots=True)
class TracedRun:
    """Traced run, as verification needs it.

    Attributes:
        run: its files.
        planned: maps and plans of the run's libraries.
        files: plans of distributions' files that are GPU code, which have no copies.
        usage: the GPU code that the run used.
        session: how the run's tests ended.
        status: exit status of the process itself, negative for a signal; None if no supervisor
            saw it.
    """

    run: Run
    planned: tuple[AnalyzedLibrary, ...]
    usage: Usage
    session: SessionResult
    status: int | None = None
    files: tuple[LibraryPlan, ...] = ()

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def plans(self) -> tuple[LibraryPlan, ...]:
        return tuple(p.plan for p in self.planned)

    @property
    def loaded(self) -> frozenset[str]:
        """Real paths of the libraries that any process of the run had mapped."""
        return frozenset(u.library.path for u in self.usage.libraries if u.processes)


def load_traced_run(
    run: Run, settings: Settings, status: int | None = None, *, cpu_alone: bool = False
) -> TracedRun:
    """Read a traced run.

    Args:
        status: see ``TracedRun``.
        cpu_alone: it has no GPU code, and so neither a plan nor perhaps a usage.

    Raises:
        NegativaError: the run can't be verified; the message says why.
    """
    _refuse_failed(run)
    usage = load_usage(run) or (merge_traces(()) if cpu_alone else None)
    if usage is None:
        raise StoreError(run.why_unplanned())
    # What ran when the last report had been written may have touched more.
    usage = with_pages(usage, run)
    if usage.replay is not None:
        raise StoreError(
            f"{run}: replays a trace of another machine, which proves nothing; trace on a "
            "machine with a GPU"
        )
    outcomes = run.outcomes_file
    if not outcomes.exists():
        raise StoreError(_why_no_outcomes(run, usage))
    plans = () if cpu_alone else load_planned(run)
    planned = tuple(one for one in plans if not one.plan.is_files)
    if settings.granularity is Granularity.KERNEL and any(
        p.plan.granularity != Granularity.KERNEL.value for p in planned
    ):
        raise StoreError(
            f"{run}: planned at element granularity; trace with --negativa-granularity=kernel, "
            "or plan this run again (negativa locate --granularity kernel)"
        )
    return TracedRun(
        run=run,
        planned=planned,
        usage=usage,
        session=read_outcomes(outcomes),
        status=status,
        files=tuple(one.plan for one in plans if one.plan.is_files),
    )


def command_to_verify(
    run: Run, settings: Settings, given: tuple[str, ...], *, healing: bool
) -> tuple[str, ...]:
    """The command that verifies a run of a plain program: the given one, else the traced one.

    Raises:
        OptionError: pytest traced the run, or the run does not name its command.
        StoreError: the run failed, or nothing says how it ended.
    """
    _refuse_failed(run)
    if not run.outcomes_file.exists():
        raise StoreError(_why_no_outcomes(run, load_usage(run)))
    session = read_outcomes(run.outcomes_file)
    if session.kind is SessionKind.PYTEST:
        # As a plain program it has one outcome, and those to compare are its tests'.
        verb, option = ("heal", "--negativa-heal") if healing else ("verify", "--negativa-verify")
        raise OptionError(
            f"{run} was traced by pytest; {verb} it with pytest {option} --negativa-run "
            f"{shlex.quote(str(run))}"
        )
    if not (command := given or session.command):
        raise OptionError(f"{run} does not name the traced command; give it after --")
    return command


def _why_no_outcomes(run: Run, usage: Usage | None) -> str:
    """Reason for which the ends of a run's tests are unknown, and the remedy."""
    for lack in () if usage is None else usage.incomplete:
        if lack.code in PROCESS_UNTRACED:
            return f"{run}: not verified: this session was not traced: {lack.text}"
    if usage is not None and len(usage.run_ids) > 1:
        return (
            f"{run}: not verified: it unites several runs; verify each of them, and combine them "
            "again"
        )
    return (
        f"{run}: no {run.outcomes_file.name}, so nothing says how this run ended (combined runs "
        "have none); trace again"
    )


def _refuse_failed(run: Run) -> None:
    """Raise ``StoreError`` for a run that failed."""
    if run.failure is not None:
        raise StoreError(run.why_unplanned())
