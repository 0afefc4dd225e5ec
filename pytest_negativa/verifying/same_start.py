"""The same start as when traced: options, files, and which environment variables may differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pytest_negativa.models.outcomes import SessionResult

_NOTHING = "nothing"
# They differ from process to process, from step to step of a CI job, and from terminal to terminal,
# or redirect to the copies.
_PASSING = re.compile(
    r"(_|COLUMNS|GLIBC_TUNABLES|LD_AUDIT|LINES|OLDPWD|PYTEST_CURRENT_TEST|SHLVL|WINDOWID)$"
    r"|(CI|GITHUB|NEGATIVA|RUNNER|SSH|TERM|TMUX|VSCODE|XDG)_"
)


def changes_of_start(traced: SessionResult, copies: SessionResult) -> Iterator[str]:
    """Differences in the circumstances of two sessions, for people.

    Args:
        traced: the session when traced.
        copies: one on the copies, which runs all tests.
    """
    before, after = traced.circumstances, copies.circumstances
    if before is None or after is None:
        return
    if before.program != after.program:
        yield f"program: {before.program} when traced, {after.program} on the copies"
    for name, old, new in _changed(before.options, after.options):
        yield f"option {name}: {old} when traced, {new} on the copies"
    for name, old, new in _changed(_lasting(before.variables), _lasting(after.variables)):
        states = {old: "set on the copies alone", new: "set when traced alone"}
        yield f"variable {name}: {states.get(_NOTHING, 'another value when traced')}"
    for name, old, new in _changed(before.files, after.files):
        # One session may have selected tests of fewer files.
        if _NOTHING not in (old, new):
            yield f"file {name}: changed since it was traced"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*before, *after}):
        old, new = before.get(name, _NOTHING), after.get(name, _NOTHING)
        if old != new:
            yield name, old, new


def _lasting(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not _PASSING.match(name)}
