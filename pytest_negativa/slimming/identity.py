"""Whether the file in the place of a slimmed library is that library, damaged, or another one.

A distribution may have been upgraded since, and slimmed again from another folder. An old original
must not replace a newer library. RECORD tells best; if it says nothing, the file itself tells.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import EHDR, ELF_MAGIC
from pytest_negativa.gpucode.slimmed import size_before
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimmedFile
from pytest_negativa.rewriting.compact.damage import diagnose
from pytest_negativa.slimming.tree import Tree

UNREADABLE = "it cannot be read"

Records = Mapping[str, Path]
"""The digests that RECORD files have for a library now, and which RECORD has each."""


def is_uninstalled(name: str, entry: SlimmedFile, records: Records) -> bool:
    """Whether a RECORD had the library when it was slimmed, and none has it now."""
    return not records and any(row.name == name for row in entry.rows)


def is_reinstalled(name: str, entry: SlimmedFile, records: Records) -> bool:
    """Whether RECORD now has another file than the one that was slimmed."""
    known = {row.digest for row in entry.rows if row.name == name}
    known |= {record_digest(entry.sha256), record_digest(entry.original_sha256)}
    return bool(records) and not known & records.keys()


class Fate(enum.Enum):
    """What became of a name of a slimmed library."""

    RESULT = "the result, or the result damaged"
    ORIGINAL = "the original"
    ANOTHER = "another file"
    UNREADABLE = "a file that can't be read"
    GONE = "no file"


class Judgement(NamedTuple):
    """What became of a name, and why it is another file."""

    fate: Fate
    reason: str | None = None


def judge(tree: Tree, entry: SlimmedFile) -> dict[str, Judgement]:
    """What became of each name of a slimmed library.

    By digest: some tools give all files the same time, so time and size tell nothing.
    """
    recorded = tree.recorded(set(entry.names))
    return {name: _judge(tree, name, entry, recorded.get(name, {})) for name in entry.names}


def _judge(tree: Tree, name: str, entry: SlimmedFile, records: Records) -> Judgement:
    if (group := tree.group_of(name)) is None:
        return Judgement(Fate.GONE)
    if (digest := tree.digest(group)) is None:
        return Judgement(Fate.UNREADABLE, UNREADABLE)
    if digest == entry.original_sha256:
        return Judgement(Fate.ORIGINAL)
    if digest == entry.sha256:
        return Judgement(Fate.RESULT)
    reason = None
    path = tree.root / name
    before = None if entry.original is None else _build_id(Path(entry.original))
    if record_digest(digest) in records:
        reason = "another one was installed since: RECORD has its digest"
    elif is_reinstalled(name, entry, records):
        reason = "another one was installed since: RECORD has neither digest of this one"
    elif before is not None and _build_id(path) not in (None, before):
        reason = "another one took its place since: it has another build id"
    elif not _is_made_from(path, entry):
        reason = "another file took its place since"
    return Judgement(Fate.RESULT if reason is None else Fate.ANOTHER, reason)


def _is_made_from(path: Path, entry: SlimmedFile) -> bool:
    """Whether the file looks like the result, but cut off or changed."""
    try:
        compacted = diagnose(path).compacted
        with ByteSource(path) as source:
            if source.size < EHDR.size:
                return False
            header = EHDR.unpack_from(source.read(0, EHDR.size))
            if compacted:
                return _size_before(source) in (None, entry.original_size)
    except FormatError:
        return False
    # Section headers end the files that slimming writes, so a cut file tells the size it had.
    is_elf = header.e_ident.startswith(ELF_MAGIC)
    return is_elf and header.e_shoff + header.e_shentsize * header.e_shnum == entry.size


def _size_before(source: ByteSource) -> int | None:
    try:
        return size_before(source)
    except FormatError:
        return None


def _build_id(path: Path) -> str | None:
    try:
        with ByteSource(path) as source:
            return read_host_elf(source).build_id
    except FormatError:
        return None
