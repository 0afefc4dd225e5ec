"""The difference of two snapshots, as text for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pytest_negativa.models.plan import UnusedReason
from pytest_negativa.models.snapshot import (
    Change,
    CodeChange,
    KernelChanges,
    LibraryChange,
    SnapshotDifference,
)
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes, format_growth, format_items

_T = TypeVar("_T")

# What a narrow terminal does without, in this order; how much each changed stays.
_DROP = ("unused before", "version", "unused after", "before", "after", "reason")
_REASONS = {UnusedReason.WRONG_ARCH.value: "for other GPUs"}
_KERNELS: tuple[tuple[str, Callable[[KernelChanges], Sequence[str]]], ...] = (
    ("appeared", lambda one: one.appeared),
    ("went", lambda one: one.went),
    ("newly used", lambda one: one.newly_used),
    ("newly unused", lambda one: one.newly_unused),
)


def render_difference(
    difference: SnapshotDifference, template_of: Callable[[str], str], top: int
) -> Iterator[str]:
    """The difference, a paragraph at a time.

    Args:
        difference: what to show.
        template_of: turns a mangled name into the name of the kernel's template.
        top: how many rows to show of each table; 0 shows all.
    """
    libraries = difference.libraries
    code = Change.total(one.code for one in libraries)
    yield (
        f"GPU code of {printable(difference.after)}, compared with {printable(difference.before)}: "
        f"{_sizes(code)}"
    )
    changed = [one for one in libraries if _is_changed(one)]
    if not changed:
        yield f"No code differs in {format_items(len(libraries), 'library', 'libraries')}."
        return
    yield _table(
        ("library", "version"),
        [_library_row(one) for one in changed],
        ("before", "after", "change", "unused before", "unused after"),
        _rest(top, changed, lambda one: one.code),
        top,
    )
    if difference.code:
        yield _table(
            ("what changed", "code", "reason"),
            [_code_row(one) for one in difference.code],
            ("before", "after", "change"),
            _rest(top, difference.code, lambda one: one.bytes),
            top,
        )
    for word, names_of in _KERNELS:
        if paragraph := _kernel_list(word, difference.kernels, names_of, template_of, top):
            yield paragraph


def _is_changed(one: LibraryChange) -> bool:
    changes = (one.code, one.unused, one.size)
    return any(change.before != change.after for change in changes)


def _library_row(one: LibraryChange) -> list[str]:
    old, new = one.versions
    versions = dict.fromkeys(version for version in (old, new) if version is not None)
    return [
        one.name,
        " -> ".join(versions),
        *_cells(one.code),
        _size(one.unused.before or None),
        _size(one.unused.after or None),
    ]


def _code_row(one: CodeChange) -> list[str]:
    reason = _REASONS.get(one.reason or "", one.reason or "")
    return [one.library, one.arch or "", reason, *_cells(one.bytes)]


def _cells(change: Change) -> list[str]:
    if change.before is None:
        return ["", _size(change.after), f"appeared {_signed(change.growth)}"]
    if change.after is None:
        return [_size(change.before), "", f"went {_signed(change.growth)}"]
    return [_size(change.before), _size(change.after), _signed(change.growth)]


def _rest(top: int, changes: Sequence[_T], of: Callable[[_T], Change]) -> list[str]:
    """The figures of what is folded, below how many there are; empty if nothing is."""
    folded = changes[top:] if top else ()
    return [f"{len(folded):,} more", *_cells(Change.total(map(of, folded)))] if folded else []


def _table(
    words: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Sequence[str],
    rest: Sequence[str],
    top: int,
) -> str:
    """A table without the columns that are empty in each row; ``rest`` is its last row."""
    headers = (*words, *figures)
    shown = [list(row) for row in rows[: top or None]]
    if rest:
        row = [rest[0], *[""] * (len(words) - 1), *rest[1:]]
        shown.append([*row, *[""] * (len(headers) - len(row))])
    return format_table(
        "l" * len(words) + "r" * len(figures),
        headers,
        shown,
        drop=[headers.index(name) for name in _DROP if name in headers],
        drop_empty=True,
    )


def _kernel_list(
    word: str,
    changes: Sequence[KernelChanges],
    names_of: Callable[[KernelChanges], Sequence[str]],
    template_of: Callable[[str], str],
    top: int,
) -> str | None:
    """Kernels by library and template, the most instantiations first."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in changes:
        counts.update((one.library, template_of(name)) for name in names_of(one))
    if not counts:
        return None
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ordered[: top or None]
    total = sum(counts.values())
    lines = [f"{format_items(total, 'kernel', 'kernels')} {word}:"]
    for (library, template), count in shown:
        times = "" if count == 1 else f"  ({count:,} instantiations)"
        lines.append(f"  {printable(library)}: {printable(template)}{times}")
    if len(shown) < len(ordered):
        folded = sum(count for _, count in ordered[len(shown) :])
        lines.append(f"  {format_items(folded, 'more kernel', 'more kernels')}")
    return "\n".join(lines)


def _sizes(change: Change) -> str:
    before, after = change.before or 0, change.after or 0
    return f"{format_bytes(before)} -> {format_bytes(after)} ({format_growth(before, after)})"


def _size(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _signed(growth: int) -> str:
    return f"{'+' if growth > 0 else ''}{format_bytes(growth)}"
