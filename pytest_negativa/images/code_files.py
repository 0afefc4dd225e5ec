"""Files of a tree that are GPU code themselves: which of them could go."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from pytest_negativa.arch import ComputeCapability, is_for_any
from pytest_negativa.images.tree import CodeFile, Tree
from pytest_negativa.installed.code_files import code_rows, digest_of_rows
from pytest_negativa.installed.record import RECORD
from pytest_negativa.models.file_kinds import CODE_SUFFIXES, FileKind


def for_other_devices(
    files: Mapping[str, CodeFile], devices: Sequence[ComputeCapability]
) -> Iterator[str]:
    """The files that ``slim --arch`` would remove for these devices; without devices, none."""
    for path, file in files.items() if devices else ():
        is_ptx = file.kind is FileKind.PTX
        is_other = file.arch is not None and not is_for_any(file.arch, devices, is_ptx=is_ptx)
        if is_other and path.endswith(CODE_SUFFIXES):
            yield path


def unused_files(tree: Tree, kept: Mapping[str, AbstractSet[str]]) -> Iterator[tuple[str, bool]]:
    """Files of distributions in a plan or lock, each with whether it may go.

    Args:
        tree: the file tree.
        kept: the files that stay, below the site, by digest of the distribution's rows in RECORD.
    """
    for folder in sorted(tree.dist_infos) if kept else ():
        with contextlib.suppress(csv.Error):
            rows = dict(code_rows(tree.read_list(f"{folder}/{RECORD}")))
            stays = kept.get(digest_of_rows(rows))
            base = folder.rpartition("/")[0]
            for name, row in rows.items() if stays is not None else ():
                path = f"{base}/{name}".lstrip("/")
                path = tree.aliases.get(path, path)
                file = tree.code_files.get(path)
                if file is not None and file.size == int(row.size):
                    yield path, name not in (stays or ())
