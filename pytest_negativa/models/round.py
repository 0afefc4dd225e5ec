"""A round: one start of the program under proof, and what it is told."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import Record


class RoundKind(str, enum.Enum):
    """What a round is for."""

    TRACE = "trace"  # the traced run itself
    VERIFY = "verify"  # on the copies
    ORIGINAL = "original"  # on the originals again: is a test that differs flaky?
    PROBE = "probe"  # on copies with some spans given back: are these the needed ones?


class Round(Record, frozen=True, kw_only=True):
    """The file ``round.json``, which the program's own process reads when it starts.

    Attributes:
        supervisor: the process that started the program and waits for it.
        base, run_id: the round's folder is ``base/run_id``.
        root: the folder against which paths of the project can be understood.
        tests: node ids to run; None: all that the command selects.
        expected: the outcomes file of the traced run; None where there is none yet.
        stop_at_failure: whether one test that fails, and didn't when traced, ends the round.
    """

    kind: RoundKind
    supervisor: int
    base: str
    run_id: str
    root: str
    tests: tuple[str, ...] | None = None
    expected: str | None = None
    stop_at_failure: bool = False
