"""What the commands that ask a traced run share: its use, its tests, and advice without them."""

from __future__ import annotations

from pytest_negativa.errors import StoreError
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.results import load_tests, load_usage
from pytest_negativa.storage.runs import Run


def usage_of(run: Run) -> Usage:
    """What a planned run used.

    Raises:
        StoreError: it has no plan, or can't be read.
    """
    usage = load_usage(run)
    if usage is None:
        raise StoreError(run.why_unplanned())
    return usage


def recorded_tests(run: Run) -> tuple[TestResult, ...]:
    """The tests of the run.

    Raises:
        StoreError: it has none, or their file can't be read.
    """
    if not (tests := load_tests(run)):
        raise StoreError(f"{run}: tells no tests; trace them with pytest --negativa")
    return tests


def require_launches(run: Run, usage: Usage) -> None:
    """Refuse a run that counted no launches.

    Raises:
        StoreError: it counted none.
    """
    if not usage.launches:
        raise StoreError(
            f"{run}: counted no launches, so which tests ran a kernel is unknown; "
            f"{how_to_trace(usage, 'launch')}"
        )


def how_to_trace(usage: Usage, level: str) -> str:
    """What to do for a trace of a level."""
    how = f"--negativa-level={level}"
    if usage.replay is None:
        return f"trace with {how}"
    return f"this run replays a recording, so make a new recording with {how}"
