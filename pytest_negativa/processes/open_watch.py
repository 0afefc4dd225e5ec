"""Watches of files by inotify: openers of originals and code files, strangers on copies; limits.

inotify(7) reports each open of an inode, whatever the name, the environment, the user or the root
folder of the process that opens it. It does not report the process. A thread looks for the opener
while that may still run. The calls need no privilege.

A file system may report nothing. So the watch opens a folder of each, the canary, at its start and
at its end, and expects an event.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_negativa.installed.sites import find_code_distributions
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.processes.file_users import FileUser, users_of
from pytest_negativa.storage.system import process_mark

_IN_ACCESS = 0x1  # linux/inotify.h
_IN_OPEN = 0x20
_IN_DELETE_SELF = 0x400
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000  # the inode is gone, or its file system
_IN_ISDIR = 0x4000_0000
_EVENT = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; then a name
_BUFFER = 1 << 16
# A search reads /proc of all processes.
_MOST_SEARCHES = 50

_REPLACED = "the file was replaced or removed meanwhile"

_LIMITS = {
    "inotify_init1": "fs.inotify.max_user_instances",
    "inotify_add_watch": "fs.inotify.max_user_watches",
}


@dataclass(frozen=True, slots=True)
class Opens:
    """Events of the watched files.

    Attributes:
        times: by path: how often the file was opened, at least. Equal events in a row are one.
        openers: by path: processes that had it open or mapped shortly after, and not before.
        unexplained: paths that were opened more often than openers were found.
        unseen: by path: why opens may have been missed.
        strangers: by path of a copy: processes that used it without the redirect.
    """

    times: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    openers: dict[str, tuple[FileUser, ...]] = field(default_factory=dict)
    unexplained: set[str] = field(default_factory=set)
    unseen: dict[str, str] = field(default_factory=dict)
    strangers: dict[str, tuple[FileUser, ...]] = field(default_factory=dict)


class OpenWatch:
    """Watches files within a context; ``opens`` is complete after it.

    A process in which no thread may run calls ``start``, ``read`` now and then, and ``finish``.

    Args:
        paths: the files. All hard links to a file are watched with it. If the user's limit of
            watches is reached, none is watched.
        finds_openers: whether to look for the processes.
    """

    _event = _IN_OPEN
    # After each reading the thread rests for so many times as long.
    _rest = 0

    def __init__(self, paths: Iterable[str], *, finds_openers: bool = True) -> None:
        self._paths = tuple(paths)
        # By device: a folder on it, and the number of its watch.
        self._canaries: dict[int, tuple[str, int]] = {}
        self._devices: dict[str, int] = {}
        self._finds_openers = finds_openers
        self._by_watch: dict[int, list[str]] = defaultdict(list)
        self._files: dict[str, tuple[int, int]] = {}
        self.opens = Opens()
        self._searches = 0
        # Who uses a file by now opened it before.
        self._users: set[tuple[str, FileUser]] = set()
        self._inotify: int | None = None
        self._process = process_mark()
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Watch from now on."""
        if not self._paths:
            return
        try:
            inotify = _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            self._lose(str(e.strerror))
            return
        for path in self._paths:
            try:
                self._devices[path] = self._watch_canary(inotify, str(Path(path).parent))
                watch = _add_watch(inotify, path, self._event)
                self._files[path] = _file_at(path)
            except OSError as e:
                self.opens.unseen[path] = str(e.strerror)
                if e.errno == errno.ENOSPC:
                    # Tests watch, too, and share the user's limit.
                    os.close(inotify)
                    self._lose(str(e.strerror))
                    return
            else:
                self._by_watch[watch].append(path)
        self._inotify = inotify
        self._try_canaries()
        if self._finds_openers:
            self._users.update(users_of(self._paths))

    def _watch_canary(self, inotify: int, folder: str) -> int:
        """Watch a folder on its device, but not for opens of its files; the device."""
        device, _ = _file_at(folder)
        if device not in self._canaries:
            self._canaries[device] = folder, _add_watch(inotify, folder, _IN_DELETE_SELF)
        return device

    def _try_canaries(self) -> None:
        """Open each canary, and note what the watch does not see if no event tells of it."""
        for device, (folder, watch) in self._canaries.items():
            self.read()
            if self._inotify is None:
                return
            if not _has_canary(self._inotify, watch):
                self._lose("a test closed the descriptor of the watch, or replaced a folder")
                return
            if not self._reports(self._inotify, folder, watch):
                reason = f"the kernel reported no open of {folder}"
                self.opens.unseen.update(
                    {p: reason for p, d in self._devices.items() if d == device}
                )

    def _reports(self, inotify: int, folder: str, watch: int) -> bool:
        """Whether an event tells that a folder is opened."""
        reported = False
        with contextlib.suppress(OSError):
            _add_watch(inotify, folder, _IN_OPEN)
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            while not reported:
                data = os.read(inotify, _BUFFER)
                reported = (watch, _IN_OPEN | _IN_ISDIR) in _events(data)
                self.add_events(data)
        with contextlib.suppress(OSError):
            _add_watch(inotify, folder, _IN_DELETE_SELF)
        return reported

    def read(self) -> None:
        """Take in what was opened until now. A forked child leaves that to its parent."""
        if self._inotify is None or process_mark() != self._process:
            return
        if not _is_inotify(self._inotify):
            self._lose("a test closed the descriptor of the watch")
            return
        # An event is queued before the open returns, so none comes after the last read.
        with contextlib.suppress(BlockingIOError):
            while True:
                self.add_events(os.read(self._inotify, _BUFFER))

    def check(self) -> None:
        """Take in what was opened until now, and note which files the watch could not see."""
        self.read()
        if self._inotify is None or process_mark() != self._process:
            return
        self._try_canaries()
        for path, file in self._files.items():
            with contextlib.suppress(OSError):
                if _file_at(path) == file:
                    continue
            self.opens.unseen.setdefault(path, _REPLACED)

    def finish(self) -> None:
        """End the watch."""
        self.check()
        if self._inotify is not None and process_mark() == self._process:
            os.close(self._inotify)
            self._inotify = None

    def _lose(self, reason: str) -> None:
        """Note that nothing is known any more; the descriptor may be another file's by now."""
        self.opens.unseen.update(dict.fromkeys(self._paths, reason))
        self._inotify = None

    def __enter__(self) -> OpenWatch:
        self.start()
        if self._inotify is not None:
            stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._stack.callback(os.close, stop)
            arguments = self._inotify, stop
            reader = threading.Thread(target=self._read_until, args=arguments, daemon=True)
            reader.start()
            self._stack.callback(reader.join)
            self._stack.callback(os.eventfd_write, stop, 1)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        self.finish()

    def _read_until(self, inotify: int, stop: int) -> None:
        poll, end = select.poll(), select.poll()
        end.register(stop, select.POLLIN)
        for descriptor in (inotify, stop):
            poll.register(descriptor, select.POLLIN)
        while not any(descriptor == stop for descriptor, _ in poll.poll()):
            begin = time.monotonic()
            self.read()
            end.poll(1000 * self._rest * (time.monotonic() - begin))

    def add_events(self, data: bytes) -> None:
        """Count the opens of a buffer of events, and look for the processes."""
        opened = Counter[str]()
        for watch, mask in _events(data):
            if mask & _IN_Q_OVERFLOW:
                self.opens.unseen.update(dict.fromkeys(self._paths, "too many opens at a time"))
            if mask & _IN_IGNORED:
                # A new file may have got the number of the inode.
                for path in self._by_watch.get(watch, ()):
                    self.opens.unseen.setdefault(path, _REPLACED)
            if not mask & self._event:
                continue
            opened.update(self._by_watch.get(watch, ()))
        for path, times in opened.items():
            self.opens.times[path] += times
        if opened and self._finds_openers:
            self._find_openers(opened)

    def _find_openers(self, opened: Counter[str]) -> None:
        """Look for the processes that use the files by now and did not before."""
        self._searches += 1
        users = users_of(opened) if self._searches <= _MOST_SEARCHES else ()
        found = [use for use in users if use not in self._users]
        for path, times in opened.items():
            new = [user for used, user in found if used == path]
            if len(new) < times:
                self.opens.unexplained.add(path)
            if new:
                self.opens.openers[path] = (*self.opens.openers.get(path, ()), *new)
        self._users.update(found)


class CopyWatch(OpenWatch):
    """Watches copies: which processes use them that the redirect did not lead there?

    A file is opened before its process has it, and the loader reads it then. So the search begins
    with each of both, and once more at the end.

    Args:
        copies: the files.
        auditor: the library that every redirected process has mapped.
    """

    _event = _IN_OPEN | _IN_ACCESS
    _rest = 9

    def __init__(self, copies: Iterable[str], auditor: str) -> None:
        super().__init__(copies, finds_openers=False)
        self._auditor = auditor

    def read(self) -> None:
        """Take in what was opened or read until now, and look for the processes."""
        before = sum(self.opens.times.values())
        super().read()
        if sum(self.opens.times.values()) != before:
            self._search()

    def finish(self) -> None:
        """End the watch."""
        super().finish()
        self._search()

    def _search(self) -> None:
        found: dict[FileUser, set[str]] = defaultdict(set)
        for path, user in users_of([*self._paths, self._auditor] if self._paths else ()):
            found[user].add(path)
        for user, paths in found.items():
            for path in paths if self._auditor not in paths else ():
                known = self.opens.strangers.get(path, ())
                self.opens.strangers[path] = tuple(dict.fromkeys((*known, user)))


class CodeFileWatch(OpenWatch):
    """Watches the files of distributions that are GPU code: which of them does a run open?

    Args:
        folders: where distributions are installed, such as ``sys.path``.
    """

    def __init__(self, folders: Iterable[str]) -> None:
        self._found = tuple(find_code_distributions(folders))
        paths = [str(one.site / name) for one in self._found for name in one.code_files]
        self._here = {path for path in paths if os.path.isfile(path)}  # noqa: PTH113
        super().__init__(self._here, finds_openers=False)

    def opened(self) -> tuple[WatchedFiles, ...]:
        """Files that were opened until now."""
        self.check()
        opens = self.opens
        found = []
        for one in self._found:
            lines = one.code_files
            paths = {str(one.site / name): name for name in lines}
            here = sorted(name for path, name in paths.items() if path in self._here)
            files = {name: (lines[name].digest, int(lines[name].size)) for name in here}
            unseen = [reason for path, reason in opens.unseen.items() if path in paths]
            if any(os.path.isfile(path) for path in paths.keys() - self._here):  # noqa: PTH113
                unseen.append("a file appeared meanwhile, and was not watched")
            found.append(
                WatchedFiles(
                    distribution=one.name,
                    version=one.version,
                    site=str(one.site),
                    digest=one.code_digest,
                    files=files,
                    opened=tuple(sorted(paths[path] for path in opens.times if path in paths)),
                    unseen=next(iter(unseen), None),
                )
            )
        return tuple(found)


def _file_at(path: str) -> tuple[int, int]:
    status = os.stat(path)  # noqa: PTH116 (there are thousands)
    return status.st_dev, status.st_ino


def _add_watch(inotify: int, path: str, mask: int) -> int:
    return _call("inotify_add_watch", inotify, os.fsencode(path), mask)


def _has_canary(inotify: int, watch: int) -> bool:
    """Whether the canary's watch is there: a test may have closed ours and opened its own."""
    # inotify wd:1 ino:9e7e sdev:800013 mask:400 ...: Documentation/filesystems/proc.rst
    watches = Path(f"/proc/self/fdinfo/{inotify}").read_text()
    wanted = {f"wd:{watch:x}", f"mask:{_IN_DELETE_SELF:x}"}
    return any(wanted <= set(line.split()) for line in watches.splitlines())


def _is_inotify(descriptor: int) -> bool:
    """Whether a descriptor is an inotify instance; a test may have closed that of the watch."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:inotify"  # noqa: PTH115
    except OSError:
        return False


def _events(data: bytes) -> Iterator[tuple[int, int]]:
    offset = 0
    while offset < len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, offset)
        yield watch, mask
        offset += _EVENT.size + length


def _call(name: str, *arguments: int | bytes) -> int:
    """Call a function of libc.

    Raises:
        OSError: it failed; the message names the limit that was reached, if one was.
    """
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        text = f"{name}: {os.strerror(number)}"
        # EMFILE and ENOSPC: inotify_init(2), inotify_add_watch(2).
        if number in (errno.EMFILE, errno.ENOSPC):
            text += f" (the limit {_LIMITS[name]})"
        raise OSError(number, text)
    return result
