"""The command ``negativa``: its group, and how an error ends it.

A command parses, calls a stage and prints; what decides lives below. A command is imported when it
is asked for, and imports what only it needs when it runs, for a quick start.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from pytest_negativa.cli.common import EXIT_FAILED, EXIT_USAGE, interruptible
from pytest_negativa.errors import SYSTEM_REFUSALS, NegativaError, OptionError, did_you_mean
from pytest_negativa.settings.flags import click_options

_COMMANDS = {
    "baseline": ("diff", "Write the figures of a run to a small file, to compare later runs with."),
    "combine": ("run", "Find the GPU code that none of several RUNS used."),
    "debloat": ("run", "Trace COMMAND, report its unused GPU code; slim removes it."),
    "diff": ("diff", "Show what changed in the GPU code from A to B."),
    "explain": ("slim", "Tell whether slimmed libraries can cause a CUDA ERROR."),
    "heal": ("verify", "Verify, find the code that COMMAND needs, and keep it."),
    "history": (
        "diff",
        "Show how GPU code grew over the saved runs, or over the revisions of LOCK.",
    ),
    "image-report": ("image_report", "Show the GPU code in a file tree, and what a suite needs."),
    "inspect": ("inspect", "Show the GPU code in libraries."),
    "kernels": ("kernels", "List the unused kernels of a traced run, or the used ones."),
    "locate": ("run", "Find the unused GPU code of a traced run."),
    "lock": ("slim", "Lock what a run proved, for machines without a GPU."),
    "measure": ("measure", "Compare COMMAND on original and on slim libraries."),
    "misses": ("misses", "Show what came back to libraries that were slimmed with a spare."),
    "needs": ("tests", "Show the GPU code that a part of the tests needs alone."),
    "pages": ("pages", "Show which pages of CPU code a traced run touched, by library."),
    "reconstruct": ("verify", "Write copies of libraries without their unused GPU code."),
    "report": ("report", "Write reports of a traced run."),
    "runs": ("runs", "List, show, delete, push and fetch traced runs."),
    "schema": ("schema", "Print the JSON Schema of a file or output format."),
    "slim": ("slim", "Remove unused GPU code from installed libraries."),
    "tests": (
        "tests",
        "List the tests of a run that ran kernels, with launches and GPU time.",
    ),
    "trace": ("run", "Run COMMAND and record the GPU code that it uses."),
    "verify": ("verify", "Run COMMAND on copies without unused GPU code."),
    "vex": ("vex", "State which code of vulnerabilities slimmed libraries lack."),
}
"""By name: the module of ``cli`` that has the command, and what ``negativa --help`` says of it.

The sentence is the first one of the command's own help. It stands here, too, because a list of the
commands should not import them.
"""


class _Group(click.Group):
    """A group that imports a command when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"pytest_negativa.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; click would cut their sentences to one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        is_option = word.startswith("-")
        if not is_option and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            ctx.fail(f"No such command {word!r}{did_you_mean(word, _COMMANDS) or '.'}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except (NegativaError, OSError) as e:
            # Such as a full disk behind a redirection; click sees to a closed pipe itself.
            if isinstance(e, OSError) and e.errno not in SYSTEM_REFUSALS:
                raise
            from pytest_negativa.reporting.text import print_error

            if isinstance(e, OSError) and e.filename is not None:
                print_error(f"{e.filename}: {e.strerror}")
            else:
                print_error(e)
            ctx.exit(EXIT_USAGE if isinstance(e, OptionError) else EXIT_FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-negativa", prog_name="negativa")
@click_options("config", "directory")
def main(**_flags: Any) -> None:
    """Find and remove GPU code that a program does not need.

    Exit status: 0 if all is done. 1 if a file could not be read or written, or the answer is no.
    2 for wrong usage, such as an invalid setting. A command that runs a program ends with its
    status. 128 + N if signal N, such as Ctrl-C, interrupted it.
    """
