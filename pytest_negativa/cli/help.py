"""``negativa help`` and ``schema``: pages of the documentation, help of commands, JSON Schemas."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pytest_negativa.errors import did_you_mean

_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?:[\w./-]*/)?([\w-]+)\.md[^)]*\)")


@click.command()
@click.argument("words", nargs=-1, metavar="[TOPIC]")
@click.pass_context
def help(context: click.Context, words: tuple[str, ...]) -> None:
    """Print a page of the documentation, or the help of a command.

    TOPIC is a page or a command, such as slim undo; without it, list the commands, then the pages.
    """
    topic = " ".join(words)
    pages = {path.stem: path.read_text("utf-8") for path in _pages()}
    parent = context.find_root()
    assert isinstance(parent.command, click.Group)
    if not topic:
        formatter = parent.make_formatter()
        with formatter.section("Pages"):
            titles = (text.partition("\n")[0].lstrip("# ") for text in pages.values())
            formatter.write_dl(list(zip(pages, titles, strict=True)))
        text = f"{parent.get_help()}\n\n{formatter.getvalue()}"
    elif topic in pages:
        text = _LINK.sub(
            lambda link: f"{link[1]} (negativa help {link[2]})" if link[2] in pages else link[1],
            _COMMENT.sub("", pages[topic]),
        )
    elif (command := parent.command.get_command(parent, topic)) is not None:
        with click.Context(command, parent, info_name=topic) as asked:
            text = command.get_help(asked)
    else:
        hint = did_you_mean(topic, (*pages, *parent.command.list_commands(parent)))
        raise click.BadParameter(
            f"no page and no command {topic!r}{hint}; negativa help lists both", param_hint="TOPIC"
        )
    click.echo_via_pager(text)


def _pages() -> list[Path]:
    """The index, the guides, the explanations: in the installed package, else in the clone."""
    package = Path(__file__).parents[1]
    docs = next(root / "docs" for root in (package, package.parent) if (root / "docs").is_dir())
    pages = [docs / "index.md"]
    for part in ("guides", "explanation"):
        pages += sorted((docs / part).iterdir())
    return pages


@click.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON Schema of a file or output format.

    Without NAME, list the names.
    """
    from pytest_negativa.storage.schema import SCHEMA_NAMES, schema_text

    if name is None:
        click.echo("\n".join(SCHEMA_NAMES))
    elif name in SCHEMA_NAMES:
        click.echo(schema_text(name), nl=False)
    else:
        hint = did_you_mean(name, SCHEMA_NAMES)
        raise click.BadParameter(
            f"{name!r} is none of {', '.join(SCHEMA_NAMES)}{hint}", param_hint="NAME"
        )
