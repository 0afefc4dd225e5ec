"""How large the package is, in the units of ``tests/budget.yaml``.

``python -m tests.support.budget`` writes today's sizes there.

Statements are nodes of the syntax tree, so neither formatting nor docstrings count.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator

import click
import yaml

from pytest_negativa.cli.main import main
from pytest_negativa.settings.options import OPTIONS
from tests.support.libraries import ROOT, TESTS

BUDGET = TESTS / "budget.yaml"
PACKAGE = ROOT / "pytest_negativa"
_TOP_LEVEL = "top level"
_RECORDS = {"Record", "Struct", "NamedTuple", "TypedDict", "dataclass"}


def read_budget() -> dict[str, dict[str, int]]:
    """The most that the package may have; see ``measure``."""
    budget: dict[str, dict[str, int]] = yaml.safe_load(BUDGET.read_text())
    return budget


@functools.cache
def measure() -> dict[str, dict[str, int]]:
    """The package's statements by part, and its other sizes."""
    trees = {path: ast.parse(path.read_bytes()) for path in sorted(PACKAGE.rglob("*.py"))}
    statements: Counter[str] = Counter()
    for path, tree in trees.items():
        part, *inside = path.relative_to(PACKAGE).parts
        statements[part if inside else _TOP_LEVEL] += _count_statements(tree)
    commands = list(_commands(main))
    return {
        "statements": dict(sorted(statements.items())),
        "lines": {"C": _count_lines("*.c", "*.h"), "JSON": _count_lines("*.json")},
        "surface": {
            "commands": len(commands),
            "options of commands": sum(
                isinstance(p, click.Option) for c in commands for p in c.params
            ),
            "settings": len(OPTIONS),
        },
        "records": {"types": len(_records(trees.values()))},
    }


def _count_statements(tree: ast.AST) -> int:
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(tree)
    )


def _count_lines(*patterns: str) -> int:
    paths = [path for pattern in patterns for path in PACKAGE.rglob(pattern)]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def _commands(command: click.Command) -> Iterator[click.Command]:
    """Everything that can be run: a group only if it does something by itself."""
    if not isinstance(command, click.Group):
        yield command
        return
    if command.invoke_without_command:
        yield command
    context = click.Context(command)
    for name in command.list_commands(context):
        # Commands are imported when they are asked for.
        found = command.get_command(context, name)
        assert found is not None
        yield from _commands(found)


def _records(trees: Iterable[ast.AST]) -> set[str]:
    """Classes whose instances are fields alone, and those that extend them."""
    bases = {
        node.name: {ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases}
        | {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while more := {name for name, of in bases.items() if of & (_RECORDS | found)} - found:
        found |= more
    return found


def _write() -> None:
    head, _, _ = BUDGET.read_text().partition("\nstatements:")
    BUDGET.write_text(f"{head}\n{yaml.safe_dump(measure(), sort_keys=False)}")


if __name__ == "__main__":
    _write()
