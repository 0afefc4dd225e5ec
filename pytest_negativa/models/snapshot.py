"""The GPU code of several libraries in figures, by which releases, runs and locks are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pytest_negativa.models.base import NonNegative, Record, Row, Versioned


class SnapshotRow(Row, frozen=True):
    """Code of a library that shares arch and reason: ``[arch, reason, elements, bytes]``.

    Attributes:
        arch: of machine code, such as ``sm_90``, of another kind with it, such as ``ptx sm_90``;
            None if the source doesn't tell.
        reason: why it is needed or unused; None without a plan.
        is_unused: whether it is unused; False without a plan.
        elements: how many elements and frames.
        bytes: in the file.
    """

    arch: str | None
    reason: str | None
    is_unused: bool
    elements: NonNegative
    bytes: NonNegative


class SnapshotLibrary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One library with GPU code.

    Attributes:
        name: the file name, with its folder if two share it.
        place: its path below ``site-packages``, or else below the project's folder; None if it lies
            elsewhere. Libraries are paired by place, or else by name.
        version: of the distribution that installed it.
        size: of the file in bytes; None if the source doesn't tell.
        rows: its code by arch and reason.
        kernels: mangled names, sorted; None if they are not listed.
        used_kernels: those that the run used; None without a plan.
    """

    name: str
    rows: tuple[SnapshotRow, ...]
    place: str | None = None
    version: str | None = None
    size: NonNegative | None = None
    kernels: tuple[str, ...] | None = None
    used_kernels: tuple[str, ...] | None = None

    @property
    def code_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def unused_bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.is_unused)


class Snapshot(Versioned, Record, frozen=True, kw_only=True, omit_defaults=True):
    """Libraries by name.

    Attributes:
        libraries: those with GPU code.
        title: what it is of.
    """

    title: str
    libraries: tuple[SnapshotLibrary, ...]


class Change(msgspec.Struct, frozen=True, order=True):
    """A figure before and after.

    Attributes:
        before, after: None if there is no such code at all, or the source doesn't tell the figure.
    """

    before: int | None
    after: int | None

    @staticmethod
    def total(changes: Iterable[Change]) -> Change:
        """The sums of both sides; None for a side that is None in all."""
        pairs = [(one.before, one.after) for one in changes]
        sides = ([side for side in both if side is not None] for both in zip(*pairs, strict=True))
        return Change(*(sum(side) if side else None for side in sides)) if pairs else Change(0, 0)

    @property
    def growth(self) -> int:
        return (self.after or 0) - (self.before or 0)


class CodeChange(msgspec.Struct, frozen=True):
    """Code of a library, arch and reason that changed.

    Attributes:
        library: its name.
        arch, reason: None if one of the snapshots doesn't tell them.
        bytes: in the file.
    """

    library: str
    arch: str | None
    reason: str | None
    bytes: Change


class KernelChanges(msgspec.Struct, frozen=True):
    """Kernels of a library that changed, by mangled name; empty where names are not listed.

    Attributes:
        library: its name.
        appeared, went: in one of the snapshots alone.
        newly_used, newly_unused: in both, and used in one alone.
    """

    library: str
    appeared: tuple[str, ...]
    went: tuple[str, ...]
    newly_used: tuple[str, ...]
    newly_unused: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.appeared, *self.went, *self.newly_used, *self.newly_unused)

    def only(self, wanted: Callable[[str], bool]) -> KernelChanges:
        """The changes of the wanted kernels."""
        names = (self.appeared, self.went, self.newly_used, self.newly_unused)
        return KernelChanges(self.library, *(tuple(filter(wanted, part)) for part in names))


class LibraryChange(msgspec.Struct, frozen=True):
    """A library that is in at least one of the snapshots.

    Attributes:
        name: as in the snapshots.
        versions: before and after.
        code, size: in bytes.
        unused: in bytes; None without a plan.
    """

    name: str
    versions: tuple[str | None, str | None]
    code: Change
    unused: Change
    size: Change


class SnapshotDifference(Versioned, Record, frozen=True, kw_only=True):
    """Differences of two snapshots; each list has the largest changes first.

    Attributes:
        before, after: titles.
        libraries: all of them.
        code: what changed by library, arch and reason.
        kernels: by library.
    """

    before: str
    after: str
    libraries: tuple[LibraryChange, ...]
    code: tuple[CodeChange, ...]
    kernels: tuple[KernelChanges, ...]
