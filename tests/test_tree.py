"""The tests mirror the package, and what they share lies in ``tests/support``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.libraries import ROOT, TESTS

MODULES = sorted(path for path in TESTS.rglob("*.py") if TESTS / "fixtures" not in path.parents)
NO_PACKAGES = {"data", "docs", "fixtures", "fuzz", "gpu", "real", "support"}


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_only_helpers_are_imported(path: Path) -> None:
    assert [
        name
        for name in imported(path)
        if name.startswith("tests.") and not name.startswith("tests.support.")
    ] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_nothing_private_is_patched(path: Path) -> None:
    """What a test has to change is a parameter."""
    assert [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setattr"
        and isinstance(name := node.args[1], ast.Constant)
        and str(name.value).startswith("_")
    ] == []


def test_folders_are_those_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    mirrored = {folder for folder in folders if folder.parts[:1] not in {(n,) for n in NO_PACKAGES}}
    assert [f for f in mirrored if not (ROOT / "pytest_negativa" / f).is_dir()] == []
