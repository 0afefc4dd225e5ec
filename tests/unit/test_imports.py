"""Who imports whom: read off the source, so that the layers stay layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_negativa

PACKAGE = Path(pytest_negativa.__file__).parent
ROOT = "pytest_negativa"

# What a module may import from us; a name stands for the module and all below it. What is not
# here is no layer that others rest on: see STAGES and FACES.
LAYERS = {
    "errors": (),
    "arch": ("errors",),
    "models": ("errors", "arch", "models"),
    "store": ("errors", "arch", "models"),
    "gpucode": ("errors", "arch", "models", "gpucode"),
    "summarize": ("arch", "models"),
    "reachable": ("models",),
    "inputs": ("errors",),
    "progress": (),
    "mapcache": ("errors", "arch", "models", "store", "gpucode", "config_kinds"),
    "mapping": (
        "errors", "arch", "models", "store", "gpucode", "summarize", "mapcache",
    ),
}  # fmt: skip

# From frozen models to a frozen model each; only pipeline and the faces compose them.
STAGES = (
    "inspecting", "merge", "locate", "plan", "locking", "rewriting", "proving",
    "measuring", "imagereport",
)  # fmt: skip
FACES = ("plugin", "cli", "pipeline", "session", "reporter")

# Libraries that only one place may know, wherever in the file the import stands.
DOORS = {
    "elftools": ("gpucode.elf",),
    "lz4": ("gpucode.payload", "rewriting.repack"),
    "tabulate": ("reporting.tables",),
    "rich": ("progress",),
    "click": ("cli", "cli_run", "cli_prove", "cli_slim", "cli_measure", "cli_types", "options"),
    "cupti": ("tracing",),
    "pynvml": ("measuring.nvml",),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports at run time, at its top or later."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # "from package import module" and "from module import name" look alike.
            yield from (
                f"{module}.{alias.name}"
                if (PACKAGE.parent / module.replace(".", "/") / f"{alias.name}.py").exists()
                else module
                for alias in node.names
            )
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return set(visit(ast.parse(path.read_text("utf-8"))))


def ours(path: Path) -> set[str]:
    return {name.removeprefix(f"{ROOT}.") for name in imports(path) if name.startswith(f"{ROOT}.")}


def within(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


MODULES = dict(modules())


def test_modules_are_found() -> None:
    assert {"", "cli", "models.library", "gpucode.elf"} <= set(MODULES)
    assert "models.library" in ours(MODULES["store"])
    assert "gpucode.frames" in ours(MODULES["gpucode.scan"])
    assert set(LAYERS) <= {name.split(".")[0] for name in MODULES}


@pytest.mark.parametrize("name", [n for n in MODULES if within(n, tuple(LAYERS))])
def test_layers(name: str) -> None:
    allowed = LAYERS[name.split(".")[0]]
    assert {n for n in ours(MODULES[name]) if not within(n, allowed)} == set()


@pytest.mark.parametrize("name", [n for n in MODULES if within(n, STAGES)])
def test_stages_never_import_each_other(name: str) -> None:
    own = name.split(".")[0]
    others = tuple(stage for stage in STAGES if stage != own) + FACES
    assert {n for n in ours(MODULES[name]) if within(n, others)} == set()


@pytest.mark.parametrize("name", [n for n in MODULES if within(n, ("tracing", "reporting"))])
def test_tracing_and_reporting_know_no_stage(name: str) -> None:
    # The record of all that the stages found is pipeline's.
    allowed = {"pipeline"} if name == "reporting.build" else set()
    assert {n for n in ours(MODULES[name]) if within(n, STAGES + FACES)} <= allowed


@pytest.mark.parametrize("library", DOORS)
def test_doors(library: str) -> None:
    users = {name for name, path in MODULES.items() if within_any(imports(path), library)}
    assert {name for name in users if not within(name, DOORS[library])} == set()


def within_any(names: set[str], library: str) -> bool:
    return any(within(name, (library,)) for name in names)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "pytest_negativa",
            "msgspec elftools zstandard lz4 click cupti rich tabulate yaml packaging "
            "importlib.metadata",
        ),
        (
            "pytest_negativa.cli",
            "msgspec elftools zstandard lz4 cupti rich tabulate yaml packaging",
        ),
        ("pytest_negativa.inspecting", "rich tabulate cupti multiprocessing importlib.metadata"),
    ],
)
def test_import_brings_only_what_is_needed(module: str, unwanted: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {module}; "
        f"print(*(set({unwanted.split()!r}) & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
