"""RECORD: rows of files that may be code, digests, and rows changed for other files.

https://packaging.python.org/specifications/recording-installed-packages. A row has the path, the
digest (``sha256=`` and urlsafe base64 without padding) and the size in bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.file_kinds import CODE_SUFFIXES, is_named_code
from pytest_negativa.models.file_state import FileState
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.system import read_regular

RECORD = "RECORD"


class RecordLine(NamedTuple):
    """A file's row in a RECORD: its second and third field."""

    digest: str
    size: str


def record_digest(sha256: str) -> str:
    """The second field of a row for a SHA-256 in hex."""
    encoded = base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=")
    return f"sha256={encoded.decode()}"


def read_rows(text: str) -> Iterator[list[str]]:
    """The rows of a RECORD.

    Raises:
        csv.Error: the text is not CSV, or a field has more than ``csv.field_size_limit()`` letters.
    """
    return csv.reader(io.StringIO(text, newline=""))


def code_lines(text: str) -> dict[str, RecordLine]:
    """Rows of a RECORD for files that may be code (``is_named_code``), by the path in the row.

    Raises:
        csv.Error: see ``read_rows``.
    """
    rows = (row for row in read_rows(text) if row and is_named_code(row[0]))
    return {row[0]: RecordLine(*(*row[1:3], "", "")[:2]) for row in rows}


def code_files(lines: Mapping[str, RecordLine]) -> dict[str, RecordLine]:
    """The lines of files that are GPU code by their names, by normalized path below the site.

    Without a digest and a size, nothing tells what such a file was.
    """
    found = (
        (os.path.normpath(name), line)
        for name, line in lines.items()
        if name.endswith(CODE_SUFFIXES) and line.digest and line.size.isdecimal() and int(line.size)
    )
    return {path: line for path, line in found if not path.startswith(("..", "/"))}


def digest_of_lines(lines: Mapping[str, RecordLine]) -> str:
    """SHA-256 of lines, which two installations of the same wheel share."""
    digest = hashlib.sha256()
    for path, (hashed, size) in sorted(lines.items()):
        digest.update(f"{path}\0{hashed}\0{size}\n".encode())
    return digest.hexdigest()


def update_rows(text: str, site: Path, changes: Mapping[str, RecordLine]) -> str:
    """A RECORD with other fields of some files; all other rows stay byte for byte.

    Args:
        text: the file's.
        site: the folder that its paths are relative to.
        changes: the new fields by normalized absolute path. Files without a row get none.

    Raises:
        csv.Error: it is not CSV.
    """
    return "".join(_update(row, site, changes) for row in io.StringIO(text, newline=""))


def update_record(record: Path, update: Callable[[str], str], hidden: Path | None = None) -> None:
    """Change what a file says of installed files.

    Args:
        record: a RECORD, or a file of ``conda-meta``; mode and owner stay as they are.
        update: its text to the new one.
        hidden: see ``storage.atomic.NewFile``.

    Raises:
        StoreError: the file can't be read or written; then it is as it was. Or another process
            changed it meanwhile.
    """
    try:
        before = FileState.of(record.stat())
        text = read_regular(record).decode("utf-8")
        updated = update(text)
    except FileNotFoundError:
        return
    except OSError as e:
        raise StoreError(f"{record}: cannot be read: {e.strerror}") from e
    except (csv.Error, *UNDECODABLE) as e:
        raise StoreError(f"{record}: damaged: {e}") from e
    if updated == text:
        return
    with refusing(record, "written"):
        if FileState.of(record.stat()) != before:
            raise StoreError(f"{record} was replaced while negativa worked; run the command again")
    write_atomically(record, updated.encode(), hidden=hidden, durable=True)


def _update(text: str, site: Path, changes: Mapping[str, RecordLine]) -> str:
    row = next(csv.reader([text]), [])
    line = changes.get(os.path.normpath(os.path.join(site, *row[:1])))
    if line is None or row[1:3] == list(line):
        return text
    buffer = io.StringIO()
    line_break = text[len(text.rstrip("\r\n")) :]
    csv.writer(buffer, lineterminator=line_break).writerow([row[0], *line, *row[3:]])
    return buffer.getvalue()
