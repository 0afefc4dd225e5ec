"""Formats of figures (percent, growth, time, counts, names): each stands once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_negativa.models.library import ForeignCode, add_foreign
from pytest_negativa.models.sizes import format_bytes as format_bytes


def format_share(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent; a dash where there is no whole.

    100.0% is said of the whole alone, and 0.0% of nothing: almost all is ``>99.9%``.
    """
    if not whole:
        return "-"
    share = 100 * part / whole
    if part < whole and share >= 99.95:
        return ">99.9%"
    return "<0.1%" if part > 0 and share < 0.05 else f"{share:.1f}%"


def format_growth(before: int, after: int) -> str:
    """Growth of bytes: ``+1.2 MB, +3.4%``; without the percentage if there were none."""
    growth = after - before
    share = f", {100 * growth / before:+.1f}%" if before else ""
    return f"{'+' if growth > 0 else ''}{format_bytes(growth)}{share}"


def format_time(nanoseconds: int | None) -> str:
    """A duration, three figures or so: ``12.3 ms``; a dash for one that is unknown."""
    if nanoseconds is None:
        return "-"
    value = nanoseconds / 1000
    for unit in ("us", "ms"):
        if value < 999.95:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} s"


def format_count(count: int | None) -> str:
    """With thousands separators; a dash for what was not counted."""
    return "-" if count is None else f"{count:,}"


def format_items(count: int, one: str, many: str) -> str:
    """``1 library``, ``3 libraries``."""
    return f"1 {one}" if count == 1 else f"{count:,} {many}"


def format_names(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are: ``a, b and 3 more``."""
    found = list(names)
    return " ".join((", ".join(found[:most]), *and_more(len(found), most)))


def and_more(count: int, most: int, text: str = "and {} more") -> Iterator[str]:
    """The line below the first ``most`` of a list that counts the others; 0: the list has all."""
    if 0 < most < count:
        yield text.format(f"{count - most:,}")


def format_holders(libraries: int, code_files: int) -> str:
    """Count of holders of GPU code: ``3 libraries and 1 file that is GPU code``."""
    files = format_items(code_files, "file that is GPU code", "files that are GPU code")
    if code_files and not libraries:
        return files
    return format_items(libraries, "library", "libraries") + (f" and {files}" if code_files else "")


def format_foreign(found: Iterable[ForeignCode]) -> str:
    """``; .hip_fatbin (AMD, 29.5 MB) is not read``; empty without code of other vendors."""
    return "".join(
        f"; {code.section} ({code.vendor}, {format_bytes(code.size)}) is not read"
        for code in add_foreign(found)
    )
