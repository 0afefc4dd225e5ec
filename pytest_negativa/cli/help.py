"""Pages of the documentation, for ``negativa --help TOPIC``."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pytest_negativa.errors import did_you_mean

_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?:[\w./-]*/)?([\w-]+)\.md[^)]*\)")


def show_page(topic: str) -> None:
    """Print a page, or the list of the pages for the topic ``topics``.

    Raises:
        click.BadParameter: there is no such page.
    """
    pages = {path.stem: path.read_text("utf-8") for path in _pages()}
    if topic == "topics":
        width = max(map(len, pages))
        titles = ((name, text.partition("\n")[0].lstrip("# ")) for name, text in pages.items())
        click.echo("\n".join(f"{name:{width}}  {title}" for name, title in titles))
    elif topic in pages:
        text = _LINK.sub(
            lambda link: f"{link[1]} (negativa --help {link[2]})" if link[2] in pages else link[1],
            _COMMENT.sub("", pages[topic]),
        )
        click.echo_via_pager(text)
    else:
        hint = did_you_mean(topic, pages)
        raise click.BadParameter(
            f"no page {topic!r}{hint}; negativa --help topics lists the pages", param_hint="--help"
        )


def _pages() -> list[Path]:
    """The guides, then the explanations: in the installed package, else in the clone."""
    package = Path(__file__).parents[1]
    docs = next(root / "docs" for root in (package, package.parent) if (root / "docs").is_dir())
    return [page for part in ("guides", "explanation") for page in sorted((docs / part).iterdir())]
