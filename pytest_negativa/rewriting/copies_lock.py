"""Locks of a folder of copies: one process writes, or several run tests on the copies.

There are two lock files. Writers take the first and wait for each other. Processes that run tests
share the second until the tests end. A writer waits some seconds for it, then reports an error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pytest_negativa.errors import ReconstructError, refusing
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.rewriting.copies import state_at
from pytest_negativa.storage.flock import find_holders, lock, open_to_lock

WRITING_NAME = ".negativa-lock"
IN_USE_NAME = ".negativa-in-use"

PATIENCE = 3.0
"""Seconds that a writer waits for tests to end; a process that was killed takes a moment."""

_PAUSE = 0.1
_opened = partial(open_to_lock, flags=os.O_RDWR | os.O_CREAT, kind=ReconstructError)


@contextlib.contextmanager
def writing_copies(root: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other writers and test runs away from a folder of copies.

    Args:
        root: the folder, which must exist.
        patience: seconds to wait for tests that run on the copies.

    Raises:
        ReconstructError: the folder can't be locked, or tests still run on its copies.
    """
    with _opened(root / WRITING_NAME) as writing, _opened(root / IN_USE_NAME) as in_use:
        _lock(root, writing)
        give_up = time.monotonic() + patience
        while not _lock(root, in_use, wait=False):
            if time.monotonic() > give_up:
                pids = ", ".join(map(str, find_holders(in_use)))
                process = f" (process {pids})" if pids else ""
                raise ReconstructError(
                    f"{root}: its copies are in use by a verification{process}; wait until it "
                    "ends, or use another folder for runs"
                )
            time.sleep(_PAUSE)
        yield


@contextlib.contextmanager
def hold_copies(root: Path) -> Iterator[None]:
    """Keep writers away from a folder of copies while tests run on it.

    Several processes may hold the folder. The call waits for a writer at work. The holder can't
    write there either. ``check_copies`` tells whether the files changed before the folder was held.

    Args:
        root: the folder, which must exist.

    Raises:
        ReconstructError: the folder can't be locked.
    """
    with _opened(root / IN_USE_NAME) as in_use:
        _lock(root, in_use, shared=True)
        yield


def check_copies(reconstruction: Reconstruction) -> tuple[str, ...]:
    """Tell which copies and originals changed since the copies were written, a sentence for each.

    Ask after the tests: if a file changed, the bytes that the tests ran on are not known.
    """
    problems = []
    for library in reconstruction.libraries:
        for path, known in (
            (library.copy, library.copy_state),
            (library.library.path, library.original_state),
        ):
            found = state_at(Path(path))
            if found is None:
                problems.append(f"{path} was removed while the tests ran")
            elif found != known:
                problems.append(f"{path} changed while the tests ran")
    return tuple(problems)


def _lock(root: Path, file: int, *, shared: bool = False, wait: bool = True) -> bool:
    with refusing(root, "locked", ReconstructError):
        return lock(file, shared=shared, wait=wait)
