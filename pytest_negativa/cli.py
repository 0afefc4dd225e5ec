"""The command ``negativa``: parses, calls the stages, prints. No logic of its own."""

from __future__ import annotations

from typing import Any

import click

from pytest_negativa.errors import NegativaError

EXIT_FAILED = 1
"""Something could not be read or done; 2 is click's, for wrong usage."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NegativaError as e:
            _print_error(e)
            ctx.exit(EXIT_FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-negativa", prog_name="negativa")
def main() -> None:
    """Find the GPU code that nothing needs.

    Exit status: 0 done, 1 something could not be read or done, 2 wrong usage.
    """


@main.command()
@click.argument("libraries", nargs=-1, required=True, metavar="LIB...")
@click.option("--arch", help="Also show what such a device loads, e.g. sm_90 or 9.0.")
@click.option("--deps", is_flag=True, help="With a distribution, take those that it requires too.")
@click.option("--kernels", is_flag=True, help="List the kernels, by mangled name.")
@click.option("--elements", is_flag=True, help="List every element, by file offset.")
@click.option("--headers-only", is_flag=True, help="Unpack nothing: fast, but names no kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema: negativa schema).")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Processes to use.")
@click.option("--no-cache", is_flag=True, help="Neither use nor fill the cache of maps.")
def inspect(
    libraries: tuple[str, ...],
    arch: str | None,
    deps: bool,
    kernels: bool,
    elements: bool,
    headers_only: bool,
    as_json: bool,
    jobs: int | None,
    no_cache: bool,
) -> None:
    """Show the GPU code in libraries.

    LIB is a shared library or executable, a folder (all ELF files below it), or the name of
    an installed distribution such as torch.
    """
    # What only this command needs is imported here, for a quick --help.
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.inspecting import (
        InspectionRequest,
        errors_of,
        inspect_libraries,
        render_json,
        render_text,
    )
    from pytest_negativa.mapcache import MapCache, default_directory, default_limit
    from pytest_negativa.progress import ByteProgress

    request = InspectionRequest(
        arguments=libraries,
        device=None if arch is None else ComputeCapability.parse(arch),
        with_dependencies=deps,
        kernels=kernels,
        elements=elements,
        headers_only=headers_only,
    )
    cache = None if no_cache else MapCache(default_directory(), default_limit())
    with ByteProgress("reading libraries") as progress:
        inspected = inspect_libraries(request, cache, jobs, progress.update)
    if as_json:
        click.echo(render_json(inspected))
    else:
        click.echo("\n\n".join(render_text(inspected, request)))
    errors = [error for one in inspected for error in errors_of(one)]
    for error in errors:
        _print_error(error)
    if errors:
        click.get_current_context().exit(EXIT_FAILED)


def _print_error(error: Exception) -> None:
    click.echo(f"negativa: error: {error}", err=True)
