"""The examples get along with the public API; see docs/reference/api.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.libraries import EXAMPLES, ROOT

PUBLIC = re.compile(r"pytest_negativa(\.models(\..+)?|\.hookspecs|\.tracing\.detector)?")


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] == "pytest_negativa"}


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(EXAMPLES.rglob("*.py")) if imports_of(file)],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_examples_import_public_names_only(file: Path) -> None:
    assert not [name for name in imports_of(file) if not PUBLIC.fullmatch(name)]
