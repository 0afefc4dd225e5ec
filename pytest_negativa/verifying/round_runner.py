"""Runs the rounds of a session, and shows what each is for, how far it is, and how it ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from pytest_negativa.errors import refusing
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.settings import Settings
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import path_for_people, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.outcomes import EndedTests, by_nodeid, read_outcomes
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.originals import MOST_RERUNS
from pytest_negativa.verifying.rounds import Program, RoundResult, run_round
from pytest_negativa.verifying.same_outcome import same_outcome

# A program that starts or ends no test for five times the longest pause of the traced run hangs.
_LEAST_SILENCE = 60.0
_TIMES_SILENCE = 5.0

# For as long as this share of the traced session, or of a minute, tests that differ are repeated
# if the user gives no number. With trace and proof, that is 2.4 times the tests' own time.
_REPEATING = 0.4
_LEAST_REPEATING = 24.0

# Lines that are shown of the output of a round.
_MOST_OF_TESTS = 200
_MOST_OF_CRASH = 20

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# TerminalReporter.summary_failures and summary_errors of pytest: a line of "_" with a name in it,
# which is no line between two entries of a traceback ("_ _ _"). "=" begins the next part.
_SECTION = re.compile(r"_+ (?![_ ]+$)(.+?) _+")
_PART = re.compile(r"={3,} .+ ={3,}")
# Begins what Python's faulthandler prints, the call that crashed first.
_FAULT = "Fatal Python error: "
_PHASE = re.compile(r"ERROR at (setup|teardown) of ")


class RoundRunner:
    """Runs the rounds of one session.

    The first one is shown as the program prints it. If tests can't see the difference, the output
    of each further one goes to a file, and one line before the round and one behind stand for it.

    Args:
        program: what to run.
        settings: how to verify.
        traced: the traced run.
        say: shows a line.
        has_shown: whether a round of this session was shown already, by ``run_round``.
    """

    def __init__(
        self,
        program: Program,
        settings: Settings,
        traced: Run,
        say: Callable[[str], None],
        *,
        has_shown: bool,
    ) -> None:
        self.program = program
        self.say = say
        self._settings = settings
        self._traced = traced
        self._has_shown = has_shown
        # By what all tests ran on: for how many seconds.
        self._took: dict[str, float] = {}

    @cached_property
    def session(self) -> SessionResult:
        """How the tests of the traced run ended."""
        return read_outcomes(self._traced.outcomes_file)

    def run(
        self,
        kind: RoundKind,
        run: Run,
        environ: Mapping[str, str],
        where: str,
        *,
        tests: Sequence[str] | None = None,
        repeated: Sequence[str] = (),
        why: str = "",
    ) -> RoundResult:
        """Run one round.

        Args:
            run: its folder.
            environ: the program's environment.
            where: on what the tests run, for people.
            tests, repeated: see ``Round``.
            why: its reason, for people.

        Raises:
            NegativaError: see ``run_round``.
            Interrupted: see ``run_round``.
        """
        most = self._settings.verify.rerun
        seconds = None
        if most is None:
            most, seconds = MOST_RERUNS, max(_LEAST_REPEATING, _REPEATING * self.session.duration)
        round_spec = self.program.new_round(
            kind,
            run,
            tests=tests,
            repeated=repeated,
            most=most,
            seconds=seconds,
            expected=self._traced.outcomes_file,
        )
        folds = self._has_shown and self.program.folds
        self._has_shown = True
        self.say(self._announcement(where, tests, most if repeated else 1, why))
        limit = _silence_limit(self._settings, self.session)
        if not folds:
            result = run_round(self.program, round_spec, environ, limit)
            if result.died:
                self.say("")  # Behind pytest's dots.
            return result
        wanted = None if tests is None else frozenset(tests)
        chosen = [t for t in self.session.tests if wanted is None or t.nodeid in wanted]
        expected = self._took.get(where, self.session.duration)
        if tests is not None:
            expected = sum(test.duration for test in chosen)
        if repeated and seconds is not None:
            expected += seconds
        ended, of_all = EndedTests(run.outcomes_file), format_items(len(chosen), "test", "tests")
        with Progress(where, expected_s=expected) as progress:

            def follow() -> None:
                done = len(ended.read())
                progress.update(done, max(done, len(chosen)), f"{done:,} of {of_all}")

            follow()
            result = run_round(
                self.program, round_spec, environ, limit, output=run.output_file, follow=follow
            )
        if tests is None:
            self._took[where] = result.seconds
        differing = self._differing(result)
        text = f"negativa: {_count(result)} {where} in {result.seconds:.0f} s"
        if differing or result.died:
            text += f"; output: {printable(str(path_for_people(run.output_file)))}"
        self.say(text)
        if kind is RoundKind.VERIFY:
            for line in excerpt(run.output_file, differing, died=result.died):
                self.say(line)
        return result

    def _announcement(self, where: str, tests: Sequence[str] | None, most: int, why: str) -> str:
        count = len(self.session.tests if tests is None else tests)
        what = format_items(count, "test", "tests") if self.program.is_pytest else "the command"
        took = ""
        if tests is None:
            last = self._took.get(where)
            seconds = self.session.duration if last is None else last
            took = f", {seconds:.0f} s {'when traced' if last is None else 'last time'}"
        elif most > 1:
            took = f", up to {most} times"
        return f"negativa: {why}{'; ' * bool(why)}running {what} {where}{took}"

    def _differing(self, result: RoundResult) -> tuple[str, ...]:
        """What ended otherwise than when traced: node ids of tests and of modules."""
        before = by_nodeid(self.session.tests)
        known = frozenset(self.session.collection_errors)

        def is_same(test: TestResult) -> bool:
            traced = before.get(test.nodeid)
            return traced is not None and same_outcome(traced, test, self._settings.verify.tolerate)

        return (
            *(test.nodeid for test in result.session.tests if not is_same(test)),
            *(e.partition(": ")[0] for e in result.session.collection_errors if e not in known),
        )


def _silence_limit(settings: Settings, traced: SessionResult) -> float | None:
    """For how many seconds no test may begin or end; None: no limit."""
    given = settings.verify.timeout
    if given is not None:
        return float(given) or None
    return max(_LEAST_SILENCE, _TIMES_SILENCE * traced.longest_silence)


def _count(result: RoundResult) -> str:
    session = result.session
    found = Counter(test.outcome for test in (*session.tests, *session.repeats))
    return ", ".join(f"{found[o]:,} {o.value}" for o in Outcome if found[o]) or "no test ran"


def excerpt(path: Path, differing: Collection[str], *, died: bool) -> Iterator[str]:
    """What the output of a round shows of tests that differ, and of a crash.

    Args:
        path: a file with the output of pytest.
        differing: node ids of tests, and of modules that could not be collected.
        died: the session did not come to its end.

    Raises:
        StoreError: the file can't be read.
    """
    with refusing(path, "read"), path.open(errors="replace") as file:
        lines = list(map(str.rstrip, file))
    shown = list(_sections(lines, {_title(nodeid) for nodeid in differing}))
    yield from shown[:_MOST_OF_TESTS]
    if left := len(shown[_MOST_OF_TESTS:]):
        yield f"negativa: {left:,} more lines in {printable(str(path))}"
    if died:
        # It follows pytest's dots in their line.
        _, fault, behind = "\n".join(lines).rpartition(_FAULT)
        last = lines[-_MOST_OF_CRASH:]
        yield from (fault + behind).split("\n")[:_MOST_OF_CRASH] if fault else last


def _sections(lines: Iterable[str], titles: Collection[str]) -> Iterator[str]:
    is_wanted = False
    for line in lines:
        plain = _COLOR.sub("", line)
        if (found := _SECTION.fullmatch(plain)) is not None:
            is_wanted = _PHASE.sub("", found[1]) in titles
        elif _PART.fullmatch(plain):
            is_wanted = False
        if is_wanted:
            yield line


def _title(nodeid: str) -> str:
    """The title of a test's section, and that of a module that can't be collected."""
    path, _, name = nodeid.partition("::")
    if not name:
        return f"ERROR collecting {path}"
    name, bracket, parameters = name.partition("[")
    return name.replace("::", ".") + bracket + parameters
