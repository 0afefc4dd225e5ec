"""Links of the pages outside of the site lead somewhere; mkdocs checks those inside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.libraries import EXAMPLES, ROOT

PAGES = (*sorted(ROOT.glob("*.md")), *sorted(EXAMPLES.glob("*/README.md")))
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as MkDocs and code hosts make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
