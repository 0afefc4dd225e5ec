"""Whether the file in the place of a slimmed library is that library, damaged, or another one.

A distribution may have been upgraded since, and slimmed again from another folder. An old original
must not replace a newer library. RECORD tells best; if it says nothing, the file itself tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import EHDR, ELF_MAGIC
from pytest_negativa.gpucode.slimmed import size_before
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimmedFile
from pytest_negativa.rewriting.compact.damage import diagnose
from pytest_negativa.slimming.manifest import digest_of

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


def why_another(path: Path, name: str, entry: SlimmedFile, records: Records) -> str | None:
    """Why a file that differs from the result is another file; None if it is that, damaged.

    Args:
        path: of the file.
        name: its name in the manifest.
        entry: what the manifest says of it.
        records: what RECORD files say of that name.
    """
    digest = digest_of(path)
    if digest is None:
        return UNREADABLE
    if record_digest(digest) in records:
        return "another one was installed since: RECORD has its digest"
    if is_reinstalled(name, entry, records):
        return "another one was installed since: RECORD has neither digest of this one"
    before = None if entry.original is None else _build_id(Path(entry.original))
    if before is not None and _build_id(path) not in (None, before):
        return "another one took its place since: it has another build id"
    if not _is_made_from(path, entry):
        return "another file took its place since"
    return None


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
