"""Evidence to a verdict. A proof must be able to fail: what isn't shown isn't proved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import ReconstructedLibrary, Reconstruction
from pytest_negativa.models.verdict import (
    TESTS_DIFFER,
    LibraryStatus,
    ProvedLibrary,
    TestVerdict,
    TrimmedCode,
)
from pytest_negativa.storage.outcomes import iter_differences


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of the processes of all rounds on the copies.

    Attributes:
        copies: by real path of the original: the processes that had its copy mapped.
        originals: by real path of the original: who had the original itself, in words.
        unsubstituted: by real path of the original: why it can't be substituted here.
        incomplete: why processes may have been missed, or None.
    """

    copies: Mapping[str, Collection[object]] = field(default_factory=dict)
    originals: Mapping[str, str] = field(default_factory=dict)
    unsubstituted: Mapping[str, str] = field(default_factory=dict)
    incomplete: str | None = None


@dataclass(frozen=True, slots=True)
class TestEvidence:
    """How the tests ended.

    Attributes:
        before, after: by node id, in the traced run and on the copies.
        flaky: tests whose outcome differs between runs on the originals, too.
        used: by node id: libraries that the test was the first to use, when traced.
        gpu_tests: how many tests were seen to load GPU code on the copies.
        traced_on, verified_on: compute capabilities.
        problems: what else speaks against the run: collection errors, a session that died.
        statuses: exit status of the session when traced, and on the copies; None: it died.
    """

    __test__ = False

    before: Mapping[str, TestResult]
    after: Mapping[str, TestResult]
    flaky: Collection[str]
    used: Mapping[str, Collection[str]]
    gpu_tests: int
    traced_on: Collection[str]
    verified_on: Collection[str]
    problems: tuple[str, ...] = ()
    statuses: tuple[int | None, int | None] = (None, None)


def judge_tests(tests: TestEvidence) -> tuple[TestVerdict, ...]:
    """All tests of both runs, those that differ first."""
    different = {d.nodeid: d for d in iter_differences(tests.before, tests.after)}
    verdicts = []
    for nodeid in (*different, *(n for n in tests.before if n not in different)):
        before, after = tests.before.get(nodeid), tests.after.get(nodeid)
        verdicts.append(
            TestVerdict(
                nodeid=nodeid,
                before=None if before is None else before.outcome,
                after=None if after is None else after.outcome,
                flaky=nodeid in tests.flaky,
                text=after.text if after is not None and nodeid in different else None,
                gpu_error=after.gpu_error if after is not None else None,
                libraries=tuple(sorted(tests.used.get(nodeid, ()))),
            )
        )
    return tuple(verdicts)


def reasons_of_tests(tests: TestEvidence, verdicts: Collection[TestVerdict]) -> Iterator[str]:
    """Why the tests don't prove anything; nothing if they do."""
    yield from tests.problems
    against = [v for v in verdicts if v.differs and not v.flaky]
    missing = [v for v in against if v.after is None]
    new = [v for v in against if v.before is None]
    different = [v for v in against if v.after is not None and v.before is not None]
    if different:
        yield f"{_count(different, 'test')} ended otherwise than in the traced run"
    if missing:
        yield f"{_count(missing, 'test')} of the traced run did not run"
    if new:
        yield f"{_count(new, 'test')} ran that the traced run doesn't have"
    before, after = tests.statuses
    # Where a test differs, the status may well differ with it.
    if not any(v.differs for v in verdicts) and None not in (before, after) and before != after:
        yield f"the session ended with exit status {after}, with {before} when it was traced"
    if verdicts and all(v.differs for v in verdicts):
        yield "no test ended as in the traced run"
    if not tests.gpu_tests:
        yield "no test was seen to use the GPU"
    elif set(tests.traced_on) != set(tests.verified_on):
        yield (
            f"it ran on compute capability {_list(tests.verified_on)}, "
            f"the plan is for {_list(tests.traced_on)}"
        )


def judge_libraries(
    plans: Collection[LibraryPlan],
    reconstruction: Reconstruction,
    evidence: Evidence,
    loaded_when_traced: Collection[str],
    *,
    tests_agree: bool,
) -> Iterator[ProvedLibrary]:
    """Each library with a plan, the most unused bytes first."""
    copies = {c.library.path: c for c in reconstruction.libraries}
    refused = {r.path: r.why for r in reconstruction.refused}
    for plan in sorted(plans, key=lambda p: (-p.unused_bytes, p.library.path)):
        path = plan.library.path
        copy = copies.get(path)
        repacked = copy.repacked if copy is not None else ()
        unused = copy.unused_bytes if copy is not None else 0
        processes = evidence.copies.get(path, ())
        why: str | None = None
        status = LibraryStatus.NOT_PROVED
        if path in refused:
            why = refused[path]
        elif not plan.unused_bytes and not plan.trimmed:
            status = LibraryStatus.NOTHING_UNUSED
        elif path in evidence.unsubstituted:
            status, why = LibraryStatus.NOT_SUBSTITUTED, evidence.unsubstituted[path]
        elif path in evidence.originals:
            why = evidence.originals[path]
        elif not processes and path in loaded_when_traced:
            status, why = LibraryStatus.NOT_SUBSTITUTED, "no process loaded its copy"
        elif not processes:
            status, why = LibraryStatus.NOT_SUBSTITUTED, "the tests don't load it"
        elif evidence.incomplete is not None:
            why = evidence.incomplete
        elif copy is None or not copy.changes_code:
            status = LibraryStatus.NOTHING_UNUSED
        elif not tests_agree:
            why = TESTS_DIFFER
        else:
            status = LibraryStatus.PROVED
        yield ProvedLibrary(
            path=path,
            soname=plan.library.soname,
            build_id=plan.library.build_id,
            size=plan.library.size,
            sha256=plan.library.sha256,
            copy_sha256=None if copy is None else copy.copy_sha256,
            status=status,
            why=why,
            code_bytes=plan.code_bytes,
            # Of the copy, not of the plan: what could not be overwritten isn't proved.
            unused_bytes=unused,
            elements=len(plan.decisions),
            unused_elements=copy.elements if copy is not None else 0,
            trimmed=tuple(TrimmedCode(start=c.start, filled=c.filled) for c in repacked),
            notes=_notes(copy),
            trimmed_code_bytes=sum(c.code_bytes for c in repacked),
            left_bytes=plan.code_bytes
            - unused
            - sum(c.stored_before - c.stored_after for c in repacked),
            copy_size=_size(copy),
            processes=len(processes),
            spans=copy.unused if copy is not None else (),
        )


def _notes(copy: ReconstructedLibrary | None) -> tuple[str, ...]:
    if copy is None:
        return ()
    left = [c.left_alone for c in copy.repacked if c.left_alone is not None]
    notes = copy.compaction.notes if copy.compaction is not None else ()
    return (*notes, *(f"a cubin stays whole: {why}" for why in dict.fromkeys(left)))


def _size(copy: ReconstructedLibrary | None) -> int | None:
    if copy is None:
        return None
    return copy.library.size if copy.compaction is None else copy.compaction.size


def reasons_of_libraries(
    libraries: Collection[ProvedLibrary], loaded_when_traced: Collection[str]
) -> Iterator[str]:
    """Why the libraries don't let anything be proved; nothing if they do.

    A library that no test loads in either run, as one that a plugin added, takes no proof away.
    """
    wanted = [
        row
        for row in libraries
        if row.status is LibraryStatus.NOT_SUBSTITUTED and row.path in loaded_when_traced
    ]
    wanted += [
        row
        for row in libraries
        if row.status is LibraryStatus.NOT_PROVED and row.why != TESTS_DIFFER
    ]
    if wanted:
        yield f"{_count(wanted, 'library', 'libraries')} could not be proved: see there"
    if not any(row.processes for row in libraries):
        yield "no copy was loaded by any process"


def _count(things: Collection[object], one: str, many: str | None = None) -> str:
    return f"{len(things):,} {one if len(things) == 1 else many or one + 's'}"


def _list(values: Collection[str]) -> str:
    return ", ".join(sorted(values)) or "unknown"
