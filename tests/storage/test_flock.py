"""Locks between processes: who gets one, and when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.flock import lock, open_to_lock

FILE = os.O_RDWR | os.O_CREAT


@pytest.mark.parametrize("flags", [FILE, os.O_RDONLY | os.O_DIRECTORY])
def test_one_at_a_time(tmp_path: Path, flags: int) -> None:
    path = tmp_path / "x" if flags == FILE else tmp_path
    # Each open(2) has locks of its own, as another process has.
    with open_to_lock(path, flags) as mine, open_to_lock(path, flags) as other:
        assert lock(mine)
        assert not lock(other, wait=False)
        assert not lock(other, shared=True, wait=False)
        assert lock(mine, shared=True)
        assert lock(other, shared=True, wait=False)
    with open_to_lock(path, flags) as later:
        assert lock(later, wait=False)


def test_ends_although_the_process_was_forked(tmp_path: Path) -> None:
    with open_to_lock(tmp_path / "x", FILE) as mine:
        assert lock(mine)
        # As in a child that fork(2) makes, the descriptor stays open.
        copy = os.dup(mine)
    with open_to_lock(tmp_path / "x", FILE) as other:
        assert lock(other, wait=False)
    os.close(copy)


def test_nothing_to_open(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="cannot be opened: No such file"),
        open_to_lock(tmp_path / "x/y", FILE),
    ):
        pass
