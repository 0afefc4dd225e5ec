"""Asks ``certify.c``, a program that trusts no writer, whether a slim library means the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.records import CheckError
from pytest_negativa.rewriting.edits import Edits

PROGRAM = Path(__file__).with_name("_certify")
NO_PROGRAM = "not certified: the program that certifies was not built; it needs a C compiler"


def certify(
    original: str | os.PathLike[str],
    slim: Path,
    spare: Path | None = None,
    *,
    declared: str = "",
    sha256: str | None = None,
) -> str:
    """Compare a slim library with its original.

    Args:
        original, slim: the library before and after.
        spare: the file that has the removed pages, if there is one.
        declared: see ``declared_code``.
        sha256: of the original, if it is known.

    Returns:
        The program's word: ``certified: ...``, or why it could not be asked.

    Raises:
        CheckError: the library means something else.
    """
    if not PROGRAM.is_file():
        return NO_PROGRAM
    known = ["--hashed", sha256] if sha256 is not None else []
    files = [str(file) for file in (original, slim, spare) if file is not None]
    done = subprocess.run(
        [str(PROGRAM), "--holes", "-", *known, *files],
        input=declared,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise CheckError(original, f"the result fails its check: {done.stderr.strip()}")
    return done.stdout.strip()


def declared_code(library_map: LibraryMap, plan: LibraryPlan, edits: Edits | None = None) -> str:
    """What may differ, for the certificate: a line for each region and each block of unused code.

    Args:
        library_map, plan: of the original.
        edits: those within kept GPU code (trimmed cubins).
    """
    return "".join(
        f"{kind} {start} {end}\n" for kind, start, end in _declared(library_map, plan, edits)
    )


def _declared(
    library_map: LibraryMap, plan: LibraryPlan, edits: Edits | None
) -> Iterator[tuple[str, int, int]]:
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    unused -= {(d.start, d.end) for d in plan.decisions if d.kept}
    for region in library_map.iter_regions():
        if any((e.payload.start, e.payload.end) in unused for e in region.elements):
            yield "region", region.span.start, region.span.end
    for block in library_map.iter_code():
        start = block.start if block.region is None else block.header_offset
        if start == block.end:
            continue
        if (block.start, block.end) in unused:
            yield "unused", start, block.end
        elif edits is not None and any(True for _ in edits.overlapping(start, block.end)):
            yield "trimmed", start, block.end
