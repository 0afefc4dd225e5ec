"""Names and texts out of files, escaped for each format that a report is written in.

A library, a source file or a kernel may have any name. ``text.printable`` comes first everywhere:
no format holds a control character.
"""

from __future__ import annotations

import re

from pytest_negativa.reporting.text import printable

# CommonMark 2.4 lets a backslash escape these; the others have no meaning inside a line.
# (GFM: an underscore between letters has none, either.)
_MARKDOWN = re.compile(r"([\\`*\[\]<>#|~&]|(?<!\w)_|_(?!\w))")
# GitHub and GitLab notify who is named so. A comment in between is not shown.
_MENTION = re.compile(r"@(?=\w)")
_BACKTICKS = re.compile(r"`+")


def escape_markdown(text: str) -> str:
    """``text`` as a line of Markdown that shows it as it is, also in a table."""
    return _MENTION.sub("@<!-- -->", _MARKDOWN.sub(r"\\\1", printable(text)))


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """``text`` as a code span of Markdown."""
    text = printable(text)
    fence = "`" * (1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    pad = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    # GFM 4.10: only in a table, a pipe is escaped even inside a code span.
    return span.replace("|", "\\|") if in_table else span


def escape_github(text: str) -> str:
    """``text`` as the message of a workflow command of GitHub Actions.

    Source: ``escapeData`` in github.com/actions/toolkit, packages/core/src/command.ts. Line breaks
    are escaped by ``printable``.
    """
    return printable(text).replace("%", "%25")


def escape_github_property(text: str) -> str:
    """``text`` as a property of a workflow command; source: ``escapeProperty``, same file."""
    return escape_github(text).replace(":", "%3A").replace(",", "%2C")
