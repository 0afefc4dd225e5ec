"""Rows of binary tables, as named tuples."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Buffer = bytes | bytearray | memoryview
"""Bytes that hold a table."""

_Row = TypeVar("_Row", bound=tuple[Any, ...])


class RowLayout(Generic[_Row]):
    """How a row lies in a file: a ``struct.Struct`` whose rows have names.

    Args:
        layout: the format, as of ``struct``.
        make: ``_make`` of the rows' ``NamedTuple``.

    Attributes:
        size: bytes of a row.
        struct: for a hot loop that unpacks each row into names of its own.
    """

    def __init__(self, layout: str, make: Callable[[Iterable[Any]], _Row]) -> None:
        self.struct = struct.Struct(layout)
        self.size = self.struct.size
        self._make = make

    def unpack_from(self, data: Buffer, offset: int = 0) -> _Row:
        """The row at ``offset``.

        Raises:
            struct.error: ``data`` ends before the row.
        """
        return self._make(self.struct.unpack_from(data, offset))

    def iter_unpack(self, data: Buffer) -> Iterator[_Row]:
        """All rows of a table.

        Raises:
            struct.error: ``data`` has no whole number of rows.
        """
        return map(self._make, self.struct.iter_unpack(data))

    def column(self, data: Buffer, index: int) -> list[int]:
        """One field of all rows. Fast for large tables.

        Args:
            data: the table.
            index: of the field, a number, in the rows.

        Raises:
            struct.error: ``data`` has no whole number of rows.
        """
        return [number for (number,) in _column(self.struct.format, index).iter_unpack(data)]

    def pack(self, row: _Row) -> bytes:
        """The bytes of a row."""
        return self.struct.pack(*row)


@functools.lru_cache
def _column(layout: str, index: int) -> struct.Struct:
    """The layout of a row whose only field is the one of that index."""
    order, fields = layout[0], layout[1:]
    before = struct.calcsize(order + fields[:index])
    behind = struct.calcsize(layout) - before - struct.calcsize(order + fields[index])
    return struct.Struct(f"{order}{before}x{fields[index]}{behind}x")
