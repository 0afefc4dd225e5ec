"""Sizes as text (46.3 MB), in all messages and reports."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_bytes(size: int) -> str:
    """Bytes in decimal units, three figures or so: ``46.3 MB``, ``512 B``."""
    value = float(size)
    for unit in _UNITS[:-1]:
        # Below 999.5 three figures suffice; at and above, rounding would print 1000.
        if abs(value) < 999.5:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} {_UNITS[-1]}"
