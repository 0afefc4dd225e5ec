"""The command that explains errors of slimmed libraries: explain."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.cli.common import active_paths, as_json_option, encode_json
from pytest_negativa.models.listing import LISTING_VERSION, Explanation
from pytest_negativa.slimming.explain import explain_error, rows_of, slimmed_in


@click.command()
@click.argument("error", required=False, default="")
@click.argument(
    "folders",
    nargs=-1,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="[PATH]...",
)
@as_json_option("explanation")
def explain(error: str, folders: tuple[Path, ...], as_json: bool) -> None:
    """Tell whether slimmed libraries can cause a CUDA ERROR.

    explain also says what to do. ERROR is the message, such as "CUDA error: no kernel image is
    available for execution on the device". PATH has the packages of the program; by
    default, the active environment. In a Python program:
    print(pytest_negativa.why(exception))
    """
    asked = folders or active_paths()
    slimmed = slimmed_in(asked)
    text = explain_error(error, slimmed, asked)
    if not as_json:
        click.echo(text)
        return
    explanation = Explanation(
        format_version=LISTING_VERSION, error=error, text=text, libraries=rows_of(slimmed)
    )
    click.echo(encode_json(explanation), nl=False)
