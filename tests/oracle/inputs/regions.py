"""Finds GPU code in a library, for the inputs that need its offsets."""

from __future__ import annotations

import struct


def places_of(data: bytes) -> list[dict[str, int]]:
    """Of each region its ``start`` and ``size``, and its cubins' payloads by arch."""
    found: list[dict[str, int]] = []
    at = data.find(b"\x50\xed\x55\xba")
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        region, place = {"start": at, "size": 16 + size}, at + 16
        while place < at + 16 + size:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, place)
            (arch,) = struct.unpack_from("<I", data, place + 28)
            if kind == 2:
                region.setdefault(str(arch), place + header)
            place += header + payload
        found.append(region)
        at = data.find(b"\x50\xed\x55\xba", place)
    return found
