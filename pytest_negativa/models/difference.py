"""What ``negativa diff`` and a baseline compare: libraries of two sides, and how they changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.base import Record, Versioned


class SideLibrary(NamedTuple):
    """One library with GPU code on a side. Sizes are in bytes.

    Attributes:
        path: where it is, or a part of that. Libraries are paired by the ends of their paths.
        size: of the file.
        code: its GPU code.
        version: of the distribution that installed it.
        unused: the unused part of that; None without a plan.
        archs: the code by arch, with its kind if it is no machine code: ``ptx sm_90``; None if the
            source doesn't tell.
        reasons: the code by reason; None without a plan.
        kernels: mangled names; None if they are not listed.
        used: the kernels that the run used; None if that is not known.
    """

    path: str
    size: int
    code: int
    version: str | None = None
    unused: int | None = None
    archs: Mapping[str, int] | None = None
    reasons: Mapping[str, int] | None = None
    kernels: Collection[str] | None = None
    used: Collection[str] | None = None


class Side(NamedTuple):
    """One side of a comparison.

    Attributes:
        title: what it is.
        libraries: those with GPU code.
        unread: why libraries are missing.
    """

    title: str
    libraries: tuple[SideLibrary, ...]
    unread: tuple[NegativaError, ...] = ()


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


class LibraryChange(Record, frozen=True, kw_only=True):
    """A library that is on at least one side.

    Attributes:
        name: the file name, with its folder if two share it.
        path: on the side after, else before.
        versions: before and after.
        code, size: in bytes.
        unused: in bytes; None without a plan.
        parts: bytes of each arch or reason that changed, if both sides tell it.
        appeared, went: mangled names of kernels on one side alone; None if a side lists none.
        newly_used, newly_unused: kernels that one side alone used; None if a side doesn't tell.
    """

    name: str
    path: str
    versions: tuple[str | None, str | None]
    code: Change
    unused: Change
    size: Change
    parts: dict[str, Change]
    appeared: tuple[str, ...] | None
    went: tuple[str, ...] | None
    newly_used: tuple[str, ...] | None
    newly_unused: tuple[str, ...] | None


class Difference(Versioned, Record, frozen=True, kw_only=True):
    """Differences of two sides.

    Attributes:
        before, after: titles.
        libraries: all of them, the largest change first.
    """

    before: str
    after: str
    libraries: tuple[LibraryChange, ...]
