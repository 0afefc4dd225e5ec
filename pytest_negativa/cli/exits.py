"""Exit statuses of ``negativa``, and the end by a signal.

``cli.main`` imports this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import click

from pytest_negativa.errors import Stopped

EXIT_FAILED = 1
"""A file could not be read or written, or the answer is no."""

EXIT_USAGE = 2
"""Wrong usage; click's own, too."""


@contextlib.contextmanager
def interruptible(state: str | None = None) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the process soon: one line, and status 128 + N.

    Args:
        state: how things are then, for the line. The process then ends at once, although threads
            may still be in a library. None: as Python ends it.
    """
    # nohup has SIGHUP ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt as e:
        click.echo(f"negativa: interrupted{f': {state}' if state else ''}", err=True)
        status = 128 + (e.number if isinstance(e, Stopped) else signal.SIGINT)
        if state is None:
            sys.exit(status)
        sys.stdout.flush()
        os._exit(status)
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)
