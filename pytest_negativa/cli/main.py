"""The command ``negativa``: its group, and how an error ends it.

A command parses, calls a stage and prints; what decides lives below. A command imports what only it
needs when it runs, for a quick ``--help``.
"""

from __future__ import annotations

import errno
from typing import Any

import click

from pytest_negativa.cli.common import EXIT_FAILED, EXIT_USAGE
from pytest_negativa.cli.image_report import COMMANDS as IMAGE_COMMANDS
from pytest_negativa.cli.inspect import COMMANDS as INSPECT_COMMANDS
from pytest_negativa.cli.measure import COMMANDS as MEASURE_COMMANDS
from pytest_negativa.cli.run import COMMANDS as RUN_COMMANDS
from pytest_negativa.cli.runs import COMMANDS as RUNS_COMMANDS
from pytest_negativa.cli.slim import COMMANDS as SLIM_COMMANDS
from pytest_negativa.cli.verify import COMMANDS as VERIFY_COMMANDS
from pytest_negativa.errors import NegativaError, OptionError
from pytest_negativa.reporting.text import print_error


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NegativaError as e:
            print_error(e)
            ctx.exit(EXIT_USAGE if isinstance(e, OptionError) else EXIT_FAILED)
        except OSError as e:
            # click sees to a closed pipe itself; this is a full disk behind a redirection.
            if e.errno != errno.ENOSPC:
                raise
            print_error(e)
            ctx.exit(EXIT_FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-negativa", prog_name="negativa")
def main() -> None:
    """Find and remove GPU code that a program does not need.

    Exit status: 0 if all is done. 1 if a file could not be read or written, or the answer is no.
    2 for wrong usage, such as an invalid setting. A command that runs a program ends with its
    status.
    """


@main.command()
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
        raise click.BadParameter(f"{name!r} is none of {', '.join(names)}", param_hint="NAME")


for _command in (
    *INSPECT_COMMANDS,
    *RUN_COMMANDS,
    *RUNS_COMMANDS,
    *VERIFY_COMMANDS,
    *SLIM_COMMANDS,
    *MEASURE_COMMANDS,
    *IMAGE_COMMANDS,
):
    main.add_command(_command)
