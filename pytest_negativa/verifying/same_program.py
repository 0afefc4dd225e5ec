"""Whether the tests were started on the copies as they were when traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_negativa.models.outcomes import SessionResult

_NOTHING = "nothing"
# They differ from process to process, or redirect to the copies.
_PASSING = frozenset({"_", "GLIBC_TUNABLES", "LD_AUDIT", "OLDPWD", "PYTEST_CURRENT_TEST", "SHLVL"})


def changes_of_start(traced: SessionResult, copies: SessionResult) -> Iterator[str]:
    """What differs in the circumstances of two sessions, for people.

    Of variables it is whether they are set: values change from one step of a CI job to the next.

    Args:
        traced: the session when traced.
        copies: one on the copies, which runs all tests.
    """
    before, after = traced.circumstances, copies.circumstances
    if before is None or after is None:
        return
    for name, old, new in _changed(before.options, after.options):
        yield f"option {name}: {old} when traced, {new} on the copies"
    for name, old, _ in _changed(_names(before.variables), _names(after.variables)):
        state = "set on the copies alone" if old == _NOTHING else "set when traced alone"
        yield f"variable {name}: {state}"
    for name, old, new in _changed(before.files, after.files):
        # One session may have selected tests of fewer files.
        if _NOTHING not in (old, new):
            yield f"file {name}: changed since it was traced"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*before, *after}):
        old, new = before.get(name, _NOTHING), after.get(name, _NOTHING)
        if old != new:
            yield name, old, new


def _names(variables: tuple[str, ...]) -> dict[str, str]:
    return {n: n for n in variables if n not in _PASSING and not n.startswith("NEGATIVA_")}
