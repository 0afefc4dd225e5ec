"""Payloads, unpacked (LZ4, zstd): never beyond the promised size nor beyond 512 MiB."""

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
