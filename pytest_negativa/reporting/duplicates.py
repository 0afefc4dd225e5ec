"""Output of ``negativa inspect --duplicates``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pytest_negativa.models.duplicates import Duplicates
from pytest_negativa.reporting.inspection import short_names
from pytest_negativa.reporting.tables import format_table
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes, format_names

# Each copy of a library in an environment has a name; more make no table.
_MOST_NAMES = 4


def render_duplicates(duplicates: Duplicates) -> Iterator[str]:
    """The files that are the same, the code that different files share, and the sum."""
    if not duplicates.saved_bytes:
        yield "No GPU code is stored more than once."
        return
    paths = {path for row in duplicates.files for path in row.paths}
    paths.update(path for row in duplicates.code for path in row.paths)
    names = short_names(sorted(paths))
    if duplicates.files:
        yield "Files that are the same:"
        yield format_table(
            "lrrr",
            ["files", "copies", "size of one", "one copy saves"],
            [
                [
                    _names(row.paths, names),
                    f"{len(row.paths):,}",
                    format_bytes(row.size),
                    format_bytes(row.saved_bytes),
                ]
                for row in duplicates.files
            ],
            drop=(2, 1),
        )
    if duplicates.code:
        yield "GPU code that is stored more than once:"
        yield format_table(
            "lrrrr",
            ["files", "copies", "regions", "size of one copy", "one copy saves"],
            [
                [
                    _names(row.paths, names),
                    f"{len(row.paths):,}",
                    f"{row.regions:,}",
                    format_bytes(row.size),
                    format_bytes(row.saved_bytes),
                ]
                for row in duplicates.code
            ],
            drop=(2, 3, 1),
        )
    yield f"One copy of everything would save {format_bytes(duplicates.saved_bytes)}."


def _names(paths: Sequence[str], names: Mapping[str, str]) -> str:
    counts = Counter(names[path] for path in paths)
    shown = (
        printable(name) + (f" ({count} times)" if count > 1 else "")
        for name, count in counts.items()
    )
    return format_names(shown, _MOST_NAMES)
