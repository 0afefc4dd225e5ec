"""What ``negativa slim`` remembers of a folder, and what it answers."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import Offset, Record
from pytest_negativa.models.lock import Sha256

MANIFEST_VERSION = 1
"""Of the manifest. History: 1 is the first."""


class RecordRow(Record, frozen=True, kw_only=True):
    """A line of a distribution's RECORD as it was.

    Attributes:
        record: the RECORD file, below the folder.
        name: which of the library's names it is of.
        digest, size: the line's second and third field.
    """

    record: str
    name: str
    digest: str
    size: str


class SlimmedFile(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A library that was replaced. Paths are below the folder.

    Attributes:
        names: all its names: more than one where hard links lead to it.
        original_sha256, original_size: of the file before.
        sha256, size, mtime_ns: of the file that took its place. The times are those of before.
        recipe: digest of what was to be done, see ``slimming.recipes``.
        source: who said what stays, for people: the lock, or archs.
        gpu_code_removed: bytes of GPU code that are gone, or overwritten; 0 if only stripped.
            Compressed cubins that lost a part count by how much smaller they are.
        rows: what RECORD files said of it.
        original: where the file of before lies; none if it was not kept.
        notes: what a reader should know.
        never_loaded: all its GPU code went, because the run of the lock did not load it.
    """

    names: tuple[str, ...]
    original_sha256: Sha256
    original_size: Offset
    sha256: Sha256
    size: Offset
    mtime_ns: int
    recipe: str
    source: str
    gpu_code_removed: Offset
    rows: tuple[RecordRow, ...] = ()
    original: str | None = None
    notes: tuple[str, ...] = ()
    never_loaded: bool = False


class LeftFile(Record, frozen=True, kw_only=True):
    """A library that was looked at and left as it is, so that it need not be looked at again."""

    size: Offset
    mtime_ns: int
    recipe: str
    reason: str


class SlimManifest(Record, frozen=True, kw_only=True):
    """``negativa-slim.json`` in the folder that was slimmed; by the first name of each library."""

    format_version: int
    slimmed: dict[str, SlimmedFile]
    left: dict[str, LeftFile]


class SlimStatus(str, enum.Enum):
    """What became of a library."""

    SLIMMED = "slimmed"
    WOULD_SLIM = "would be slimmed"
    ALREADY = "slimmed before"
    SOUND = "sound"
    UNDONE = "original is back"
    WOULD_UNDO = "would be put back"
    LEFT = "left as it is"
    DIFFERENT = "another file"
    MISSING = "not found"
    CHANGED = "changed"
    GONE = "gone"
    DAMAGED = "damaged"
    FAILED = "failed"


PROBLEMS = frozenset({SlimStatus.CHANGED, SlimStatus.GONE, SlimStatus.DAMAGED, SlimStatus.FAILED})
"""What ends the command with an error."""

UNMET = frozenset({SlimStatus.DIFFERENT, SlimStatus.MISSING})
"""What does so with ``--require``."""


class SlimRow(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one library; sizes in bytes.

    Attributes:
        path: below the folder; as the lock has it where it was not found.
        before, after: size of the file.
        why: more of it.
        others: how many further names lead to the file.
    """

    path: str
    status: SlimStatus
    before: Offset
    after: Offset
    why: str | None = None
    others: Offset = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def unchanged(cls, path: str, status: SlimStatus, size: int, why: str | None) -> SlimRow:
        """A row for a file that stays as it is; ``size`` in bytes."""
        return cls(path=path, status=status, before=size, after=size, why=why)
