"""``negativa measure``: a program on original and on slim libraries."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.cli.common import (
    COMMAND,
    FOLDER,
    PASS_ON,
    answer,
    as_json_option,
    settings_of,
)
from pytest_negativa.measuring import session
from pytest_negativa.reporting.measurement import render_measurement


@click.command(context_settings=PASS_ON)
@click.option(
    "--slim-dir",
    "slim",
    type=FOLDER,
    metavar="DIR",
    help="Take slim libraries from DIR instead of what reconstruct wrote.",
)
@click.option(
    "--runs", "pairs", type=click.IntRange(min=1), default=5, metavar="N",
    help="Count this many runs of each variant and way of loading. (default: 5)",
)  # fmt: skip
@click.option(
    "--loading",
    type=click.Choice(["lazy", "eager", "both"]),
    help="Set CUDA_MODULE_LOADING. (default: both, without a GPU lazy)",
)
@click.option(
    "--cold", is_flag=True, help="Evict the libraries from the page cache before each run."
)
@as_json_option("measurement")
@COMMAND
def measure(
    command: tuple[str, ...],
    slim: Path | None,
    pairs: int,
    loading: str | None,
    cold: bool,
    as_json: bool,
) -> None:
    """Compare COMMAND on original and on slim libraries.

    Runs take turns. The comparison covers time, memory, GPU memory, energy, page cache and sizes.
    Installed libraries stay as they are: the process loads the slim ones in their place. The output
    of COMMAND goes to files. DIR holds each slim library under the path of its original.

    Exit status: 0, or 1 if the runs can't be compared, for instance because they end differently.
    """
    measurement, folder = session.measure(
        command, settings_of(), copies=slim, loading=loading, pairs=pairs, cold=cold
    )
    paragraphs = (*render_measurement(measurement), f"Files in {folder}")
    answer(
        measurement,
        paragraphs,
        as_json=as_json,
        then="negativa lock",
        errors=measurement.failures,
    )
