"""A project's folder to its first ``negativa.yaml`` (``negativa init``): what it imports."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope

_NAMES = (
    "torch|torchvision|triton|cupy|numba|jax|tensorflow|paddle|onnxruntime|tensorrt|vllm|xformers|"
    "flash[-_]attn|flashinfer|bitsandbytes|transformer[-_]engine|cudf|cuml|rmm|warp|pycuda"
)
_IMPORT = re.compile(rf"^\s*(?:import|from)\s+({_NAMES})\b", re.MULTILINE)
_REQUIREMENT = re.compile(rf"^[\s\"']*({_NAMES})\b", re.MULTILINE)
_INSTALLED = (
    ("requirements.txt", "-r requirements.txt "),
    ("pyproject.toml", "-e . "),
    ("setup.py", "-e . "),
)
_NOT_OURS = ("site-packages", "node_modules", "build", "dist")


class Project(NamedTuple):
    """GPU code of a project, and its use of it.

    Attributes:
        packages: GPU packages that it imports or requires, by import name.
        libraries: globs on the files of its own libraries with GPU code.
        installed_by: what pip installs for it: its requirements, itself, or nothing.
        on_gitlab: whether GitLab runs its CI.
    """

    packages: tuple[str, ...]
    libraries: tuple[str, ...]
    installed_by: str
    on_gitlab: bool


def read_project(root: Path) -> Project:
    """Read the files below ``root``, but for environments and hidden folders."""
    packages: set[str] = set()
    libraries: set[str] = set()
    for path in _iter_files(root):
        is_text = path.name == "pyproject.toml" or path.match("*requirements*.txt")
        if path.suffix == ".py" or is_text:
            pattern = _REQUIREMENT if is_text else _IMPORT
            with contextlib.suppress(OSError):
                packages.update(pattern.findall(path.read_text(errors="replace")))
        elif ".so" in path.suffixes and _has_code(path):
            libraries.add(f"{path.name.partition('.')[0]}.*")
    return Project(
        packages=tuple(sorted({name.replace("-", "_") for name in packages})),
        libraries=tuple(sorted(libraries)),
        installed_by=next((how for name, how in _INSTALLED if (root / name).is_file()), ""),
        on_gitlab=(root / ".gitlab-ci.yml").is_file(),
    )


def first_settings(project: Project) -> str:
    """A ``negativa.yaml`` for the project; what it can't know is a comment."""
    used = ", ".join(project.packages) or "no GPU package by name"
    include = [f"dist:{name.replace('_', '-')}*" for name in project.packages or ("torch",)]
    mark = "" if project.libraries else "# "
    own = list(project.libraries or ("libours.*",))
    return f"""\
# Settings of pytest-negativa. negativa schema negativa prints a JSON Schema for editors.

# All loaded libraries with GPU code are analysed. The project uses {used}.
# libraries:
#   include: {json.dumps(include)}

# GPUs of production, beside those that run the tests.
# keep:
#   archs: [A100, L4]

# The project's own libraries, and the least percentage of their kernels that tests must run.
{mark}coverage:
{mark}  libraries: {json.dumps(own)}
#   fail_under: 80

# Limits over all libraries that fail a session.
# thresholds:
#   max_unused_percent: 99
"""


def _iter_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".")
            and name not in _NOT_OURS
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        yield from (path for name in files if (path := Path(folder) / name).is_file())


def _has_code(path: Path) -> bool:
    try:
        return bool(read_library(path, Scope(headers_only=True)).sections)
    except (NegativaError, OSError):
        return False
