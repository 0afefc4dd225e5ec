"""The Next line of a report: the next command on the way from a trace to smaller libraries."""

from __future__ import annotations

from pytest_negativa.models.outcomes import SessionKind
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.results import load_report, load_verdict
from pytest_negativa.storage.runs import Run


def next_line(after: Run | str) -> str:
    """The line, after the report of a run, or with a command that is known."""
    return f"Next: {after if isinstance(after, str) else next_command(after)}"


def next_command(run: Run) -> str:
    """The command after the report of a run."""
    # A run that unites several has no outcomes.
    outcomes = run.outcomes_file
    kind = read_outcomes(outcomes).kind if outcomes.exists() else None
    trace, verify, heal = "pytest --negativa", "pytest --negativa-verify", "pytest --negativa-heal"
    cpu, command = "--negativa-cpu", ""
    if kind is SessionKind.COMMAND:
        trace, verify, heal = "negativa trace", "negativa verify", "negativa verify --heal"
        cpu, command = "--cpu", " -- COMMAND"
    verdict = load_verdict(run)
    is_proved = verdict is not None and verdict.proved
    if run.has_pages and not run.trace_files():
        words = (verify, cpu) if verdict is None and run.failure is None else (trace, cpu + command)
        return "negativa lock" if is_proved else " ".join(words)
    if load_report(run).replay is not None:
        return f"{trace}{command} on a machine with a GPU"
    if not run.plan_files():
        # Either its tests failed, or they used no GPU code.
        return trace + command if run.failure is not None else "negativa inspect"
    if is_proved:
        return "negativa lock"
    if kind is None:
        return f"{verify} for each run that is not proved, then negativa combine"
    if verdict is None:
        return verify
    return trace + command if verdict.healing else heal
