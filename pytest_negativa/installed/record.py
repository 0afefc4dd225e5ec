"""Notes of installers on files: RECORD of a distribution, and ``conda-meta`` of an environment.

RECORD: https://packaging.python.org/specifications/recording-installed-packages. A row has the
path, the digest (``sha256=`` and urlsafe base64 without padding) and the size in bytes.

A package of conda has a JSON file in ``conda-meta``, a ``PrefixRecord`` in conda's
conda/models/records.py. ``files`` lists its files, and ``paths_data`` has what ``conda doctor``
compares with them (``find_altered_packages`` in altered_files.py), also by way of links.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_negativa.errors import StoreError, refusing
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.file_kinds import CODE_SUFFIXES
from pytest_negativa.models.reconstruction import FileState
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


def hex_digest(digest: str) -> str:
    """The SHA-256 in hex of the second field of a row; empty for an empty field."""
    encoded = digest.removeprefix("sha256=")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()


def is_code(name: str) -> bool:
    """Whether it may be a library, or a file that is GPU code, by its name."""
    return ".so" in name or name.endswith(CODE_SUFFIXES)


def iter_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of a RECORD: its text with the line break, and its fields.

    Raises:
        csv.Error: the text is not CSV, or a field has more than ``csv.field_size_limit()`` letters.
    """
    lines = io.StringIO(text, newline="").readlines()
    reader = csv.reader(lines)
    start = 0
    for row in reader:
        yield "".join(lines[start : reader.line_num]), row
        start = reader.line_num


def read_rows(record: Path) -> list[list[str]]:
    """The fields of each row of a RECORD; none if it can't be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error):
        return [row for _, row in iter_rows(read_regular(record).decode("utf-8"))]
    return []


def path_of(row: list[str], site: Path) -> str:
    """The normalized absolute path of a row's file; empty for an empty row."""
    return os.path.normpath(os.path.join(site, row[0])) if row else ""


def update_rows(text: str, site: Path, changes: Mapping[str, RecordLine]) -> str:
    """A RECORD with other fields of some files; all other rows stay byte for byte.

    Args:
        text: the file's.
        site: the folder that its paths are relative to.
        changes: the new fields by normalized absolute path. Files without a row get none.

    Raises:
        csv.Error: it is not CSV.
    """
    return "".join(
        _update(part, row, changes.get(path_of(row, site))) for part, row in iter_rows(text)
    )


def update_record(record: Path, update: Callable[[str], str], hidden: Path | None = None) -> bool:
    """Change what a file says of installed files.

    Args:
        record: a RECORD, or a file of ``conda-meta``; mode and owner stay as they are.
        update: its text to the new one.
        hidden: see ``storage.atomic.NewFile``; a file of that name is replaced.

    Returns:
        Whether the text is another one.

    Raises:
        StoreError: the file can't be read or written; then it is as it was. Or another process
            changed it meanwhile.
    """
    try:
        before = FileState.of(record.stat())
        text = read_regular(record).decode("utf-8")
        updated = update(text)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise StoreError(f"{record}: cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise StoreError(f"{record}: not UTF-8 at byte {e.start}") from e
    except csv.Error as e:
        raise StoreError(f"{record}: not CSV: {e}") from e
    except UNDECODABLE as e:
        raise StoreError(f"{record}: not JSON of conda: {e}") from e
    if updated == text:
        return False
    with refusing(record, "written"):
        if hidden is not None:
            hidden.unlink(missing_ok=True)
        if FileState.of(record.stat()) != before:
            raise StoreError(f"{record} was replaced while negativa worked; run the command again")
    write_atomically(record, updated.encode(), hidden=hidden, durable=True)
    return True


def _update(text: str, row: list[str], line: RecordLine | None) -> str:
    if line is None or row[1:3] == list(line):
        return text
    buffer = io.StringIO()
    line_break = text[len(text.rstrip("\r\n")) :]
    csv.writer(buffer, lineterminator=line_break).writerow([row[0], *line, *row[3:]])
    return buffer.getvalue()


# ---- conda-meta ----

CONDA_META = "conda-meta"

_SHA256 = re.compile(r"[0-9a-f]{64}")
# An entry of ``paths_data`` has no other objects in it.
_ENTRY = re.compile(r"\{[^{}]*\}")
_DIGEST = re.compile(r'("sha256_in_prefix"\s*:\s*")[^"]*')
_SIZE = re.compile(r'("size_in_bytes"\s*:\s*)\d+')


class _CondaPath(msgspec.Struct, rename={"path": "_path"}):
    path: str
    sha256_in_prefix: str | None = None
    size_in_bytes: int | None = None

    @property
    def line(self) -> RecordLine:
        """The digest and the size as a RECORD has them; empty if they are not there."""
        sha256, size = self.sha256_in_prefix or "", self.size_in_bytes
        digest = record_digest(sha256) if _SHA256.fullmatch(sha256) else ""
        return RecordLine(digest, "" if size is None else str(size))


class _CondaPaths(msgspec.Struct):
    paths: list[_CondaPath] = []


class CondaPackage(msgspec.Struct):
    """A file of ``conda-meta``; ``files`` are below the environment."""

    name: str
    version: str
    files: list[str]
    paths_data: _CondaPaths = msgspec.field(default_factory=_CondaPaths)

    def lines(self, prefix: Path) -> dict[str, RecordLine]:
        """Digests and sizes of libraries and of files that are GPU code, by real path.

        It may list a file only by way of a link, as packages for developers do.
        """
        known = {one.path: one.line for one in self.paths_data.paths}
        found: dict[str, RecordLine] = {}
        for name in filter(_is_listed, self.files):
            path = os.path.join(prefix, name)
            real = os.path.realpath(path)
            if real == path or real not in found:
                found[real] = known.get(name, RecordLine("", ""))
        return found


def _is_listed(name: str) -> bool:
    return is_code(name) or name.endswith(f"/{RECORD}")


def read_conda(prefix: Path) -> Iterator[tuple[Path, CondaPackage]]:
    """The packages of an environment, each with its file; one that can't be read is left out."""
    for path in sorted((prefix / CONDA_META).glob("*.json")):
        with contextlib.suppress(OSError, *UNDECODABLE):
            yield path, msgspec.json.decode(read_regular(path), type=CondaPackage)


def update_entries(text: str, prefix: Path, changes: Mapping[str, RecordLine]) -> str:
    """A file of ``conda-meta`` with other digests and sizes of some files, else byte for byte.

    Args:
        text: the file's.
        prefix: the environment.
        changes: by real path of the file.
    """
    before = msgspec.json.decode(text, type=CondaPackage).lines(prefix)

    def update(match: re.Match[str]) -> str:
        try:
            entry = msgspec.json.decode(match[0], type=_CondaPath)
        except UNDECODABLE:  # Another object.
            return match[0]
        path = os.path.join(prefix, entry.path)
        real = os.path.realpath(path) if _is_listed(entry.path) else ""
        if real not in before.keys() & changes:
            return match[0]
        part, new = match[0], changes[real]
        if entry.line.digest == before[real].digest:
            part = _DIGEST.sub(rf"\g<1>{hex_digest(new.digest)}", part)
        # Of a link, it may be its own.
        return part if path != real else _SIZE.sub(rf"\g<1>{new.size}", part)

    return _ENTRY.sub(update, text)
