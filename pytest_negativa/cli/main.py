"""The command ``negativa``: parses, calls the stages, prints. No logic of its own."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.cli.common import DeviceType, settings_of
from pytest_negativa.cli.measure import COMMANDS as MEASURE_COMMANDS
from pytest_negativa.cli.run import COMMANDS as RUN_COMMANDS
from pytest_negativa.cli.slim import COMMANDS as SLIM_COMMANDS
from pytest_negativa.cli.verify import COMMANDS as PROVE_COMMANDS
from pytest_negativa.errors import NegativaError, OptionError
from pytest_negativa.reporting.text import print_error
from pytest_negativa.settings.flags import click_options

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability

EXIT_FAILED = 1
"""Something could not be read or done, or the answer is no."""

EXIT_USAGE = 2
"""Wrong usage; click's own, too."""


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
    """Find the GPU code that nothing needs.

    Exit status: 0 done; 1 something could not be read or done, or the answer is no; 2 wrong usage,
    as of a name or a setting that can't be used. Commands that run a program end with its status.
    """


@main.command()
@click.argument("libraries", nargs=-1, required=True, metavar="LIB...")
@click.option(
    "--arch",
    "device",
    type=DeviceType(),
    help="Also show what a device (sm_90, 9.0) loads.",
)
@click.option("--deps", is_flag=True, help="With a distribution, take those that it requires too.")
@click.option("--kernels", is_flag=True, help="List the kernels, by mangled name.")
@click.option("--elements", is_flag=True, help="List every element, by file offset.")
@click.option("--headers-only", is_flag=True, help="Unpack nothing: fast, but names no kernels.")
@click.option("--json", "as_json", is_flag=True, help="JSON (see: negativa schema inspection).")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Processes to use.")
@click.option("--no-cache", is_flag=True, help="Neither use nor fill the cache of maps.")
@click_options("config")
def inspect(
    libraries: tuple[str, ...],
    device: ComputeCapability | None,
    deps: bool,
    kernels: bool,
    elements: bool,
    headers_only: bool,
    as_json: bool,
    jobs: int | None,
    no_cache: bool,
    **flags: Any,
) -> None:
    """Show the GPU code in libraries.

    LIB is a shared library or executable, a folder (all ELF files below it), or the name of
    an installed distribution such as torch.

    Exit status: 0, or 1 if something could not be read.
    """
    if headers_only and kernels:
        raise click.UsageError("--kernels needs the code unpacked, so not with --headers-only")
    # What only this command needs is imported here, for a quick --help.
    from pytest_negativa.analysis.inspect import (
        InspectionRequest,
        errors_of,
        inspect_libraries,
        render_json,
        render_text,
    )
    from pytest_negativa.cli.progress import ByteProgress
    from pytest_negativa.gpucode.cache import open_cache

    request = InspectionRequest(
        arguments=libraries,
        device=device,
        with_dependencies=deps,
        kernels=kernels,
        elements=elements,
        headers_only=headers_only,
    )
    cache = None if no_cache else open_cache(settings_of(flags).cache)
    with ByteProgress("reading libraries") as progress:
        inspected = inspect_libraries(request, cache, jobs, progress.update)
    if as_json:
        click.echo(render_json(inspected))
    else:
        for number, part in enumerate(render_text(inspected, request)):
            click.echo(f"\n{part}" if number else part)
    errors = [error for one in inspected for error in errors_of(one)]
    for error in errors:
        print_error(error)
    if errors:
        click.get_current_context().exit(EXIT_FAILED)


@main.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON Schema of a file or output format; without NAME, which there are."""
    from pytest_negativa.storage.records import schema_names, shipped_schema

    names = schema_names()
    if name is None:
        click.echo("\n".join(names))
    elif name in names:
        click.echo(shipped_schema(name), nl=False)
    else:
        raise click.BadParameter(f"{name!r} is none of {', '.join(names)}", param_hint="NAME")


for _command in (*RUN_COMMANDS, *PROVE_COMMANDS, *SLIM_COMMANDS, *MEASURE_COMMANDS):
    main.add_command(_command)
