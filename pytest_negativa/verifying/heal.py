"""Healing: if a proof fails, find what the tests need, give it back, keep it, and verify again."""

from __future__ import annotations

import dataclasses
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import CopyKind, Verify
from pytest_negativa.models.spans import Span
from pytest_negativa.models.verdict import (
    NEEDS,
    FoundBy,
    Healing,
    NeededSpan,
    Verdict,
    WorkDifference,
    WorkKind,
)
from pytest_negativa.planning.keep_needed import (
    Part,
    functions_of,
    iter_parts,
    keep_needed,
    keep_needed_spans,
    of_each_path,
    part_of,
)
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.outcomes import by_nodeid
from pytest_negativa.storage.results import load_healed, load_unhealed, save_healed, save_plans
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.verifying.answers import Answers
from pytest_negativa.verifying.bisect import LimitReached, find_needed
from pytest_negativa.verifying.evidence import Attempt, libraries_by_test, trace_files
from pytest_negativa.verifying.judge import judge, work_of_rounds
from pytest_negativa.verifying.rounds import RoundResult, conclusive_tests
from pytest_negativa.verifying.verification import Verification

_ELSEWHERE = {
    CopyKind.OVERWRITTEN: "the tests fail whenever their libraries lie in another folder: no "
    "removed code is the cause",
    CopyKind.COMPACTED: "the tests fail on compacted copies with all GPU code in them, too: no "
    "removed code is the cause",
}
"""Why nothing is given back for tests that fail with everything given back."""

_FOUND_BY = {WorkKind.REFUSED: FoundBy.REFUSAL, WorkKind.TOUCHED: FoundBy.TOUCH}

_WorkKey = tuple[object, ...]

# A test that was hidden behind a failing one may show up when that one passes.
_MAX_SEARCHES = 5


@dataclass(frozen=True, slots=True)
class _Plans:
    """Plans to verify, and their history.

    Attributes:
        spans: what healing gave back in them.
        unfinished: parts that an unfinished search had kept; they are removed again.
    """

    planned: tuple[AnalyzedLibrary, ...]
    spans: tuple[NeededSpan, ...]
    unfinished: frozenset[Part]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What one search has found.

    Attributes:
        spans: what to give back; empty if that helps no test.
        reasons: what kept the search from being complete, or from finding anything.
        complete: no limit ended the search.
    """

    spans: tuple[NeededSpan, ...] = ()
    reasons: tuple[str, ...] = ()
    complete: bool = True


@dataclass(slots=True)
class _Budget:
    """The limits of healing, which hold for all its searches together."""

    limits: Verify
    runs: int = 0
    _begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    @property
    def progress(self) -> str:
        """The number of the last run, and the most that there may be."""
        most = self.limits.heal_runs
        return f"{self.runs} of at most {most}" if most else f"{self.runs}"

    def spend(self) -> None:
        """Count a run.

        Raises:
            LimitReached: no run is left.
        """
        limits = self.limits
        if limits.heal_runs and self.runs >= limits.heal_runs:
            raise LimitReached
        if limits.heal_minutes and self.seconds / 60 >= limits.heal_minutes:
            raise LimitReached
        self.runs += 1


def verify_and_heal(verification: Verification) -> Verdict:
    """Verify; while tests fail for what was removed, give back what they need and verify again.

    The verdict is that of the plans as they are saved.
    """
    run = verification.traced.run
    budget = _Budget(verification.settings.verify)
    plans = _without_unfinished(verification)
    needed: list[NeededSpan] = []
    reasons: list[str] = []
    complete = True
    attempt = verification.attempt(plans.planned)
    verdict = judge(attempt)
    if verdict.proved and plans.unfinished:
        reasons.append("the tests don't need what an unfinished search had kept")
        _save_healed_plans(run, plans, ())
    searches = 0
    while complete and not verdict.proved:
        if searches == _MAX_SEARCHES:
            reasons.append(f"tests still fail after {_MAX_SEARCHES} searches; heal again to go on")
            complete = False
            break
        searches += 1
        result = search(verification, plans, attempt, verdict, budget)
        reasons += result.reasons
        if result.spans:
            needed += result.spans
            plans = _save_healed_plans(run, plans, result.spans)
            complete = result.complete
        elif plans.unfinished:
            # The verdict must be that of the plans as they are saved.
            plans = _Plans(verification.traced.planned, plans.spans, frozenset())
            complete = False
        else:
            break
        attempt = verification.attempt(plans.planned)
        verdict = judge(attempt)
    if not needed and not reasons:
        return verdict
    healing = Healing(
        needed=tuple(needed),
        runs=budget.runs,
        seconds=budget.seconds,
        complete=complete,
        reason="; ".join(reasons) or None,
    )
    return replace(verdict, healing=healing)


def search(
    verification: Verification,
    plans: _Plans,
    attempt: Attempt,
    verdict: Verdict,
    budget: _Budget,
) -> SearchResult:
    """Find what must be given back for the tests that fail in an attempt."""
    if seen := list(_needed_parts(plans, verdict)):
        # Locks repeat it, so it names no id of a process.
        spans = [
            _span(plans.planned, part, work.nodeid or "a process", found_by=_FOUND_BY[work.kind])
            for part, work in seen
        ]
        return SearchResult(of_each_path(plans.planned, spans))
    wanted = _wanted_work(verification, verdict)
    failing = [t.nodeid for t in verdict.differences if t.before is not None]
    failing += [nodeid for nodeid in wanted if nodeid not in failing]
    if not failing:
        return SearchResult(
            reasons=("no test of the traced run fails on the copies: nothing to search",)
        )
    copied = {c.library.path for c in attempt.reconstruction.libraries}
    parts = [p for p in _likely_first(verification, plans, failing) if p.library in copied]
    if not parts:
        return SearchResult(reasons=("tests fail, but no part was removed that they could need",))
    likely = [part for part in parts if part in plans.unfinished]
    first = f", of them {len(likely):,}, kept by an unfinished search, first" if likely else ""
    verification.say(
        f"negativa: healing: {format_items(len(failing), 'test differs', 'tests differ')} on the "
        f"copies; searching {format_items(len(parts), 'removed part', 'removed parts')}{first}"
    )
    trials = _Trials(verification, plans.planned, attempt, wanted)
    caused = trials.passing_on_originals(failing)
    if not caused:
        return SearchResult(
            reasons=("the tests differ on the originals, too: no removed code is the cause",)
        )
    for candidates in filter(None, (likely, parts)):
        tests = trials.passing_with(candidates, caused)
        if len(tests) == len(caused):
            break
    elsewhere = _ELSEWHERE[verification.settings.verify.copies]
    if not tests:
        return SearchResult(reasons=(elsewhere,))
    left = len(caused) - len(tests)
    reasons = (
        (f"{left} of {len(caused)} failing tests get nothing back: {elsewhere}",) if left else ()
    )
    question = _question(verification, plans.planned, candidates, tests, wanted)
    answers = Answers.open(verification.traced.run.answers_file, question)

    def probe(kept: frozenset[Part]) -> str | None:
        known = answers.get(kept)
        if known is not None:
            return known.failing
        budget.spend()
        failed = trials.first_failing(kept, tests)
        outcome = "pass" if failed is None else f"{failed} fails"
        verification.say(
            f"negativa: healing: run {budget.progress}, "
            f"{format_items(len(kept), 'part', 'parts')} given back: {outcome}"
        )
        answers.add(kept, failed)
        return failed

    found = find_needed(candidates, probe, _GROUPS, tests[0])
    if found.complete:
        spans = [_span(plans.planned, n.part, n.test, complete=True) for n in found.needed]
        return SearchResult(of_each_path(plans.planned, spans), reasons)
    limit = (
        "a limit was reached (verify.heal_runs, verify.heal_minutes): "
        f"{len(found.enough):,} parts are kept, which may be more than is needed; heal again to "
        "go on"
    )
    spans = [_span(plans.planned, part, tests[0], complete=False) for part in found.enough]
    return SearchResult(of_each_path(plans.planned, spans), (*reasons, limit), complete=False)


def _needed_parts(plans: _Plans, verdict: Verdict) -> Iterator[tuple[Part, WorkDifference]]:
    """The removed code that was touched, or that the driver was asked for by name."""
    seen = [d for d in verdict.other_work if d.kind in NEEDS]
    for planned in plans.planned if seen else ():
        contents = {block.start: block.content for block in planned.library_map.iter_code()}
        never = _wrong_arch(planned)
        for part in iter_parts(planned.library_map, planned.plan):
            wanted = [d for d in seen if d.library == part.library and _lies_in(part, d)]
            if not wanted or part.start in never:
                continue
            if part.code is None:
                found = planned.library_map.kernels_of(contents[part.start])
                names = {kernel.name for kernel in found}
            else:
                code = Span(part.code, part.code + 1)
                names = set(functions_of(planned.library_map, part.start, code))
            for work in wanted:
                if work.kernel is None or work.kernel in names:
                    yield part, work
                    break


def _lies_in(part: Part, work: WorkDifference) -> bool:
    return work.image is None or int(work.image, 16) in (part.region, part.start)


def _wrong_arch(planned: AnalyzedLibrary) -> set[int]:
    """Code that the driver would never choose."""
    decisions = planned.plan.decisions
    return {d.start for d in decisions if d.reason == UnusedReason.WRONG_ARCH.value}


@dataclass(frozen=True, slots=True)
class _Trials:
    """Runs tests on originals, and on copies with some parts given back."""

    verification: Verification
    planned: tuple[AnalyzedLibrary, ...]
    attempt: Attempt
    wanted: Mapping[str, frozenset[_WorkKey]]

    def passing_on_originals(self, tests: Sequence[str]) -> list[str]:
        """The tests that end as traced on the originals."""
        return self._passing(RoundKind.ORIGINAL, tests, self.attempt.reconstruction, None)

    def passing_with(self, parts: Sequence[Part], tests: Sequence[str]) -> list[str]:
        """The tests that end as traced on copies with all of ``parts`` given back."""
        return self._passing(RoundKind.CONTROL, tests, *self._write_copies(parts))

    def first_failing(self, kept: Collection[Part], tests: Sequence[str]) -> str | None:
        """A test that does not end as traced with the parts given back; None if all do."""
        reconstruction, table = self._write_copies(kept)
        rounds = [self.verification.run_once(RoundKind.PROBE, tests, table)]
        ended = conclusive_tests(rounds)
        good = self._as_traced(tests, rounds, reconstruction)
        # A test that differs ends the round: what is missing may only come after it.
        different = [n for n in tests if n in ended and n not in good]
        missing = [n for n in tests if n not in ended]
        return next(iter([*different, *missing]), None)

    def _passing(
        self,
        kind: RoundKind,
        tests: Sequence[str],
        reconstruction: Reconstruction,
        table: Path | None,
    ) -> list[str]:
        return self._as_traced(tests, self.verification.run(kind, tests, table), reconstruction)

    def _as_traced(
        self, tests: Sequence[str], rounds: Sequence[RoundResult], reconstruction: Reconstruction
    ) -> list[str]:
        """The tests that ended as traced, and whose wanted work was done."""
        before = by_nodeid(self.verification.traced.session.tests)
        ended = conclusive_tests(rounds)
        good = [
            n
            for n in tests
            if n in ended
            and self.verification.is_same(before[n], ended[n])
            and ended[n].gpu_error is None
        ]
        if self.wanted.keys().isdisjoint(good):
            return good
        work = work_of_rounds(self.attempt, merge_traces(trace_files(rounds)), reconstruction)
        left_out = {difference.key for difference in work}
        return [n for n in good if self.wanted.get(n, frozenset()).isdisjoint(left_out)]

    def _write_copies(self, kept: Collection[Part]) -> tuple[Reconstruction, Path | None]:
        """Copy all libraries that have unused code in the plan, with these parts given back.

        A library that is given back as a whole is copied, too: probes must not differ in where
        libraries lie.
        """
        planned = [
            dataclasses.replace(p, plan=keep_needed(p.plan, kept, "probed"))
            for p in self.planned
            if p.plan.unused_bytes or p.plan.trimmed
        ]
        return self.verification.write_copies(planned, copy_all=True)


def _wanted_work(verification: Verification, verdict: Verdict) -> dict[str, frozenset[_WorkKey]]:
    """By test: what it, or a process or fixture that it starts, did not do on the copies."""
    nodeids = [test.nodeid for test in verification.traced.session.tests]
    wanted: dict[str, set[_WorkKey]] = {}
    for difference in verdict.other_work:
        place = difference.nodeid or ""
        # Of a module's fixture, of an import or of an unknown process: the first test beside it.
        test = next((n for n in nodeids if n == place or n.startswith(f"{place}::")), nodeids[0])
        wanted.setdefault(test, set()).add(difference.key)
    return {test: frozenset(keys) for test, keys in wanted.items()}


def _without_unfinished(verification: Verification) -> _Plans:
    """The run's plans without what an unfinished search had kept, which is searched first.

    The plans of the run stay as they are until more is known.
    """
    traced = verification.traced
    spans = load_healed(traced.run)
    saved = _Plans(traced.planned, spans, frozenset())
    unhealed = {p.library.path: p for p in load_unhealed(traced.run)}
    if not unhealed:
        return saved
    now = {plan.library.path: plan for plan in traced.plans}
    if any(now.get(path) != keep_needed_spans(plan, spans) for path, plan in unhealed.items()):
        verification.say(
            "negativa: healing: the plan has changed since an unfinished search; the parts that "
            "the search had kept stay kept"
        )
        return saved
    return _Plans(
        planned=tuple(
            dataclasses.replace(p, plan=unhealed.get(p.plan.library.path, p.plan))
            for p in traced.planned
        ),
        spans=tuple(s for s in spans if s.complete),
        unfinished=frozenset(part_of(s) for s in spans if not s.complete),
    )


def _save_healed_plans(run: Run, plans: _Plans, spans: Sequence[NeededSpan]) -> _Plans:
    """Give ``spans`` back in the plans, and make the result the run's plans."""
    planned = tuple(
        dataclasses.replace(p, plan=keep_needed_spans(p.plan, spans)) for p in plans.planned
    )
    left = {span.library for span in spans if not span.complete}
    unhealed = [p.plan for p in plans.planned if p.plan.library.path in left]
    healed = _Plans(planned, (*plans.spans, *spans), frozenset())
    save_healed(run, healed.spans, unhealed)
    save_plans(run, [p.plan for p in planned])
    return healed


def _library(part: Part) -> object:
    return part.library


def _region(part: Part) -> object:
    return part.library, part.region


def _element(part: Part) -> object:
    return part.library, part.start


# Parts of one group are given back together while that excludes many of them.
_GROUPS = (_library, _region, _element)


def _likely_first(
    verification: Verification, plans: _Plans, failing: Collection[str]
) -> list[Part]:
    """All removed parts, the likely ones first.

    Likely parts lie in libraries that the failing tests were the first to use, and in regions
    that the run had loaded. The driver would choose them.
    """
    usage = verification.traced.usage
    loaded = {(use.library.path, image.offset) for use in usage.libraries for image in use.images}
    uses = libraries_by_test(usage)
    used = {path for nodeid in failing for path in uses.get(nodeid, ())}
    never_chosen = {(p.plan.library.path, start) for p in plans.planned for start in _wrong_arch(p)}
    return sorted(
        (part for p in plans.planned for part in iter_parts(p.library_map, p.plan)),
        key=lambda p: (
            (p.library, p.region) not in loaded,
            (p.library, p.start) in never_chosen,
            p.library not in used,
            p.library,
            p.start,
            p.code or 0,
        ),
    )


def _span(
    planned: Iterable[AnalyzedLibrary],
    part: Part,
    test: str,
    *,
    complete: bool = True,
    found_by: FoundBy = FoundBy.BISECTION,
) -> NeededSpan:
    library = next(p for p in planned if p.plan.library.path == part.library)
    decision = next(d for d in library.plan.decisions if d.start == part.start)
    function = None
    if part.code is not None:
        code = Span(part.code, part.code + 1)
        function = next(iter(functions_of(library.library_map, part.start, code)), None)
    return NeededSpan(
        library=part.library,
        start=part.start,
        end=decision.end,
        test=test,
        region=part.region,
        code=part.code,
        function=function,
        complete=complete,
        found_by=found_by,
    )


def _question(
    verification: Verification,
    planned: Sequence[AnalyzedLibrary],
    parts: Sequence[Part],
    tests: Sequence[str],
    wanted: Mapping[str, frozenset[_WorkKey]],
) -> list[str]:
    """Everything known that the answers of probes depend on."""
    program, how = verification.program, verification.settings.verify
    removed = [part for p in planned for part in iter_parts(p.library_map, p.plan)]
    return [
        how.copies.value,
        *(f"{p.plan.library.path} {p.plan.library.sha256}" for p in planned),
        *map(repr, program.command),
        *(f"{k}={v}" for k, v in sorted(program.environ.items()) if k.startswith("CUDA_")),
        *_states(_test_files(program.root, tests)),
        *_states(program.cwd / word for word in program.command),
        *map(repr, removed),
        "searched:",
        *map(repr, parts),
        *tests,
        *sorted(repr(key) for keys in wanted.values() for key in keys),
    ]


def _test_files(root: Path, nodeids: Collection[str]) -> Iterator[Path]:
    """The files of tests, and the conftest.py files that apply to them."""
    files = dict.fromkeys(root / nodeid.partition("::")[0] for nodeid in nodeids)
    yield from files
    folders = {folder for file in files for folder in file.parents}
    yield from sorted(folder / "conftest.py" for folder in folders)


def _states(paths: Iterable[Path]) -> Iterator[str]:
    """Size and time of each path that is a regular file."""
    for path in paths:
        try:
            found = path.stat()
        except (OSError, ValueError):
            continue  # A word of the command that names no file.
        if stat.S_ISREG(found.st_mode):
            yield f"{path} {found.st_size} {found.st_mtime_ns}"
