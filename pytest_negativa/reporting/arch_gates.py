"""Output of ``negativa inspect --require-arch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_negativa.models.summary import LoadableCode
from pytest_negativa.planning.snapshot import short_names
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.units import format_bytes


def render_loadable(loadable: Mapping[str, Sequence[LoadableCode]]) -> Iterator[str]:
    """Code of each library that each device could load; libraries without GPU code go out."""
    shown = sorted(path for path, rows in loadable.items() if rows)
    if not shown:
        return
    headers = ["library", "device", "machine code", "compiled (JIT)", "bytes", "from", "nothing"]
    yield "Regions by what a device loads of them:"
    yield format_table(
        "llrrrlr",
        headers,
        [
            [
                name,
                row.device,
                f"{row.machine:,}",
                f"{row.compiled:,}",
                format_bytes(row.compiled_bytes) if row.compiled else "-",
                ", ".join(row.compiled_from) or "-",
                "ALL" if row.is_missing else f"{row.nothing:,}",
            ]
            for path, name in zip(shown, short_names(shown), strict=True)
            for row in loadable[path]
        ],
        drop=(4, 5, 3, 2),
    )
