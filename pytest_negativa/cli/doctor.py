"""``negativa doctor``: this machine."""

from __future__ import annotations

import click

from pytest_negativa.analysis.doctor import machine_facts
from pytest_negativa.cli.common import answer, as_json_option, runs_of, settings_of
from pytest_negativa.errors import ExitStatus
from pytest_negativa.models.base import Listing
from pytest_negativa.reporting.text import printable


@click.command()
@as_json_option("doctor")
def doctor(as_json: bool) -> None:
    """Show what this machine has for tracing, and what it lacks.

    The page is for an issue: versions, driver, GPUs, CUPTI, file systems, and one line for each
    obstacle to tracing. It has paths and values of variables: read it before you publish it.

    Exit status: 0, or 1 if GPU code can't be traced here.
    """
    facts = tuple(machine_facts(runs_of(settings_of()).folder))
    obstacles = [f"- {printable(fact.obstacle)}" for fact in facts if fact.obstacle]
    can = "cannot" if obstacles else "can"
    answer(
        Listing(rows=facts),
        (
            "\n".join(printable(f"{fact.name}: {fact.value}") for fact in facts),
            "\n".join((f"GPU code {can} be traced here", *obstacles)),
        ),
        as_json=as_json,
        then="negativa inspect" if obstacles else "pytest --negativa",
    )
    click.get_current_context().exit(ExitStatus.FAILED if obstacles else 0)
