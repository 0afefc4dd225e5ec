"""The processes that have a file open or mapped."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class FileUser:
    """A process that has a file open or mapped.

    Attributes:
        who: its id and executable, in words.
        started: when it began, seconds since the epoch; up to a second too early.
    """

    who: str
    started: float


def users_of(paths: Iterable[str]) -> Iterator[tuple[str, FileUser]]:
    """Each of the files with each other process that has it open or mapped.

    Processes of other users show only to root.
    """
    files: dict[tuple[int, int], str] = {}
    inodes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError):
            status = Path(path).stat()
            files[status.st_dev, status.st_ino] = path
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            inodes[str(status.st_ino)].append((device, path))
    for process in Path("/proc").iterdir():
        if not files or not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            # In this order: who has mapped a file closes it afterwards.
            used = {files[key] for key in _open_files(process) if key in files}
            used |= set(_mapped_files(process, inodes))
            if used:
                who = f"process {process.name} ({(process / 'exe').readlink()})"
                user = FileUser(who, psutil.Process(int(process.name)).create_time())
                yield from ((path, user) for path in sorted(used))


def _open_files(process: Path) -> Iterator[tuple[int, int]]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            status = descriptor.stat()
            yield status.st_dev, status.st_ino


def _mapped_files(process: Path, inodes: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    for line in (process / "maps").read_text("utf-8", "surrogateescape").splitlines():
        # 7f5e2000-7f5e4000 r-xp 00002000 08:01 123456   /lib/a.so: proc_pid_maps(5). Some file
        # systems have another device here than in stat.
        words = line.split(maxsplit=5)
        for device, path in inodes.get(words[4], ()):
            if words[3] == device or words[5:] == [path]:
                yield path
