"""Small disks and read-only folders, mounted in a namespace that only the test sees.

Root may read and write whatever a mode says, so tests of read-only folders need a mount.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.storage.shared_folders import ALONE

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # sched.h
_PAGE = 4096

Test = Callable[..., None]


@functools.cache
def _may_mount() -> bool:
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def in_namespace(test: Test) -> Test:
    """Run a test in a child process that is root of its own user and mount namespace.

    The test is skipped on systems that forbid such namespaces.
    """

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if not _may_mount():
            pytest.skip("this system forbids user and mount namespaces")
        with warnings.catch_warnings():
            # The child is one thread, and needs none of the locks of pytest-xdist's others.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                _enter()
                test(**fixtures)
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0, "see what the child wrote to stderr"
        if "fault" in fixtures:
            fixtures["fault"].checked = True

    return run


def _enter() -> None:
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    # user_namespaces(7)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if user != 0:
        # The system's root is a stranger there.
        os.environ[ALONE] = "1"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes, in the namespace of the test."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def free_pages(disk: Path) -> int:
    return os.statvfs(disk).f_bavail


@contextmanager
def leave(disk: Path, pages: int) -> Iterator[None]:
    """Fill a small disk, except for some pages."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free_pages(disk) - pages, 1) * _PAGE)
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def bind(path: Path, place: Path | None = None) -> Iterator[None]:
    """Mount a file or folder at another place, or at its own."""
    place = place or path
    mount("--bind", path, place)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let no process of the namespace change anything in a folder, not even root."""
    with bind(folder):
        mount("-o", "remount,bind,ro", folder)
        yield


def mount(*arguments: str | Path) -> None:
    """Mount something, in the namespace of the test."""
    subprocess.run(["mount", *arguments], check=True)
