"""The tests mirror the package, share helpers only, and patch nothing private; names are unique."""

from __future__ import annotations

import ast
import functools
from collections import Counter

from tests.support.libraries import FIXTURES, ROOT, TESTS

NO_PACKAGES = {"data", "docs", "fixtures", "fuzz", "gpu", "oracle", "real", "support"}


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """All imports and calls in all modules of the tests, with the module's name."""
    return [
        (str(path.relative_to(TESTS)), node)
        for path in sorted(TESTS.rglob("*.py"))
        if FIXTURES not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
    ]


def test_only_helpers_are_imported() -> None:
    imported = [
        (name, module)
        for name, node in nodes()
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if module.startswith("tests.")
    ]
    assert len(imported) > 100
    assert [pair for pair in imported if not may_import(*pair)] == []


def may_import(module: str, imported: str) -> bool:
    inside = module.startswith("oracle/") and imported.startswith("tests.oracle.")
    return inside or imported.startswith("tests.support.")


def test_nothing_private_is_patched() -> None:
    """What a test has to change is a parameter."""
    patched = [
        (name, ast.unparse(node))
        for name, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setattr"
    ]
    assert patched
    assert [call for call in patched if ", '_" in call[1]] == []


def test_folders_are_those_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    mirrored = {folder for folder in folders if not NO_PACKAGES.intersection(folder.parts[:1])}
    assert len(mirrored) > 10
    assert [f for f in mirrored if not (ROOT / "pytest_negativa" / f).is_dir()] == []


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in (ROOT / "pytest_negativa").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []
