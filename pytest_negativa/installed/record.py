"""RECORD files: which digest and size the files of a distribution have.

See https://packaging.python.org/specifications/recording-installed-packages: CSV of path, digest
(``sha256=`` and urlsafe base64 without padding) and size. Only the lines of our libraries change;
all others stay byte for byte.
"""

from __future__ import annotations

import base64
import csv
import io
import os
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import StoreError
from pytest_negativa.installed.csvrows import iter_rows
from pytest_negativa.installed.sites import Site
from pytest_negativa.slimming.replace import write_whole
from pytest_negativa.slimming.tree import Tree


class RecordLine(NamedTuple):
    """A file's line in a RECORD: its second and third field."""

    digest: str
    size: str


def record_digest(sha256: str) -> str:
    """The second field for a digest in hex."""
    encoded = base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=")
    return f"sha256={encoded.decode()}"


def read_lines(record: Path, site: Path, wanted: frozenset[str]) -> dict[str, RecordLine]:
    """The lines of those files that are ``wanted``, by normalized absolute path.

    Raises:
        StoreError: the file is there and can't be read.
    """
    text = _read(record)
    if text is None:
        return {}
    found = {}
    for _start, _end, row in iter_rows(text):
        path = _path_of(row, site)
        if path in wanted:
            found[path] = RecordLine(*(*row[1:3], "", "")[:2])
    return found


def recorded(tree: Tree, names: Set[str]) -> dict[str, dict[str, Path]]:
    """What RECORD files say of files of a tree: by name, the digests, and which RECORD has them.

    Raises:
        StoreError: a RECORD can't be read.
    """
    paths = {os.path.join(tree.root, name): name for name in names}
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for site in tree.sites:
        for installed in Site(site).installed():
            wanted = installed.files & paths.keys()
            if not wanted:
                continue
            for path, line in read_lines(installed.record, site, wanted).items():
                if line.digest:
                    found[paths[path]][line.digest] = installed.record
    return dict(found)


def update_record(record: Path, site: Path, changes: Mapping[str, RecordLine]) -> bool:
    """Make the lines of some files, by normalized absolute path, say what they should.

    Written under another name and renamed, with the mode and the owner that it had. Files without
    a line get none. Returns whether anything had to be changed.

    Raises:
        StoreError: it can't be read or written; then it is as it was.
    """
    text = _read(record)
    if text is None:
        return False
    parts = []
    position = 0
    for start, end, row in iter_rows(text):
        line = changes.get(_path_of(row, site))
        if line is None or row[1:3] == list(line):
            continue
        ending = text[start:end]
        ending = ending[len(ending.rstrip("\r\n")) :]
        parts += [text[position:start], _to_csv([row[0], *line, *row[3:]]) + ending]
        position = end
    if not parts:
        return False
    write_whole(record, "".join([*parts, text[position:]]).encode())
    return True


def _path_of(row: list[str], site: Path) -> str:
    return os.path.normpath(os.path.join(site, row[0])) if row else ""


def _read(record: Path) -> str | None:
    try:
        return record.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as e:
        raise StoreError(f"{record}: cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise StoreError(f"{record}: not UTF-8 at byte {e.start}") from e


def _to_csv(row: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(row)
    return buffer.getvalue()
