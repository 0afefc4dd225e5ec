"""Text made fit for terminals, Markdown, GitHub; wrapping, cut names; printed errors.

A library, a source file or a kernel may have any name. ``printable`` comes first everywhere: no
format holds a control character.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_negativa.reporting.units import and_more

_CUT = "..."
# GitHub Actions runs a printed line that begins so (ActionCommand.TryParseV2 in
# github.com/actions/runner), or that holds "##[" (TryParse).
_COMMAND = re.compile(r"^(\s*):(?=:)")
# Between the headers of a table and its rows.
_RULE = re.compile(r"-+(?:  -+)*")
# Of ours, to be copied: with its options and their values, and all that looks like an argument.
_OURS = re.compile(
    r"\bnegativa [a-z]+(?: (?:undo|check)\b)?"
    r"(?: (?:--?[a-z][\w-]*(?:[ =][^\s-]\S*)?|--(?= )|[A-Z]{2,}\b|\S*/\S*))*"
    r"|\bpytest(?: --[a-z][\w-]*)+"
)


def printable(text: str) -> str:
    r"""``text`` with everything escaped that a terminal or a CI log acts on or cannot show.

    Names of files, sections, sources and kernels may hold any bytes, escape sequences too:
    ``"\x1b[2J"`` comes out as these characters. A line break is escaped as well, and so is the
    begin of a workflow command of GitHub Actions.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return _no_command(text)


def printable_lines(text: str) -> str:
    """``text`` escaped like ``printable``; its line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def _no_command(line: str) -> str:
    # Lists of kernels have a hundred thousand lines, most without any "::".
    escaped = _COMMAND.sub(r"\1\\x3a", line) if "::" in line else line
    return escaped.replace("##[", "#\\x23[")


def path_for_people(path: Path) -> str:
    """``path`` from the current folder if it lies inside; not escaped."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def terminal_width() -> int:
    """The columns of the terminal, or of the variable ``COLUMNS``; 0 without either."""
    return shutil.get_terminal_size((0, 0)).columns


def cut_middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, cut in the middle; 0 or less cuts nothing."""
    if width <= 0 or len(text) <= width:
        return text
    if width <= len(_CUT):
        return text[:width]
    tail = (width - len(_CUT)) // 2
    return text[: width - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def wrap(text: str, width: int, indent: str = "") -> str:
    """``text`` in lines of at most ``width`` columns, all but the first indented; 0 wraps nothing.

    What is longer stays whole: a path, or a command of ours.
    """
    if not width or len(text) <= width:
        return text
    lines = textwrap.wrap(
        # ``printable`` escapes no-break spaces of others.
        _OURS.sub(lambda command: command[0].replace(" ", "\N{NO-BREAK SPACE}"), text.lstrip(" ")),
        width,
        initial_indent=" " * (len(text) - len(text.lstrip(" "))),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(_no_command(line.replace("\N{NO-BREAK SPACE}", " ")) for line in lines)


def itemize(title: str, items: Iterable[str], width: int = 0, most: int = 0) -> Iterator[str]:
    """A paragraph: a title, and a line for each item; none without items.

    Args:
        title: printable.
        items: the lines.
        width: that lines are wrapped to; 0 wraps none.
        most: how many items are listed before their number is; 0 for all.
    """
    lines = list(map(printable, items))
    listed = (*lines[: most or None], *and_more(len(lines), most))
    if lines:
        yield "\n".join([title, *(wrap(f"  {line}", width, "    ") for line in listed)])


def fit(text: str) -> str:
    """``text`` with those lines wrapped that are wider than the terminal, if there is one.

    Tables stay as they are. No command of ours is broken, so that it can be copied.
    """
    width = terminal_width()
    return "\n\n".join(_fit_lines(part.split("\n"), width) for part in text.split("\n\n"))


def _fit_lines(lines: list[str], width: int) -> str:
    if any(map(_RULE.fullmatch, lines)):
        return "\n".join(lines)
    # Of several lines, such as a list, each must show where it begins.
    further = "    " if len(lines) > 1 else ""
    return "\n".join(
        wrap(line, width, line[: len(line) - len(line.lstrip(" "))] + further) for line in lines
    )


def print_warning(text: str) -> None:
    """Print a warning to stderr, escaped."""
    sys.stderr.write(f"negativa: warning: {printable_lines(text)}\n")
    sys.stderr.flush()


def print_error(error: object) -> None:
    """Print an error or its message to stderr, escaped; its line breaks stay."""
    sys.stderr.write(f"negativa: error: {printable_lines(str(error))}\n")
    sys.stderr.flush()


# CommonMark 2.4 lets a backslash escape these; the others have no meaning inside a line.
# (GFM: an underscore between letters has none, either.)
_MARKDOWN = re.compile(r"([\\`*\[\]<>#|~&]|(?<!\w)_|_(?!\w))")
# GitHub and GitLab notify who is named so. A comment in between is not shown.
_MENTION = re.compile(r"@(?=\w)")
_BACKTICKS = re.compile(r"`+")


def escape_markdown(text: str) -> str:
    """``text`` as a line of Markdown that shows it as it is, also in a table."""
    return _MENTION.sub("@<!-- -->", _MARKDOWN.sub(r"\\\1", printable(text)))


def markdown_code(text: str) -> str:
    """``text`` as a code span in a table of Markdown."""
    text = printable(text)
    fence = "`" * (1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    pad = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") else ""
    # GFM 4.10: only in a table, a pipe is escaped even inside a code span.
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def escape_github(text: str) -> str:
    """``text`` as the message of a workflow command of GitHub Actions.

    Source: ``escapeData`` in github.com/actions/toolkit, packages/core/src/command.ts. Line breaks
    are escaped by ``printable``.
    """
    return printable(text).replace("%", "%25")


def escape_github_property(text: str) -> str:
    """``text`` as a property of a workflow command; source: ``escapeProperty``, same file."""
    return escape_github(text).replace(":", "%3A").replace(",", "%2C")
