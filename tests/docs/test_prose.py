"""What of the style sheet in CONTRIBUTING.md can be counted: long sentences, phrases to avoid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.libraries import DOCS, EXAMPLES, FIXTURES, ROOT

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(EXAMPLES.rglob("*.md")),
    ROOT / "benchmarks" / "paper" / "README.md",
    FIXTURES / "README.md",
)
MOST_WORDS = 25
AVOIDED = re.compile(
    r"\b(that is said|nobody|no one|whoever|of which|those of which|stands in|be it|so often)\b",
    re.IGNORECASE,
)


def prose_of(page: Path) -> str:
    """A page without code blocks, comments, tables and links; quotes count as one word."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`|\"[^\"]*\"", "CODE", text)


def sentences_of(page: Path) -> list[str]:
    """Its sentences; headings, items of lists and paragraphs end one, too."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )", prose_of(page))
    return [
        " ".join(sentence.split())
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?:;])(?:\*\*)?\s+", paragraph)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_and_plain(page: Path) -> None:
    sentences = sentences_of(page)
    assert not [s for s in sentences if len(re.findall(r"[\w'.%/-]*\w", s)) > MOST_WORDS]
    assert not [s for s in sentences if AVOIDED.search(s)]
