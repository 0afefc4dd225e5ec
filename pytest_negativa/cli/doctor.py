"""``negativa doctor``: this machine."""

from __future__ import annotations

import click

from pytest_negativa.analysis.doctor import machine_facts
from pytest_negativa.cli.common import runs_of, say_next, settings_of, show
from pytest_negativa.errors import ExitStatus
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable


@click.command()
def doctor() -> None:
    """Show what this machine has for tracing, and what it lacks.

    The page is for an issue: versions, driver, GPUs, CUPTI, file systems, and one line for each
    obstacle to tracing. It has paths and values of variables: read it before you publish it.

    Exit status: 0, or 1 if GPU code can't be traced here.
    """
    findings = list(machine_facts(runs_of(settings_of()).folder))
    click.echo(
        format_table("ll", ("what", "found"), [one[:2] for one in findings], names=(1,), fold=True)
    )
    obstacles = [f"- {printable(obstacle)}" for _name, _value, obstacle in findings if obstacle]
    can = "cannot" if obstacles else "can"
    show("\n".join((f"\nGPU code {can} be traced here", *obstacles)))
    say_next("negativa inspect" if obstacles else "pytest --negativa")
    click.get_current_context().exit(ExitStatus.FAILED if obstacles else 0)
