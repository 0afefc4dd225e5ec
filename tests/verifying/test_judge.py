"""Evidence to verdicts: one thing at a time speaks against a proof, and ends it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.models.outcomes import Circumstances, Outcome, SessionResult, TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import (
    Reconstruction,
    RepackedCubin,
)
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.spans import Span, covers, size
from pytest_negativa.models.trace import EAGER_LOADING, FirstUse, Refusal, UsageWarning
from pytest_negativa.models.verdict import (
    TESTS_DIFFER,
    LibraryStatus,
    Need,
    ProvedLibrary,
    Witness,
)
from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.evidence import Attempt, LoadEvidence
from pytest_negativa.verifying.judge import (
    TestEvidence,
    judge,
    judge_libraries,
    judge_tests,
    reasons_of_libraries,
    reasons_of_tests,
)
from pytest_negativa.verifying.rounds import Program, RoundResult
from pytest_negativa.verifying.traced_run import TracedRun
from pytest_negativa.verifying.tripwire import Touches
from tests.support.analyses import settings, used
from tests.support.defaults import DEFAULTS
from tests.support.faults import PlantedFault
from tests.support.libraries import MULTIARCH
from tests.support.usages import usage_of


def results(**outcomes: Outcome) -> dict[str, TestResult]:
    return {
        nodeid: TestResult(nodeid=nodeid, outcome=outcome, duration=0, text=f"{nodeid} ended")
        for nodeid, outcome in outcomes.items()
    }


SOUND = TestEvidence(
    before=results(a=Outcome.PASSED, b=Outcome.FAILED, c=Outcome.SKIPPED),
    after=results(c=Outcome.SKIPPED, b=Outcome.FAILED, a=Outcome.PASSED),
    on_originals=(),
    used={"a": ["/lib/b.so", "/lib/a.so"]},
    gpu_tests=1,
    traced_on=["9.0"],
    verified_on=["9.0"],
)


def reasons(evidence: TestEvidence) -> list[str]:
    return list(reasons_of_tests(evidence, judge_tests(evidence)))


def test_equal_outcomes_say_nothing_against() -> None:
    assert reasons(SOUND) == []
    verdicts = {v.nodeid: v for v in judge_tests(SOUND)}
    assert not any(v.differs for v in verdicts.values())
    assert verdicts["a"].libraries == ("/lib/a.so", "/lib/b.so")
    assert verdicts["b"].text is None, "it failed before, too"


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.PASSED])
def test_every_other_outcome_speaks_against(outcome: Outcome) -> None:
    changed = replace(SOUND, after={**SOUND.after, **results(a=outcome)})
    assert reasons(changed) == ["1 test ended with another outcome than in the traced run"]
    first = judge_tests(changed)[0]
    assert (first.nodeid, first.after, first.text) == ("a", outcome, "a ended")
    assert reasons(replace(changed, on_originals={"a"})) == []


def test_those_that_differ_come_first() -> None:
    error = "CUDA_ERROR_LAUNCH_FAILED"
    lost = TestResult(nodeid="b", outcome=Outcome.CRASHED, duration=0, gpu_error=error)
    changed = replace(SOUND, after={**results(d=Outcome.PASSED, a=Outcome.PASSED), "b": lost})
    assert [(v.nodeid, v.before, v.after, v.gpu_error) for v in judge_tests(changed)] == [
        ("d", None, Outcome.PASSED, None),
        ("b", Outcome.FAILED, Outcome.CRASHED, error),
        ("c", Outcome.SKIPPED, None, None),
        ("a", Outcome.PASSED, Outcome.PASSED, None),
    ]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            replace(SOUND, after=results(a=Outcome.PASSED)),
            "2 tests of the traced run did not run",
        ),
        (
            replace(SOUND, after={**SOUND.after, **results(d=Outcome.PASSED)}),
            "1 test ran that the traced run doesn't have",
        ),
        (replace(SOUND, gpu_tests=0), "no test was seen to use the GPU"),
        (
            replace(SOUND, verified_on=["8.0", "9.0"]),
            "it ran on compute capability 8.0, 9.0, the plan is for 9.0",
        ),
        (
            replace(SOUND, verified_on=[]),
            "it ran on compute capability unknown, the plan is for 9.0",
        ),
        (replace(SOUND, problems=("not collected: b.py",)), "not collected: b.py"),
        (
            replace(SOUND, statuses=(0, 1)),
            "the session ended with exit status 1, with 0 when it was traced",
        ),
    ],
)
def test_what_else_speaks_against(changed: TestEvidence, reason: str) -> None:
    assert reasons(changed) == [reason]


def test_a_context_lost_on_the_originals_too_is_told_only_if_flaky() -> None:
    error = "CUDA_ERROR_LAUNCH_FAILED"
    lost = TestResult(nodeid="b", outcome=Outcome.FAILED, duration=0, gpu_error=error)
    same = replace(SOUND, after={**SOUND.after, "b": lost})
    assert reasons(same) == ["1 test ended as in the traced run, but lost the CUDA context"]
    known = replace(same, on_originals={"b"})
    assert reasons(known) == [] and not any(v.gpu_error or v.flaky for v in judge_tests(known))
    passed = {**SOUND.before, **results(b=Outcome.PASSED)}
    [first, *_] = judge_tests(replace(known, before=passed))
    assert (first.nodeid, first.flaky, first.gpu_error) == ("b", True, error)


@pytest.mark.planted_fault(
    "An internal error of pytest ends the session on the copies, and a flaky test differs, too",
    says="the session ended with exit status 3, with 0 when it was traced",
)
def test_a_flaky_test_explains_no_internal_error(fault: PlantedFault) -> None:
    flaky = replace(SOUND, after={**SOUND.after, **results(a=Outcome.FAILED)}, on_originals={"a"})
    assert reasons(replace(flaky, statuses=(0, 1))) == []
    fault.check("; ".join(reasons(replace(flaky, statuses=(0, 3)))))


# ---- Libraries ----


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LibraryPlan, Reconstruction]:
    """A plan of a library of which one region is used, and its copy."""
    folder = tmp_path_factory.mktemp("judge")
    library = Path(shutil.copy(MULTIARCH, folder))
    analysis = analyze(used(library, regions=(1,)), settings(folder))
    [planned] = analysis.libraries
    return planned.plan, reconstruct([planned], folder / "reconstructed")


def judge_one(
    made: tuple[LibraryPlan, Reconstruction],
    evidence: LoadEvidence,
    *,
    loaded: bool = True,
    tests_agree: bool = True,
) -> tuple[ProvedLibrary, list[str]]:
    attempt = replace(attempt_of(made), loads=evidence)
    if not loaded:
        attempt = replace(attempt, traced=replace(attempt.traced, usage=usage_of()))
    rows = list(judge_libraries(attempt, None if tests_agree else {}))
    [row] = rows
    return row, list(reasons_of_libraries(rows, attempt.traced.loaded))


def mapped(made: tuple[LibraryPlan, Reconstruction]) -> LoadEvidence:
    return LoadEvidence(copies={made[0].library.path: {41, 42}})


def test_a_library_is_proved(made: tuple[LibraryPlan, Reconstruction]) -> None:
    row, against = judge_one(made, mapped(made))
    plan, reconstruction = made
    assert (row.status, row.detail, against) == (LibraryStatus.PROVED, None, [])
    assert row.processes == 2
    path, unused = plan.library.path, reconstruction.libraries[0].unused
    first = next(d for d in plan.decisions if not d.kept)
    page = Span(first.end - 1, first.end)
    for armed, watched in ((), 0), ((page,), 1), (unused, row.unused_elements):
        attempt = attempt_of(made)
        touches = Touches(watched=frozenset({path}))
        [found] = judge_libraries(replace(attempt, armed={path: armed}, touches=touches), None)
        assert (found.watched_bytes, found.watched_elements) == (size(armed), watched)
    assert row.unused_bytes == plan.unused_bytes == sum(s.size for s in row.spans) > 0
    assert row.left_bytes == plan.code_bytes - plan.unused_bytes
    assert row.copy_sha256 == reconstruction.libraries[0].copy_sha256 != row.sha256


def test_what_was_trimmed_counts_and_what_stays_whole_is_noted(
    made: tuple[LibraryPlan, Reconstruction],
) -> None:
    plan, reconstruction = made
    trimmed = (
        RepackedCubin(
            start=64, filled=(Span(start=0, end=80),), stored_before=300, stored_after=100
        ),
        RepackedCubin(
            start=512, filled=(), stored_before=9, stored_after=9, left_alone="it calls by address"
        ),
    )
    [copy] = reconstruction.libraries
    changed = replace_fields(reconstruction, libraries=(replace_fields(copy, repacked=trimmed),))
    row, against = judge_one((plan, changed), mapped(made))
    assert (row.status, against) == (LibraryStatus.PROVED, [])
    assert row.left_bytes == plan.code_bytes - plan.unused_bytes - 200
    assert row.trimmed_code_bytes == 80 and list(row.trimmed) == [64, 512]
    assert row.notes == ("a cubin stays whole: it calls by address",)


COULD_NOT = "1 library could not be proved: each row says why"
NO_COPY = "no copy was loaded by any process"


def test_each_lack_of_evidence_ends_the_proof(made: tuple[LibraryPlan, Reconstruction]) -> None:
    path = made[0].library.path
    sound = mapped(made)
    status = LibraryStatus

    row, against = judge_one(made, replace(sound, originals={path: "process 7 opened it"}))
    assert (row.status, row.detail) == (status.NOT_PROVED, "process 7 opened it")
    assert against == [COULD_NOT]

    row, against = judge_one(made, replace(sound, incomplete="process 7: torn"))
    assert (row.status, row.detail, against) == (status.NOT_PROVED, "process 7: torn", [COULD_NOT])

    row, against = judge_one(made, LoadEvidence(unsubstituted={path: "no LD_AUDIT"}))
    assert (row.status, row.detail) == (status.NOT_SUBSTITUTED, "no LD_AUDIT")
    assert against == [COULD_NOT, NO_COPY]

    row, against = judge_one(made, LoadEvidence())
    assert (row.status, row.detail) == (status.NOT_SUBSTITUTED, "no process loaded its copy")
    assert against == [COULD_NOT, NO_COPY]

    # Neither run loads it: it takes nothing away, and proves nothing.
    row, against = judge_one(made, LoadEvidence(), loaded=False)
    assert (row.status, against) == (status.NOT_SUBSTITUTED, [NO_COPY])

    # Said once, with the tests.
    row, against = judge_one(made, sound, tests_agree=False)
    assert (row.status, row.detail, against) == (status.NOT_PROVED, TESTS_DIFFER, [])


def test_a_refused_library(made: tuple[LibraryPlan, Reconstruction]) -> None:
    plan, reconstruction = made
    refused = {plan.library.path: "it changed"}
    without = replace_fields(reconstruction, libraries=(), refused=refused)
    row, against = judge_one((plan, without), LoadEvidence())
    assert (row.status, row.detail) == (LibraryStatus.NOT_PROVED, "it changed")
    assert row.copy_sha256 is None and against == [COULD_NOT, NO_COPY]


def test_nothing_unused_is_nothing_to_prove(made: tuple[LibraryPlan, Reconstruction]) -> None:
    plan, reconstruction = made
    kept = tuple(replace_fields(d, kept=True) for d in plan.decisions)
    nothing = replace_fields(plan, decisions=kept)
    row, against = judge_one(
        (nothing, replace_fields(reconstruction, libraries=())), LoadEvidence()
    )
    assert row.status is LibraryStatus.NOTHING_UNUSED
    assert against == [NO_COPY]
    # All that is planned stays in the copy.
    [copy] = reconstruction.libraries
    same = replace_fields(copy, unused=(), unused_bytes=0, elements=0)
    row, against = judge_one(
        (plan, replace_fields(reconstruction, libraries=(same,))), mapped(made)
    )
    assert (row.status, row.unused_bytes, against) == (LibraryStatus.NOTHING_UNUSED, 0, [])


# ---- The verdict as a whole ----


def session(*tests: TestResult) -> SessionResult:
    return SessionResult(
        tests=tests, collection_errors=(), command=(), duration=1, longest_silence=1, exit_status=0
    )


def attempt_of(made: tuple[LibraryPlan, Reconstruction], *tests: TestResult) -> Attempt:
    """An attempt whose facts come from no file and no process."""
    plan, reconstruction = made
    usage = used(Path(plan.library.path), regions=(1,))
    traced = TracedRun(Run(Path("run")), (), usage, session(*results(a=Outcome.PASSED).values()))
    result = RoundResult(
        "001-verify",
        RoundKind.VERIFY,
        Run(Path("round")),
        session(*tests),
        0,
        silent=False,
        seconds=2,
    )
    return Attempt(
        traced=traced,
        plans=(plan,),
        program=Program(("tests",), (), Path(), Path(), {}, is_pytest=True),
        settings=DEFAULTS.verify,
        reconstruction=reconstruction,
        rounds=(result,),
        all_rounds=(result,),
        usage=usage,
        compare_launches=False,
        originals={},
        loads=mapped(made),
        opened={},
        held={},
        files=(),
        problems=(),
        versions={"pytest-negativa": "1", "python": "3"},
        ended_ns=7,
    )


def test_a_verdict_follows_from_an_attempt(made: tuple[LibraryPlan, Reconstruction]) -> None:
    attempt = attempt_of(made, *results(a=Outcome.PASSED).values())
    verdict = judge(attempt)
    assert verdict.proved and verdict.reasons == ()
    assert [row.status for row in verdict.libraries] == [LibraryStatus.PROVED]
    assert (verdict.run_id, verdict.command, verdict.gpu_tests) == ("run", ("tests",), 1)
    assert (verdict.created_ns, verdict.rounds[0].name) == (7, "001-verify")
    assert judge(attempt) == verdict

    failing = attempt_of(made, *results(a=Outcome.FAILED).values())
    assert judge(failing).reasons[0] == "1 test ended with another outcome than in the traced run"
    assert [row.detail for row in judge(failing).libraries] == [TESTS_DIFFER]
    assert judge(replace(attempt, problems=("a copy changed",))).reasons == ("a copy changed",)

    path = made[0].library.path
    opened = judge(replace(attempt, opened={path: "opened"}))
    assert [row.detail for row in opened.libraries] == ["opened"] and opened.reasons == (COULD_NOT,)
    noted = judge(replace(attempt, held={path: "opened"}))
    assert noted.proved and noted.libraries[0].notes == ("opened",)
    other = judge(replace(attempt, opened={"/lib/other.so": "opened"}))
    assert other.proved and other.libraries[0].notes == ()

    # The driver reads the headers of what it refuses.
    first = FirstUse(process=0, context=0, time_ns=0)
    refusal = Refusal(call="c", code=500, first=first, path=path, offset=64, name="k")
    refusing = replace_fields(attempt.usage, refusals=(refusal,))
    witness, image = Witness.TOUCHED, "0x40"
    touch = Need(witness=witness, library=path, image=image, test="t", nodeid="t")
    touched = replace(attempt, touches=Touches((touch,)))
    assert [d.witness for d in judge(touched).needs] == [Witness.TOUCHED]
    both = judge(replace(touched, usage=refusing))
    assert [d.witness for d in both.needs] == [Witness.REFUSED] and not both.proved

    # Tests that are started otherwise may do other work.
    traced, first_round = attempt.traced, attempt.rounds[0]
    starts = [
        replace_fields(traced.session, circumstances=Circumstances(program=program))
        for program in ("pytest", "run.py")
    ]
    otherwise = replace(
        attempt,
        traced=replace(traced, session=starts[0]),
        rounds=(replace(first_round, session=starts[1]),),
    )
    assert judge(otherwise).proved and judge(otherwise).changes
    *_, reason = judge(replace(otherwise, touches=touched.touches)).reasons[:2]
    assert reason.startswith("the tests were started otherwise than when traced (program: pytest")

    held = judge(replace(attempt, held={path: "process 7 had it open"}))
    assert held.proved and held.libraries[0].notes == ("process 7 had it open",)

    plan, reconstruction = made
    [library] = reconstruction.libraries
    fallback = replace_fields(library, not_compacted="saves only 7 bytes")
    left = attempt_of((plan, replace_fields(reconstruction, libraries=(fallback,))))
    [row] = judge(left).libraries
    assert row.notes == ("overwritten instead of compacted: saves only 7 bytes",)

    # Flaky, and nothing else ended as traced.
    ends = (*results(a=Outcome.PASSED).values(), *results(a=Outcome.FAILED).values())
    flaky = judge(replace(failing, originals={"a": ends}))
    assert flaky.differences == ()
    assert flaky.reasons == ("no test ended as in the traced run",)


def test_a_trace_that_watched_is_a_witness_of_work_that_is_missing(
    made: tuple[LibraryPlan, Reconstruction], tmp_path: Path
) -> None:
    plan, reconstruction = made
    attempt = attempt_of(made, *results(a=Outcome.PASSED).values())
    [planned] = analyze(used(Path(plan.library.path), regions=(1,)), settings(tmp_path)).libraries
    [library] = attempt.usage.libraries
    [copy] = reconstruction.libraries
    first, *others = copy.unused
    # All but the first element was watched, and the copies load the region and no kernel of it.
    watched = replace_fields(library, untouched=tuple(others))
    usage = replace_fields(attempt.usage, libraries=(watched,))
    lacking = replace_fields(library, images=tuple(
        replace_fields(i, kernels={}) for i in library.images
    ))  # fmt: skip
    traced = replace(attempt.traced, planned=(planned,), usage=usage)
    attempt = replace(attempt, traced=traced, usage=replace_fields(usage, libraries=(lacking,)))
    verdict = judge(attempt)
    assert verdict.proved and {w.witness for w in verdict.needs} == {Witness.NOT_REPEATED}
    assert {span for need in verdict.needs for span in need.spans if need.kept} == {
        (d.start, d.end) for d in plan.decisions if not d.kept and covers([first], d.start, d.end)
    }
    [row] = verdict.libraries
    assert row.spans == tuple(others) and row.unused_bytes == size(others) < plan.unused_bytes

    eager = UsageWarning(code=EAGER_LOADING, text="", process=0)
    gap = UsageWarning(code="gap", text="the detector was off", process=0)
    other = replace_fields(attempt.rounds[0].session, circumstances=Circumstances(program="run.py"))
    traced_by_pytest = replace_fields(traced.session, circumstances=Circumstances(program="pytest"))
    for no_witness in (
        replace(traced, usage=replace_fields(usage, warnings=(eager,))),
        replace(traced, usage=replace_fields(usage, incomplete=(gap,))),
        replace(traced, usage=replace_fields(usage, libraries=(library,))),
        replace(traced, session=traced_by_pytest),
    ):
        rounds = (replace(attempt.rounds[0], session=other),)
        doubted = judge(replace(attempt, traced=no_witness, rounds=rounds))
        assert not doubted.proved and not any(need.kept for need in doubted.needs)
        assert all(w.witness is Witness.NOT_USED for w in doubted.needs)
