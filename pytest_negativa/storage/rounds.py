"""``round.json``, which tells a program under proof what to do; who is in a round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.models.environment import ROUND_VARIABLE
from pytest_negativa.models.round import Round
from pytest_negativa.storage.handover import is_child_of
from pytest_negativa.storage.records import load_record


def current_round(environ: Mapping[str, str]) -> Round | None:
    """The round whose program this process is; None in any other process.

    A process that a test starts inherits the variable, but has another parent. A program that is
    no pytest session takes no part either: the supervisor writes its outcome.

    Raises:
        StoreError: the round file can't be read.
    """
    path = environ.get(ROUND_VARIABLE)
    if not path:
        return None
    found = load_round(Path(path))
    # A test may start a pid namespace.
    is_child = is_child_of(found.supervisor, found.pid_namespace)
    return found if found.is_pytest and is_child else None


def load_round(path: Path) -> Round:
    """Read a round file.

    Raises:
        StoreError: it can't be read, or is no round file.
    """
    return load_record(path, Round, "a round", "start it anew with one release")
