"""Compiles the C sources of these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.libraries import SUPPORT

SOURCES = SUPPORT / "sources"
CC = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")

needs_compiler = pytest.mark.skipif(CC is None, reason="needs a C compiler")


def compile_c(source: str, target: Path, *flags: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [CC or "cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", str(target), str(SOURCES / source), *flags, "-ldl"], check=True)
    return target


def compile_shared(source: str, target: Path, *flags: str) -> Path:
    return compile_c(source, target, "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *flags)
