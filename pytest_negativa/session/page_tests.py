"""Tells the tracer of CPU code which test runs, so that each test has pages of its own.

They are those that its process, and the children that it starts, touch from its setup to the end
of its teardown. What a fixture of more than one test touches belongs to no test.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from pytest_negativa.session.traced_process import SHARED_SCOPES


class PageTests:
    """Tells where tests begin and end.

    Args:
        tell: gets the node id of the test that runs from now on; empty if none does.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._running = ""

    def _enter(self, nodeid: str) -> None:
        self._running = nodeid
        self._tell(nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._enter(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        before = self._running
        if fixturedef.scope not in SHARED_SCOPES or not before:
            return (yield)
        self._enter("")
        try:
            return (yield)
        finally:
            self._enter(before)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._enter("")
