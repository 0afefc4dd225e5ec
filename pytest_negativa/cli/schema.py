"""``negativa schema``: the JSON Schema of a file or an output."""

from __future__ import annotations

import click

from pytest_negativa.errors import did_you_mean


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
