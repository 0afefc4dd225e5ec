"""Shared by the commands: options, settings, the run, --json, the Next line, questions, limits."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.devices import parse_archs
from pytest_negativa.errors import ExitStatus, OptionError, no_such_file
from pytest_negativa.gpucode.workers import DaskCluster, Workers, open_workers
from pytest_negativa.images.archive_kinds import count_archives
from pytest_negativa.installed.active import find_active
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.settings import Settings
from pytest_negativa.reporting.text import fit, print_error, print_warning, printable
from pytest_negativa.reporting.units import and_more, format_items
from pytest_negativa.settings.flags import find_variables, pick_flags
from pytest_negativa.settings.resolve import load_settings
from pytest_negativa.storage.records import encode_hook, utf8
from pytest_negativa.storage.runs import Run, RunsFolder, run_at
from pytest_negativa.storage.urls import Url, is_url

_Command = TypeVar("_Command", bound=Callable[..., Any])


COMMAND = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
PASS_ON = {"allow_interspersed_args": False}
"""Context settings of a command with COMMAND: what follows it are COMMAND's own options."""


class Existing(click.Path):
    """A path; if ``exists``, an ``OptionError`` says that nothing is there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.exists and not os.path.lexists(value):
            raise no_such_file(value)
        return super().convert(value, param, ctx)


class PathOrUrl(Existing):
    """A lock: its path, or its URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Url(value) if is_url(value) else super().convert(value, param, ctx)


LOCK = "negativa.lock"
PATHS = click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
LOCK_FILE = PathOrUrl(exists=True, dir_okay=False, path_type=Path)
EXISTING = Existing(exists=True, path_type=Path)
FOLDER = Existing(exists=True, file_okay=False, path_type=Path)
JOBS = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Process N libraries at a time. (default: one per processor)",
)


def option_reader(read: Callable[[Any], Any]) -> Callable[..., Any]:
    """A callback that reads the value of an option; an ``OptionError`` is one of its usage."""

    def callback(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
        try:
            return None if given is None else read(given)
        except OptionError as e:
            raise click.BadParameter(str(e), ctx, param) from None

    return callback


def _executor(given: str) -> str:
    DaskCluster(given, print_warning)
    return given


def workers_for(executor: str | None, jobs: int | None = None) -> AbstractContextManager[Workers]:
    """The workers that read libraries, by ``--executor`` and ``--jobs``."""
    return open_workers(executor, jobs, warn=print_warning)


EXECUTOR = click.option(
    "--executor",
    metavar="URL",
    callback=option_reader(_executor),
    help="Read the libraries on a Dask cluster: dask://HOST:PORT.",
)
MATCH = click.option(
    "--match",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="List only kernels whose mangled or demangled name matches.",
)
NO_CACHE = click.option("--no-cache", is_flag=True, help="Ignore the cache of library maps.")


def as_json_option(schema: str) -> Callable[[_Command], _Command]:
    """The option ``--json`` of a command whose output has this schema."""
    return click.option(
        "--json", "as_json", is_flag=True, help=f"Print JSON (see: negativa schema {schema})."
    )


ARCH_LIST = "ARCH|GPU,..."
"""Placeholder for the value of an option that ``parse_devices`` reads."""


def arch_option(flag: str, name: str, help_text: str) -> Callable[[_Command], _Command]:
    """An option that takes archs, and gives the devices that have them.

    Args:
        flag: of the option.
        name: of the command's argument.
        help_text: a sentence for ``--help``.
    """
    return click.option(
        flag,
        name,
        metavar=ARCH_LIST,
        multiple=True,
        help=help_text,
        callback=option_reader(parse_devices),
    )


def parse_devices(
    given: Sequence[str], *, also_unknown: bool = False
) -> tuple[ComputeCapability, ...]:
    """The devices of the archs and GPUs that ``devices.parse_archs`` reads.

    Raises:
        OptionError: see there.
    """
    return tuple(
        sorted(
            {
                ComputeCapability(arch.major, arch.minor)
                for arch in parse_archs(given, also_unknown=also_unknown)
            }
        )
    )


def check_usage(*rules: tuple[object, str]) -> None:
    """Refuse options that don't go together.

    Args:
        rules: whether the options break one, and the rule.

    Raises:
        click.UsageError: they break one; the first is named.
    """
    for is_broken, rule in rules:
        if is_broken:
            raise click.UsageError(rule)


def print_variables(variables: Mapping[str, str], *, as_json: bool) -> None:
    """Print variables of the environment for a shell, or as a JSON object."""
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    click.echo(encode_json(variables) if as_json else "".join(lines), nl=False)


def encode_json(record: object) -> bytes:
    """A record as ``--json`` prints it, with escapes in paths that are not UTF-8."""
    try:
        data = msgspec.json.encode(record, enc_hook=encode_hook)
    except UnicodeEncodeError:
        values = msgspec.to_builtins(record, str_keys=True, enc_hook=encode_hook)
        data = msgspec.json.encode(_escaped(values))
    return msgspec.json.format(data, indent=1) + b"\n"


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_escaped, value))
    return utf8(value) if isinstance(value, str) else value


def settings_of(flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a command, from the flags that ``click_options`` gave it.

    Raises:
        OptionError: an option or ``negativa.yaml`` can't be used.
    """
    here = Path.cwd()
    for warning in find_variables(os.environ):
        print_warning(warning)
    # --config and --dir stand before the command's name.
    given = pick_flags({**click.get_current_context().find_root().params, **(flags or {})})
    return load_settings(given, os.environ, root=here, cwd=here, of_command=True)


def run_of(settings: Settings) -> Run:
    """The run that a command works on: that of ``--run``, else the last one.

    Raises:
        OptionError: there is no such run.
        StoreError: it can't be fetched.
    """
    return run_at(runs_of(settings).find(settings.run).folder)


def settings_and_run(flags: Mapping[str, Any]) -> tuple[Settings, Run]:
    """The settings of a command, see ``settings_of``, and its run, see ``run_of``."""
    settings = settings_of(flags)
    return settings, run_of(settings)


def runs_of(settings: Settings) -> RunsFolder:
    """The folder of all runs."""
    return RunsFolder(Path(settings.directory))


def active_paths(*, or_own: bool = True) -> tuple[Path, ...]:
    """The folders of the active environment, which it names on standard error.

    Args:
        or_own: without one, take that of the interpreter that runs; not to change it.

    Raises:
        OptionError: there is none.
    """
    folders, named_by = find_active(os.environ, Path.cwd(), or_own=or_own)
    show(f"negativa: {printable(', '.join(map(str, folders)))} ({named_by})", err=True)
    return folders


def show(text: str, *, err: bool = False) -> None:
    """Print text for people, in the width of the terminal."""
    click.echo(fit(text), err=err)


def answer(
    record: object,
    paragraphs: Iterable[str],
    *,
    as_json: bool,
    then: Run | str | None = None,
    errors: Iterable[object] = (),
) -> None:
    """Print a record: as JSON, or in paragraphs for people, which end with the next command.

    Args:
        errors: end the command with 1 if there are any, and print them instead of the next one.
    """
    if as_json:
        click.echo(encode_json(record), nl=False)
    elif text := "\n\n".join(paragraphs):
        show(text)
    fail_for(errors)
    if then is not None and not as_json:
        say_next(then)


def say_next(after: Run | str) -> None:
    """End a report with the next command, on standard error: no part of what a pipe reads."""
    # It reads the results of runs, of which inspect and slim have none.
    from pytest_negativa.reporting.next_command import next_line

    click.echo(printable(next_line(after)), err=True)


def slim_by(lock: str | Path | Url) -> str:
    """The command that comes after a look at a lock."""
    return f"negativa slim --lock {shlex.quote(str(lock))} --spare spares"


def note_unopened(folder: Path) -> None:
    """Tell of archives in a folder without GPU code: a folder's archives are not opened."""
    if count := count_archives(folder):
        were = format_items(count, "archive was", "archives were")
        show(f"negativa: note: {printable(str(folder))}: {were} not opened: name them", err=True)


YES = click.option("--yes", "-y", is_flag=True, help="Start without a question on the terminal.")


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal, unless ``--yes`` is given: a script gave its options on purpose."""
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm(f"negativa: {question}?", abort=True, err=True)


def fail_for(errors: Iterable[object]) -> None:
    """Print the errors; end the command with 1 if there are any."""
    found = list(errors)
    for error in found:
        print_error(error)
    if found:
        click.get_current_context().exit(ExitStatus.FAILED)


def fail_for_limits(crossed: Sequence[str], status: int = 0) -> None:
    """Name the crossed limits; end the command with 1 if there are any and it did not fail before.

    Args:
        status: that of the command without its limits.
    """
    for limit in crossed:
        click.echo(f"negativa: {printable(limit)}", err=True)
    if crossed and not status:
        click.get_current_context().exit(ExitStatus.FAILED)


def show_proof(lock: Lock, *, takes_cpu_code: bool = True) -> None:
    """Tell what a lock doesn't rest on."""
    doubts = [
        (row.path, row.not_proved)
        for row in (*lock.libraries, *lock.files)
        if row.not_proved is not None
    ]
    if not lock.proof.proved:
        print_warning(f"this lock is NOT PROVED: {'; '.join(lock.proof.not_proved)}")
    elif doubts:
        more = "".join(and_more(len(doubts), 1, " (and {} more)"))
        print_warning(f"NOT PROVED in this lock: {': '.join(doubts[0])}{more}")
    reasons = lock.proof.pages_not_proved
    if takes_cpu_code and reasons and reasons != lock.proof.not_proved:
        print_warning(f"CPU code of this lock is NOT PROVED: {'; '.join(reasons)}")
    for note in lock.proof.notes if takes_cpu_code else ():
        print_warning(note)
    if lock.has_pages and not takes_cpu_code:
        show("negativa: CPU code of the lock leaves with --spare alone: all of it stays", err=True)


def as_words(paths: Sequence[Path]) -> str:
    """The paths as words of a command."""
    return shlex.join(dict.fromkeys(map(str, paths)))
