"""Originals that a process opened while the tests ran on the copies: it may have run on them."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.reporting.units import format_items


def opened_originals(rounds: Sequence[Opens]) -> dict[str, str]:
    """By real path of an original: who opened it, or why that could not be watched; and what to do.

    Args:
        rounds: what was seen in each round on the copies. This package opens no original meanwhile.
    """
    found: dict[str, str] = {}
    for opens in rounds:
        for path, times in opens.times.items():
            found.setdefault(path, _opened(times, opens.openers.get(path, ())))
        for path, reason in opens.unseen.items():
            found.setdefault(
                path,
                "nothing tells whether a process opened the original while the tests ran on the "
                f"copies ({reason}); mend this, or set verify.opened_originals to note",
            )
    return found


def _opened(times: int, openers: Sequence[str]) -> str:
    who = f"{', '.join(openers)} had it open or mapped then" if openers else "its opener is unknown"
    return (
        f"a process opened the original {format_items(times, 'time', 'times')} while the tests ran "
        f"on the copies ({who}) and may have run on it; pass the environment on to child "
        "processes, stop what else reads the file (another session, a linker, a scanner), or set "
        "verify.opened_originals to note"
    )
