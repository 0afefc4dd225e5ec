"""Selects tests by the settings ``tests``: markers, keywords, node ids to include or exclude."""

from __future__ import annotations

import pytest

from pytest_negativa.models.settings import Tests
from pytest_negativa.settings.globs import matches


class Selection:
    """Adds the expressions of ``tests`` to pytest's own, and deselects by node id.

    Workers of pytest-xdist parse the command line anew, so each process needs it.
    """

    def __init__(self, tests: Tests) -> None:
        self._tests = tests

    def pytest_configure(self, config: pytest.Config) -> None:
        # Only here: pytest has parsed its arguments for the last time.
        for option, expression in (
            ("markexpr", self._tests.markers),
            ("keyword", self._tests.keywords),
        ):
            if expression:
                given = getattr(config.option, option, None)
                both = f"({given}) and ({expression})" if given else expression
                setattr(config.option, option, both)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tests = self._tests
        selected: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            included = not tests.include or any(matches(g, item.nodeid) for g in tests.include)
            excluded = any(matches(g, item.nodeid) for g in tests.exclude)
            (selected if included and not excluded else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = selected
