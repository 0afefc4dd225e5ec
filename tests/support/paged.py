"""A library whose functions each lie on a page of their own: which of them ran is known."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_negativa.models.spans import Span
from pytest_negativa.pages.auditors import why_unwatchable
from tests.support.compiling import compile_c, compile_shared

needs_page_watch = pytest.mark.skipif(why_unwatchable() is not None, reason=str(why_unwatchable()))

# What the library's program calls, by itself or in threads, children and handlers.
FUNCTIONS = {
    *("in_constructor", "in_main", "in_thread", "in_child", "in_grandchild"),
    *("in_handler", "when_blocked", "at_exit"),
}


def compile_paged(folder: Path) -> Path:
    return compile_shared("pages/library.c", folder / "libpaged.so")


def compile_program(folder: Path) -> Path:
    return compile_c("pages/program.c", folder / "program")


def compile_constants(folder: Path, *flags: str) -> Path:
    """A library with 12 blocks of constants, each wider than what the kernel maps around a page."""
    made = compile_shared("pages/constants.c", folder / "made.so", *flags).read_bytes()
    target = folder / "libconstants.so"
    # Page by page: Linux 6.18 maps whole what it has as one folio.
    with target.open("wb", buffering=0) as file:
        for at in range(0, len(made), 4096):
            file.write(made[at : at + 4096])
    (folder / "made.so").unlink()
    return target


def symbols_of(library: Path) -> dict[int, str]:
    """By address: the functions that a library exports."""
    output = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    return {int(words[0], 16): words[2] for words in map(str.split, output.splitlines())}


def functions_in(library: Path, spans: Iterable[Span]) -> set[str]:
    """The functions that begin in spans of the file; its code lies at offsets like addresses."""
    names = symbols_of(library).items()
    return {name for span in spans for at, name in names if span.start <= at < span.end}
