"""Healing: where a proof fails, find what must be given back, keep it, and verify again."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.outcomes import TestResult
from pytest_negativa.models.plan import CodeRange, UnusedReason
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import CopyKind
from pytest_negativa.models.verdict import Healing, NeededSpan, Verdict
from pytest_negativa.planning.restore import (
    Part,
    functions_of,
    give_back,
    give_back_spans,
    iter_parts,
    part_of,
)
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.outcomes import by_nodeid
from pytest_negativa.storage.runs import load_healed, load_unhealed, save_healed, save_plans
from pytest_negativa.verifying.bisect import LimitReached, find_needed
from pytest_negativa.verifying.rounds import settled_tests
from pytest_negativa.verifying.verification import Attempt, Verification

STATE_FILE = "healing.jsonl"
"""In a run's folder: the answers of all probes so far, by which an interrupted search goes on."""

_ELSEWHERE = {
    CopyKind.OVERWRITTEN: "the tests fail wherever their libraries lie elsewhere: nothing that was "
    "removed is the cause",
    CopyKind.COMPACTED: "the tests fail on compacted copies with all GPU code in them, too: none "
    "of it that was removed is the cause",
}
"""Why nothing is given back for tests that fail with everything given back."""

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
    """Verify; while tests fail for what was removed, give back what they need and verify again.

    The verdict is that of the plans as they are saved.
    """
    healer = _Healer(verification)
    while True:
        attempt = verification.attempt(healer.planned)
        verdict = verification.judge(attempt, [p.plan for p in healer.planned])
        if not healer.go_on(attempt, verdict):
            return replace(verdict, healing=healer.result)


class _Healer:
    """All searches of one verification: the limits hold for them together.

    What an earlier search had kept because it wasn't finished is removed again, and searched
    first. The plans of the run stay as they are until more is known.

    Attributes:
        planned: what is to be verified next.
    """

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._before = by_nodeid(verification.traced.session.tests)
        self._begin = time.monotonic()
        self._runs = 0
        self._turns = 0
        self._ended = False
        self._whys: list[str] = []
        self._new: list[NeededSpan] = []
        self._failing: list[str] = []
        self._answers = _Answers(verification.traced.folder / STATE_FILE)
        self._spans = load_healed(verification.traced.folder)
        self._unfinished: frozenset[Part] = frozenset()
        self.planned = self._without_unfinished()

    @property
    def result(self) -> Healing | None:
        """How it went; None where nothing was to be healed."""
        if not self._new and not self._whys:
            return None
        return Healing(
            needed=tuple(self._new),
            runs=self._runs,
            seconds=time.monotonic() - self._begin,
            complete=not self._ended,
            why="; ".join(self._whys) or None,
        )

    def go_on(self, attempt: Attempt, verdict: Verdict) -> bool:
        """Take up an attempt's verdict; whether there is another plan to be verified."""
        if verdict.proved:
            if self._unfinished:
                self._whys.append("what an unfinished search had kept is not needed")
                self._save(self.planned, ())
            return False
        failing = [t.nodeid for t in verdict.differences if t.before is not None]
        if self._ended:
            return False
        if self._turns == _MAX_TURNS:
            self._whys.append(f"tests still fail after {_MAX_TURNS} searches; heal again to go on")
            self._ended = True
            return False
        self._turns += 1
        spans = self._search(attempt, failing)
        if spans:
            planned = self._healed(spans)
            self._save(planned, spans)
            self._new += spans
            return True
        if self._unfinished:
            # The verdict must be that of what is saved.
            self._unfinished = frozenset()
            self.planned = self._verification.traced.planned
            self._ended = True
            return True
        return False

    def _without_unfinished(self) -> tuple[AnalyzedLibrary, ...]:
        """The run's plans without what an unfinished search had kept."""
        planned = self._verification.traced.planned
        unhealed = {p.library.path: p for p in load_unhealed(self._verification.traced.folder)}
        if not unhealed:
            return planned
        now = {p.plan.library.path: p.plan for p in planned}
        if any(
            now.get(path) != give_back_spans(plan, self._spans) for path, plan in unhealed.items()
        ):
            self._verification.say(
                "negativa: healing: the plan has changed since a search was left unfinished; what "
                "it had kept stays kept"
            )
            return planned
        self._unfinished = frozenset(part_of(s) for s in self._spans if not s.complete)
        self._spans = tuple(s for s in self._spans if s.complete)
        return tuple(
            replace_fields(p, plan=unhealed.get(p.plan.library.path, p.plan)) for p in planned
        )

    def _search(self, attempt: Attempt, failing: Sequence[str]) -> tuple[NeededSpan, ...]:
        """What is to be given back for the tests that fail; nothing where that doesn't help."""
        if not failing:
            self._whys.append("no test of the traced run fails on the copies: nothing to search")
            return ()
        copied = {c.library.path for c in attempt.reconstruction.libraries}
        parts = [part for part in self._parts(failing) if part.library in copied]
        if not parts:
            self._whys.append("tests fail, and nothing was removed that they could need")
            return ()
        likely = [part for part in parts if part in self._unfinished]
        first = f", of them {len(likely):,}, kept by an unfinished search, first" if likely else ""
        self._verification.say(
            f"negativa: healing: {len(failing)} tests fail on the copies; searching "
            f"{len(parts):,} removed parts{first}"
        )
        caused = self._caused_by_removal(failing)
        if not caused:
            self._whys.append(
                "the tests fail on the originals too: nothing that was removed is the cause"
            )
            return ()
        for candidates in (likely, parts):
            if candidates:
                self._failing = self._passing_with(candidates, caused)
                if len(self._failing) == len(caused):
                    break
        if not self._failing:
            self._whys.append(_ELSEWHERE[self._copies])
            return ()
        if left := len(caused) - len(self._failing):
            self._whys.append(f"of {left} tests: {_ELSEWHERE[self._copies]}")
        self._answers.begin(self._question(candidates))
        found = find_needed(candidates, self._probe, _GROUPS, self._failing[0])
        if found.complete:
            return tuple(self._span(n.part, n.test, complete=True) for n in found.needed)
        self._ended = True
        self._whys.append(
            "a limit was reached (verify.heal_runs, verify.heal_minutes): "
            f"{len(found.enough):,} parts are kept, which may be more than is needed; heal again "
            "to go on"
        )
        return tuple(self._span(part, self._failing[0], complete=False) for part in found.enough)

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
        parts = [part for p in self.planned for part in iter_parts(p.library_map, p.plan)]
        never_chosen = {
            (p.plan.library.path, d.start)
            for p in self.planned
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
        rounds = self._verification.rounds.run(RoundKind.ORIGINAL, failing, None)
        ended = by_nodeid(test for r in rounds for test in settled_tests(r))
        return [n for n in failing if self._as_traced(n, ended)]

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
        table = self._write_copies(kept)
        result = self._verification.rounds.run_once(RoundKind.PROBE, self._failing, table)
        ended = by_nodeid(settled_tests(result))
        # One that differs ends the round: what is missing may only come after it.
        different = [n for n in self._failing if n in ended and not self._as_traced(n, ended)]
        missing = [n for n in self._failing if n not in ended]
        return next(iter([*different, *missing]), None)

    def _passing_with(self, parts: Sequence[Part], tests: Sequence[str]) -> list[str]:
        """Those of the tests that end as traced on copies with all of ``parts`` given back."""
        table = self._write_copies(parts)
        rounds = self._verification.rounds.run(RoundKind.CONTROL, tests, table)
        ended = by_nodeid(test for r in rounds for test in settled_tests(r))
        return [n for n in tests if self._as_traced(n, ended)]

    def _as_traced(self, nodeid: str, ended: Mapping[str, TestResult]) -> bool:
        return nodeid in ended and ended[nodeid].outcome is self._before[nodeid].outcome

    def _write_copies(self, kept: Collection[Part]) -> Path | None:
        """Copies with these parts given back, of all libraries that have unused code in the plan.

        Of one that is given back as a whole, too: that a library lies elsewhere must make no
        difference between two probes.
        """
        planned = [
            replace_fields(p, plan=give_back(p.plan, kept, "probed"))
            for p in self.planned
            if p.plan.unused_bytes or p.plan.trimmed
        ]
        return self._verification.write_copies(planned, copy_all=True)[1]

    def _healed(self, spans: Sequence[NeededSpan]) -> tuple[AnalyzedLibrary, ...]:
        return tuple(replace_fields(p, plan=give_back_spans(p.plan, spans)) for p in self.planned)

    def _question(self, parts: Sequence[Part]) -> list[str]:
        """All that the answers of probes depend on, as far as it can be told."""
        rounds = self._verification.rounds
        how = self._verification.settings.verify
        removed = [part for p in self.planned for part in iter_parts(p.library_map, p.plan)]
        return [
            f"{how.fill} {how.copies.value}",
            *(f"{p.plan.library.path} {p.plan.library.sha256}" for p in self.planned),
            *map(repr, rounds.program.command),
            *(f"{k}={v}" for k, v in sorted(rounds.environ.items()) if k.startswith("CUDA_")),
            *_states(_test_files(rounds.root, self._failing)),
            *_states(rounds.program.cwd / word for word in rounds.program.command),
            *map(repr, removed),
            "searched:",
            *map(repr, parts),
            *self._failing,
        ]

    def _span(self, part: Part, test: str, *, complete: bool) -> NeededSpan:
        planned = next(p for p in self.planned if p.plan.library.path == part.library)
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
            complete=complete,
        )

    def _save(self, planned: tuple[AnalyzedLibrary, ...], spans: Sequence[NeededSpan]) -> None:
        """Make ``planned`` the run's plans, which differ from those verified by ``spans``."""
        folder = self._verification.traced.folder
        left = {span.library for span in spans if not span.complete}
        unhealed = [p.plan for p in self.planned if p.plan.library.path in left]
        self._spans = (*self._spans, *spans)
        save_healed(folder, self._spans, unhealed)
        save_plans(folder, [p.plan for p in planned])
        self.planned = planned
        self._unfinished = frozenset()

    @property
    def _copies(self) -> CopyKind:
        return self._verification.settings.verify.copies


def _test_files(root: Path, nodeids: Collection[str]) -> Iterator[Path]:
    """The files of tests, and the conftests that they see."""
    files = dict.fromkeys(root / nodeid.partition("::")[0] for nodeid in nodeids)
    yield from files
    folders = {folder for file in files for folder in file.parents}
    yield from sorted(folder / "conftest.py" for folder in folders)


def _states(paths: Iterable[Path]) -> Iterator[str]:
    """Size and time of those that are files."""
    for path in paths:
        try:
            found = path.stat()
        except (OSError, ValueError):
            continue  # A word of the command that names no file.
        if stat.S_ISREG(found.st_mode):
            yield f"{path} {found.st_size} {found.st_mtime_ns}"


class _Answer(msgspec.Struct, frozen=True):
    kept: str
    failing: str | None


class _Answers:
    """What probes have answered, in a file that survives an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _Answer] = {}

    def begin(self, asked: Sequence[str]) -> None:
        """Take up the answers to the same question; others are forgotten.

        Raises:
            StoreError: the file can't be read or written.
        """
        question = _digest(asked)
        self._known = {}
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
