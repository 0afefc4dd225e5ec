"""Processes that use a file now, open or mapped, or the GPU; waits 10 s for young ones."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pytest_negativa.tracing.mappings import DELETED, Mapping, parse_maps

# The time of the system's start, which the start of a process is counted from, has no fractions.
_CLOCK_ERROR = 1.0
_PATIENCE = 10.0
_POLL = 0.1
# NFS's name of a file that has no name any more (nfs(5)).
_GONE_ON_NFS = "/.nfs"
_DRIVER = "libcuda.so"
# TCP_LISTEN of net/tcp_states.h, and __SO_ACCEPTCON of linux/net.h: proc_pid_net(5).
_TCP_LISTEN = "0A"
_ACCEPTS = 1 << 16


@dataclass(frozen=True, slots=True)
class FileUser:
    """A process that has a file open or mapped.

    Attributes:
        who: its id and executable, in words.
        started: when it began, seconds since the epoch; up to a second too early. 0 for what this
            process runs in, such as a wrapper: no test started that.
        listens: it waits for connections, so that a test may talk to it.
        command: its command line, with spaces between the words; empty for this process.
    """

    who: str
    started: float
    listens: bool = field(default=False, compare=False)
    command: str = field(default="", compare=False)

    def may_be_younger(self, when: float) -> bool:
        """Whether it may have begun after this time."""
        return self.started > when - _CLOCK_ERROR


def wait_for_users(
    paths: Iterable[str], since: float, gone_from: str | None = None
) -> tuple[tuple[str, FileUser], ...]:
    """``users_of``, after waiting up to 10 seconds for processes that began after a time to end.

    Workers of a session may outlive it for a moment.

    Args:
        since: seconds since the epoch.
    """
    paths = tuple(paths)
    deadline = time.monotonic() + _PATIENCE
    while True:
        found = tuple(users_of(paths, gone_from, and_own=True))
        may_end = any(user.may_be_younger(since) for _, user in found)
        if not may_end or time.monotonic() > deadline:
            return found
        time.sleep(_POLL)


def users_of(
    paths: Iterable[str], gone_from: str | None = None, *, and_own: bool = False
) -> Iterator[tuple[str, FileUser]]:
    """Each of the files with each other process that has it open or mapped.

    Processes of other users show only to root.

    Args:
        gone_from: a folder, by its real path; files that were replaced there or removed count, too.
        and_own: what this process has open, too, which tests inherit.
    """
    files: dict[tuple[int, int], str] = {}
    inodes: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError):
            status = Path(path).stat()
            files[status.st_dev, status.st_ino] = path
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            inodes[status.st_ino].append((device, path))
    own = str(os.getpid())
    ancestors = {str(ancestor.pid) for ancestor in psutil.Process().parents()}
    for process in _processes() if files or gone_from else ():
        with contextlib.suppress(OSError, psutil.Error):
            # In this order: who has mapped a file closes it afterwards.
            is_own = process.name == own
            if is_own and not and_own:
                continue
            used = {files[key] for key in _open_files(process) if key in files}
            if not is_own:
                used |= set(_mapped_files(process, inodes))
                used |= set(_gone_files(process, f"{gone_from}/") if gone_from else ())
            if used:
                is_ancestor = process.name in ancestors
                started = 0.0 if is_ancestor else psutil.Process(int(process.name)).create_time()
                # Tests inherit what this one has open, however old it is.
                started = math.inf if is_own else started
                listens = not (is_own or is_ancestor) and _listens(process)
                command = "" if is_own else _command(process)
                user = FileUser(_describe(process), started, listens, command)
                yield from ((path, user) for path in sorted(used))


def processes_with_driver(started_by: str, apart_from: str) -> Iterator[str]:
    """In words: processes with CUDA's driver mapped, and with a word in their environment.

    Args:
        started_by: the word.
        apart_from: a word that their environment does not have.
    """
    for process in _processes():
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            is_meant = os.fsencode(started_by) in environ and os.fsencode(apart_from) not in environ
            mapped = _mappings(process) if is_meant else ()
            if any(Path(one.file.path).name.startswith(_DRIVER) for one in mapped):
                yield _describe(process)


def _listens(process: Path) -> bool:
    """Whether it waits for connections by TCP or at a Unix socket."""
    sockets = {name[8:-1] for name in _open_names(process) if name.startswith("socket:[")}
    rows = [words for name in ("tcp", "tcp6") for words in _rows(process / "net" / name)]
    listening = {words[9] for words in rows if words[3] == _TCP_LISTEN}
    rows = list(_rows(process / "net/unix"))
    listening |= {words[6] for words in rows if int(words[3], 16) & _ACCEPTS}
    return not sockets.isdisjoint(listening)


def _rows(table: Path) -> Iterator[list[str]]:
    # A kernel without IPv6 has no tcp6.
    with contextlib.suppress(FileNotFoundError):
        for line in table.read_text("utf-8", "surrogateescape").splitlines()[1:]:
            yield line.split()


def _processes() -> Iterator[Path]:
    """The newest first: they end soonest."""
    for number in sorted((int(n) for n in os.listdir("/proc") if n.isdecimal()), reverse=True):  # noqa: PTH208
        yield Path("/proc", str(number))


def _describe(process: Path) -> str:
    return f"process {process.name} ({(process / 'exe').readlink()})"


def _command(process: Path) -> str:
    words = (process / "cmdline").read_text("utf-8", "surrogateescape")
    return words.rstrip("\0").replace("\0", " ")


def _open_names(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(descriptor.readlink())


def _open_files(process: Path) -> Iterator[tuple[int, int]]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            status = descriptor.stat()
            yield status.st_dev, status.st_ino


def _mapped_files(process: Path, inodes: dict[int, list[tuple[str, str]]]) -> Iterator[str]:
    for mapping in _mappings(process):
        # Some file systems have another device here than in stat.
        for device, path in inodes.get(mapping.file.inode, ()):
            if mapping.device == device or mapping.file.path == path:
                yield path


def _gone_files(process: Path, start: str) -> Iterator[str]:
    for name in (*_open_names(process), *(one.file.path for one in _mappings(process))):
        if name.startswith(start) and (name.endswith(DELETED) or _GONE_ON_NFS in name):
            yield name


def _mappings(process: Path) -> tuple[Mapping, ...]:
    return parse_maps((process / "maps").read_bytes())
