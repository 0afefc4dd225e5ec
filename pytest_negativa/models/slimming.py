"""``negativa-slim.json``, and statuses of libraries in reports of slim: which are problems."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from pytest_negativa.models.base import NonNegative, Record, Versioned
from pytest_negativa.models.lock import Sha256

Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Time since the epoch that a file can have."""


class SlimmedFile(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A library that was replaced, or a file of GPU code that was removed.

    Paths are below the folder. A file that was removed has the size and digest of an empty one.

    Attributes:
        names: all its names; more than one if it has hard links.
        original_sha256, original_size: of the original; the size in bytes.
        sha256, size, mtime_ns: of the result. It has the times of the original.
        recipe: digest of what was removed, see ``slimming.recipes``.
        source: what told what stays, for people: the lock, or archs.
        gpu_code_removed: bytes of GPU code that are gone, overwritten, or in the spare; 0 if only
            stripped.
            A compressed cubin that lost a part counts by how much smaller it is.
        certificate: the word of a second program that compared the result with the original.
        records: the RECORD files that had a line for it.
        original: where the original lies; None if it was not kept.
        never_loaded: no run of the lock or the trace loaded it, so all code that may leave is gone.
        spare: where the pages lie that the library lacks; None: it has no spare. Library and spare
            together give the original.
        holes: how many mappings of the spare the library has.
        replaced: digest of the earlier result in whose place this one goes. It is there if a run
            was killed in between.
    """

    names: tuple[str, ...]
    original_sha256: Sha256
    original_size: NonNegative
    sha256: Sha256
    size: NonNegative
    mtime_ns: Nanoseconds
    recipe: str
    source: str
    gpu_code_removed: NonNegative
    certificate: str | None = None
    records: tuple[str, ...] = ()
    original: str | None = None
    never_loaded: bool = False
    spare: str | None = None
    holes: NonNegative = 0
    replaced: Sha256 | None = None

    @property
    def is_removed(self) -> bool:
        """Whether the file was removed."""
        return self.size == 0


class SlimManifest(Versioned, Record, frozen=True, kw_only=True, omit_defaults=True):
    """``negativa-slim.json`` in the folder that was slimmed; by the first name of each library.

    Attributes:
        run_spares: the folders in which that run writes spares, and the spares that libraries had
            before.
        run: the token of the run that is at work, or was killed; it is in the names of the
            temporary files of that run.
    """

    slimmed: dict[str, SlimmedFile]
    run_spares: tuple[str, ...] = ()
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")] | None = None


class SlimStatus(str, enum.Enum):
    """What became of a library."""

    SLIMMED = "slimmed"
    WOULD_SLIM = "would be slimmed"
    ALREADY = "slimmed before"
    SOUND = "sound"
    SPARE_AWAY = "no spare here"
    UNDONE = "original is back"
    WOULD_UNDO = "would be put back"
    LEFT = "left as it is"
    DIFFERENT = "another file"
    MISSING = "not found"
    CHANGED = "changed"
    GONE = "gone"
    DAMAGED = "damaged"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


PROBLEMS = frozenset(
    {
        SlimStatus.CHANGED,
        SlimStatus.GONE,
        SlimStatus.DAMAGED,
        SlimStatus.FAILED,
    }
)
"""Statuses that end the command with an error."""

UNMET = frozenset({SlimStatus.DIFFERENT, SlimStatus.MISSING, SlimStatus.SPARE_AWAY})
"""Statuses that do so with ``--require``."""


class SlimRow(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one library; sizes in bytes.

    Attributes:
        path: below the folder; the lock's path if the library was not found.
        status: what became of it.
        before, after: size of the file in bytes.
        detail: the reason, for people.
        others: how many further names lead to the file.
        useless: no code for any of the named archs stays; such rows come first in a report.
        notes: what a reader should know.
    """

    path: str
    status: SlimStatus
    before: NonNegative
    after: NonNegative
    detail: str | None = None
    others: NonNegative = 0
    useless: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def unchanged(
        cls, path: str, status: SlimStatus, size: int, detail: str | None, others: int = 0
    ) -> SlimRow:
        """A row for a file that stays as it is; ``size`` in bytes."""
        return cls(path=path, status=status, before=size, after=size, detail=detail, others=others)
