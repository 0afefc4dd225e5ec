"""Tests of a round: selection, --lf in rounds, reruns of flaky ones, when it stops early.

Options such as ``--lf`` select tests by what pytest's cache has of the session before. In a round,
that is another round. So a round with such an option runs the tests of the traced run instead.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Generator
from functools import cached_property
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.models.outcomes import SessionResult
from pytest_negativa.models.round import LEAST_RERUNS, Round
from pytest_negativa.session.circumstances import BY_CACHE
from pytest_negativa.session.cuda_context import lost_context
from pytest_negativa.session.outcome_recorder import CONTEXT_LOST, details_of
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.system import System


def options_by_cache(namespace: argparse.Namespace) -> list[str]:
    """The options of a session that select or order tests by what ran before, by attribute."""
    return [name for name in BY_CACHE if getattr(namespace, name, False)]


class RoundHooks:
    """Selects the tests of a round, and ends it if further tests would tell nothing."""

    def __init__(self, round_spec: Round) -> None:
        self._round = round_spec
        # Whether the tests are those of the traced run, in its order.
        self._repeats = False
        # Whether they are of its files alone.
        self._skips_files = False
        # By node id of a test that is repeated: whether its phases passed, run by run.
        self._ends: dict[str, list[list[bool]]] = defaultdict(list)

    @cached_property
    def _traced(self) -> SessionResult | None:
        """The traced run; None if it can't be read."""
        if self._round.expected is None:
            return None
        try:
            return read_outcomes(Path(self._round.expected))
        except StoreError:
            return None

    @cached_property
    def _collected(self) -> frozenset[str]:
        """Node ids of the files that the traced run collected tests of, or could not collect."""
        assert self._traced is not None
        tests = (test.nodeid.partition("::")[0] for test in self._traced.tests)
        errors = (error.partition(": ")[0] for error in self._traced.collection_errors)
        return frozenset((*tests, *errors))

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Switch off what selects or orders tests by what ran before."""
        chosen = options_by_cache(config.option)
        # To read the traced run touches pages of CPU code that the trace has not.
        self._repeats = bool(chosen) and self._traced is not None
        self._skips_files = self._repeats and "lf" in chosen
        for name in chosen if self._repeats else ():
            setattr(config.option, name, False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> pytest.CollectReport | None:
        """Import no file that ``--lf`` skipped when traced: it may use the GPU."""
        if not self._skips_files or not isinstance(collector, pytest.File):
            return None
        if isinstance(collector, pytest.Package) or utf8(collector.nodeid) in self._collected:
            return None
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tests = self._round.tests
        repeated = self._round.repeated
        order: dict[str, int] = {}
        if self._repeats and self._traced is not None:
            order = {test.nodeid: number for number, test in enumerate(self._traced.tests)}
            tests = tuple(order) if tests is None else tests
        items.sort(
            key=lambda item: (
                utf8(item.nodeid) in repeated,
                order.get(utf8(item.nodeid), len(order)),
            )
        )
        if tests is None:
            return
        wanted = frozenset(tests)
        if left_out := [item for item in items if utf8(item.nodeid) not in wanted]:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if utf8(item.nodeid) in wanted]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Repeat tests, each time with fixtures of all scopes made anew.

        At once, because a worker of pytest-xdist takes reports of its current test alone.
        """
        ends = self._ends[item.nodeid]
        if (passed := self._round.repeated.get(utf8(item.nodeid))) is None:
            return (yield)
        ends.append([])
        done = yield
        if len(ends) > 1:
            return done
        begin, seconds = System.monotonic(), self._round.seconds
        share = math.inf if seconds is None else seconds / len(self._round.repeated)
        while len(ends) < self._round.most:
            as_traced = [all(phases) is passed for phases in ends]
            # First as when traced, and otherwise after that.
            is_seen = as_traced != sorted(as_traced)
            late = len(ends) >= LEAST_RERUNS and System.monotonic() - begin > share
            if is_seen or late or item.session.shouldstop or item.session.shouldfail:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._ends[item.nodeid]:
            self._ends[item.nodeid][-1].append(report.passed)
        # A test may pass although it lost the context: it expected an error, or used the CPU then.
        if report.failed or report.when == "teardown":
            error = lost_context()
            if error is not None:
                details_of(report)["gpu_error"] = error
                # Also after a test that failed when traced: what follows would mean nothing.
                item.session.shouldstop = (
                    f"{CONTEXT_LOST} ({error}): the remaining tests run in a fresh process"
                )
        return report
