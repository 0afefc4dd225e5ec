"""Traces a program if asked to, verifies the plans of its traced run, and shows the verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.processes.watch import Interrupted, interruptible
from pytest_negativa.reporting.text import print_error
from pytest_negativa.reporting.verdict import render_verdict
from pytest_negativa.storage.runs import find_run, is_failed
from pytest_negativa.tracing.start import new_run_id
from pytest_negativa.verifying.heal import verify_and_heal
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.rounds import Program, run_round
from pytest_negativa.verifying.traced_run import load_traced_run
from pytest_negativa.verifying.verification import Verification, exit_code


def run_supervisor(work: Callable[[], int]) -> int:
    """Call ``work``, and print the error that ends it or the signal that interrupts it.

    Returns:
        The exit status.
    """
    try:
        with interruptible():
            return work()
    except NegativaError as e:
        print_error(e)
        return 1
    except Interrupted as e:
        print_error(e)
        return 128 + e.number  # As shells have it.


def verify_program(program: Program, settings: Settings, *, trace_first: bool = False) -> int:
    """Verify a traced run of ``program``, and show the verdict.

    Args:
        trace_first: trace the program instead of taking an earlier run.

    Returns:
        The exit status.

    Raises:
        NegativaError: the run can't be verified.
        Interrupted: a signal asked this process to end.
    """
    status = 0
    if trace_first:
        status, folder = _trace(program, settings)
        if folder is None:
            return status
    else:
        folder = find_run(Path(settings.directory), Path(settings.run) if settings.run else None)
    verification = Verification(load_traced_run(folder, settings), program, settings, _say)
    if settings.healing:
        verdict = verify_and_heal(verification)
    else:
        verdict = judge(verification.attempt(verification.traced.planned))
    path = verification.write(verdict)
    for paragraph in render_verdict(verdict, path, settings.reports):
        _say(paragraph)
    return exit_code(verdict) or status


def _trace(program: Program, settings: Settings) -> tuple[int, Path | None]:
    """Run the traced session; its status, and its folder if it can be verified."""
    round_spec = Round(
        kind=RoundKind.TRACE,
        supervisor=os.getpid(),
        base=settings.directory,
        run_id=new_run_id(),
        root=str(program.root),
        is_pytest=program.is_pytest,
    )
    result = run_round(program, round_spec, program.environ, None)
    status = result.status if result.status >= 0 else 128 - result.status
    planned = (result.folder / "plan").is_dir()
    if not planned or (is_failed(result.folder) and not settings.trace.accept_failed):
        _say("negativa: nothing to verify: nothing was planned from the traced run")
        return status or 1, None
    return status, result.folder


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
