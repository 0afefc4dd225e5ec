"""Traces a pytest process: tells the detector which test and phase is running."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest

from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.tracing.start import Tracing

_SHARED_SCOPES = frozenset({"session", "package", "module", "class"})


class NotTraced(NamedTuple):
    """Why a process is not traced.

    Attributes:
        is_faulty: whether the reason is an error, such as a folder that can't be written.
    """

    reason: str
    is_faulty: bool = False


class TracedProcess:
    """Tells the detector which phase of which test is running, and ends tracing.

    Attributes:
        not_traced: why this process is not traced; None if it is.
    """

    def __init__(self, role: Role, started: Tracing | NotTraced) -> None:
        self.not_traced = started if isinstance(started, NotTraced) else None
        self._role = role
        self._tracing = started if isinstance(started, Tracing) else None
        self._current = Context(phase=Phase.IMPORT)

    @contextmanager
    def _context(self, context: Context) -> Iterator[None]:
        """Tell the detector of ``context`` until the body ends; contexts nest."""
        before, self._current = self._current, context
        self._tell(context)
        try:
            yield
        finally:
            self._current = before
            self._tell(before)

    def _tell(self, context: Context) -> None:
        if self._tracing is not None:
            self._tracing.set_context(context)

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Release CUPTI; the trace has a gap meanwhile."""
        if self._tracing is None:
            yield
            return
        self._tracing.pause(reason)
        try:
            yield
        finally:
            self._tracing.resume()

    def stop(self) -> None:
        """End tracing; the trace file is complete."""
        if self._tracing is not None:
            self._tracing.stop()
            self._tracing = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        self._current = Context(phase=Phase.SESSION)
        with self._context(Context(phase=Phase.COLLECTION)):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("negativa_off")
        if marker is None:
            result = yield
        else:
            with self.paused(_reason(marker)):
                result = yield
        if self._tracing is not None:
            self._tracing.drain()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._phase(item, Phase.SETUP):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._phase(item, Phase.CALL):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._phase(item, Phase.TEARDOWN):
            return (yield)

    def _phase(self, item: pytest.Item, phase: Phase) -> AbstractContextManager[None]:
        return self._context(Context(phase=phase, nodeid=item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope not in _SHARED_SCOPES:
            return (yield)
        # What a shared fixture loads belongs to the fixture, not to the first test that uses it.
        context = Context(
            phase=Phase.FIXTURE, nodeid=request.node.nodeid or None, detail=fixturedef.argname
        )
        with self._context(context):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._role is Role.CONTROLLER:
            # The tests run in workers. A replay compares their node ids with the recording's.
            with self._context(Context(phase=Phase.CALL, nodeid=report.nodeid)):
                pass

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.stop()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["negativa"] = self.not_traced.reason if self.not_traced else ""

    def pytest_unconfigure(self) -> None:
        # After an error of usage there was no session to finish.
        self.stop()


def _reason(marker: pytest.Mark) -> str:
    given = marker.kwargs.get("reason") or next(iter(marker.args), None)
    return str(given or "marked negativa_off")
