"""A progress bar on the terminal, for work that turns out to take longer than a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 1.0


class ByteProgress:
    """Shows bytes done of bytes in all on stderr; nothing where stderr is no terminal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ByteProgress:
        return self

    def update(self, done: int, total: int) -> None:
        if not sys.stderr.isatty() or time.monotonic() - self._start < _PATIENCE_S:
            return
        if self._bar is None or self._task is None:
            # rich costs 50 ms to import: only once it is wanted.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._text, total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
