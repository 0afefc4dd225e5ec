"""Flags and environment variables: adding them to pytest and click, and reading them.

Every pytest session imports this module to add the flags. Only the functions that need click
import it, and none needs pytest, msgspec or PyYAML.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pytest_negativa.errors import OptionError
from pytest_negativa.settings.options import BY_NAME, MODES, OPTIONS, Option
from pytest_negativa.settings.value_types import InvalidValue, one_of


class OptionGroup(Protocol):
    """The part of pytest's option group that is used here."""

    def addoption(self, *opts: str, **attrs: Any) -> None: ...


def add_pytest_options(group: OptionGroup) -> None:
    """Add every option to ``group``.

    All default to None: a flag with a default of its own would hide the other sources.
    """
    for option in OPTIONS:
        common = {"dest": option.dest, "default": None}
        text = option.help_with_default.replace("%", "%%")  # argparse formats the help
        if (off := option.off_flag) is not None:
            group.addoption(option.flag, action="store_true", help=text, **common)
            undo = f"Undo {option.flag}."
            group.addoption(off, action="store_false", help=undo, **common)
        else:
            action = "append" if option.type.repeated else "store"
            group.addoption(
                option.flag, action=action, metavar=option.value_name, help=text, **common
            )


_Command = TypeVar("_Command", bound=Callable[..., Any])


def click_options(*names: str) -> Callable[[_Command], _Command]:
    """A decorator that gives a click command these options.

    The command receives them as keywords named ``Option.dest``; see ``pick_flags``.
    """
    import click

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):  # click shows them in reverse order of decoration
            option = BY_NAME[name]
            off = f"/--no-{option.flag_name}" if option.is_switch else ""
            command = click.option(
                option.cli_flag + off,
                option.dest,
                default=None,
                multiple=option.type.repeated,
                metavar=None if option.is_switch else option.value_name,
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


def value_before_file(name: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """The value of an option that no file can set: by flag, by environment, or its default.

    Raises:
        OptionError: the value can't be used.
    """
    found = from_flag_or_environment(BY_NAME[name], flags, environ)
    return found.value if found else BY_NAME[name].default


def is_enabled(name: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether a switch is on that no file can set. Every session asks, so no file is read.

    Raises:
        OptionError: the environment variable is neither true nor false.
    """
    return bool(value_before_file(name, flags, environ))


def idle_flag(
    words: Iterable[str], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Why a flag on a session's command line has no effect; None if all may have one.

    Args:
        words: the typed command line, without ``addopts``: flags there are for all sessions.

    Raises:
        OptionError: an environment variable is neither true nor false.
    """
    if any(flags.get(name) is False for name in MODES):
        return None  # The user switches it off once, in an otherwise unchanged command line.
    on = [name for name in MODES if is_enabled(name, flags, environ)]
    typed = {word.partition("=")[0] for word in itertools.takewhile(lambda w: w != "--", words)}
    for option in OPTIONS:
        flag = next((f for f in (option.flag, option.off_flag) if f in typed), None)
        if flag is None or not option.requires:
            continue
        if not set(option.requires) & set(on):
            return f"{flag} has no effect without {_one_of_switches(option.requires)}"
        if option.name == "run" and "enabled" in on:
            return f"{flag} has no effect with --negativa, which traces a run of its own"
    return None


def _one_of_switches(names: Sequence[str]) -> str:
    return one_of([BY_NAME[name].flag for name in names])


class Found(NamedTuple):
    """A value by flag or environment.

    Attributes:
        source: ``"flag"`` or ``"environment"``.
        where: the flag or the variable.
    """

    value: Any
    source: str
    where: str


def from_flag_or_environment(
    option: Option,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    of_command: bool = False,
) -> Found | None:
    """The value of ``option`` by the stronger of the two sources; None if neither has one.

    Args:
        of_command: the flags are those of the ``negativa`` command; messages name them so.

    Raises:
        OptionError: the value can't be used.
    """
    where = option.cli_flag if of_command else option.flag
    try:
        if option.name in flags:
            return Found(option.type.parse_flag(flags[option.name]), "flag", where)
        where = option.variable
        # CI systems hand over a variable that is not set as an empty one.
        if text := environ.get(where, "").strip():
            return Found(option.type.parse_variable(text), "environment", where)
    except InvalidValue as problem:
        raise OptionError(f"{where}: {problem}") from None
    return None
