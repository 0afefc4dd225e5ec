"""A session's facts in NEGATIVA_SESSION: workers of pytest-xdist, and children of tests.

Workers of pytest-xdist take part in the session. Any other process that inherits the variable is
part of a test. The session's own process finds it if ``execv`` replaced its program.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pytest_negativa.models.environment import SESSION_VARIABLE
from pytest_negativa.storage.system import System


class ProcessIdentity(NamedTuple):
    """Identity of a process among all others. ``execve`` keeps all of it.

    Attributes:
        pid: repeats in other pid namespaces, and after the process's end.
        namespace: the pid namespace, as ``/proc/self/ns/pid`` names it; None if it can't be read.
        started: field 22 of ``/proc/self/stat``, see proc(5); None if it can't be read.
    """

    pid: int
    namespace: str | None
    started: str | None


def identify_process() -> ProcessIdentity:
    """The identity of this process."""
    namespace = started = None
    with contextlib.suppress(OSError):
        namespace = System.readlink("/proc/self/ns/pid")
        # Field 2, the name in parentheses, may hold spaces and parentheses.
        started = System.read_all("/proc/self/stat").rpartition(b")")[2].split()[19].decode()
    return ProcessIdentity(System.getpid(), namespace, started)


@dataclass(frozen=True, slots=True)
class Handover:
    """A session, as other processes need to know it.

    Attributes:
        process: the one that reports.
        folder: of its run or round.
        root: the project's folder.
        round_file: see ``models.round``; None outside of a round.
        has_workers: it starts workers of pytest-xdist.
        outer_folder, outer_runs: the folder of the run or round of the outermost session, and of
            all its runs. They are this session's own unless a test started it.
    """

    process: ProcessIdentity
    folder: str
    root: str
    round_file: str | None
    has_workers: bool
    outer_folder: str
    outer_runs: str

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))


def find_controller(environ: Mapping[str, str]) -> Handover | None:
    """The session of which this process is a worker of pytest-xdist, if it is one."""
    session = find_handover(environ)
    if session is None or not session.has_workers or "PYTEST_XDIST_WORKER" not in environ:
        return None
    # A pytest that a test starts inherits the variables too, but its parent is the worker.
    return session if is_child_of(session.process.pid, session.process.namespace) else None


def is_child_of(pid: int, namespace: str | None) -> bool:
    """Whether a process started this one. Ids repeat in other pid namespaces."""
    return (os.getppid(), identify_process().namespace) == (pid, namespace)


def find_handover(environ: Mapping[str, str]) -> Handover | None:
    """The session that set the variable; None if none did, or one of another release."""
    try:
        fields = json.loads(environ.get(SESSION_VARIABLE, ""))
        return Handover(**{**fields, "process": ProcessIdentity(*fields["process"])})
    except (ValueError, TypeError, KeyError):
        return None
