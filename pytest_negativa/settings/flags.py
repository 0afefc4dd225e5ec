"""Flags of pytest and click; a flag without effect; unknown NEGATIVA_* variables.

Every pytest session imports this module to add the flags. Only the functions that need click
import it, and none needs pytest, msgspec or PyYAML.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pytest_negativa.errors import did_you_mean, one_of
from pytest_negativa.models.environment import OWN_VARIABLES
from pytest_negativa.settings.options import BY_NAME, MODES, OPTIONS


class OptionGroup(Protocol):
    """The part of pytest's option group that is used here."""

    def addoption(self, *opts: str, **attrs: Any) -> None: ...


def add_pytest_options(group: OptionGroup, words: Iterable[str] | None = None) -> None:
    """Add the options to ``group``; without one of them on the command line, the modes alone.

    All default to None: a flag with a default of its own would hide the other sources. pytest makes
    its parser anew several times in each session, which takes 10 ms for all options.

    Args:
        words: the command line, with ``addopts``; None: not known.
    """
    is_asked = words is None or any(
        "-negativ" in word or word.startswith("@") or word in ("-h", "--help") for word in words
    )
    for option in OPTIONS if is_asked else (BY_NAME[name] for name in MODES):
        common = {"dest": option.dest, "default": None}
        text = option.help_with_default.replace("%", "%%")  # argparse formats the help
        if (off := option.off_flag) is not None:
            group.addoption(option.flag, action="store_true", help=text, **common)
            group.addoption(off, action="store_false", help=f"Undo {option.flag}.", **common)
        else:
            action = "append" if option.is_repeated else "store"
            group.addoption(option.flag, action=action, metavar=option.value, help=text, **common)


_Command = TypeVar("_Command", bound=Callable[..., Any])


def click_options(*names: str) -> Callable[[_Command], _Command]:
    """A decorator that gives a click command these options.

    The command receives them as keywords named ``Option.dest``; see ``pick_flags``.
    """
    import click

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):  # click shows them in reverse order of decoration
            option = BY_NAME[name]
            command = click.option(
                option.cli_flag if option.value else f"{option.cli_flag}/--no-{option.stem}",
                option.dest,
                default=None,
                multiple=option.is_repeated,
                metavar=option.value or None,
                help=option.help_with_default,
            )(command)
        return command

    return decorate


def pick_flags(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags by option name.

    Args:
        parsed: parsed flags by ``Option.dest``: ``vars(namespace)`` of pytest, or the keywords of a
            click command.
    """
    found = {option.name: parsed.get(option.dest) for option in OPTIONS}
    # click hands over an empty tuple for a repeatable flag that is not there.
    return {name: value for name, value in found.items() if value is not None and value != ()}


def find_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable ``NEGATIVA_*`` that no option has."""
    known = {option.variable for option in OPTIONS if option.variable is not None}
    for name in sorted(environ):
        if name.startswith("NEGATIVA_") and name not in known | OWN_VARIABLES:
            yield f"{name}: no option has this variable{did_you_mean(name, known)}"


def flag_without_effect(words: Iterable[str], flags: Mapping[str, Any]) -> str | None:
    """Fault of a flag on a session's command line: it has no effect; None without one.

    Args:
        words: the typed command line, without ``addopts``: flags there are for all sessions.
    """
    typed = {word.partition("=")[0] for word in itertools.takewhile(lambda w: w != "--", words)}
    if any(flags.get(name) is False for name in MODES):
        return None  # The user switches it off once, in an otherwise unchanged command line.
    on = {name for name in MODES if flags.get(name)}
    for option in OPTIONS:
        flag = next((f for f in (option.flag, option.off_flag) if f in typed), None)
        if flag is None:
            continue
        if option.requires and not on.intersection(option.requires):
            return f"{flag} has no effect without {_switches(option.requires)}"
        if on.intersection(option.excludes):
            return f"{flag} has no effect with {_switches(option.excludes)}"
    return None


def _switches(names: Sequence[str]) -> str:
    return one_of([BY_NAME[name].flag for name in names])
