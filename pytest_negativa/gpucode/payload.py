"""Unpacks payloads, never beyond the size that their header promises nor beyond a limit.

So has the table in which a map holds each name once.
"""

from __future__ import annotations

import threading

import lz4.block
import zstandard

from pytest_negativa.models.library import Compression

MAX_UNPACKED_SIZE = 512 << 20
"""Bytes. An element whose header promises more is unreadable, and kept.

The largest cubin in the PyTorch 2.11 stack unpacks to 105 MB.
"""

# LZ4 block format description: a byte of input yields at most 255 bytes of output.
_LZ4_MAX_RATIO = 255


class PayloadError(Exception):
    """A payload can't be unpacked or read; the caller knows the file and the offset."""


class _Decompressors(threading.local):
    """One for each thread: zstandard's can't be shared by threads, and are costly to make."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


_decompressors = _Decompressors()


def unpack(payload: bytes, compression: Compression, promised_size: int) -> bytes:
    """Unpack a payload to exactly ``promised_size`` bytes.

    Raises:
        PayloadError: it unpacks to another size, is damaged, or promises too much.
    """
    if compression is Compression.NONE:
        return payload
    if promised_size > MAX_UNPACKED_SIZE:
        raise PayloadError(
            f"promises {promised_size:,} bytes unpacked, more than the limit of "
            f"{MAX_UNPACKED_SIZE:,}"
        )
    try:
        if compression is Compression.LZ4:
            if promised_size > len(payload) * _LZ4_MAX_RATIO:
                raise PayloadError(
                    f"promises {promised_size:,} bytes, which {len(payload):,} bytes of LZ4 "
                    "cannot hold"
                )
            content: bytes = lz4.block.decompress(payload, uncompressed_size=promised_size)
        else:
            content = _unpack_zstd(payload, promised_size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError, MemoryError) as e:
        raise PayloadError(f"damaged {compression.value} payload: {e}") from e
    if len(content) != promised_size:
        raise PayloadError(f"unpacks to {len(content):,} bytes, promised were {promised_size:,}")
    return content


def _unpack_zstd(payload: bytes, promised_size: int) -> bytes:
    stated = zstandard.frame_content_size(payload)
    # zstandard allocates the size that the frame states, whatever max_output_size is.
    if stated not in (-1, promised_size):
        raise PayloadError(f"zstd frame states {stated:,} bytes, promised were {promised_size:,}")
    if promised_size == 0:
        # max_output_size=0 would mean that there is no limit.
        if stated:
            raise PayloadError("zstd frame states no size, promised were 0 bytes")
        return b""
    return _decompressors.zstd.decompress(payload, max_output_size=promised_size)


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
