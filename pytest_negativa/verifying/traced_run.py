"""A traced run, as verification reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import StoreError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import SessionResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.settings import Granularity, Settings
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.outcomes import outcomes_file, read_outcomes
from pytest_negativa.storage.runs import (
    failure_of,
    load_planned,
    load_usage,
    require_run,
    why_unplanned,
)


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What verification needs of a traced run.

    Attributes:
        folder: the run's folder.
        planned: maps and plans of the run's libraries.
        usage: the GPU code that the run used.
        session: how the run's tests ended.
    """

    folder: Path
    planned: tuple[AnalyzedLibrary, ...]
    usage: Usage
    session: SessionResult

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def plans(self) -> tuple[LibraryPlan, ...]:
        return tuple(p.plan for p in self.planned)

    @property
    def loaded(self) -> frozenset[str]:
        """Real paths of the libraries that any process of the run had mapped."""
        return frozenset(u.library.path for u in self.usage.libraries if u.processes)


def load_traced_run(folder: Path, settings: Settings) -> TracedRun:
    """Read a traced run.

    Raises:
        NegativaError: the run can't be verified; the message says why.
    """
    folder = require_run(folder)
    refuse_failed(folder, settings)
    usage = load_usage(folder)
    if usage is None:
        raise StoreError(f"{folder}: not a traced run, or not located yet: no usage.json")
    if usage.replay is not None:
        raise StoreError(
            f"{folder}: replays a trace of another machine, which proves nothing; trace on a "
            "machine with a GPU"
        )
    outcomes = outcomes_file(folder)
    if not outcomes.exists():
        raise StoreError(f"{outcomes}: not there, so outcomes can't be compared; trace again")
    planned = load_planned(folder)
    if settings.granularity is Granularity.KERNEL and any(
        p.plan.granularity != Granularity.KERNEL.value for p in planned
    ):
        raise StoreError(
            f"{folder}: planned at element granularity; trace with --negativa-granularity=kernel, "
            "or plan this run again (negativa locate --granularity kernel)"
        )
    return TracedRun(
        folder=folder,
        planned=planned,
        usage=usage,
        session=read_outcomes(outcomes),
    )


def refuse_failed(folder: Path, settings: Settings) -> None:
    """Refuse a run that failed, unless the settings accept it.

    Raises:
        StoreError: the run failed; the message says why and what to do.
    """
    failure = failure_of(folder)
    if failure is None or settings.trace.accept_failed:
        return
    if not (folder / "plan").is_dir():
        raise StoreError(why_unplanned(folder))
    raise StoreError(
        f"{folder}: this run failed ({failure}), and was planned all the same; verify it with "
        "--accept-failed (with pytest: --negativa-accept-failed)"
    )
