"""Slim libraries that are sound, and the certificate that is asked for them or for damaged ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import Range
from pytest_negativa.rewriting.compact.compact import PROGRAM, compact_library, declared_code
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.records import CompactOptions
from tests.support.compacting import build, plan_of, read, relocations_supported
from tests.support.corrupting import Pair
from tests.support.cutting import compile_library, needs_stub


@dataclass(frozen=True)
class Sound:
    """A sound result and what is known of it."""

    original: Path
    pair: Pair
    declared: str
    unused: list[Range]

    @property
    def is_cut(self) -> bool:
        return bool(self.pair.spare)

    def ask(
        self, pair: Pair, folder: Path, program: Path = PROGRAM
    ) -> subprocess.CompletedProcess[str]:
        """Ask for the certificate of a pair that may be damaged."""
        (folder / "lib.so").write_bytes(pair.library)
        files = [str(self.original), str(folder / "lib.so")]
        if self.is_cut:
            (folder / "lib.spare").write_bytes(pair.spare)
            files.append(str(folder / "lib.spare"))
        command = [str(program), *files]
        environ = {**os.environ, "ASAN_OPTIONS": "exitcode=97", "UBSAN_OPTIONS": "exitcode=97"}
        return subprocess.run(
            command, input=self.declared, capture_output=True, text=True, env=environ, check=False
        )


def cut(folder: Path, *flags: str, needed: Sequence[Range] = ()) -> Sound:
    folder.mkdir()
    library = compile_library(folder, *flags, pages=60)
    options = CutOptions(min_hole=4096, folders=("/opt/spares", "/srv/spares"))
    done = cut_library(library, folder / "lib.so", folder, needed, options)
    return Sound(library, Pair(done.library.read_bytes(), done.spare.read_bytes()), "", [])


def compacted(folder: Path, *flags: str, strip: bool = True, every: int = 13) -> Sound:
    library = build(folder, *flags)
    library_map = read(library)
    plan = plan_of(library_map, lambda number: number % every == 2)
    options = CompactOptions(min_gain=0, strip=strip)
    compact_library(library, folder / "lib.so", library_map, plan, options=options)
    with ByteSource(library) as source:
        declared = declared_code(source, library_map, plan)
    unused = [(d.start, d.end) for d in plan.decisions if not d.kept]
    return Sound(library, Pair((folder / "lib.so").read_bytes()), declared, unused)


EVERY_TENTH = [(at * 40960, at * 40960 + 1) for at in range(10)]


def build_sound(folder: Path) -> list[Sound]:
    """Compacted libraries, then those that are cut, if this machine can."""
    found = [
        compacted(folder / "compacted"),
        compacted(folder / "symbols", "-g", "-Wl,-z,noseparate-code", strip=False),
        compacted(folder / "all gone", every=10_000),
    ]
    if needs_stub.args[0]:
        return found
    packed = ["-Wl,-z,pack-relative-relocs"] if relocations_supported() else []
    return [
        *found,
        cut(folder / "cut"),
        cut(folder / "pieces", "-Wl,-z,now", needed=EVERY_TENTH),
        cut(folder / "packed", "-DDATA", "-Wl,-z,noseparate-code", *packed),
    ]
