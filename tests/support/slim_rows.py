"""What slim and undo say of each library."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.slim import undo_trees
from tests.support.made_site import Made


def statuses(rows: Iterable[SlimRow]) -> dict[str, SlimStatus]:
    """Status by path."""
    return {row.path: row.status for row in rows}


def undo_all(site: Made) -> dict[str, SlimRow]:
    """Undo in the whole site; the rows by path."""
    return {row.path: row for row in undo_trees((site.folder,))}
