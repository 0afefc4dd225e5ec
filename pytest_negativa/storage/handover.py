"""What a session tells the processes that it starts, in an environment variable.

Workers of pytest-xdist take part in the session. Any other process that inherits the variable is
part of a test. The session's own process finds it if ``execv`` replaced its program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pytest_negativa.models.environment import SESSION_VARIABLE


@dataclass(frozen=True, slots=True)
class Handover:
    """A session, as other processes need to know it.

    Attributes:
        pid: of the process that reports.
        folder: of its run or round.
        root: the project's folder.
        round_file: see ``models.round``; None outside of a round.
        has_workers: it starts workers of pytest-xdist.
        outer_folder, outer_runs: the folder of the run or round of the outermost session, and of
            all its runs. They are this session's own unless a test started it.
    """

    pid: int
    folder: str
    root: str
    round_file: str | None
    has_workers: bool
    outer_folder: str
    outer_runs: str

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))


def find_handover(environ: Mapping[str, str]) -> Handover | None:
    """The session that set the variable; None if none did, or one of another release."""
    try:
        return Handover(**json.loads(environ.get(SESSION_VARIABLE, "")))
    except (ValueError, TypeError):
        return None
