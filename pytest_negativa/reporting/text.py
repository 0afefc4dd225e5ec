"""Text out of files, made fit for a terminal; and the one way to print an error."""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    r"""``text`` with everything escaped that a terminal acts on or cannot show.

    Names of files, sections, sources and kernels may hold any bytes, escape sequences too:
    ``"\x1b[2J"`` comes out as these characters. A line break is escaped as well.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """``text`` escaped like ``printable``; its line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def print_warning(text: str) -> None:
    """Print a warning to stderr, escaped."""
    sys.stderr.write(f"negativa: warning: {printable_lines(text)}\n")
    sys.stderr.flush()


def print_error(error: object) -> None:
    """Print an error or its message to stderr, escaped; its line breaks stay."""
    sys.stderr.write(f"negativa: error: {printable_lines(str(error))}\n")
    sys.stderr.flush()
