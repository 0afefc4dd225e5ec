"""``negativa explain``: an error, and the slimmed libraries that may cause it."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.cli.common import FOLDER, active_paths, as_words, say_next, show
from pytest_negativa.slimming.explain import explain_error, slimmed_in


@click.command()
@click.argument("error", required=False, default="")
@click.argument("folders", nargs=-1, type=FOLDER, metavar="[PATH]...")
def explain(error: str, folders: tuple[Path, ...]) -> None:
    """Tell whether slimmed libraries can cause a CUDA ERROR.

    explain also says what to do. ERROR is the message, such as "CUDA error: no kernel image is
    available for execution on the device". PATH has the packages of the program; by
    default, the active environment. In a Python program:
    print(pytest_negativa.why(exception))
    """
    asked = folders or active_paths()
    slimmed = slimmed_in(asked)
    show(explain_error(error, slimmed, asked))
    say_next(f"negativa {'slim check' if slimmed else 'inspect'} {as_words(asked)}")
