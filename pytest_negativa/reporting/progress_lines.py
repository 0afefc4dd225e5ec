"""Lines that tell a log how far long work is."""

from __future__ import annotations

import time
from collections.abc import Callable

from pytest_negativa.reporting.units import format_bytes

_EVERY_S = 30.0


class ProgressLines:
    """Writes the finished share of bytes now and then, as a line each time.

    Args:
        say: writes a line.
        text: what is in progress.
        every_s: seconds before the first line, and between two.
        clock: tells seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        text: str,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._text = text
        self._every_s = every_s
        self._clock = clock
        self._next = clock() + every_s

    def update(self, done: int, total: int) -> None:
        """Tell how many bytes are done; a line follows if it is time for one."""
        now = self._clock()
        if now >= self._next and done < total:
            self._next = now + self._every_s
            self._say(f"{self._text}: {format_bytes(done)} of {format_bytes(total)}")
