"""The command in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main


def inspect(*arguments: str | Path) -> Result:
    """``negativa inspect``; an error that is not told is raised."""
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], catch_exceptions=False)
