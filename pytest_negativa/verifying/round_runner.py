"""One session of rounds: when a round hangs (verify.timeout, else 300 s), what of it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from pytest_negativa.errors import refusing
from pytest_negativa.models.outcomes import Outcome, SessionResult, TestResult
from pytest_negativa.models.round import MOST_RERUNS, RoundKind, seconds_of_reruns
from pytest_negativa.models.settings import Settings
from pytest_negativa.reporting.progress import Progress
from pytest_negativa.reporting.text import path_for_people, printable
from pytest_negativa.reporting.units import format_items
from pytest_negativa.storage.outcomes import by_nodeid, count_ended, read_outcomes
from pytest_negativa.storage.runs import Run
from pytest_negativa.verifying.rounds import Program, RoundResult, run_round
from pytest_negativa.verifying.same_outcome import same_outcome

# A program that starts or ends no test for five times the longest pause of the traced run hangs.
# pytest removes old temporary folders at the end of a session, which may take minutes.
_LEAST_SILENCE = 300.0
_TIMES_SILENCE = 5.0

# Last lines that are shown of the output of a round that did not end as traced.
_MOST_LINES = 100


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
        """Ends of the traced run's tests."""
        return read_outcomes(self._traced.outcomes_file)

    def run(
        self,
        kind: RoundKind,
        run: Run,
        environ: Mapping[str, str],
        where: str,
        *,
        tests: Sequence[str] | None = None,
        repeated: Mapping[str, bool] | None = None,
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
            Stopped: see ``run_round``.
        """
        most = self._settings.verify.rerun
        seconds = None
        if most is None:
            most, seconds = MOST_RERUNS, seconds_of_reruns(self.session.duration)
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
        of_all = format_items(len(chosen), "test", "tests")
        with Progress(where, expected_s=expected) as progress:

            def follow() -> None:
                done = count_ended(run.outcomes_file)
                progress.update(done, max(done, len(chosen)), f"{done:,} of {of_all}")

            follow()
            result = run_round(
                self.program, round_spec, environ, limit, output=run.output_file, follow=follow
            )
        if tests is None:
            self._took[where] = result.seconds
        differs = result.died or self._differs(result)
        text = f"negativa: {_count(result)} {where} in {result.seconds:.0f} s"
        if differs:
            text += f"; output: {printable(str(path_for_people(run.output_file)))}"
        self.say(text)
        if differs and kind is RoundKind.VERIFY:
            with refusing(run.output_file, "read"):
                lines = run.output_file.read_text(errors="replace").splitlines()
            self.say("\n".join(lines[-_MOST_LINES:]))
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

    def _differs(self, result: RoundResult) -> bool:
        """Whether a test or a module ended otherwise than when traced."""
        before = by_nodeid(self.session.tests)

        def is_same(test: TestResult) -> bool:
            traced = before.get(test.nodeid)
            return traced is not None and same_outcome(traced, test, self._settings.verify.tolerate)

        return not all(map(is_same, result.session.tests)) or not (
            {*result.session.collection_errors} <= {*self.session.collection_errors}
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
