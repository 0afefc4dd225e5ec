"""``negativa``: the table of commands, exit statuses of errors, Ctrl-C and other signals.

A command parses, calls a stage and prints; what decides lives below. A command is imported when it
is asked for, for a quick start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain
from typing import Any

import click
from click.exceptions import Exit

from pytest_negativa.errors import (
    SYSTEM_REFUSALS,
    ExitStatus,
    NegativaError,
    Stopped,
    did_you_mean,
)
from pytest_negativa.settings.flags import click_options

_GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Begin": {
        "help": ("help", "Print a page of the documentation, or the help of a command."),
        "init": ("init", "Write a first negativa.yaml for the project here, and print its CI job."),
    },
    "Look": {
        "inspect": ("inspect", "Show the GPU code in libraries."),
        "diff": ("diff", "Show what changed in the GPU code from A to B."),
        "vex": ("vex", "State which code of vulnerabilities slimmed libraries lack."),
        "explain": ("explain", "Tell whether slimmed libraries can cause a CUDA ERROR."),
    },
    "Trace": {
        "debloat": ("trace", "Trace COMMAND, report its unused GPU code; slim removes it."),
        "trace": ("trace", "Run COMMAND and record the GPU code that it uses."),
        "locate": ("trace", "Find the unused GPU code of a traced run."),
        "combine": ("combine", "Find the GPU code that none of several RUNS used."),
    },
    "Ask a run": {
        "report": ("report", "Write reports of a traced run."),
        "kernels": ("tests", "List the unused kernels of a traced run, or the used ones."),
        "tests": ("tests", "List the tests of a run that ran kernels, with launches and GPU time."),
        "needs": ("tests", "Show the GPU code that a part of the tests needs alone."),
        "pages": ("report", "Show which pages of CPU code a traced run touched, by library."),
        "runs": ("runs", "List the traced runs, the newest first, or delete some."),
    },
    "Ship": {
        "verify": ("verify", "Run COMMAND on copies without unused GPU code."),
        "lock": ("lock", "Lock what a run proved, for machines without a GPU."),
        "slim": ("slim", "Remove unused code from installed libraries."),
        "slim check": ("slim", "Check that slimmed libraries are still what slim wrote."),
        "slim undo": ("slim", "Put back the originals."),
        "misses": ("misses", "Show what came back to libraries that were slimmed with a spare."),
        "measure": ("measure", "Compare COMMAND on original and on slim libraries."),
    },
    "More": {
        "doctor": ("doctor", "Show what this machine has for tracing, and what it lacks."),
        "reconstruct": ("verify", "Write copies of libraries without their unused GPU code."),
        "push": ("runs", "Send a run to a URL."),
        "fetch": ("runs", "Fetch runs from URLs."),
        "schema": ("help", "Print the JSON Schema of a file or output format."),
    },
}
"""By group and name: the module of ``cli`` that has the command, and what ``negativa --help`` says.

The sentence is the first one of the command's own help. It stands here, too, because a list of the
commands should not import them.
"""

_COMMANDS = {name: row for commands in _GROUPS.values() for name, row in commands.items()}


@contextlib.contextmanager
def ended_by_signals(state: str | None = None) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the process soon: one line, and status 128 + N.

    Args:
        state: how things are then, for the line. The process then ends at once, although threads
            may still be in a library. None: as Python ends it.
    """
    # nohup has SIGHUP ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt as e:
        click.echo(f"negativa: interrupted{f': {state}' if state else ''}", err=True)
        status = 128 + (e.number if isinstance(e, Stopped) else signal.SIGINT)
        if state is None:
            sys.exit(status)
        sys.stdout.flush()
        os._exit(status)
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)


class _Group(click.Group):
    """A group that imports a command when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"pytest_negativa.cli.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace(" ", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by group; click would cut their sentences to one line."""
        for group, commands in _GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name, text) for name, (_module, text) in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word, two = args[0], " ".join(args[:2])
        if two in _COMMANDS:
            return two, self.get_command(ctx, two), args[2:]
        is_known = self.get_command(ctx, word) is not None
        if not (is_known or word.startswith("-") or ctx.resilient_parsing):
            # Below that, "heal" is like "help".
            inside = (f"; did you mean {name}?" for name in _COMMANDS if name.endswith(f" {word}"))
            hint = did_you_mean(word, _COMMANDS, at_least=0.8) or next(inside, ".")
            ctx.fail(f"No such command {word!r}{hint}")
        return super().resolve_command(ctx, args)

    def make_context(self, *words: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*words, **extra)
        except click.UsageError as e:
            raise Exit(_refuse(e)) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        except click.UsageError as e:
            name = e.option_name if isinstance(e, click.NoSuchOption) else None
            if any(name in option.opts for option in self.params):
                e = click.UsageError(f"{name} goes before the command", ctx)
            ctx.exit(_refuse(e))
        except (NegativaError, OSError) as e:
            # Such as a full disk behind a redirection; click sees to a closed pipe itself.
            if isinstance(e, OSError) and e.errno not in SYSTEM_REFUSALS:
                raise
            from pytest_negativa.reporting.text import print_error

            if isinstance(e, NegativaError):
                print_error(e)
                ctx.exit(e.exit_status)
            print_error(e if e.filename is None else f"{e.filename}: {e.strerror}")
            ctx.exit(ExitStatus.FAILED)


# Of click 8.2 or later: no word at all asks for help.
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _refuse(error: click.UsageError) -> int:
    """Say what is wrong with a command line, in one line; returns the exit status."""
    if isinstance(error, _HELP):
        error.show()
    else:
        from pytest_negativa.reporting.text import print_error

        path = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
        message = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption):
            # A flag of pytest has its prefix there alone.
            word = error.option_name.replace("--negativa-", "--")
            options = [] if error.ctx is None else error.ctx.command.params
            near = did_you_mean(word, chain.from_iterable(o.opts for o in options), at_least=0.75)
            message = f"No such option {error.option_name!r}{near}"
        print_error(f"{message}{path}")
    return error.exit_code


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-negativa", prog_name="negativa")
@click_options("config", "directory")
def main(**_flags: Any) -> None:
    """Find and remove GPU code that a program does not need.

    Without PATH, a command takes the active environment: that of VIRTUAL_ENV, CONDA_PREFIX or
    .venv, else that of the Python that runs negativa. slim and slim undo never take the last one.

    Exit status: 0 if all is done. 1 if a file could not be read or written, or the answer is no.
    2 for wrong usage, such as an invalid setting or a path that is not there. A command that runs
    a program ends with its status. 128 + N if signal N, such as Ctrl-C, interrupted it.
    """
