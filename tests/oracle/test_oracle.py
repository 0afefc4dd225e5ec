"""The oracle knows the product from outside alone, and the product is as it was recorded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.compare import differences
from tests.oracle.product import shortened
from tests.support.libraries import ROOT

HERE = Path(__file__).parent


def imports(path: Path) -> set[str]:
    """The modules that a module imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_no_module_of_the_package_is_imported() -> None:
    """Nor by the helpers that the oracle imports."""
    waiting = sorted(path for path in HERE.rglob("*.py") if path.name != Path(__file__).name)
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found = imports(path)
        assert not [name for name in found if name.split(".")[0] == "pytest_negativa"], path
        files = (ROOT / (name.replace(".", "/") + ".py") for name in found)
        waiting += [file for file in files if file.is_file()]
    assert {HERE / "cases.py", ROOT / "tests" / "support" / "pages.py"} <= seen


def test_what_differs_is_named() -> None:
    recorded = {"rows": [[1, 2], [3, 4]], "lines": ["a", "b", "c"], "gone": 1, "same": None}
    now = {"rows": [[1, 2], [3, 5]], "lines": ["a", "x", "b", "c"], "same": None, "new": "n"}
    assert [row[1:] for row in differences("case", recorded, now)] == [
        ("gone", "1", "-"),
        ("lines[1]", "-", "x"),
        ("new", "-", "n"),
        ("rows[1][1]", "4", "5"),
    ]


def test_what_is_shortened_still_differs() -> None:
    rows = [[n, "kept" if n % 3 else "unused", n % 3 == 0] for n in range(1000)]
    before = shortened(rows)
    rows[500][1] = "unused"
    after = shortened(rows)
    assert before["length"] == after["length"] == 1000
    assert {row.field for row in differences("case", before, after)} == {
        "sha256",
        'column 1 > "kept"',
        'column 1 > "unused"',
    }
    assert shortened(rows[:10]) == rows[:10]


@pytest.mark.slow
def test_the_product_is_as_it_was_recorded() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle", "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
