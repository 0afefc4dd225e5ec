"""Runs a command that is killed, or meets a full disk, at its Nth change of the file system.

Python processes of the command count changes below a folder together: opening for writing, renames,
links, removals, modes, times. With a full disk the Nth change and all later ones fail, and so do
bytes that Python's ``os`` writes. The driver's and the loader's own changes don't count.

``TESTS_KILLS=60`` tries 60 points in each test, and ``TESTS_KILLS_LOG=FILE`` collects what was hit.
To count it: ``python -m tests.support.kills FILE``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HOOK = Path(__file__).parent / "killed_python"
FULL_DISK = 0
"""In place of a signal."""

MOST = int(os.environ.get("TESTS_KILLS", "10"))
"""How many points each test tries; chosen by chance if there are more."""

_LOG = os.environ.get("TESTS_KILLS_LOG")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        changes: how many it had begun.
    """

    status: int
    stdout: str
    stderr: str
    changes: int


def run(
    command: Sequence[str | os.PathLike[str]],
    below: Path,
    *,
    at: int = 0,
    by: int = signal.SIGKILL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    last_words: str = "",
) -> Ended:
    """Run a command.

    Args:
        command: the program and its arguments.
        below: the folder whose changes count.
        at: the change before which the process ends, from 1; 0: it isn't disturbed.
        by: the signal, or ``FULL_DISK``.
        env: its environment.
        cwd: its working folder.
        last_words: a traceback that ends so is not the command's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        fault = {"below": str(below), "log": str(log), "at": at, "signal": int(by)}
        inherited = os.environ if env is None else env
        # Before Python 3.12, threads can't install trace functions beside an audit hook that is
        # written in Python: coverage then prints a traceback of its own.
        variables = {
            **{name: inherited[name] for name in inherited if not name.startswith("COVERAGE_")},
            "TESTS_FAULT": json.dumps(fault),
            "PYTHONPATH": os.pathsep.join([str(_HOOK), inherited.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=300
        )
        changes = log.stat().st_size if log.exists() else 0
    if not (last_words and done.stderr.rstrip().endswith(last_words)):
        assert "Traceback" not in done.stderr, done.stderr
    if at and changes >= at and _LOG is not None:
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" (")[0].partition("[")[0]
        how = signal.Signals(by).name if by != FULL_DISK else "full disk"
        with open(_LOG, "a") as file:
            file.write(f"{test}\t{how}\n")
    return Ended(done.returncode, done.stdout, done.stderr, changes)


def points(changes: int, seed: int, most: int = MOST) -> Iterator[int]:
    """Some of the changes ``1..changes``, or all of them if they are few; in ascending order.

    The last one is always among them: it may come when all seems to be done.
    """
    numbers = range(1, changes + 1)
    rng = random.Random(seed)
    some = [*rng.sample(numbers[:-1], most - 1), changes] if changes > most else numbers
    yield from sorted(some)


def main() -> None:
    """Print how many points of each test were hit, by what ended the command there."""
    counted = Counter(Path(sys.argv[1]).read_text().splitlines())
    for line, count in sorted(counted.items()):
        print(f"{count:6} {line.expandtabs(90)}")


if __name__ == "__main__":
    main()
