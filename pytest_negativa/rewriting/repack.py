"""Payloads packed again (zstd, LZ4) into the space that they had; levels, window, padding.

The reader of a zstd frame may rely on its content size, its window and the checksum at its end.
All of that stays, and the window never grows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import lz4.block
import zstandard

from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.models.library import Compression

ZSTD_LEVELS = (19, 19, 22)
"""Levels, tried in this order until the result fits.

NVIDIA packs at 19: libtorch_cuda.so packed at 19 comes out byte for byte. The first attempt is 19
with smaller tables, which take half the time and make 1% more bytes. Level 9 would take a ninth of
the time and make 8% more bytes. Measured on mostly filled cubins.
"""

_SMALL_TABLES = {"chain_log": 17, "hash_log": 17, "search_log": 4, "target_length": 64}
_LZ4_LEVELS = (9, 12)
# RFC 8878, 3.1.2: a frame to be skipped, of any of 16 magic numbers; then u32 length.
_SKIPPABLE_MAGIC = (0x184D2A50).to_bytes(4, "little")
_SKIPPABLE_HEADER_SIZE = 8
# The smallest window that zstd knows is 1 KiB.
_MIN_WINDOW_LOG = 10


class RepackError(Exception):
    """Content that can't be packed into its old space; the caller adds the file and the offset."""


def repack(content: bytes, packed: bytes, compression: Compression, space: int) -> bytes:
    """``content`` packed as ``packed`` was, in at most ``space`` bytes.

    Raises:
        RepackError: it doesn't fit at any level.
    """
    for candidate in _candidates(content, packed, compression):
        if len(candidate) <= space:
            return _checked(candidate, content, compression)
    raise RepackError(f"does not fit into its {space:,} bytes again")


def repack_frame(
    content: bytes, packed: bytes, levels: Sequence[int] = ZSTD_LEVELS
) -> tuple[bytes, int]:
    """A bare zstd frame for ``content``, of exactly the length of ``packed``.

    Its reader hands zstd the old length, and zstd fails on zeros behind a frame. So the rest is a
    frame to be skipped.

    Returns:
        The bytes, and how many of them are zeros at the end.

    Raises:
        RepackError: it doesn't fit at any level.
    """
    for candidate in _candidates(content, packed, Compression.ZSTD, levels):
        left = len(packed) - len(candidate)
        if left == 0 or left >= _SKIPPABLE_HEADER_SIZE:
            _checked(candidate, content, Compression.ZSTD)
            padding = max(0, left - _SKIPPABLE_HEADER_SIZE)
            if left:
                candidate += _SKIPPABLE_MAGIC + padding.to_bytes(4, "little") + bytes(padding)
            _check_as_whole(candidate, content)
            return candidate, padding
    raise RepackError(f"does not fit into its {len(packed):,} bytes again")


def _candidates(
    content: bytes, packed: bytes, compression: Compression, levels: Sequence[int] = ZSTD_LEVELS
) -> Iterator[bytes]:
    if compression is Compression.LZ4:
        for level in _LZ4_LEVELS:
            yield lz4.block.compress(
                content, mode="high_compression", compression=level, store_size=False
            )
        return
    original = zstandard.get_frame_parameters(packed)
    stated = original.content_size != zstandard.CONTENTSIZE_UNKNOWN
    # A frame of a single segment has a window as large as its content, which need not be a power
    # of two. zstd makes a single segment again if the window holds all of the content.
    log = original.window_size.bit_length() - 1
    if original.window_size == len(content):
        log = (len(content) - 1).bit_length()
    for attempt, level in enumerate(levels):
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level,
            source_size=len(content),
            **(_small_tables(level, len(content)) if attempt == 0 else {}),
            window_log=max(log, _MIN_WINDOW_LOG),
            write_content_size=stated,
            write_checksum=original.has_checksum,
        )
        candidate = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
        made = zstandard.get_frame_parameters(candidate)
        if made.content_size == original.content_size and made.window_size <= original.window_size:
            yield candidate


def _small_tables(level: int, size: int) -> dict[str, int]:
    """Parameters of a level for content of a size, none larger than those for small tables."""
    usual = zstandard.ZstdCompressionParameters.from_level(level, source_size=size)
    return {name: min(limit, getattr(usual, name)) for name, limit in _SMALL_TABLES.items()}


def _checked(candidate: bytes, content: bytes, compression: Compression) -> bytes:
    try:
        unpacked = unpack(candidate, compression, len(content))
    except PayloadError as e:
        raise RepackError(f"came out unreadable: {e}") from e
    if unpacked != content:
        raise RepackError("came out with other content")
    return candidate


def _check_as_whole(frames: bytes, content: bytes) -> None:
    """Check that the bytes unpack to ``content`` if frames are read one after the other."""
    reader = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(frames), read_across_frames=True, closefd=False
    )
    if reader.read(len(content) + 1) != content:
        raise RepackError("came out with other content")
