"""Rounds of a proof: what each is told; reruns of flaky tests: 20 times; 40% or 24 s; then 3."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from pytest_negativa.models.base import Record, Versioned

MOST_RERUNS = 20
"""Most runs of a repeated test if the user gives no number."""

# For as long as this share of the traced session, or of a minute, tests that differ are repeated
# if the user gives no number. With trace and proof, that is 2.4 times the tests' own time.
_REPEATING = 0.4
_LEAST_REPEATING = 24.0

LEAST_RERUNS = 3
"""However slow they are, tests that are repeated run so often."""


def seconds_of_reruns(session: float) -> float:
    """For how long tests are repeated, in seconds, after a traced session of so many."""
    return max(_LEAST_REPEATING, _REPEATING * session)


class RoundKind(str, enum.Enum):
    """Purpose of a round."""

    TRACE = "trace"  # the traced run itself
    VERIFY = "verify"  # on the copies
    ORIGINAL = "original"  # on the originals again: does a test that differs fail there, too?


class Round(Versioned, Record, frozen=True, kw_only=True):
    """The file ``round.json``, which the program's own process reads when it starts.

    Attributes:
        supervisor: the process that started the program and waits for it.
        pid_namespace: that of the supervisor; see ``storage.handover``.
        folder: the round's folder.
        is_pytest: whether the program is a pytest session that takes part in the round. Any other
            program is only started and watched, even if it is pytest.
        tests: node ids to run; None: all that the command selects.
        repeated: by node id of a test that runs last, up to ``most`` times: whether it passed when
            traced.
        seconds: for about how long, all together, before few runs are enough; None: no limit.
        expected: the outcomes file of the traced run; None if there is none yet.
    """

    kind: RoundKind
    supervisor: int
    pid_namespace: str | None
    folder: str
    is_pytest: bool
    tests: tuple[str, ...] | None = None
    repeated: Mapping[str, bool] = {}
    most: int = 1
    seconds: float | None = None
    expected: str | None = None
