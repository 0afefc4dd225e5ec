"""Ends of processes: which exit status, signal, crash or silent end speaks against a proof.

What was not seen to end well did not. A pytest process ends well if its last hook returned, its
trace has an end, and it ended with the exit status of its session. A process that ended in the
middle of a test needs no reason here: the test's outcome says so. A child may end without a word if
it did so in the traced run, too: its test kills it, or it ends by ``os._exit``
(``multiprocessing``).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from pytest_negativa.models.outcomes import Outcome, SessionKind
from pytest_negativa.models.trace import AFTER_SESSION, Header, Role, Usage, UsageProcess
from pytest_negativa.verifying.rounds import RoundResult
from pytest_negativa.verifying.traced_run import TracedRun

# What differs between two runs in the words of one command: names of temporary files, numbers but
# for those in the name of a script.
_VARYING = re.compile(r"(?<=/tmp)[^/]+|[0-9a-fA-F]*[0-9][0-9a-fA-F]*(?![^/]*\.py$)")

_Command = tuple[str, ...]


def reasons_of_ends(
    rounds: Sequence[RoundResult], usage: Usage, traced: TracedRun
) -> Iterator[str]:
    """Reasons against a proof from the ends of processes.

    Args:
        rounds: the rounds on the copies.
        usage: what the traces of the rounds add up to.
        traced: the run that the rounds are compared with.
    """
    before = [p for p in traced.usage.processes if p.header.role is Role.CHILD]
    sessions = commands_of(traced, rounds)
    for result in rounds:
        if result.session.running:
            continue
        processes = [p for p in usage.processes if p.header.run_id == result.name]
        children = [p for p in processes if p.header.role is Role.CHILD]
        if result.session.tests and result.session.kind is SessionKind.PYTEST:
            yield from _reasons_of_session(result, processes, traced)
            yield from _reasons_of_workers(result, processes, traced)
        yield from _reasons_of_children(children, before, sessions)


def _reasons_of_session(
    result: RoundResult, processes: Sequence[UsageProcess], traced: TracedRun
) -> Iterator[str]:
    """Reason for which the process that reports did not end well; at most one."""
    # More than one if a conftest replaced the program by execv, or a test called pytest.main.
    own = min(
        (p for p in processes if p.header.role in (Role.SOLO, Role.CONTROLLER)),
        key=lambda p: p.ended,
        default=None,
    )
    where = "" if own is None else _where(own)
    name = f"round {result.name}: the pytest process"
    session = result.session.exit_status
    when_traced = traced.session.exit_status
    expected = traced.status if traced.status not in (None, when_traced) else session
    if result.silent:
        yield f"{name} hung{where} and was ended"
    elif session is None:
        yield f"{name} ended with {describe_status(result.status)}{where}, before its session's end"
    elif result.status != expected:
        yield (
            f"{name} ended with {describe_status(result.status)}{where}, expected was "
            f"{describe_status(expected)}"
        )
    elif own is not None and not own.ended:
        yield (
            f"{name} ended with {describe_status(result.status)}{where}, but its trace has no end"
        )


def _where(process: UsageProcess) -> str:
    """Last place of a pytest process, with a blank before."""
    return " after its session" if process.last == AFTER_SESSION else f" in {process.last}"


def describe_status(status: int | None) -> str:
    """An exit status in words; a negative one is the signal that ended the process."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _reasons_of_workers(
    result: RoundResult, processes: Sequence[UsageProcess], traced: TracedRun
) -> Iterator[str]:
    """Reasons for which workers of pytest-xdist did not end well."""
    # pytest-xdist replaces a worker that crashes in a test. The test's outcome says so.
    crashed = {t.worker for t in result.session.tests if t.outcome is Outcome.CRASHED}
    expected = {0, *(worker.status for worker in traced.session.workers)}
    statuses = {worker.worker: worker.status for worker in result.session.workers}
    traced_here = {p.header.worker for p in processes if p.header.role is Role.WORKER}
    for ended in result.session.workers:
        if ended.worker not in traced_here | crashed and ended.status not in expected:
            yield (
                f"round {result.name}: worker {ended.worker} did not end well: it ended with "
                f"{describe_status(ended.status)}, and left no trace"
            )
    for process in processes:
        worker = process.header.worker or ""
        status = statuses.get(worker)
        if process.header.role is not Role.WORKER or worker in crashed:
            continue
        name = f"round {result.name}: worker {worker} (process {process.header.pid})"
        if not process.ended or process.last != AFTER_SESSION or status not in (None, *expected):
            how = "" if status is None else f" with {describe_status(status)}"
            yield f"{name} did not end well: it ended{how}{_where(process)}"


def _reasons_of_children(
    after: Sequence[UsageProcess], before: Sequence[UsageProcess], sessions: Collection[_Command]
) -> Iterator[str]:
    """Children of a round's tests that did not end as when traced, a sentence each.

    Children are matched by their command. Commands that only one side has are matched by their
    executable: a test may make up a new name each time.
    """
    common = {command_of(p.header, sessions) for p in after} & {
        command_of(p.header, sessions) for p in before
    }

    def kind(process: UsageProcess) -> _Command:
        command = command_of(process.header, sessions)
        return command if command in common else command[:1]

    allowed = Counter(kind(p) for p in before if not p.ended)
    found = Counter[_Command]()
    for process in after:
        if process.ended:
            continue
        found[kind(process)] += 1
        if found[kind(process)] > allowed[kind(process)]:
            header = process.header
            yield (
                f"round {header.run_id}: the child process {header.pid} ({' '.join(header.argv)}) "
                f"of {process.last or 'no known test'} did not come to its end; when traced, "
                f"{allowed[kind(process)]} such processes did not"
            )


def commands_of(traced: TracedRun, rounds: Sequence[RoundResult]) -> frozenset[_Command]:
    """The words by which pytest was started: when traced, and in the rounds."""
    sessions = (traced.session, *(result.session for result in rounds))
    return frozenset(s.command for s in sessions if s.kind is SessionKind.PYTEST)


def command_of(header: Header, sessions: Collection[_Command] = ()) -> _Command:
    """The words of a process's command, without what differs between two runs.

    Args:
        sessions: commands of pytest. A process that such a session forked has its words, which
            say no more than that: the options of a trace are others than those of a proof.
    """
    if header.argv in sessions:
        return header.executable, "forked by the session"
    return tuple(_VARYING.sub("0", word) for word in (header.executable, *header.argv))
