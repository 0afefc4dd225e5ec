"""Asks ``certify.c``, a program that trusts no writer, whether a slim library means the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.compact.records import CannotCompactError, CheckError
from pytest_negativa.rewriting.edits import Edits

PROGRAM = Path(__file__).with_name("_certify")
# Its exit status; 2 is that it can't know, such as without memory.
_WRONG = 1


def certify(
    original: str | os.PathLike[str],
    slim: Path,
    spare: Path | None = None,
    *,
    declared: str = "",
    sha256: str | None = None,
    page_size: int | None = None,
) -> str:
    """Compare a slim library with its original.

    Args:
        original, slim: the library before and after.
        spare: the file that has the removed pages, if there is one.
        declared: see ``declared_code``.
        sha256: of the original, if it is known.
        page_size: bytes; None: the largest page of a kernel for the library's machine.

    Returns:
        The program's word, a line.

    Raises:
        CheckError: the library means something else: the writer has a bug, or the disk is faulty.
        CannotCompactError: the program can't be run (without a C compiler it was not built), or
            can't read a file, or was killed.
    """
    try:
        done = subprocess.run(
            [PROGRAM, original, slim, spare or "", sha256 or "", str(page_size or 0)],
            input=declared,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as e:
        raise CannotCompactError(
            original,
            f"{PROGRAM}, which certifies results, can't be run: {e.strerror}; install "
            "pytest-negativa again, from a wheel or with a C compiler",
        ) from e
    if done.returncode == _WRONG:
        problem = done.stderr.strip().partition(": not certified: ")[2]
        raise CheckError(original, f"the result fails its check: {problem}")
    if done.returncode:
        why = done.stderr.strip() or f"status {done.returncode}"
        raise CannotCompactError(original, f"the result could not be checked: {why}")
    return done.stdout.strip()


def declared_code(
    source: ByteSource, library_map: LibraryMap, plan: LibraryPlan, edits: Edits | None = None
) -> str:
    """Declare what may differ, for the certificate: lines for regions, unused and trimmed code.

    Args:
        source, library_map, plan: of the original.
        edits: those within kept GPU code, which trim cubins.
    """
    found = _declared(source, library_map, plan, edits or Edits(source.size))
    return "".join(f"{' '.join(map(str, line))}\n" for line in found)


def _declared(
    source: ByteSource, library_map: LibraryMap, plan: LibraryPlan, edits: Edits
) -> Iterator[tuple[object, ...]]:
    unused = {(d.start, d.end) for d in plan.decisions if not d.kept}
    unused -= {(d.start, d.end) for d in plan.decisions if d.kept}
    for region in library_map.iter_regions():
        yield "region", region.span.start, region.span.end
    for block in library_map.iter_code():
        start, end = block.header_offset, block.payload.end
        if (block.payload.start, end) in unused:
            if start < end:
                yield "unused", start, end
        elif any(True for _ in edits.overlapping(start, end)):
            trimmed = edits.applied_to(source.read(start, end - start), start)
            yield "trimmed", start, end, hashlib.sha256(trimmed).hexdigest()
