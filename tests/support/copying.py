"""A file to copy and edits of every kind."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.rewriting.layout import STEP, Edits, Fill, Patch

SIZE = (5 << 20) + 123


def identity(path: Path) -> LibraryIdentity:
    data = path.read_bytes()
    return LibraryIdentity(
        path=str(path),
        size=len(data),
        mtime_ns=path.stat().st_mtime_ns,
        build_id=None,
        soname=None,
        sha256=hashlib.sha256(data).hexdigest(),
    )


MANY = Edits.of(
    SIZE,
    [
        Fill(0, 1, 7),
        Patch(1, b"\xff\xfe"),
        # To the end of a step, over one, from its beginning; more than two steps; one byte apart.
        Fill(STEP - 10, STEP, 1),
        Patch(STEP, b"abc"),
        Fill(2 * STEP - 5, 2 * STEP + 5, 2),
        Patch(3 * STEP - 2, b"over"),
        Fill(4 * STEP, 7 * STEP + 1, 3),
        Patch(7 * STEP + 1, b"x"),
        Fill(7 * STEP + 2, 7 * STEP + 3, 4),
        *(Fill(8 * STEP + 20 * i, 8 * STEP + 20 * i + 10, 5) for i in range(500)),
        Fill(SIZE - 3, SIZE, 0),
    ],
)
