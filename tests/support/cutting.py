"""Libraries that are cut, and a program that uses them, built by the system's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.spans import Range, Span
from pytest_negativa.pages.auditors import misses_environment
from pytest_negativa.pages.note import why_no_stub
from pytest_negativa.pages.page_watch import read_processor
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.compiling import SOURCES, compile_c, compile_shared

CXX = shutil.which("g++")
PAGES = 200
OPTIONS = CutOptions(min_hole=4096)

needs_stub = pytest.mark.skipif(
    why_no_stub() is not None or CXX is None,
    reason="needs the code that maps spares, and a C++ compiler",
)


def logged(logs: Path | str) -> dict[str, str]:
    """Variables with which what a program misses is logged."""
    return misses_environment({}, Path(logs))


def compile_library(folder: Path, *flags: str, pages: int = PAGES) -> Path:
    """A library with so many functions of a page each."""
    target = folder / "libpages.so"
    command = [CXX or "c++", "-std=c++17", "-O1", "-shared", "-fPIC", f'-DPAGES="{pages}"', *flags]
    subprocess.run([*command, "-o", target, SOURCES / "spare" / "library.cpp"], check=True)
    return target


def compile_later(folder: Path) -> tuple[Cut, Path]:
    """A library that is cut, behind another one that starts first, and a program with both."""
    compile_shared("spare/later.c", folder / "libfirst.so", "-DFIRST")
    flags = ("-L", str(folder), "-Wl,--no-as-needed", "-lfirst", "-Wl,-rpath,$ORIGIN")
    later = compile_shared("spare/later.c", folder / "liblater.so", *flags)
    program = compile_c("spare/main.c", folder / "program", *flags[:2], "-llater", *flags[2:])
    return cut_library(later, later, folder, [], CutOptions(min_hole=4096)), program


def trace_of(library: Path) -> HostUsage:
    """A trace that watched the pages of functions, and saw every 20th touched."""
    with library.open("rb") as file:
        text = ELFFile(file).get_section_by_name(".text")
        assert text is not None
        first, size = text["sh_offset"], text["sh_size"]
    pages = range(-(-first // 4096) * 4096, first + size - 4096, 4096)
    sha256 = digest_of(library)
    assert sha256 is not None
    return HostUsage(
        processors=(read_processor(),),
        processes={"run": 1},
        libraries=(
            HostLibrary(
                sha256=sha256,
                size=library.stat().st_size,
                build_id=None,
                paths=(str(library),),
                watched=(Span(pages[0], pages[-1] + 4096),),
                touched=tuple(Span(page, page + 4096) for page in pages[::20]),
            ),
        ),
        incomplete=(),
    )


@dataclass(frozen=True)
class Kit:
    """A library and a program; see ``sources/spare``."""

    library: Path
    program: Path
    pages: int

    def cut(self, folder: Path, needed: Sequence[Range] = (), options: CutOptions = OPTIONS) -> Cut:
        """Cut the library into a folder, all of it by default."""
        folder.mkdir(parents=True, exist_ok=True)
        return cut_library(self.library, folder / self.library.name, folder, needed, options)

    def run(
        self, what: str, path: Path, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the program on a library; the environment is empty but for ``environ``."""
        return subprocess.run(
            [self.program, what, path, str(self.pages), *arguments],
            env=dict(environ or {}),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    @property
    def output(self) -> str:
        """What the program prints when it has used all pages."""
        return f"42 {sum(i + 7 for i in range(self.pages))} 0 30 60 90 120\n"


def build_kit(folder: Path, *, pages: int = PAGES) -> Kit:
    """Compile the library and the program."""
    program = compile_c("spare/program.c", folder / "program")
    return Kit(compile_library(folder, pages=pages), program, pages)


def may_mount() -> bool:
    """Whether file systems can be mounted in a namespace of our own."""
    if os.geteuid() != 0:
        return False
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0
