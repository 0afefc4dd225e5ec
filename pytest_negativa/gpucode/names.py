"""Names of a library's kernels and symbols, each once, by index; at most 256 MiB of them."""

from __future__ import annotations

from pytest_negativa.gpucode.payload import PayloadError

# A small payload can unpack to tables of millions of rows, or to names that overlap in their
# string table. It would take far more memory than it has bytes. All archs of libtorch_cuda.so
# together have 7 MB of names and 680,000 rows.
_MAX_NAMES_SIZE = 256 << 20
_NAME_COST = 64
_MAX_ROWS = 8 << 20


class NameTable:
    """Gives each distinct name (bytes, as in a string table) the next free index."""

    __slots__ = ("_indices", "_rows_left", "_size_left", "_strings", "_strings_read")

    def __init__(self) -> None:
        self._indices: dict[bytes, int] = {}
        self._size_left = _MAX_NAMES_SIZE
        self._rows_left = _MAX_ROWS
        self._strings = b""
        self._strings_read: dict[int, int] = {}

    def index(self, name: bytes) -> int:
        """Look a name up, or add it.

        Raises:
            PayloadError: the library has more names than any sound library.
        """
        index = self._indices.get(name)
        if index is None:
            cost = len(name) + _NAME_COST
            if cost > self._size_left:
                raise PayloadError(
                    f"the library's names take more than the limit of {_MAX_NAMES_SIZE:,} bytes"
                )
            self._size_left -= cost
            index = self._indices[name] = len(self._indices)
        return index

    def indices_in(self, strings: bytes) -> dict[int, int]:
        """The indices of names by their offset in a string table, as far as they were looked up.

        A million symbols may share one name of a megabyte, which is looked up once. Half of the
        cubins have the string table of the one before: that of the same code for another arch.
        """
        if strings != self._strings:
            self._strings, self._strings_read = strings, {}
        return self._strings_read

    def reserve_rows(self, count: int) -> None:
        """Announce a table of ``count`` rows that refer to names.

        Raises:
            PayloadError: the library has more rows than any sound library.
        """
        if count > self._rows_left:
            raise PayloadError(f"the library's tables have more than {_MAX_ROWS:,} rows")
        self._rows_left -= count

    def names(self) -> tuple[str, ...]:
        """All names by index. Mangled names are ASCII; other bytes come out as ``\\xNN``."""
        return tuple(name.decode("ascii", "backslashreplace") for name in self._indices)
