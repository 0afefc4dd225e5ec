"""What no module may do with a file that it does not trust."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest_negativa

PACKAGE = Path(pytest_negativa.__file__).parent
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
YAML = {"load", "full_load", "unsafe_load"}


def dangers(tree: ast.AST) -> set[str]:
    """Imports and calls by which bytes of a file become code."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & CALLS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "yaml" and node.func.attr in YAML:
                found.add(f"yaml.{node.func.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.add("shell")
    return found


def test_no_module_turns_data_into_code() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    assert {str(p): found for p in paths if (found := dangers(ast.parse(p.read_bytes())))} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    code = "import pickle\nfrom marshal import loads\neval('1')\nyaml.load(x)\nf(shell=True)\n"
    assert dangers(ast.parse(code)) == {"pickle", "marshal", "eval", "yaml.load", "shell"}
