"""Originals that a process opened while the tests ran on the copies: it may have run on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from pytest_negativa.processes.file_users import FileUser
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.reporting.units import format_items


def opened_originals(
    rounds: Sequence[Opens],
    twins: Mapping[str, str] = MappingProxyType({}),
    copies: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """By real path of an original: who opened it, or why that could not be watched; and what to do.

    Args:
        rounds: what was seen in each round on the copies. This package opens no original meanwhile.
        twins: by path of another file with the content of an original: the original.
        copies: by path of a copy: the original.
    """
    found: dict[str, str] = {}
    originals = {**twins, **copies}
    for opens in rounds:
        for path, times in opens.times.items():
            reason = _opened(path, times, opens.openers.get(path, ()), is_twin=path in twins)
            found.setdefault(twins.get(path, path), reason)
        for path, reason in opens.unseen.items():
            found.setdefault(
                originals.get(path, path),
                "nothing tells whether a process opened the original while the tests ran on the "
                f"copies ({reason}); mend this, or set verify.opened_originals to note",
            )
        for path, users in opens.strangers.items():
            found.setdefault(
                copies[path],
                f"{', '.join(users)} used the copy without the redirect, so what it needed was not "
                "seen; pass the environment on to child processes, end what else uses the copy, or "
                "set verify.opened_originals to note",
            )
    return found


def held_originals(
    held: Iterable[tuple[str, FileUser]],
    since: float,
    twins: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, str], dict[str, str]]:
    """By real path of an original: who had it open or mapped before a round began.

    Args:
        held: an original or a twin, and a process that used it.
        twins: see ``opened_originals``.
        since: when the traced run began, seconds since the epoch.

    Returns:
        The processes that a test may have started, for they are younger than the traced run, or
        may talk to, for they listen; and other older ones.
    """
    younger: dict[str, str] = {}
    older: dict[str, str] = {}
    for path, user in held:
        what = f"{user.who} had the original open or mapped before the tests ran on the copies"
        if user.may_be_younger(since):
            younger[twins.get(path, path)] = (
                f"{what}, and began after the traced run: a test may have started it or use it; "
                "end it, or set verify.opened_originals to note"
            )
        elif user.listens:
            younger[twins.get(path, path)] = (
                f"{what}, and listens: a test may talk to it; end it, or set "
                "verify.opened_originals to note"
            )
        else:
            older[twins.get(path, path)] = (
                f"{what}; if a test uses this process, end it and verify again"
            )
    return younger, older


def lingering_processes(processes: Iterable[str]) -> Iterator[str]:
    """Why rounds tell nothing: what the traced run or an earlier round started may have answered.

    Args:
        processes: those that used a copy when the tests began, or CUDA's driver when they ended.
    """
    for who in dict.fromkeys(processes):
        yield (
            f"{who} of the traced run or an earlier round still used a copy or the CUDA driver "
            "when the tests ran again: one may have talked to it; let the test that starts this "
            "process end it"
        )


def _opened(path: str, times: int, openers: Sequence[str], *, is_twin: bool) -> str:
    what = f"{path}, which has the content of the original," if is_twin else "the original"
    who = f"{', '.join(openers)} had it open or mapped then" if openers else "its opener is unknown"
    return (
        f"a process opened {what} {format_items(times, 'time', 'times')} while the tests ran "
        f"on the copies ({who}) and may have run on it; pass the environment on to child "
        "processes, stop what else reads the file (another session, a linker, a scanner), or set "
        "verify.opened_originals to note"
    )
