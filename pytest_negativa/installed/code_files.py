"""The files of distributions that are GPU code by their names, by what RECORD says of them."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.installed.distributions import Distribution, named_metadata
from pytest_negativa.installed.record import RECORD, RecordLine, iter_rows
from pytest_negativa.models.code_files import map_files
from pytest_negativa.models.file_kinds import CODE_SUFFIXES
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.storage.system import read_regular

_MARKS = tuple(suffix.encode() for suffix in CODE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class CodeDistribution:
    """A distribution that has such files.

    Attributes:
        site: real path of the folder that it is installed in.
        rows: what RECORD says of each file, by path below the site.
    """

    name: str
    version: str
    site: Path
    rows: Mapping[str, RecordLine]

    @property
    def digest(self) -> str:
        """SHA-256 of the rows, which two installations of the same wheel share."""
        return digest_of_rows(self.rows)

    def map(self) -> LibraryMap:
        """The files as one library."""
        sizes = {name: int(row.size) for name, row in self.rows.items()}
        return map_files(str(self.site), self.name, self.digest, sizes)


def digest_of_rows(rows: Mapping[str, RecordLine]) -> str:
    """SHA-256 of what RECORD says of the files."""
    digest = hashlib.sha256()
    for path, (hashed, size) in sorted(rows.items()):
        digest.update(f"{path}\0{hashed}\0{size}\n".encode())
    return digest.hexdigest()


def find_code_distributions(folders: Iterable[str]) -> Iterator[CodeDistribution]:
    """Yield the distributions in some folders, such as ``sys.path``, that have such files."""
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders if folder):
        for record in sorted(Path(folder).glob(f"*.dist-info/{RECORD}")):
            try:
                data = read_regular(record)
                # Most distributions have none, and reading CSV takes most of the time.
                if not any(mark in data for mark in _MARKS):
                    continue
                rows = dict(code_rows(data.decode("utf-8")))
                metadata = named_metadata(Distribution(record.parent))
            except (OSError, UnicodeDecodeError, csv.Error):
                continue
            if rows and metadata is not None and (version := metadata["Version"]) is not None:
                name = str(metadata["Name"])
                yield CodeDistribution(name, version, Path(folder), rows)


def code_rows(text: str) -> Iterator[tuple[str, RecordLine]]:
    """The rows of a RECORD that are about such files, by path below the site.

    Raises:
        csv.Error: it is not CSV.
    """
    for _, row in iter_rows(text):
        if (
            len(row) >= 3
            and row[0].endswith(CODE_SUFFIXES)
            and row[1]
            and row[2].isdecimal()
            and int(row[2])
        ):
            path = os.path.normpath(row[0])
            if not path.startswith("..") and not os.path.isabs(path):  # noqa: PTH117
                yield path, RecordLine(row[1], row[2])
