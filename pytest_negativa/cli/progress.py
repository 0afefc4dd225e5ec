"""A progress bar on the terminal, for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from pytest_negativa.reporting.progress_lines import ProgressLines

if TYPE_CHECKING:
    from rich.progress import Progress


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class ByteProgress:
    """Shows the finished share of bytes on stderr: a bar, or lines if stderr is no terminal.

    A timer shows the bar, not ``update``: a single large library calls it once, at its end.

    Args:
        text: what is in progress.
        delay_s: seconds until the bar appears.
    """

    def __init__(self, text: str, delay_s: float = 1.0) -> None:
        self._text = text
        self._delay_s = delay_s
        self._done = 0
        self._total = 0
        self._bar: Progress | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._lines = None if sys.stderr.isatty() else ProgressLines(_say, f"negativa: {text}")

    def __enter__(self) -> ByteProgress:
        if self._lines is None:
            self._timer = threading.Timer(self._delay_s, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def update(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            if self._lines is not None:
                self._lines.update(done, total)
            elif self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _show(self) -> None:
        # rich costs 50 ms to import: only once it is wanted.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        with self._lock:
            # Done while rich was imported.
            if self._timer is None:
                return
            bar.add_task(self._text, completed=self._done, total=self._total or None)
            bar.start()
            self._bar = bar

    def __exit__(self, *_exception: object) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
            bar, self._bar = self._bar, None
        if timer is not None:
            timer.cancel()
        if bar is not None:
            bar.stop()
