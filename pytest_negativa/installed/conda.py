"""``conda-meta``: the files of conda packages, their digests and sizes, changed in place.

A package has a JSON file there, a ``PrefixRecord`` in conda's conda/models/records.py. ``files``
lists its files, and ``paths_data`` has what ``conda doctor`` compares with them
(``find_altered_packages`` in altered_files.py), also by way of links.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from pytest_negativa.installed.record import RECORD, RecordLine, record_digest
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.file_kinds import is_named_code
from pytest_negativa.storage.system import read_regular

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
    return is_named_code(name) or name.endswith(f"/{RECORD}")


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
            part = _DIGEST.sub(rf"\g<1>{_hex(new.digest)}", part)
        # Of a link, it may be its own.
        return part if path != real else _SIZE.sub(rf"\g<1>{new.size}", part)

    return _ENTRY.sub(update, text)


def _hex(digest: str) -> str:
    """The SHA-256 in hex of a ``RecordLine``; empty for an empty one."""
    encoded = digest.removeprefix("sha256=")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
