"""Traces a pytest process: tells the detector which test and phase is running."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.errors import NegativaError, StoreError, describe_fault
from pytest_negativa.models.settings import Settings, TraceLevel
from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.settings.globs import matches
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.detector import TraceError
from pytest_negativa.tracing.gpu import has_gpu
from pytest_negativa.tracing.start import Tracing, make_header, start_tracing

HANDOVER = "NEGATIVA_SESSION"
"""The variable by which pytest-xdist's workers, which inherit it, learn of their controller."""

_SHARED_SCOPES = frozenset({"session", "package", "module", "class"})


def _select_tests(config: pytest.Config, settings: Settings) -> None:
    """Add the expressions of ``tests`` to pytest's own.

    Workers of pytest-xdist parse the arguments of the command line anew, so they do it too.
    """
    for option, expression in (
        ("markexpr", settings.tests.markers),
        ("keyword", settings.tests.keywords),
    ):
        if expression:
            given = getattr(config.option, option, None)
            both = f"({given}) and ({expression})" if given else expression
            setattr(config.option, option, both)


def _reason(marker: pytest.Mark) -> str:
    given = marker.kwargs.get("reason") or next(iter(marker.args), None)
    return str(given or "marked negativa_off")


class TracedProcess:
    """Traces this process, and tells the detector which phase of which test is running.

    Attributes:
        not_traced: why this process is not traced; None if it is.
        is_faulty: whether the reason is an error, such as a folder that can't be written.
    """

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        role: Role,
        run: Run,
        root: Path,
        *,
        in_round: bool,
    ) -> None:
        self.role = role
        self.run = run
        self._root = root
        self.not_traced: str | None = None
        self.is_faulty = False
        self._config = config
        self._settings = settings
        self._in_round = in_round
        self._current = Context(phase=Phase.IMPORT)
        self._tracing = self._start()
        self._tell(self._current)

    def _start(self) -> Tracing | None:
        """Start tracing, or store why it can't start. The tests run in any case."""
        try:
            if (own := self._start_own_detector()) is not None:
                return own
            replay = None
            if not has_gpu():
                if self._in_round:
                    self.not_traced = "no GPU here, and a recorded trace would prove nothing"
                    return None
                if self._settings.trace.replay is None:
                    self.not_traced = "no GPU here, and no recorded trace to replay (trace.replay)"
                    return None
                replay = Path(self._settings.trace.replay)
            return start_tracing(
                self.run,
                self.role,
                root=self._root,
                worker=os.environ.get("PYTEST_XDIST_WORKER"),
                launches=self._settings.trace.level is TraceLevel.LAUNCH,
                replay=replay,
                children=self._settings.trace.children,
            )
        except NegativaError as e:
            self.not_traced = str(e)
            # A machine without CUPTI is no error; a run that can't be recorded is one.
            self.is_faulty = isinstance(e, StoreError)
            return None

    def _start_own_detector(self) -> Tracing | None:
        """Start the detector that another plugin provides, if there is one."""
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        header = make_header(self.run, self.role, root=self._root, detector="plugin", worker=worker)
        path = self.run.new_trace_file()
        try:
            detector = self._config.hook.pytest_negativa_register_detector(
                settings=self._settings, path=path, header=header
            )
            if detector is None:
                return None
            detector.start()
        except NegativaError:
            raise
        except Exception as e:
            # A fault in another plugin's code must not stop the tests.
            raise TraceError(f"the detector of a plugin failed: {describe_fault(e)}") from e
        return Tracing(detector, os.environ, {})

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
    def paused(self, why: str) -> Iterator[None]:
        """Release CUPTI; the trace has a gap meanwhile."""
        if self._tracing is None:
            yield
            return
        self._tracing.pause(why)
        try:
            yield
        finally:
            self._tracing.resume()

    def stop(self) -> None:
        """End tracing; the trace file is complete."""
        if self._tracing is not None:
            self._tracing.stop()
            self._tracing = None
        os.environ.pop(HANDOVER, None)

    def pytest_configure(self, config: pytest.Config) -> None:
        # Only here: pytest has parsed its arguments for the last time.
        _select_tests(config, self._settings)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        self._current = Context(phase=Phase.SESSION)
        with self._context(Context(phase=Phase.COLLECTION)):
            return (yield)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tests = self._settings.tests
        selected: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            included = not tests.include or any(matches(g, item.nodeid) for g in tests.include)
            excluded = any(matches(g, item.nodeid) for g in tests.exclude)
            (selected if included and not excluded else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = selected

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
        if self.role is Role.CONTROLLER:
            # The tests run in workers. A replay compares their node ids with the recording's.
            with self._context(Context(phase=Phase.CALL, nodeid=report.nodeid)):
                pass

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.stop()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["negativa"] = self.not_traced or ""

    def pytest_unconfigure(self) -> None:
        # After an error of usage there was no session to finish.
        self.stop()
