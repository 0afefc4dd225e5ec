"""Pytest hooks that select the tests of a round and decide when it stops."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.round import Round
from pytest_negativa.session.cuda_context import lost_context
from pytest_negativa.session.outcome_recorder import CONTEXT_LOST, GPU_ERROR_ATTRIBUTE, printable_id
from pytest_negativa.storage.outcomes import read_outcomes

_FAILING = (Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED)


class RoundHooks:
    """Selects the tests of a round, and ends it if further tests would tell nothing."""

    def __init__(self, round_spec: Round) -> None:
        self._round = round_spec

    @cached_property
    def _failed_before(self) -> frozenset[str]:
        """Tests that failed in the traced run, too; read when the first test fails."""
        if self._round.expected is None:
            return frozenset()
        try:
            tests = read_outcomes(Path(self._round.expected)).tests
        except StoreError:
            return frozenset()
        return frozenset(t.nodeid for t in tests if t.outcome in _FAILING)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._round.tests is None:
            return
        wanted = frozenset(self._round.tests)
        selected: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            (selected if printable_id(item.nodeid) in wanted else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = selected

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # A test may pass although it lost the context: it expected an error, or used the CPU then.
        if report.failed or report.when == "teardown":
            error = lost_context()
            if error is not None:
                setattr(report, GPU_ERROR_ATTRIBUTE, error)
                # Also after a test that failed when traced: what follows would mean nothing.
                item.session.shouldstop = (
                    f"{CONTEXT_LOST} ({error}): the remaining tests run in a fresh process"
                )
            elif (
                self._round.stop_at_failure
                and report.failed
                and printable_id(item.nodeid) not in self._failed_before
            ):
                item.session.shouldstop = "negativa: one failure is enough"
        return report
