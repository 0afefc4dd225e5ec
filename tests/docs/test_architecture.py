"""Every module, name and path in docs/architecture.md exists, and its index lists each file."""

from __future__ import annotations

import importlib
import re
import subprocess

import pytest

import pytest_negativa
from tests.support.libraries import DOCS, ROOT

PACKAGE = ROOT / "pytest_negativa"
TEXT = (DOCS / "architecture.md").read_text("utf-8")
CODE = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
TOP = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
TOP -= {"__init__", "__main__", "__pycache__", "native"}  # the last has headers alone

DOTTED = [c for c in CODE if re.fullmatch(r"[a-z_]+(\.\w+)*", c) and c.partition(".")[0] in TOP]
PATHS = [c for c in CODE if re.fullmatch(r"[\w-]+/[\w/.-]*", c)]
# Files of a run, which no source tree holds.
RUN_FILES = {"cpu/", "map/", "plan/", "spans/", "verify/"}
PICTURE = TEXT.split("```text")[1].split("```")[0]
ENTRY = re.compile(r"(\w+(?:/|\.py))(?=\s|$)")


def test_something_is_found() -> None:
    assert len(DOTTED) > 20 and len(PATHS) > 5


@pytest.mark.parametrize("name", [n for n in DOTTED if not n.endswith((".py", ".json"))])
def test_a_name_exists(name: str) -> None:
    value: object = pytest_negativa
    module = pytest_negativa.__name__
    for part in name.split("."):
        if not hasattr(value, part):
            importlib.import_module(f"{module}.{part}")
        value = getattr(value, part)
        module = f"{module}.{part}"


@pytest.mark.parametrize(
    "path", [*(p for p in PATHS if p not in RUN_FILES), *ENTRY.findall(PICTURE)]
)
def test_a_path_exists(path: str) -> None:
    assert (PACKAGE / path).exists() or (ROOT / path).exists()


def test_the_index_has_the_first_line_of_each_source_file() -> None:
    command = next(c for c in CODE if c.startswith("grep "))
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    index = dict(line.split(":", 1) for line in done.stdout.decode().splitlines())
    files = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".c", ".h", ".js")]
    assert index == {
        str(path.relative_to(ROOT)): path.read_text("utf-8").partition("\n")[0] for path in files
    }
    assert not [path for path, line in index.items() if len(line) > 100]


def test_the_picture_shows_the_floors_that_imports_keep_to() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    layers = re.search(r"^layers = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    assert layers is not None
    kept = [set(floor.split(" | ")) for floor in re.findall(r'"(.+)"', layers[1])]
    shown: list[set[str]] = []
    for line in PICTURE.strip("\n").splitlines():
        if re.match(r" *\d+ ", line):
            shown.append(set())
        shown[-1] |= {name.removesuffix(".py").rstrip("/") for name in ENTRY.findall(line)}
    assert shown == kept
    assert set().union(*shown) == TOP
