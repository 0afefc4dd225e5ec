"""Selects recorded tests as pytest's ``-m``, ``-k`` and node ids would."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pytest_negativa.errors import OptionError
from pytest_negativa.models.outcomes import TestResult


def select_tests(
    tests: Sequence[TestResult],
    *,
    markers: str | None = None,
    keywords: str | None = None,
    nodeids: Collection[str] = (),
) -> tuple[TestResult, ...]:
    """The tests that match all that is given, in their order.

    Args:
        tests: as recorded.
        markers: a marker expression, without arguments of markers.
        keywords: a keyword expression.
        nodeids: of tests, or of classes, files or folders that hold them.

    Raises:
        OptionError: an expression can't be parsed, or nothing matches.
    """
    # Every test has its own name among them.
    if keywords is not None and tests and not any(test.keywords for test in tests):
        raise OptionError(
            "-k: the run has no keywords of its tests, because this release can't read them with "
            "its version of pytest; select by node id or -m"
        )
    found = tuple(
        test
        for test in tests
        if (not nodeids or any(_is_in(test.nodeid, nodeid) for nodeid in nodeids))
        and (markers is None or _matches("-m", markers, test.markers, exact=True))
        and (keywords is None or _matches("-k", keywords, test.keywords, exact=False))
    )
    lost = [n for n in nodeids if not any(_is_in(test.nodeid, n) for test in tests)]
    if lost:
        raise OptionError(f"{lost[0]}: no test of the run has this node id")
    if not found:
        known = sorted({marker for test in tests for marker in test.markers})
        hint = f"; the run's markers: {', '.join(known) or 'none'}" if markers is not None else ""
        raise OptionError(f"none of the run's {len(tests):,} tests matches{hint}")
    return found


def resolve_nodeids(
    nodeids: Iterable[str], tests: Sequence[TestResult], *, root: Path, cwd: Path
) -> tuple[str, ...]:
    """Node ids by paths as pytest takes them: absolute, or relative to the current folder.

    A node id as pytest prints it, relative to the root, stays as it is.

    Args:
        nodeids: as they were typed.
        tests: as recorded.
        root: pytest's root folder in the traced run.
        cwd: the current folder, without links.
    """

    def resolve(typed: str) -> str:
        path, separator, rest = typed.partition("::")
        given = os.path.normpath(cwd / path)
        relative = [os.path.relpath(given, folder) for folder in (root, root.resolve())]
        # The folder "." is the current one alone.
        as_printed = os.path.normpath(path)
        if as_printed != ".":
            relative.append(as_printed)
        for found in (f"{one}{separator}{rest}" for one in relative):
            if any(_is_in(test.nodeid, found) for test in tests):
                return found
        return typed if as_printed != "." else given

    return tuple(map(resolve, nodeids))


def _is_in(nodeid: str, wanted: str) -> bool:
    wanted = wanted.rstrip("/")
    if wanted == ".":
        return True
    rest = nodeid.removeprefix(wanted)
    return nodeid == wanted or (rest != nodeid and rest.startswith(("::", "/", "[")))


def _matches(flag: str, expression: str, names: Collection[str], *, exact: bool) -> bool:
    # pytest has no public function for it. A second grammar would differ one day.
    from _pytest.mark import expression as grammar

    # As KeywordMatcher and MarkMatcher of _pytest/mark/__init__.py.
    lowered = [name.lower() for name in names]

    def has(name: str, /, **arguments: object) -> bool:
        if arguments:
            raise OptionError(f"{flag} {expression!r}: the arguments of markers are not recorded")
        return name in names if exact else any(name.lower() in known for known in lowered)

    try:
        return bool(grammar.Expression.compile(expression).evaluate(has))
    # ParseError before pytest 9.
    except (SyntaxError, getattr(grammar, "ParseError", SyntaxError)) as e:
        raise OptionError(f"{flag} {expression!r}: {e}") from e
