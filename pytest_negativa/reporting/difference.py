"""``negativa diff`` as text: one row for all instantiations of a template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.models.difference import Change, Difference, LibraryChange
from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.planning.by_tests import split_signature
from pytest_negativa.reporting.tables import first_rows, format_table
from pytest_negativa.reporting.text import itemize, printable
from pytest_negativa.reporting.units import format_growth, format_items

_REASONS = {UnusedReason.WRONG_ARCH.value: "for other GPUs"}
_KERNELS = ("appeared", "went", "newly_used", "newly_unused")
_Part = tuple[str, str, Change]  # the name of its library, arch or reason, bytes


def template_of(name: str) -> str:
    """The template of a kernel for people, by its mangled name: one for all instantiations."""
    return "::".join(filter(None, split_signature(demangle(name))))


def render_difference(difference: Difference, top: int) -> Iterator[str]:
    """The difference, a paragraph at a time.

    Args:
        difference: what to show.
        top: how many rows to show of each table; 0 shows all.
    """
    libraries = difference.libraries
    code = Change.total(one.code for one in libraries)
    yield (
        f"GPU code of {printable(difference.after)}, compared with {printable(difference.before)}: "
        f"{describe_change(code)}"
    )
    changed = [
        one
        for one in libraries
        if any(change.before != change.after for change in (one.code, one.unused, one.size))
    ]
    if not changed:
        yield f"No code differs in {format_items(len(libraries), 'library', 'libraries')}."
        return
    yield format_table(
        "llrrrrr",
        ("library", "version", "before", "after", "change", "unused before", "unused after"),
        first_rows(changed, top, attrgetter("name"), _library_cells),
        drop=(5, 1, 6, 2, 3),
        drop_empty=True,
    )
    parts = [(one.name, part, change) for one in libraries for part, change in one.parts.items()]
    if parts:
        parts.sort(key=lambda part: (-abs(part[2].growth), part[:2]))
        yield format_table(
            "llrrr",
            ("what changed", "code", "before", "after", "change"),
            first_rows(parts, top, itemgetter(0), _part_cells),
            drop=(2, 3),
        )
    for kind in _KERNELS:
        counts = Counter(
            (one.name, template_of(kernel))
            for one in libraries
            for kernel in getattr(one, kind) or ()
        )
        # The most instantiations first.
        lines = (
            f"{library}: {template}" + ("" if count == 1 else f"  ({count:,} instantiations)")
            for (library, template), count in sorted(counts.items(), key=lambda i: (-i[1], i[0]))
        )
        count = format_items(counts.total(), "kernel", "kernels")
        yield from itemize(f"{count} {kind.replace('_', ' ')}:", lines, most=top)


def _library_cells(name: str, some: Sequence[LibraryChange]) -> list[str]:
    versions = dict.fromkeys(filter(None, some[0].versions)) if len(some) == 1 else ()
    unused = Change.total(one.unused for one in some)
    return [
        name,
        " -> ".join(versions),
        *_cells(Change.total(one.code for one in some)),
        _size(unused.before or None),
        _size(unused.after or None),
    ]


def _part_cells(name: str, some: Sequence[_Part]) -> list[str]:
    code = _REASONS.get(some[0][1], some[0][1]) if len(some) == 1 else ""
    return [name, code, *_cells(Change.total(change for *_, change in some))]


def _cells(change: Change) -> list[str]:
    if change.before is None:
        return ["", _size(change.after), f"appeared {_signed(change.growth)}"]
    if change.after is None:
        return [_size(change.before), "", f"went {_signed(change.growth)}"]
    return [_size(change.before), _size(change.after), _signed(change.growth)]


def describe_change(change: Change) -> str:
    """Bytes before and after, and how much they grew."""
    before, after = change.before or 0, change.after or 0
    return f"{format_bytes(before)} -> {format_bytes(after)} ({format_growth(before, after)})"


def _size(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _signed(growth: int) -> str:
    return f"{'+' if growth > 0 else ''}{format_bytes(growth)}"
