"""Puts an original into the places of a slimmed library, and its lines back into RECORD files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.installed.record import RecordLine
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.models.slimming import SlimmedFile
from pytest_negativa.slimming.manifest import digest_of
from pytest_negativa.slimming.replace import copy_file, has_digest, replace_all
from pytest_negativa.slimming.spares import rebuild
from pytest_negativa.slimming.tree import staged_name
from pytest_negativa.storage.shared_folders import refuse_shared


def put_back(
    aside: Path | None,
    places: Mapping[Path, FileState | None],
    entry: SlimmedFile,
    token: str,
    like: Path | None,
) -> None:
    """Put a copy of an original into its places.

    Args:
        aside: the original; None: the library in the first place and its spare give it back.
        places, token: see ``replace_all``.
        entry: of the manifest.
        like: whose attributes it gets instead of those of ``aside``, such as those of the file
            there. A kept original may be that of another folder, too, where its attributes were
            others.

    Raises:
        NegativaError: it can't be done.
    """
    first = next(iter(places))
    staged = staged_name(first, token)
    refuse_shared(*{place.parent for place in places})
    try:
        if aside is None:
            rebuild(first, staged, entry.mtime_ns)
        else:
            # Not a link: a program that writes to the library must not change the kept original.
            copy_file(aside, staged, like=like, mtime_ns=entry.mtime_ns)
        if not has_digest(staged, entry.original_sha256):
            raise ReconstructError(f"{aside} changed while it was copied; run the command again")
        replace_all(staged, places, token)
    except OSError as e:
        raise ReconstructError(f"{first}: cannot be put back: {e.strerror}") from e
    finally:
        staged.unlink(missing_ok=True)


def lines_before(root: Path, entry: SlimmedFile) -> Iterator[tuple[str, str, RecordLine]]:
    """The lines of RECORD files before slimming: the RECORD, the library's path, the line.

    Names that do not lead to the original have none.
    """
    for row in entry.rows:
        if digest_of(root / row.name) == entry.original_sha256:
            record = os.path.normpath(root / row.record)
            yield record, os.path.join(root, row.name), RecordLine(row.digest, row.size)
