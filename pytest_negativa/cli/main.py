"""The command ``negativa``: its group, and how an error ends it.

A command parses, calls a stage and prints; what decides lives below. A command is imported when it
is asked for, and imports what only it needs when it runs, for a quick start.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from pytest_negativa.cli.common import EXIT_FAILED, EXIT_USAGE, interruptible
from pytest_negativa.errors import SYSTEM_REFUSALS, NegativaError, OptionError
from pytest_negativa.reporting.text import print_error

_MODULES = {
    command: module
    for module, commands in {
        "by_test": ("needs", "tests"),
        "completion": ("completion",),
        "diff": ("baseline", "diff", "history"),
        "image_report": ("image-report",),
        "inspect": ("inspect",),
        "kernels": ("kernels",),
        "measure": ("measure",),
        "report": ("report",),
        "pages": ("pages",),
        "run": ("combine", "debloat", "locate", "trace"),
        "runs": ("runs",),
        "slim": ("explain", "lock", "slim"),
        "verify": ("heal", "reconstruct", "verify"),
    }.items()
    for command in commands
}
"""The module of ``cli`` that has a command, by the command's name."""


class _Group(click.Group):
    """A group that imports a command when it runs or is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*self.commands, *_MODULES))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"pytest_negativa.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; click would cut their sentences to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(200)) for name, c in commands if c])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except NegativaError as e:
            print_error(e)
            ctx.exit(EXIT_USAGE if isinstance(e, OptionError) else EXIT_FAILED)
        except OSError as e:
            # Such as a full disk behind a redirection; click sees to a closed pipe itself.
            if e.errno not in SYSTEM_REFUSALS:
                raise
            print_error(e)
            ctx.exit(EXIT_FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-negativa", prog_name="negativa")
def main() -> None:
    """Find and remove GPU code that a program does not need.

    Exit status: 0 if all is done. 1 if a file could not be read or written, or the answer is no.
    2 for wrong usage, such as an invalid setting. A command that runs a program ends with its
    status. 128 + N if signal N, such as Ctrl-C, interrupted it.
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
