"""Which ends of processes speak against a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from pytest_negativa.models.outcomes import (
    Outcome,
    SessionKind,
    SessionResult,
    TestResult,
    WorkerEnded,
)
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.trace import (
    AFTER_SESSION,
    Context,
    Header,
    Phase,
    Role,
    Usage,
    UsageProcess,
)
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.process_ends import reasons_of_ends
from pytest_negativa.verifying.rounds import RoundResult
from pytest_negativa.verifying.traced_run import TracedRun
from tests.support.faults import PlantedFault

ROUND = "001-verify"
UNCONFIGURE = Context(phase=Phase.SESSION, detail="pytest_unconfigure")
CALL = Context(phase=Phase.CALL, nodeid="t.py::t")


def process(
    role: Role = Role.SOLO,
    *,
    run: str = ROUND,
    ended: bool = True,
    last: Context | None = AFTER_SESSION,
    argv: Sequence[str] = ("pytest",),
    executable: str = "/usr/bin/python3",
    worker: str | None = None,
) -> UsageProcess:
    header = Header(
        run_id=run,
        pid=7,
        ppid=1,
        role=role,
        detector="d",
        executable=executable,
        argv=tuple(argv),
        start_ns=0,
        root="/",
        worker=worker,
    )
    return UsageProcess(header=header, trace="t.jsonl", ended=ended, last=last)


def child(*argv: str, ended: bool = True, run: str = ROUND) -> UsageProcess:
    return process(Role.CHILD, run=run, ended=ended, last=CALL, argv=argv, executable="/bin/a")


def worker(name: str, *, ended: bool = True, last: Context = AFTER_SESSION) -> UsageProcess:
    return process(Role.WORKER, ended=ended, last=last, worker=name)


def usage(*processes: UsageProcess) -> Usage:
    return Usage(
        run_ids=(), devices=(), libraries=(), memory_images=(),
        compiled=(), contexts=(), processes=processes, launches={}, ranges=(), warnings=(),
        incomplete=(),
    )  # fmt: skip


def session(
    status: int | None = 0,
    *tests: TestResult,
    running: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    kind: SessionKind = SessionKind.PYTEST,
) -> SessionResult:
    return SessionResult(
        tests=tests or (TestResult(nodeid="t.py::t", outcome=Outcome.PASSED, duration=1),),
        collection_errors=(),
        command=command,
        duration=1,
        longest_silence=1,
        exit_status=status,
        running=running,
        kind=kind,
    )


def a_round(status: int = 0, name: str = ROUND, *, silent: bool = False) -> RoundResult:
    return RoundResult(
        name, RoundKind.VERIFY, Run(Path(name)), session(), status, silent=silent, seconds=1
    )


def reasons(
    result: RoundResult,
    *processes: UsageProcess,
    before: Sequence[UsageProcess] = (),
    status: int | None = None,
) -> list[str]:
    traced = TracedRun(Run(Path("run")), (), usage(*before), session(), status)
    return list(reasons_of_ends([result], usage(*processes), traced))


def test_a_process_that_ends_well() -> None:
    assert reasons(a_round(), process()) == []
    assert reasons(a_round(), process(Role.CONTROLLER), worker("gw0"), worker("gw1")) == []


@pytest.mark.parametrize("ended", [(True, False), (False, True)])
def test_each_program_of_the_process_must_end(ended: tuple[bool, bool]) -> None:
    """``execv`` in a conftest replaces the program, which begins a trace of its own."""
    assert reasons(a_round(), process(), process()) == []
    [reason] = reasons(a_round(), *(process(ended=one) for one in ended))
    assert reason.endswith("but its trace has no end")


@pytest.mark.parametrize(
    ("result", "own", "reason"),
    [
        (
            a_round(9),
            process(),
            "ended with exit status 9 after its session, expected was exit status 0",
        ),
        (
            a_round(-11),
            process(ended=False),
            "ended with signal SIGSEGV after its session, expected was exit status 0",
        ),
        (
            a_round(),
            process(ended=False),
            "ended with exit status 0 after its session, but its trace has no end",
        ),
        (
            replace(a_round(-64), session=session(None)),
            process(ended=False, last=UNCONFIGURE),
            "ended with signal SIGRTMAX in pytest_unconfigure, before its session's end",
        ),
        (
            replace(a_round(-9, silent=True), session=session(None)),
            process(ended=False, last=UNCONFIGURE),
            "hung in pytest_unconfigure and was ended",
        ),
    ],
)
def test_a_process_that_ends_otherwise(result: RoundResult, own: UsageProcess, reason: str) -> None:
    assert reasons(result, own) == [f"round {ROUND}: the pytest process {reason}"]


def test_a_crash_at_exit_that_the_supervisor_saw_when_tracing_is_expected() -> None:
    assert reasons(a_round(-11), process(), status=-11) == []
    [reason] = reasons(a_round(), process(), status=-11)
    assert reason.endswith("expected was signal SIGSEGV")


def test_a_process_that_ends_in_a_test_is_judged_by_the_test() -> None:
    result = replace(a_round(-11), session=session(None, running=("t.py::t",)))
    assert reasons(result, process(ended=False, last=CALL), child("a", ended=False)) == []


def test_workers() -> None:
    controller = process(Role.CONTROLLER)
    for bad in (worker("gw1", ended=False), worker("gw1", last=UNCONFIGURE)):
        [reason] = reasons(a_round(), controller, worker("gw0"), bad)
        assert reason.startswith(f"round {ROUND}: worker gw1 (process 7) did not end well")
        crashed = TestResult(nodeid="t", outcome=Outcome.CRASHED, duration=1, worker="gw1")
        result = replace(a_round(), session=session(0, crashed))
        assert reasons(result, controller, worker("gw0"), bad) == []


def test_statuses_of_workers() -> None:
    died = replace_fields(session(), workers=(WorkerEnded(worker="gw0", status=-11),))
    processes = (process(Role.CONTROLLER), worker("gw0"))
    [reason] = reasons(replace(a_round(), session=died), *processes)
    assert reason.endswith("it ended with signal SIGSEGV after its session")
    traced = TracedRun(Run(Path("run")), (), usage(), died)
    result = replace(a_round(), session=died)
    assert list(reasons_of_ends([result], usage(*processes), traced)) == []


def test_a_child_that_ends_as_when_traced() -> None:
    for ended in (False, True):
        before = [child("a", "/tmp/tmpx/1", ended=ended), child("a", ended=True)]
        assert reasons(a_round(), process(), *before, before=before) == []
        # Neither names of temporary files nor numbers tell commands apart.
        after = [child("a", "/tmp/tmpy/2", ended=ended), child("a", ended=True)]
        assert reasons(a_round(), process(), *after, before=before) == []
    # Nor do names that a test makes up.
    before, after = [child("a", "--name=x", ended=False)], [child("a", "--name=y", ended=False)]
    assert reasons(a_round(), process(), *after, before=before) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([child("a")], [child("a", ended=False)], 0),
        ([child("a"), child("a", ended=False)], [child("a", ended=False)] * 2, 1),
        ([child("a"), child("b", ended=False)], [child("a", ended=False), child("b")], 0),
        ([child("a"), child("b")], [child("a"), child("c", ended=False)], 0),
        ([], [child("a", ended=False)], 0),
    ],
)
def test_a_child_that_ends_otherwise(
    before: list[UsageProcess], after: list[UsageProcess], expected: int
) -> None:
    [reason] = reasons(a_round(), process(), *after, before=before)
    name = " ".join(next(p for p in reversed(after) if not p.ended).header.argv)
    assert reason == (
        f"round {ROUND}: the child process 7 ({name}) of t.py::t (call) did not come to its end; "
        f"when traced, {expected} such processes did not"
    )


def test_a_child_of_each_round_may_be_killed() -> None:
    rounds = [a_round(name="001"), a_round(name="002")]
    traced = TracedRun(Run(Path("run")), (), usage(child("a", ended=False)), session(), None)
    killed = [child("a", run=name, ended=False) for name in ("001", "002")]
    ended = [process(run=name) for name in ("001", "002")]
    assert list(reasons_of_ends(rounds, usage(*ended, *killed), traced)) == []
    assert list(reasons_of_ends(rounds, usage(*ended, *killed, killed[0]), traced))
    # Two in one round are one too many, even if the other round had none.
    assert list(reasons_of_ends(rounds, usage(*ended, killed[0], killed[0]), traced))


@pytest.mark.planted_fault(
    "A worker that left no trace ends with an error on the copies",
    says="worker gw1 did not end well: it ended with exit status 3, and left no trace",
)
def test_a_worker_without_a_trace(fault: PlantedFault) -> None:
    ended = (WorkerEnded(worker="gw0", status=0), WorkerEnded(worker="gw1", status=3))
    result = replace(a_round(), session=replace_fields(session(), workers=ended))
    [reason] = reasons(result, process(Role.CONTROLLER), worker("gw0"))
    fault.check(reason)


def test_a_program_is_judged_as_a_child() -> None:
    result = replace(a_round(), session=session(kind=SessionKind.COMMAND))
    program = child("program")
    assert reasons(result, program, before=[program]) == []
    assert reasons(result, replace_fields(program, ended=False), before=[program])


def test_a_process_that_the_session_forked_has_its_command() -> None:
    """Which is another one when traced, unless one command traces and proves."""
    traced = TracedRun(
        Run(Path("run")), (), usage(child("pytest", "--negativa", ended=False)),
        session(command=("pytest", "--negativa")),
    )  # fmt: skip
    proof = replace(a_round(), session=session(command=("pytest", "--negativa-verify")))
    forked, other = (child("pytest", *words, ended=False) for words in (["--negativa-verify"], []))
    assert list(reasons_of_ends([proof], usage(process(), forked), traced)) == []
    [reason] = reasons_of_ends([proof], usage(process(), forked, forked), traced)
    assert "when traced, 1 such processes did not" in reason
    # Another program of the same executable may be meant, but only where no command says more.
    assert list(reasons_of_ends([proof], usage(process(), other, forked), traced)) != []
