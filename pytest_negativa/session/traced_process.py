"""The test, phase, fixture or hook that a traced process is in; pauses.

Tracing lasts until the process ends, see ``tracing_end``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_negativa.errors import describe_fault
from pytest_negativa.models.trace import AFTER_SESSION, Context, Phase, Role
from pytest_negativa.pages.auditors import LOGS_VARIABLE
from pytest_negativa.session.cuda_context import lost_context
from pytest_negativa.storage.records import utf8
from pytest_negativa.tracing.start import Tracing

if TYPE_CHECKING:
    from pytest_negativa.tracing.replay import Recording

SHARED_SCOPES = frozenset({"session", "package", "module", "class"})

_PHASES = pytest.StashKey[Counter[str]]()


class NotTraced(NamedTuple):
    """Reason for which a process is not traced.

    Attributes:
        is_faulty: whether the reason is an error, such as a folder that can't be written.
    """

    reason: str
    is_faulty: bool = False


class TracedProcess:
    """Tells the detector which phase of which test is running, and ends tracing.

    Attributes:
        not_traced: why this process is not traced; None if it is.
        session_ended: pytest's last hook has returned, and none raised an error.
        why_broken: what ended the session before that; None if nothing did.
    """

    def __init__(self, role: Role, started: Tracing | NotTraced) -> None:
        self.not_traced = started if isinstance(started, NotTraced) else None
        self._role = role
        self._tracing = started if isinstance(started, Tracing) else None
        self._current = Context(phase=Phase.IMPORT)
        self._tell(self._current)
        self.session_ended = False
        self.why_broken: str | None = None

    @property
    def where(self) -> str:
        """The test, hook or phase that is running."""
        return str(self._current)

    @property
    def recording(self) -> Recording | None:
        """The recording that is replayed here, if any."""
        return None if self._tracing is None else self._tracing.recording

    @contextmanager
    def _context(self, context: Context) -> Iterator[None]:
        """Tell the detector of ``context`` until the body ends; contexts nest."""
        before = self._enter(context)
        try:
            yield
        finally:
            self._enter(before)

    @contextmanager
    def _hook(self, name: str) -> Iterator[None]:
        """Tell the detector of a hook at the session's end; after an error, it stays there."""
        before = self._enter(Context(phase=Phase.SESSION, detail=name))
        yield
        self._enter(before)

    def _enter(self, context: Context) -> Context:
        """Tell the detector of ``context``, and return the one before."""
        before, self._current = self._current, context
        self._tell(context)
        return before

    def _tell(self, context: Context) -> None:
        if self._tracing is not None:
            self._tracing.detector.set_context(context)

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Release CUPTI; the trace has a gap meanwhile."""
        if self._tracing is not None:
            self._tracing.detector.pause(reason)
        try:
            yield
        finally:
            if self._tracing is not None:
                self._tracing.detector.resume()

    def settle(self) -> None:
        """All tests have ended: write what is known of them."""
        if self._tracing is not None:
            self._tracing.drain()
            if self._tracing.recording is not None:
                # Nothing more can come, and it knows by now which recorded tests did not run.
                self.stop()

    def stop(self) -> None:
        """End tracing; the trace file is complete."""
        if self._tracing is not None:
            if not self.session_ended and self._current.phase is not Phase.SESSION:
                text = (
                    f"tracing ended too early, in {self.where}: something ran the handlers of the "
                    "process's end, such as a test that calls atexit._run_exitfuncs()"
                )
                self._tracing.detector.warn("ended-early", text, incomplete=True)
            self._tracing.stop()
            self._tracing = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        self._current = Context(phase=Phase.SESSION)
        with self._context(Context(phase=Phase.COLLECTION)):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_PHASES] = Counter()
        marker = item.get_closest_marker("negativa_off")
        if marker is None:
            result = yield
        else:
            reason = marker.kwargs.get("reason") or next(iter(marker.args), None)
            with self.paused(str(reason or "marked negativa_off")):
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
            result = yield
            if LOGS_VARIABLE in os.environ:
                # A round asks this after each test, and needs the driver's CPU code for it.
                lost_context()
            return result

    def _phase(self, item: pytest.Item, phase: Phase) -> AbstractContextManager[None]:
        phases_run(item)[phase.value] += 1
        return self._context(Context(phase=phase, nodeid=item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope not in SHARED_SCOPES:
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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["negativa"] = self.not_traced.reason if self.not_traced else ""
        with self._hook("pytest_sessionfinish"):
            result = yield
        self.settle()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        with self._hook("pytest_terminal_summary"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_unconfigure(self) -> Generator[None, object, object]:
        with self._hook("pytest_unconfigure"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, object, object]:
        """Note that the session ended; an error of its last hooks passes through here."""
        try:
            result = yield
        except BaseException as e:
            detail = utf8(f"{self.where}, which raised {describe_fault(e)}")
            self.why_broken = f"an error ended the session in {detail}"
            self._enter(Context(phase=Phase.SESSION, detail=detail))
            raise
        self.session_ended = True
        self._tell(AFTER_SESSION)
        return result


def phases_run(item: pytest.Item) -> Counter[str]:
    """Counts of the phases that have begun in this run of a test."""
    # A plugin may run a test without pytest's protocol.
    return item.stash.setdefault(_PHASES, Counter())
