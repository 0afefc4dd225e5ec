"""Shows how far long work is, in bytes, and how long it will take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from pytest_negativa.reporting.units import format_bytes


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"negativa: {line}\n")
    sys.stderr.flush()


class ByteProgress:
    """Shows the finished share of bytes: a bar on a terminal, else a line now and then.

    A thread shows it, not ``update``: a single large library calls that once, at its end.

    Args:
        text: what is in progress.
        say: writes a line; None: stderr, and a bar if it is a terminal.
        bar_after_s: seconds until the bar appears.
        every_s: seconds before the first line, and between two.
    """

    def __init__(
        self,
        text: str,
        say: Callable[[str], None] | None = None,
        bar_after_s: float = 2.0,
        every_s: float = 10.0,
    ) -> None:
        self._text = text
        self._say = say or _to_stderr
        self._bar_after_s = bar_after_s
        self._every_s = every_s
        self._done = self._total = 0
        self._begin = time.monotonic()
        self._over = threading.Event()
        has_bar = say is None and sys.stderr.isatty()
        show = self._show_bar if has_bar else self._show_lines
        self._thread = threading.Thread(target=show, daemon=True)

    def __enter__(self) -> ByteProgress:
        self._thread.start()
        return self

    def update(self, done: int, total: int) -> None:
        """Tell how many bytes are done."""
        self._done, self._total = done, total

    def _show_lines(self) -> None:
        while not self._over.wait(self._every_s):
            self._say(self._line(time.monotonic() - self._begin))

    def _line(self, seconds: float) -> str:
        done, total = self._done, self._total
        if not done:
            return f"{self._text}: {seconds:.0f} s"
        left = seconds * (total - done) / done
        return f"{self._text}: {format_bytes(done)} of {format_bytes(total)}, {left:.0f} s left"

    def _show_bar(self) -> None:
        if self._over.wait(self._bar_after_s):
            return
        # rich costs 50 ms to import: only once it is wanted.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self._text, total=None)
            while not self._over.wait(0.1):
                bar.update(task, completed=self._done, total=self._total or None)

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()
