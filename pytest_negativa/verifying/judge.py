"""The verdict, from facts alone: flaky tests, GPUs of both runs, all reasons, the exit status.

A proof must be able to fail: what isn't shown isn't proved. Nothing here starts a process or
touches a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from msgspec.structs import replace

from pytest_negativa.models.outcomes import Aspect, Outcome, TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import FILL, ReconstructedLibrary
from pytest_negativa.models.round import MOST_RERUNS
from pytest_negativa.models.settings import Granularity
from pytest_negativa.models.spans import Span, intersection, size, union
from pytest_negativa.models.trace import UNENDED
from pytest_negativa.models.verdict import (
    NEEDS,
    TESTS_DIFFER,
    LibraryStatus,
    Need,
    ProvedLibrary,
    RoundFacts,
    TestVerdict,
    Verdict,
    Witness,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.outcomes import by_nodeid
from pytest_negativa.verifying.evidence import (
    Attempt,
    count_gpu_tests,
    libraries_by_test,
)
from pytest_negativa.verifying.page_proof import judge_pages
from pytest_negativa.verifying.process_ends import commands_of, reasons_of_ends
from pytest_negativa.verifying.rounds import RoundResult
from pytest_negativa.verifying.same_outcome import (
    changed_aspects,
    hurried_tests,
    known_of_originals,
    same_outcome,
)
from pytest_negativa.verifying.same_start import changes_of_start
from pytest_negativa.verifying.same_work import (
    Places,
    Work,
    compare_work,
    details_by_library,
    name_holders,
    reasons_of_work,
    refused_work,
    what_stays,
    without,
)

_UNWATCHED = (
    "the traced run did not watch GPU code, so nothing shows what the missing work may need; if "
    "the program chooses anew in each run, trace and prove in one command, which watches"
)

# Outcomes of a test that make a session end with status 1.
_FAILING = (Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED, Outcome.TIMED_OUT)


def judge(attempt: Attempt) -> Verdict:
    """The verdict that follows from an attempt; on the originals, of CPU code alone.

    Copies that are not proved may have led the tests to other CPU code, and show nothing of it.
    """
    tests = evidence_of_tests(attempt)
    against: tuple[str, ...] = ()
    if attempt.is_on_copies:
        verdict = _judge_copies(attempt, tests)
        if attempt.pages is None or not verdict.proved:
            return verdict
    else:
        against = tuple(reasons_of_outcomes(tests, judge_tests(tests)))
        rounds = tuple(map(facts_of, attempt.all_rounds))
        verdict = replace(attempt.before or verdict_of(attempt, tests, against), rounds=rounds)
    assert attempt.pages is not None
    return judge_pages(verdict, *attempt.pages, against)


def _judge_copies(attempt: Attempt, tests: TestEvidence) -> Verdict:
    traced = attempt.traced
    verdicts = judge_tests(tests)
    reasons = list(reasons_of_tests(tests, verdicts))
    # A test that ends otherwise does other work, too.
    flaky = {v.nodeid for v in verdicts if v.flaky}
    changes = tuple(changes_of_start(traced.session, attempt.rounds[0].session))
    work = _compare_work(attempt, flaky, as_started=not changes, needs_only=bool(reasons))
    if attempt.usage.loads_eagerly and not traced.usage.loads_eagerly:
        # Such a process asks for every kernel of what it loads, and swallows the driver's errors.
        work = tuple(d for d in work if d.witness not in NEEDS)
        reasons.append(
            "the copies ran with CUDA_MODULE_LOADING=EAGER, and the trace did not: that compares "
            "outcomes, and proves nothing; prove with lazy loading, or trace eagerly, too"
        )
    kept = (*what_stays(attempt, work), *attempt.again)
    attempt = without(attempt, kept)
    against = [need for need in work if need.is_against]
    reasons += reasons_of_work(against, attempt.usage)
    if changes and against:
        reasons.append(
            f"the tests were started otherwise than when traced ({'; '.join(changes)}); start them "
            "alike, or trace again"
        )
    elif against and not traced.usage.is_witness and all(d.witness not in NEEDS for d in against):
        reasons.append(_UNWATCHED)
    libraries = tuple(judge_libraries(attempt, details_by_library(against) if reasons else None))
    reasons += reasons_of_libraries(libraries, traced.loaded)
    files = tuple(row.doubted for row in attempt.files) if reasons else attempt.files
    return replace(
        verdict_of(attempt, tests, reasons),
        libraries=(*libraries, *files),
        changes=changes,
        needs=(*work, *kept),
    )


def verdict_of(attempt: Attempt, tests: TestEvidence, reasons: Sequence[str]) -> Verdict:
    """The verdict on an attempt, of which nothing but its tests is judged."""
    return Verdict(
        run_id=attempt.traced.run_id,
        proved=not reasons,
        reasons=tuple(reasons),
        command=attempt.program.command,
        exit_status=_first_to_end(attempt.rounds).status or session_status(attempt.rounds),
        fill=FILL,
        copies=attempt.settings.copies.value,
        granularity=next((p.granularity for p in attempt.plans), Granularity.ELEMENT.value),
        gpu_tests=tests.gpu_tests,
        created_ns=attempt.ended_ns,
        devices=attempt.usage.devices,
        versions=attempt.versions,
        libraries=(),
        tests=judge_tests(tests),
        rounds=tuple(map(facts_of, attempt.all_rounds)),
    )


def _compare_work(
    attempt: Attempt,
    flaky: Collection[str],
    *,
    as_started: bool,
    needs_only: bool,
) -> tuple[Need, ...]:
    places = Places(attempt.reconstruction)
    sessions = commands_of(attempt.traced, attempt.all_rounds)
    traced = Work.of(attempt.traced.usage, places, sessions)
    copies = Work.of(attempt.usage, places, sessions)
    work = (
        *compare_work(traced, copies, flaky, launches=attempt.compare_launches),
        *refused_work(traced, copies),
    )
    refused = {(d.library, d.image) for d in work if d.witness is Witness.REFUSED}
    # To refuse a kernel, the driver read the headers of its region; the refusal says more.
    work += tuple(d for d in attempt.touches.needs if (d.library, d.image) not in refused)
    if needs_only:
        work = tuple(d for d in work if d.witness in NEEDS)
    work = name_holders(work, attempt.traced.planned)
    # The traced run is a witness if it watched pages, loaded GPU code lazily, was traced to its
    # end, and was started as the tests on the copies were. Then such work speaks against nothing.
    if as_started and attempt.traced.usage.is_witness:
        work = tuple(
            d if d.witness in NEEDS else replace(d, witness=Witness.NOT_REPEATED) for d in work
        )
    planned = {plan.library.path for plan in attempt.plans}
    # Programs ask the driver for code of their own that is not there, too.
    return tuple(d for d in work if d.witness is not Witness.REFUSED or d.library in planned)


def _why_unlogged(attempt: Attempt) -> dict[str, str]:
    """By real path: why not all is known that a process with the copy asked the driver for."""
    if (why := attempt.loads.untraced) is not None:
        return {copy.library.path: why for copy in attempt.reconstruction.libraries}
    users = {used.library.path: used.processes for used in attempt.usage.libraries}
    return {
        copy.library.path: lack.text
        for copy in attempt.reconstruction.libraries
        for lack in attempt.usage.incomplete
        # A process that was killed had written all that it did until then.
        if lack.code != UNENDED
        and (lack.process is None or lack.process in users.get(copy.copy, ()))
    }


@dataclass(frozen=True, slots=True)
class TestEvidence:
    """Ends of the tests in both runs, and what else decides about them.

    Attributes:
        before, after: by node id, in the traced run and on the copies.
        on_originals: tests that did on the originals, too, what they did on the copies.
        used: by node id: libraries that the test was the first to use in the traced run.
        gpu_tests: how many tests, without the flaky ones, loaded GPU code on the copies.
        traced_on, verified_on: compute capabilities.
        problems: what else speaks against the run, such as a collection error.
        statuses: exit status of the session when traced, and on the copies; None if it died.
        tolerate: what two equal outcomes may differ in.
        hurried: tests that ran on the originals for too short a time to show both outcomes.
    """

    __test__ = False

    before: Mapping[str, TestResult]
    after: Mapping[str, TestResult]
    on_originals: Collection[str]
    used: Mapping[str, Collection[str]]
    gpu_tests: int
    traced_on: Collection[str]
    verified_on: Collection[str]
    problems: tuple[str, ...] = ()
    statuses: tuple[int | None, int | None] = (None, None)
    tolerate: Collection[Aspect] = ()
    hurried: Collection[str] = ()


def evidence_of_tests(attempt: Attempt) -> TestEvidence:
    """Evidence of an attempt's tests."""
    traced, usage = attempt.traced, attempt.usage
    before, after = by_nodeid(traced.session.tests), attempt.after
    tolerate = attempt.settings.tolerate
    fresh = {test.nodeid for r in attempt.rounds[1:] for test in r.session.tests}
    on_originals = known_of_originals(before, after, attempt.originals, tolerate, fresh)
    return TestEvidence(
        before=before,
        after=after,
        on_originals=on_originals,
        used=libraries_by_test(traced.usage),
        gpu_tests=count_gpu_tests(usage, on_originals),
        traced_on={d for plan in attempt.plans for d in plan.devices},
        verified_on={d.compute_capability for d in usage.devices},
        problems=(*attempt.problems, *reasons_of_ends(attempt.rounds, usage, traced)),
        statuses=(traced.session.exit_status, session_status(attempt.rounds)),
        tolerate=tolerate,
        hurried=()
        if attempt.settings.rerun is not None
        else hurried_tests(before, attempt.originals),
    )


def _first_to_end(rounds: Sequence[RoundResult]) -> RoundResult:
    """The first round that did not stop itself for a lost CUDA context; else the first one."""
    return next((r for r in rounds if not r.session.context_lost), rounds[0])


def session_status(rounds: Sequence[RoundResult]) -> int | None:
    """The exit status of the session on the copies, as if one process had run all its tests.

    A session that stopped because a CUDA context was lost has a status that tells nothing. Of the
    tests that failed before, the next process knows nothing.
    """
    status = _first_to_end(rounds).session.exit_status
    stopped = [r for r in rounds if r.session.context_lost]
    failed = any(t.outcome in _FAILING for r in stopped for t in r.session.tests if not t.doubtful)
    return 1 if status == 0 and failed else status


def judge_tests(tests: TestEvidence) -> tuple[TestVerdict, ...]:
    """All tests of both runs: those that differ first, then those that agree."""
    nodeids = dict.fromkeys((*tests.after, *tests.before))
    verdicts = [_judge_test(nodeid, tests) for nodeid in nodeids]
    return tuple(sorted(verdicts, key=lambda v: not v.differs))


def _judge_test(nodeid: str, tests: TestEvidence) -> TestVerdict:
    before, after = tests.before.get(nodeid), tests.after.get(nodeid)
    on_originals = nodeid in tests.on_originals
    as_traced = before and after and same_outcome(before, after, tests.tolerate)
    verdict = TestVerdict(
        nodeid=nodeid,
        before=None if before is None else before.outcome,
        after=None if after is None else after.outcome,
        flaky=on_originals and not as_traced,
        gpu_error=None if after is None or (as_traced and on_originals) else after.gpu_error,
        libraries=tuple(sorted(tests.used.get(nodeid, ()))),
        changes=changed_aspects(before, after, tests.tolerate) if before and after else (),
    )
    return replace(verdict, text=after.text) if after is not None and verdict.differs else verdict


def reasons_of_tests(tests: TestEvidence, verdicts: Collection[TestVerdict]) -> Iterator[str]:
    """Reasons against a proof of GPU code from the tests."""
    yield from reasons_of_outcomes(tests, verdicts)
    if not tests.gpu_tests:
        flaky = " that is not flaky" if any(v.flaky for v in verdicts) else ""
        yield f"no test{flaky} was seen to use the GPU"
    elif set(tests.traced_on) != set(tests.verified_on):
        yield (
            f"it ran on compute capability {_list(tests.verified_on)}, "
            f"the plan is for {_list(tests.traced_on)}"
        )


def reasons_of_outcomes(tests: TestEvidence, verdicts: Collection[TestVerdict]) -> Iterator[str]:
    """Differences between the tests and the traced run, a sentence each."""
    yield from tests.problems
    against = [v for v in verdicts if not v.flaky]
    missing = [v for v in against if v.after is None]
    new = [v for v in against if v.before is None]
    both = [v for v in against if v.after is not None and v.before is not None]
    if different := [v for v in both if v.before is not v.after]:
        yield f"{_tests(different)} ended with another outcome than in the traced run"
    if lost := [v for v in both if v.before is v.after and v.gpu_error is not None]:
        yield f"{_tests(lost)} ended as in the traced run, but lost the CUDA context"
    changes = [[c.aspect.value for c in v.changes if not c.tolerated] for v in both]
    if changed := list(filter(None, changes)):
        yield (
            f"{_tests(changed)} ended with the same outcome as in the traced run, but not "
            f"alike; if that is no fault, set verify.tolerate: [{_list(set(chain(*changed)))}]"
        )
    hurried = [v for v in both if v.differs and v.gpu_error is None and v.nodeid in tests.hurried]
    if hurried:
        yield (
            f"{_tests(hurried)} of these ran fewer than {MOST_RERUNS} times on the "
            "originals, for lack of time: perhaps it is chance; run as often as you like with "
            "--negativa-rerun"
        )
    if missing:
        yield f"{_tests(missing)} of the traced run did not run"
    if new:
        yield f"{_tests(new)} ran that the traced run doesn't have"
    before, after = tests.statuses
    # A test that differs may make a session fail or pass, and explains no other status.
    explained = any(v.differs for v in verdicts) and {before, after} <= {0, 1}
    if not explained and None not in (before, after) and before != after:
        yield f"the session ended with exit status {after}, with {before} when it was traced"
    if verdicts and all(v.differs for v in verdicts):
        yield "no test ended as in the traced run"


def judge_libraries(attempt: Attempt, doubts: Mapping[str, str] | None) -> Iterator[ProvedLibrary]:
    """Each library with a plan, the one with the most unused bytes first.

    Args:
        doubts: by real path: what of a library was not used on the copies; None if nothing speaks
            against the tests and their work.
    """
    loads, made, unlogged = attempt.loads, attempt.reconstruction, _why_unlogged(attempt)
    copies = {c.library.path: c for c in made.libraries}
    for plan in sorted(attempt.plans, key=lambda p: (-p.unused_bytes, p.library.path)):
        path = plan.library.path
        copy = copies.get(path)
        armed = attempt.armed.get(path, ()) if path in attempt.touches.watched else ()
        # The first that is said decides.
        rules = (
            (LibraryStatus.NOT_PROVED, made.refused.get(path)),
            (LibraryStatus.NOTHING_UNUSED, None if plan.unused_bytes or plan.trimmed else ""),
            (LibraryStatus.NOT_SUBSTITUTED, loads.unsubstituted.get(path)),
            (LibraryStatus.NOT_PROVED, loads.originals.get(path)),
            (LibraryStatus.NOT_PROVED, attempt.opened.get(path)),
            (
                LibraryStatus.NOT_SUBSTITUTED,
                None
                if loads.copies.get(path)
                else "no process loaded its copy"
                if path in attempt.traced.loaded
                else "the tests don't load it",
            ),
            (LibraryStatus.NOT_PROVED, loads.incomplete),
            (LibraryStatus.NOTHING_UNUSED, None if copy and copy.changes_code else ""),
            (LibraryStatus.NOT_PROVED, None if doubts is None else doubts.get(path, TESTS_DIFFER)),
            # No page of a kept cubin is armed: only the driver tells of functions that it lacks.
            (
                LibraryStatus.NOT_PROVED,
                f"functions were removed from kept cubins, and a process was not traced to its end "
                f"on the copies, so whether it asked for them is not known: {unlogged[path]}"
                if copy and copy.repacked and path in unlogged
                else None,
            ),
            (LibraryStatus.PROVED, ""),
        )
        status, detail = next((status, text) for status, text in rules if text is not None)
        row = replace(
            ProvedLibrary.unproved(plan),
            status=status,
            detail=detail or None,
            processes=len(loads.copies.get(path, ())),
            notes=(attempt.held[path],) if path in attempt.held else (),
        )
        yield row if copy is None else _with_copy(row, plan, copy, armed)


def _with_copy(
    row: ProvedLibrary, plan: LibraryPlan, copy: ReconstructedLibrary, armed: Sequence[Span]
) -> ProvedLibrary:
    # Of the copy, not of the plan: code that could not be overwritten isn't proved.
    watched = union(intersection(copy.unused, armed))
    saved = copy.unused_bytes + sum(c.stored_before - c.stored_after for c in copy.repacked)
    return replace(
        row,
        copy_sha256=copy.copy_sha256,
        unused_bytes=copy.unused_bytes,
        unused_elements=copy.elements,
        trimmed={c.start: c.filled for c in copy.repacked},
        notes=(*_notes(copy), *row.notes),
        trimmed_code_bytes=sum(c.code_bytes for c in copy.repacked),
        left_bytes=plan.code_bytes - saved,
        copy_size=copy.library.size if copy.compaction is None else copy.compaction.size,
        spans=copy.unused,
        watched_bytes=size(watched),
        watched_elements=sum(
            not d.kept and any(intersection([(d.start, d.end)], watched)) for d in plan.decisions
        ),
    )


def _notes(copy: ReconstructedLibrary) -> tuple[str, ...]:
    left = [c.left_alone for c in copy.repacked if c.left_alone is not None]
    notes = copy.compaction.notes if copy.compaction is not None else ()
    if copy.not_compacted is not None:
        notes = (f"overwritten instead of compacted: {copy.not_compacted}",)
    return (*notes, *(f"a cubin stays whole: {reason}" for reason in dict.fromkeys(left)))


def reasons_of_libraries(
    libraries: Collection[ProvedLibrary], loaded_when_traced: Collection[str]
) -> Iterator[str]:
    """Reasons against a proof from the libraries.

    A library that no test loads in either run does not invalidate the proof. A plugin may have
    added it.
    """
    wanted = [
        row
        for row in libraries
        if row.status is LibraryStatus.NOT_SUBSTITUTED and row.path in loaded_when_traced
    ]
    wanted += [
        row
        for row in libraries
        if row.status is LibraryStatus.NOT_PROVED and row.detail != TESTS_DIFFER
    ]
    if wanted:
        count = format_items(len(wanted), "library", "libraries")
        yield f"{count} could not be proved: each row says why"
    if not any(row.processes for row in libraries):
        yield "no copy was loaded by any process"


def facts_of(result: RoundResult) -> RoundFacts:
    """The row of a round in a verdict."""
    return RoundFacts(
        name=result.name,
        kind=result.kind.value,
        tests=len(result.session.tests),
        status=result.status,
        silent=result.silent,
        seconds=round(result.seconds, 3),
    )


def _tests(tests: Collection[object]) -> str:
    return format_items(len(tests), "test", "tests")


def _list(values: Collection[str]) -> str:
    return ", ".join(sorted(values)) or "unknown"
