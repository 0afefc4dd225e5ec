"""Finds what is stored more than once: whole files, and GPU code in different files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pytest_negativa.models.duplicates import (
    CodeDigest,
    Duplicates,
    LibraryContent,
    SameFiles,
    SharedCode,
)


def find_duplicates(contents: Iterable[LibraryContent]) -> Duplicates:
    """What is stored more than once in some libraries; each path counts once."""
    by_digest: defaultdict[str, list[LibraryContent]] = defaultdict(list)
    for one in sorted({c.path: c for c in contents}.values(), key=lambda c: c.path):
        by_digest[one.sha256].append(one)
    files = [
        SameFiles(sha256=digest, size=group[0].size, paths=tuple(one.path for one in group))
        for digest, group in by_digest.items()
        if len(group) > 1
    ]
    code = _shared_code(group[0] for group in by_digest.values())
    return Duplicates(
        files=tuple(sorted(files, key=lambda row: (-row.saved_bytes, row.paths))),
        code=tuple(sorted(code, key=lambda row: (-row.saved_bytes, row.paths))),
        saved_bytes=sum(f.saved_bytes for f in files) + sum(c.saved_bytes for c in code),
    )


def _shared_code(libraries: Iterable[LibraryContent]) -> list[SharedCode]:
    places: defaultdict[CodeDigest, list[str]] = defaultdict(list)
    for library in libraries:
        for code in library.code:
            places[code].append(library.path)
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for code, paths in places.items():
        if len(paths) > 1:
            groups[tuple(paths)].append(code.size)
    return [
        SharedCode(paths=paths, regions=len(sizes), size=sum(sizes))
        for paths, sizes in groups.items()
    ]
