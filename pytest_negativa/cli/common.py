"""What several commands of ``negativa`` share: options, settings, the run, exit statuses."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_negativa.errors import OptionError, Stopped, StoreError
from pytest_negativa.storage.urls import Url, is_url

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.gpucode.workers import Workers
    from pytest_negativa.models.plan import LibraryPlan
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.storage.runs import Run, RunsFolder


_Command = TypeVar("_Command", bound=Callable[..., Any])

EXIT_FAILED = 1
"""A file could not be read or written, or the answer is no."""

EXIT_USAGE = 2
"""Wrong usage; click's own, too."""


COMMAND = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
PASS_ON = {"allow_interspersed_args": False}
"""Context settings of a command with COMMAND: what follows it are COMMAND's own options."""


class PathOrUrl(click.Path):
    """A path, or the URL of a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Url(value) if is_url(value) else super().convert(value, param, ctx)


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
JOBS = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use this many processes. (default: one per processor)",
)


def _check_executor(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    if given is None:
        return None
    from pytest_negativa.gpucode.workers import DaskCluster
    from pytest_negativa.reporting.text import print_warning

    try:
        DaskCluster(given, print_warning)
    except OptionError as e:
        raise click.BadParameter(str(e), ctx, param) from None
    return given


def workers_for(
    executor: str | None, jobs: int | None = None
) -> contextlib.AbstractContextManager[Workers]:
    """Who reads libraries, by ``--executor`` and ``--jobs``."""
    from pytest_negativa.gpucode.workers import open_workers
    from pytest_negativa.reporting.text import print_warning

    return open_workers(executor, jobs, warn=print_warning)


EXECUTOR = click.option(
    "--executor",
    metavar="URL",
    callback=_check_executor,
    help="Read the libraries on a Dask cluster: dask://HOST:PORT.",
)
MATCH = click.option(
    "--match",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="List only kernels whose mangled or demangled name matches.",
)
TOP_KERNELS = click.option(
    "--top",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="List at most N kernels of each library; 0 lists all.",
)
NO_CACHE = click.option("--no-cache", is_flag=True, help="Ignore the cache of library maps.")


def as_json_option(schema: str) -> Callable[[_Command], _Command]:
    """The option ``--json`` of a command whose output has this schema."""
    text = f"Print JSON (see: negativa schema {schema})."
    return click.option("--json", "as_json", is_flag=True, help=text)


ARCH_LIST = "ARCH|GPU,..."
"""What stands for the value of an option that ``parse_devices`` reads."""


def arch_option(flag: str, name: str, help_text: str) -> Callable[[_Command], _Command]:
    """An option that takes archs, and gives the devices that have them.

    Args:
        flag: of the option.
        name: of the command's argument.
        help_text: a sentence for ``--help``.
    """
    return click.option(
        flag, name, metavar=ARCH_LIST, multiple=True, help=help_text, callback=_parse_archs
    )


def _parse_archs(
    ctx: click.Context, param: click.Parameter, given: Sequence[str]
) -> tuple[ComputeCapability, ...]:
    try:
        return parse_devices(given)
    except OptionError as e:
        raise click.BadParameter(str(e), ctx, param) from None


def parse_devices(
    given: Sequence[str], *, also_unknown: bool = False
) -> tuple[ComputeCapability, ...]:
    """The devices of the archs and GPUs that ``devices.parse_archs`` reads.

    Raises:
        OptionError: see there.
    """
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.devices import parse_archs

    archs = parse_archs(given, also_unknown=also_unknown)
    return tuple(sorted({ComputeCapability(arch.major, arch.minor) for arch in archs}))


def print_variables(variables: Mapping[str, str], *, as_json: bool) -> None:
    """Print variables of the environment for a shell, or as a JSON object."""
    import json
    import shlex

    if as_json:
        click.echo(json.dumps(variables, indent=1))
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def encode_json(record: object) -> bytes:
    """A record as ``--json`` prints it, with escapes in paths that are not UTF-8."""
    import msgspec

    from pytest_negativa.storage.records import encode_hook

    try:
        data = msgspec.json.encode(record, enc_hook=encode_hook)
    except UnicodeEncodeError:
        values = msgspec.to_builtins(record, str_keys=True, enc_hook=encode_hook)
        data = msgspec.json.encode(_escaped(values))
    return msgspec.json.format(data, indent=1) + b"\n"


def _escaped(value: Any) -> Any:
    from pytest_negativa.storage.records import utf8

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
    from pytest_negativa.reporting.text import print_warning
    from pytest_negativa.settings.flags import pick_flags
    from pytest_negativa.settings.overlooked import find_variables
    from pytest_negativa.settings.resolve import load_settings

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
    from pytest_negativa.storage.runs import run_at

    return run_at(runs_of(settings).find(settings.run).folder)


def runs_of(settings: Settings) -> RunsFolder:
    """The folder of all runs."""
    from pytest_negativa.storage.runs import RunsFolder

    return RunsFolder(Path(settings.directory))


def active_paths(*, or_own: bool = True) -> tuple[Path, ...]:
    """The folders of the active environment, which it names on standard error.

    Args:
        or_own: without one, take that of the interpreter that runs; not to change it.

    Raises:
        OptionError: there is none.
    """
    from pytest_negativa.installed.active import find_active
    from pytest_negativa.reporting.text import printable

    folders, named_by = find_active(os.environ, Path.cwd(), or_own=or_own)
    listed = printable(", ".join(map(str, folders)))
    click.echo(f"negativa: {listed} ({named_by})", err=True)
    return folders


def show(text: str) -> None:
    """Print text for people, in the width of the terminal."""
    from pytest_negativa.reporting.text import fit

    click.echo(fit(text))


def say_next(after: Run | str) -> None:
    """End a report with the next command, on standard error: no part of what a pipe reads."""
    from pytest_negativa.reporting.next_command import next_line
    from pytest_negativa.reporting.text import printable

    click.echo(printable(next_line(after)), err=True)


def note_unopened(folder: Path) -> None:
    """Tell of archives in a folder without GPU code: a folder's archives are not opened."""
    from pytest_negativa.images.containers import count_archives
    from pytest_negativa.reporting.text import printable
    from pytest_negativa.reporting.units import format_items

    if count := count_archives(folder):
        were = format_items(count, "archive was", "archives were")
        note = f"{printable(str(folder))}: {were} not opened: name them"
        click.echo(f"negativa: note: {note}", err=True)


def fail_for_limits(crossed: Sequence[str], status: int = 0) -> None:
    """Name the crossed limits; end the command with 1 if there are any and it did not fail before.

    Args:
        status: that of the command without its limits.
    """
    from pytest_negativa.reporting.text import printable

    for limit in crossed:
        click.echo(f"negativa: {printable(limit)}", err=True)
    if crossed and not status:
        click.get_current_context().exit(EXIT_FAILED)


def warn_of_hooks(runs: Sequence[Run]) -> None:
    """Warn if a plan of the runs kept code for a hook, which no command calls."""
    from pytest_negativa.models.plan import KeepReason
    from pytest_negativa.reporting.text import print_warning
    from pytest_negativa.reporting.units import format_items
    from pytest_negativa.storage.results import load_plans

    for run in runs:
        plans: tuple[LibraryPlan, ...] = ()
        # None are there yet, or an earlier release wrote them.
        with contextlib.suppress(StoreError):
            plans = load_plans(run)
        kept = sum(d.reason == KeepReason.HOOK.value for plan in plans for d in plan.decisions)
        if kept:
            print_warning(
                f"{run}: its plan kept {format_items(kept, 'element', 'elements')} for the hook "
                "pytest_negativa_keep_element. Commands call no hooks, so the new plan does not "
                "ask it; trace again with pytest --negativa, or name the kernels in keep.kernels"
            )


@contextlib.contextmanager
def interruptible(state: str | None = None) -> Iterator[None]:
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
