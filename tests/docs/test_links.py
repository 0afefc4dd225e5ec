"""Links of the pages outside of the site lead somewhere; mkdocs checks those inside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.libraries import EXAMPLES, ROOT
from tests.support.modules import require_modules

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


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(tmp_path: Path) -> None:
    """Without ``-q``, under which mkdocs counts no warnings, so that ``--strict`` lets all pass."""
    require_modules("mkdocs", extra="docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
