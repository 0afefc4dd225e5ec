"""Healing: where a proof fails, find what must be given back, keep it, and verify again."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.giveback import Part, functions_of, give_back, iter_parts
from pytest_negativa.models.plan import CodeRange, LibraryPlan, UnusedReason
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.verdict import Healing, NeededSpan, Verdict
from pytest_negativa.pipeline import AnalyzedLibrary
from pytest_negativa.proving.bisect import Found, LimitReached, find_needed
from pytest_negativa.proving.outcomes import by_nodeid
from pytest_negativa.proving.rerun import settled_tests
from pytest_negativa.rundir import save_healed, save_plans
from pytest_negativa.store import write_atomically
from pytest_negativa.verifying import Verification

STATE_FILE = "healing.jsonl"
"""In a run's folder: the answers of all probes so far, by which an interrupted search goes on."""

# A test that was hidden behind a failing one may show up when that one passes.
_MAX_TURNS = 5


def _library(part: Part) -> object:
    return part.library


def _region(part: Part) -> object:
    return part.library, part.region


def _element(part: Part) -> object:
    return part.library, part.start


# What is given back together as long as that rules much out.
_GROUPS = (_library, _region, _element)


def verify_and_heal(verification: Verification) -> Verdict:
    """Verify; while tests fail for what was removed, give back what they need and verify again."""
    planned = verification.traced.planned
    total: Healing | None = None
    for _ in range(_MAX_TURNS):
        attempt = verification.attempt(planned)
        verdict = verification.judge(attempt, [p.plan for p in planned])
        failing = [t.nodeid for t in verdict.differences if t.before and t.after]
        if verdict.proved or not failing or (total is not None and not total.complete):
            break
        healing, planned = _Healer(verification, planned).heal(failing)
        total = healing if total is None else _sum(total, healing)
        if not healing.needed:
            break
    return replace(verdict, healing=total)


def _sum(one: Healing, other: Healing) -> Healing:
    return Healing(
        needed=(*one.needed, *other.needed),
        runs=one.runs + other.runs,
        seconds=one.seconds + other.seconds,
        complete=one.complete and other.complete,
        why=one.why or other.why,
    )


class _Healer:
    """One search. Limits hold for it, the answers of earlier, interrupted searches included."""

    def __init__(self, verification: Verification, planned: Sequence[AnalyzedLibrary]) -> None:
        self._verification = verification
        self._planned = planned
        self._begin = time.monotonic()
        self._runs = 0
        self._failing: list[str] = []
        self._answers = _Answers(verification.traced.folder / STATE_FILE)

    def heal(self, failing: Sequence[str]) -> tuple[Healing, tuple[AnalyzedLibrary, ...]]:
        """Find what the tests need, and give it back in the run's plans."""
        say = self._verification.say
        parts = self._parts(failing)
        say(
            f"negativa: healing: {len(failing)} tests fail on the copies; searching "
            f"{len(parts):,} removed parts"
        )
        self._failing = self._caused_by_removal(failing)
        if not self._failing:
            why = "the tests fail on the originals too: nothing that was removed is the cause"
            return self._result((), complete=True, why=why), tuple(self._planned)
        how = self._verification.settings.verify
        self._answers.begin(parts, self._failing, f"{how.fill} {how.copies.value}")
        found = find_needed(parts, self._probe, _GROUPS, self._failing[0])
        needed = [(n.part, n.test) for n in found.needed]
        kept = needed or [(part, self._failing[0]) for part in found.enough]
        self._planned = self._given_back([part for part, _ in kept], dict(kept))
        spans = tuple(self._span(part, test) for part, test in kept)
        self._save(spans)
        return self._result(spans, found.complete, self._why(found)), tuple(self._planned)

    def _parts(self, failing: Sequence[str]) -> list[Part]:
        """All removed parts, the likely ones first.

        Likely is what the driver would choose, in regions that the run had loaded and libraries
        that the failing tests were the first to use.
        """
        usage = self._verification.traced.usage
        wanted = set(failing)
        used: set[str] = set()
        loaded: set[tuple[str, int]] = set()
        for library in usage.libraries:
            for image in library.images:
                loaded.add((library.library.path, image.offset))
                firsts = [image.use.first, *(k.first for k in image.use.kernels)]
                if any(usage.contexts[f.context].nodeid in wanted for f in firsts):
                    used.add(library.library.path)
        parts = [part for p in self._planned for part in iter_parts(p.library_map, p.plan)]
        never_chosen = {
            (p.plan.library.path, d.start)
            for p in self._planned
            for d in p.plan.decisions
            if d.reason == UnusedReason.WRONG_ARCH.value
        }
        return sorted(
            parts,
            key=lambda p: (
                (p.library, p.region) not in loaded,
                (p.library, p.start) in never_chosen,
                p.library not in used,
                p.library,
                p.start,
                p.code or 0,
            ),
        )

    def _caused_by_removal(self, failing: Sequence[str]) -> list[str]:
        """Those of the tests that pass, or end as traced, on the originals."""
        before = by_nodeid(self._verification.traced.session.tests)
        rounds = self._verification.rounds.run(RoundKind.ORIGINAL, failing, None)
        after = by_nodeid(test for r in rounds for test in settled_tests(r))
        return [n for n in failing if n in after and after[n].outcome is before[n].outcome]

    def _probe(self, kept: frozenset[Part]) -> str | None:
        known = self._answers.get(kept)
        if known is not None:
            return known.failing
        limits = self._verification.settings.verify
        minutes = (time.monotonic() - self._begin) / 60
        if limits.heal_runs and self._runs >= limits.heal_runs:
            raise LimitReached
        if limits.heal_minutes and minutes >= limits.heal_minutes:
            raise LimitReached
        self._runs += 1
        failing = self._run(kept)
        outcome = "pass" if failing is None else f"{failing} fails"
        self._verification.say(
            f"negativa: healing: run {self._runs}, {len(kept):,} parts given back: {outcome}"
        )
        self._answers.add(kept, failing)
        return failing

    def _run(self, kept: frozenset[Part]) -> str | None:
        verification = self._verification
        before = by_nodeid(verification.traced.session.tests)
        table = verification.write_copies(self._given_back(kept, {}))[1]
        result = verification.rounds.run_once(RoundKind.PROBE, self._failing, table)
        after = by_nodeid(settled_tests(result))
        different = [
            n for n in self._failing if n in after and after[n].outcome is not before[n].outcome
        ]
        missing = [n for n in self._failing if n not in after]
        return next(iter([*different, *missing]), None)

    def _given_back(
        self, parts: Collection[Part], tests: dict[Part, str]
    ) -> tuple[AnalyzedLibrary, ...]:
        found = []
        for planned in self._planned:
            own = [part for part in parts if part.library == planned.plan.library.path]
            plan = planned.plan
            for part in own if tests else ():
                plan = give_back(plan, [part], f"needed by {tests[part]}, found by bisection")
            if not tests:
                plan = give_back(plan, own, "probed")
            found.append(replace_fields(planned, plan=plan))
        return tuple(found)

    def _span(self, part: Part, test: str) -> NeededSpan:
        planned = next(p for p in self._planned if p.plan.library.path == part.library)
        decision = next(d for d in planned.plan.decisions if d.start == part.start)
        function = None
        if part.code is not None:
            code = CodeRange(part.code, part.code + 1)
            function = next(iter(functions_of(planned.library_map, part.start, code)), None)
        return NeededSpan(
            library=part.library,
            start=part.start,
            end=decision.end,
            test=test,
            region=part.region,
            code=part.code,
            function=function,
        )

    def _save(self, spans: tuple[NeededSpan, ...]) -> None:
        folder = self._verification.traced.folder
        save_healed(folder, spans)
        plans: list[LibraryPlan] = [p.plan for p in self._planned]
        save_plans(folder, plans)

    def _result(self, needed: tuple[NeededSpan, ...], complete: bool, why: str | None) -> Healing:
        return Healing(
            needed=needed,
            runs=self._runs,
            seconds=time.monotonic() - self._begin,
            complete=complete,
            why=why,
        )

    def _why(self, found: Found[Part]) -> str | None:
        if found.complete:
            return None
        return (
            f"a limit was reached (verify.heal_runs, verify.heal_minutes): {len(found.enough):,} "
            "parts are kept, more than is needed; heal again to go on"
        )


class _Answer(msgspec.Struct, frozen=True):
    kept: str
    failing: str | None


class _Answers:
    """What probes have answered, in a file that survives an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _Answer] = {}

    def begin(self, parts: Sequence[Part], failing: Sequence[str], how: str) -> None:
        """Take up the answers to the same question; others are forgotten.

        Args:
            how: what the copies look like.

        Raises:
            StoreError: the file can't be read or written.
        """
        question = _digest([how, *map(repr, parts), *failing])
        try:
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        except OSError as e:
            raise StoreError(f"{self._path}: cannot be read: {e.strerror}") from e
        kept = [question.encode()]
        for line in lines[1:] if lines[:1] == kept else ():
            # The last line may be cut off; the next one must not begin behind it.
            try:
                answer = msgspec.json.decode(line, type=_Answer)
            except msgspec.DecodeError:
                continue
            self._known[answer.kept] = answer
            kept.append(line)
        write_atomically(self._path, b"".join(line + b"\n" for line in kept))

    def get(self, kept: frozenset[Part]) -> _Answer | None:
        return self._known.get(_digest(sorted(map(repr, kept))))

    def add(self, kept: frozenset[Part], failing: str | None) -> None:
        answer = _Answer(_digest(sorted(map(repr, kept))), failing)
        self._known[answer.kept] = answer
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(answer) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise StoreError(f"{self._path}: cannot be written: {e.strerror}") from e


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()
