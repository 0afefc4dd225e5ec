"""The supervisor: traces if asked to, verifies, shows the verdict.

``verifying.rounds.run_all`` decides which tests run again after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pytest_negativa.errors import SYSTEM_REFUSALS, ExitStatus, NegativaError, OptionError, Stopped
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.verdict import Verdict
from pytest_negativa.pages.auditors import traces_cpu, why_unwatchable
from pytest_negativa.pages.gather import require_usage
from pytest_negativa.pages.page_watch import watch_pages
from pytest_negativa.processes.programs import interruptible
from pytest_negativa.reporting.next_command import next_line
from pytest_negativa.reporting.text import fit, print_error
from pytest_negativa.reporting.verdict import render_cpu, render_verdict
from pytest_negativa.storage.runs import Run, RunsFolder
from pytest_negativa.verifying.heal import verify_and_heal
from pytest_negativa.verifying.judge import judge
from pytest_negativa.verifying.round_runner import RoundRunner
from pytest_negativa.verifying.rounds import Program, RoundResult, run_round
from pytest_negativa.verifying.traced_run import load_traced_run
from pytest_negativa.verifying.verification import Verification


def run_supervisor(work: Callable[[], int], usage: ExitStatus) -> int:
    """Call ``work``, and print the error that ends it or the signal that interrupts it.

    Returns:
        The exit status: ``usage`` for wrong usage, and 1 for other errors.
    """
    try:
        with interruptible():
            return work()
    except NegativaError as e:
        print_error(e)
        return usage if isinstance(e, OptionError) else e.exit_status
    except OSError as e:
        if e.errno not in SYSTEM_REFUSALS:
            raise
        print_error(e)
        return ExitStatus.FAILED
    except Stopped as e:
        print_error(e)
        return 128 + e.number  # As shells have it.


def verify_program(
    program: Program,
    settings: Settings,
    run: Run | None,
    report: Callable[[Run], None],
) -> int:
    """Verify a traced run of ``program``, and show the verdict.

    Args:
        program: what to run.
        settings: how to verify.
        run: the run to verify; None: trace the program first.
        report: makes the reports of the run, in the end.

    Returns:
        The exit status.

    Raises:
        NegativaError: the run can't be verified.
        Stopped: a signal asked this process to end.
    """
    status, own_status = 0, None
    traces = run is None
    if run is None:
        result = _trace(program, settings)
        status, run = _shell_status(result.status), result.run
        # A crossed limit changes the status of the traced session alone.
        own_status = None if settings.has_limits else result.status
    runner = RoundRunner(program, settings, run, _say, has_shown=traces)
    has_plan = bool(run.plan_files())
    is_located = run.usage_file.exists() or not run.trace_files()
    # No GPU code was traced.
    is_cpu_alone = settings.cpu and not has_plan and run.has_pages and is_located
    if traces and not is_cpu_alone and (not has_plan or run.failure is not None):
        _say("negativa: nothing to verify: the traced run has no plan")
        report(run)
        if run.is_empty:
            run.remove_untraced()
        return status or 1
    run.hold()
    traced = load_traced_run(run, settings, own_status, cpu_alone=is_cpu_alone)
    verification = Verification(traced, settings, runner)
    verdict = None if is_cpu_alone else _prove_gpu(verification)
    try:
        if settings.cpu:
            verdict = _prove_cpu(verification, verdict)
    finally:
        if has_plan:
            report(run)  # Its page shows all of the verdict.
    _say(next_line(run))
    if verdict is None or verdict.reasons or verdict.cpu_reasons:
        return 1
    # The program's own exit status if all is proved.
    return _shell_status(verdict.exit_status or 0) or status


def _prove_gpu(verification: Verification) -> Verdict:
    """Prove the plan, and show the verdict."""
    settings, traced = verification.settings, verification.traced
    if settings.trace.level.counts_launches and not traced.usage.launches:
        _say(
            "negativa: the traced run counted no launches, so launches are not compared; trace "
            "with --negativa-level=launch"
        )
    if settings.healing:
        verdict = verify_and_heal(verification)
    else:
        verdict = judge(verification.attempt(traced.planned))
    verification.write(verdict)
    _show(render_verdict(verdict, settings.reports), proved=verdict.proved)
    return verdict


def _prove_cpu(verification: Verification, verdict: Verdict | None) -> Verdict:
    """Show the verdict on CPU code: if no proof of GPU code has it, by a run on the originals.

    Args:
        verdict: on GPU code; None if there is none.

    Raises:
        StoreError: there is no trace of CPU code.
    """
    if verdict is None or verdict.cpu_reasons is None:
        require_usage(verification.traced.run)
        verdict = judge(replace(verification.attempt(None), before=verdict))
        verification.write(verdict)
    _show(render_cpu(verdict), proved=not verdict.cpu_reasons)
    return verdict


def _shell_status(status: int) -> int:
    """A status as shells have it: 128 and the number of the signal that ended the program."""
    return status if status >= 0 else 128 - status


def _trace(program: Program, settings: Settings) -> RoundResult:
    """Run the traced session. Its code is watched from its start, so it need not start again."""
    runs = RunsFolder(Path(settings.directory))
    runs.make()
    run = runs.new_run()
    environ = program.environ
    # What a session around this one traces stays with it.
    if why_unwatchable() is None and not (settings.cpu and traces_cpu(environ)):
        environ = watch_pages(environ, run, runs.folder, cpu=settings.cpu)
    return run_round(program, program.new_round(RoundKind.TRACE, run), environ, None)


def _show(verdict: Iterable[str], *, proved: bool) -> None:
    """Show a verdict; its conclusion in colour, if the terminal has colours."""
    from rich.console import Console
    from rich.text import Text

    *evidence, conclusion = verdict
    for paragraph in evidence:
        _say(paragraph)
    color = "green" if proved else "red"
    Console(soft_wrap=True).print(Text(fit(conclusion), f"bold {color}"))


def _say(text: str) -> None:
    sys.stdout.write(f"{fit(text)}\n")
    sys.stdout.flush()
