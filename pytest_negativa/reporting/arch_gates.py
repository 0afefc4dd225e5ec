"""Output of ``negativa inspect --require-arch`` and ``--dead``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_negativa.models.summary import DeadCode, LibrarySummary, LoadableCode
from pytest_negativa.reporting.inspection import short_names
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.units import format_bytes, format_items, format_share


def render_loadable(loadable: Mapping[str, Sequence[LoadableCode]]) -> Iterator[str]:
    """Code of each library that each device could load; libraries without GPU code go out."""
    names = short_names([path for path, rows in loadable.items() if rows])
    if not names:
        return
    headers = ["library", "device", "machine code", "compiled (JIT)", "bytes", "from", "nothing"]
    yield "Regions by what a device loads of them:"
    yield format_table(
        "llrrrlr",
        headers,
        [
            [
                names[path],
                row.device,
                f"{row.machine:,}",
                f"{row.compiled:,}",
                format_bytes(row.compiled_bytes) if row.compiled else "-",
                ", ".join(row.compiled_from) or "-",
                "ALL" if row.is_missing else f"{row.nothing:,}",
            ]
            for path in sorted(names)
            for row in loadable[path]
        ],
        drop=(4, 5, 3, 2),
    )


def render_dead(summaries: Sequence[LibrarySummary], dead: Sequence[DeadCode]) -> Iterator[str]:
    """The code that no device loads, by library and by distribution."""
    if not summaries:
        yield "No GPU code."
        return
    names = short_names([s.path for s in summaries])
    yield f"GPU code that no device of {', '.join(summaries[0].devices)} loads:"
    headers = ["library", "GPU code", "for other GPUs", "share", "PTX in it"]
    by_loss = sorted(summaries, key=lambda s: -s.dead_bytes)
    yield format_table(
        "lrrrr",
        headers,
        [[names[s.path], *_figures(s.code_bytes, s.dead_bytes, s.dead_ptx_bytes)] for s in by_loss],
        drop=(4, 1, 3),
    )
    yield format_table(
        "lrrrrr",
        ["distribution", "libraries", *headers[1:]],
        [
            [
                row.distribution or "(none)",
                f"{row.libraries:,}",
                *_figures(row.code_bytes, row.dead_bytes, row.dead_ptx_bytes),
            ]
            for row in dead
        ],
        drop=(1, 5, 2, 4),
    )
    if ptx := sum(row.dead_ptx_bytes for row in dead):
        count = format_items(len(summaries), "library", "libraries")
        yield f"{format_bytes(ptx)} of it is PTX in {count}, which later devices could compile."


def _figures(code: int, dead: int, ptx: int) -> list[str]:
    return [format_bytes(code), format_bytes(dead), format_share(dead, code), format_bytes(ptx)]
