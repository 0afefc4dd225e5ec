"""A round: one start of the program under proof, and what it is told."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import Record


class RoundKind(str, enum.Enum):
    """Purpose of a round."""

    TRACE = "trace"  # the traced run itself
    VERIFY = "verify"  # on the copies
    ORIGINAL = "original"  # on the originals again: does a test that differs fail there, too?


class Round(Record, frozen=True, kw_only=True):
    """The file ``round.json``, which the program's own process reads when it starts.

    Attributes:
        supervisor: the process that started the program and waits for it.
        pid_namespace: that of the supervisor; see ``storage.handover``.
        folder: the round's folder.
        is_pytest: whether the program is a pytest session that takes part in the round. Any other
            program is only started and watched, even if it is pytest.
        tests: node ids to run; None: all that the command selects.
        repeated: node ids that run last, up to ``most`` times.
        seconds: for about how long, all together, before few runs are enough; None: no limit.
        expected: the outcomes file of the traced run; None if there is none yet.
    """

    kind: RoundKind
    supervisor: int
    pid_namespace: str | None
    folder: str
    is_pytest: bool
    tests: tuple[str, ...] | None = None
    repeated: tuple[str, ...] = ()
    most: int = 1
    seconds: float | None = None
    expected: str | None = None
