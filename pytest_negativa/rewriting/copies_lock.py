"""Who may do what to a folder of copies at a time: one writes, or some run tests on them.

Two lock files, both flock(2). The first is for writers among themselves: they wait for each other.
The second is shared by those who run tests, for as long as that takes, so that a writer
doesn't wait for them but says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.reconstruction import FileState, Reconstruction
from pytest_negativa.rewriting.copies import state_of
from pytest_negativa.storage.locks import lock, open_to_lock

WRITING_NAME = ".negativa-lock"
IN_USE_NAME = ".negativa-in-use"

PATIENCE = 3.0
"""Seconds that a writer waits for tests to end; a process that was killed takes a moment."""

_PAUSE = 0.1


@contextlib.contextmanager
def writing_copies(root: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only one who changes the folder ``root``, and have nobody run tests on it.

    Raises:
        ReconstructError: it can't be locked, or tests run on its copies and go on for more than
            ``patience`` seconds.
    """
    with _opened(root, WRITING_NAME) as writing, _opened(root, IN_USE_NAME) as in_use:
        _lock(root, writing)
        give_up = time.monotonic() + patience
        while not _lock(root, in_use, wait=False):
            if time.monotonic() > give_up:
                raise ReconstructError(
                    f"{root}: its copies are in use by a verification{_holders(in_use)}; wait "
                    "until it ends, or use another folder for runs"
                )
            time.sleep(_PAUSE)
        yield


@contextlib.contextmanager
def hold_copies(root: Path) -> Iterator[None]:
    """Let nobody write to the folder of copies ``root``, which must exist; others may hold it, too.

    Waits for who writes just now. Who holds it can't reconstruct there. What was written before is
    only known from ``check_copies``.

    Raises:
        ReconstructError: it can't be locked.
    """
    with _opened(root, IN_USE_NAME) as in_use:
        _lock(root, in_use, shared=True)
        yield


def check_copies(reconstruction: Reconstruction) -> tuple[str, ...]:
    """What happened to copies and originals since they were written: a sentence for each file.

    To be asked after tests ran on them: if anything did, nobody knows what they ran on.
    """
    problems = []
    for library in reconstruction.libraries:
        for path, known in (
            (library.copy, library.copy_state),
            (library.library.path, library.original_state),
        ):
            found = _state(path)
            if found is None:
                problems.append(f"{path} was removed while the tests ran")
            elif found != known:
                problems.append(f"{path} changed while the tests ran")
    return tuple(problems)


@contextlib.contextmanager
def _opened(root: Path, name: str) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_to_lock(root / name, os.O_RDWR | os.O_CREAT))
        except OSError as e:
            raise ReconstructError(f"{root}: cannot be made or written: {e.strerror}") from e
        yield file


def _lock(root: Path, file: int, *, shared: bool = False, wait: bool = True) -> bool:
    try:
        return lock(file, shared=shared, wait=wait)
    except OSError as e:
        raise ReconstructError(f"{root}: cannot be locked: {e.strerror}") from e


def _holders(file: int) -> str:
    """Who has a lock on an open file, for people; proc_locks(5). Nothing where that isn't told."""
    inode = str(os.fstat(file).st_ino)
    found = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            # 1: FLOCK  ADVISORY  READ 4321 08:01:123456 0 EOF; "->" marks one who waits.
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5].rpartition(":")[2] == inode:
                # A process of another container has no number here.
                found.add(int(words[4]))
    known = ", ".join(str(pid) for pid in sorted(found) if pid > 0)
    return f" (process {known})" if known else ""


def _state(path: str) -> FileState | None:
    try:
        return state_of(path)
    except OSError:
        return None
