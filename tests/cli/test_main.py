"""The command as a whole: help texts, and how it is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.cli.trace import debloat
from tests.support.verbs import VERBS


def commands(command: click.Command = main, *names: str) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(("negativa", *names)), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from commands(child, *names, name)


def options() -> Iterator[tuple[str, str]]:
    for name, command in commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                yield (
                    f"{name} {parameter.opts[0]}",
                    (parameter.help or "").partition(" (default")[0],
                )


@pytest.mark.parametrize(("option", "text"), [pytest.param(*o, id=o[0]) for o in options()])
def test_help_of_an_option_is_one_line_that_says_what_to_do(option: str, text: str) -> None:
    assert 0 < len(text) <= 72
    assert text.split()[0].rstrip(":,") in VERBS
    assert text.endswith(".")


@pytest.mark.parametrize(("name", "command"), [pytest.param(*c, id=c[0]) for c in commands()])
def test_help_has_one_form_of_defaults_and_no_names_of_types(
    name: str, command: click.Command
) -> None:
    shown = " ".join(command.get_help(click.Context(command, info_name=name)).split())
    assert "[default" not in shown
    assert "RANGE" not in shown
    assert "; by default" not in shown.partition(" Options: ")[2]


@pytest.mark.parametrize(("name", "command"), [pytest.param(*c, id=c[0]) for c in commands()])
def test_help_of_a_command_begins_with_what_it_does(name: str, command: click.Command) -> None:
    first = (command.help or "").split("\n\n")[0]
    assert first.split()[0].rstrip(",") in VERBS


def test_the_list_of_commands_has_the_first_sentence_of_each() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_negativa", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Usage: python -m pytest_negativa ")
    context = click.Context(main)
    listed = {
        name: command.get_short_help_str(200)
        for name in main.list_commands(context)
        if (command := main.get_command(context, name))
    }
    shown = " ".join(done.stdout.partition("\nBegin:")[2].split())
    for name, text in listed.items():
        assert f" {name} {text}" in f" {shown}"
    assert len(listed) == len(shown.split(". ")) > 20


def test_debloat_says_what_it_does_not_do() -> None:
    shown = debloat.get_short_help_str(limit=80)
    assert "race" in shown and "report" in shown and "slim removes" in shown


def test_an_option_of_the_group_after_the_command() -> None:
    done = CliRunner().invoke(main, ["inspect", "--dir=x", "y"], prog_name="negativa")
    assert done.exit_code == 2
    assert done.stderr == "negativa: error: --dir goes before the command (see negativa --help)\n"


def test_an_option_as_pytest_has_it() -> None:
    done = CliRunner().invoke(main, ["report", "--negativa-run=x"], prog_name="negativa")
    assert done.exit_code == 2 and "'--negativa-run'; did you mean --run?" in done.stderr


def test_a_mistyped_command() -> None:
    done = CliRunner().invoke(main, ["inspct"])
    assert done.exit_code == 2
    assert "No such command 'inspct'; did you mean inspect?" in done.stderr
    assert "No such command 'zzzz' (see " in CliRunner().invoke(main, ["zzzz"]).stderr
    undo = CliRunner().invoke(main, ["undo"])
    assert "No such command 'undo'; did you mean slim undo? (see " in undo.stderr
    heal = CliRunner().invoke(main, ["heal"])
    assert "No such command 'heal' (see " in heal.stderr
    schema = CliRunner().invoke(main, ["schema", "lcok"])
    assert schema.exit_code == 2 and "; did you mean lock? (see " in schema.stderr
    # All errors begin alike.
    assert done.stderr.startswith("negativa: error: ") and done.stderr.count("\n") == 1
