"""The command that prints the schemas of files: schema."""

from __future__ import annotations

import click

from pytest_negativa.errors import did_you_mean


@click.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON Schema of a file or output format.

    Without NAME, list the names.
    """
    from pytest_negativa.storage.records import schema_names, shipped_schema

    names = schema_names()
    if name is None:
        click.echo("\n".join(names))
    elif name in names:
        click.echo(shipped_schema(name), nl=False)
    else:
        hint = did_you_mean(name, names)
        raise click.BadParameter(f"{name!r} is none of {', '.join(names)}{hint}", param_hint="NAME")
