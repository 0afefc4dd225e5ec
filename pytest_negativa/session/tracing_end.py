"""The end of a traced process: order of handlers, and a new plan if code was used late.

GPU work may follow pytest's report: hooks at the end of the session, ``atexit`` handlers, threads
that still run. CUPTI must be released before the interpreter is gone, because a callback would then
be a segmentation fault. The last moment for both is the ``atexit`` handler that was registered
first: that of ``plugin``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_negativa.storage.system import process_mark

if TYPE_CHECKING:
    from pytest_negativa.session.traced_process import TracedProcess


# By process and session: what to do at the end. A test may start a session inside of its own.
_steps: list[tuple[tuple[int, int], TracedProcess, Callable[[], None]]] = []


def at_end(traced: TracedProcess, act: Callable[[], None]) -> None:
    """Have ``act`` called when the process ends, after what was given before it.

    Args:
        traced: the session that it belongs to.
    """
    _steps.append((process_mark(), traced, act))


def has_begun() -> bool:
    """Whether a session has begun in this process, and its tracing has not ended."""
    return bool(_steps)


def end_former_sessions() -> None:
    """End tracing for sessions of this process that are over: another one begins."""
    _end(lambda traced: traced.session_ended)


def end_tracing() -> None:
    """End tracing for good, and complete the runs; called when the process ends."""
    try:
        _end(lambda _: True)
    except KeyboardInterrupt:
        # An atexit handler can't pass it on, so the process ends as any that Ctrl-C ends.
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _end(is_over: Callable[[TracedProcess], bool]) -> None:
    for step in [*_steps]:
        process, traced, act = step
        if is_over(traced):
            _steps.remove(step)
            # A forked child inherits the steps.
            if process == process_mark():
                act()
