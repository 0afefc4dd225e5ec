"""The table in which a map holds each name once."""

from __future__ import annotations


class NameTable:
    """Gives each distinct name (bytes, as in a string table) the next free index."""

    __slots__ = ("_indices",)

    def __init__(self) -> None:
        self._indices: dict[bytes, int] = {}

    def index(self, name: bytes) -> int:
        return self._indices.setdefault(name, len(self._indices))

    def names(self) -> tuple[str, ...]:
        """All names by index. Mangled names are ASCII; other bytes come out as ``\\xNN``."""
        return tuple(name.decode("ascii", "backslashreplace") for name in self._indices)
