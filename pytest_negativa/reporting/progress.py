"""Progress of long work: a bar on a terminal, else a line now and then; the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from pytest_negativa.models.sizes import format_bytes


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"negativa: {line}\n")
    sys.stderr.flush()


class Progress:
    """Shows the finished share of long work: a bar on a terminal, else a line now and then.

    A thread shows it, not ``update``: a single large library calls that once, at its end.

    Args:
        text: what is in progress.
        say: writes a line; None: stderr, and a bar if it is a terminal.
        expected_s: how many seconds it will take; None: as its beginning does.
        bar_after_s: seconds until the bar appears.
        every_s: seconds before the first line, and between two.
    """

    def __init__(
        self,
        text: str,
        say: Callable[[str], None] | None = None,
        expected_s: float | None = None,
        bar_after_s: float = 2.0,
        every_s: float = 10.0,
    ) -> None:
        self._text = text
        self._say = say or _to_stderr
        self._bar_after_s = bar_after_s
        self._every_s = every_s
        self._expected_s = expected_s or 0.0
        self._done = self._total = 0
        self._shown = ""
        self._begin = time.monotonic()
        self._over = threading.Event()
        show = self._show_bar if say is None and sys.stderr.isatty() else self._show_lines
        self._thread = threading.Thread(target=show, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def update(self, done: int, total: int, shown: str | None = None) -> None:
        """Note how much is done, and in what words; ``None``: these are bytes."""
        self._done, self._total = done, total
        self._shown = f"{format_bytes(done)} of {format_bytes(total)}" if shown is None else shown

    def _show_lines(self) -> None:
        while not self._over.wait(self._every_s):
            self._say(self._line())

    def _line(self) -> str:
        done, total = self._done, self._total
        seconds = time.monotonic() - self._begin
        left = self._expected_s - seconds
        if left < 0:
            if not done:
                return f"{self._text}: {f'{self._shown}, ' if total else ''}{seconds:.0f} s"
            left = seconds * (total - done) / done
        return f"{self._text}: {self._shown}, {left:.0f} s left"

    def _show_bar(self) -> None:
        if self._over.wait(self._bar_after_s):
            return
        # rich costs 50 ms to import: only once it is wanted.
        from rich import progress
        from rich.console import Console

        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self._text, total=None)
            while not self._over.wait(0.1):
                done, total = self._done, self._total or None
                bar.update(task, description=self._line(), completed=done, total=total)

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()
