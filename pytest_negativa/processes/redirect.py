"""The redirect: which originals can have copies, its table, its logs of what was loaded.

glibc loads ``redirect.c`` into every process whose LD_AUDIT names it. This module writes the table
that ``redirect.c`` reads, and reads the logs that it writes. It starts no process.

The table has lines of fields parted by tabs::

    negativa-redirect 1
    root    <root>
    library <original: major> <minor> <inode> <copy: major> <minor> <inode> <original> <copy>
    end     <number of libraries>

A log, one file for each exec'd process, ``<pid>.<start, ns since 1970>.<number>.log``::

    negativa-redirect-log 1 <executable>
    <pid>   copy        <original>              its copy was mapped
    <pid>   original    <original> <opened as>  the original itself was mapped
    <pid>   unknown     <opened as>             original or copy: not known
    <pid>   driver      <injection>             CUDA's driver was mapped; the CUDA_INJECTION64_PATH
                                                that the exec'd process began with, or nothing
    <pid>   lost        <number>                lines could not be written
    <pid>   disabled    <reason> <table>        nothing was redirected in this process

The pid of a line differs from the head's in forked children. Control characters and the backslash
are written as ``\\xNN`` in a log.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import NegativaError
from pytest_negativa.pages.auditors import why_no_auditor, with_auditor
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.runs import REDIRECT_SUFFIX, files_in
from pytest_negativa.storage.shared_folders import make_passable
from pytest_negativa.storage.system import read_regular

REDIRECT = Path(__file__).with_name("_redirect.so")
"""Replaces libraries. Not there if no compiler built it."""

TABLE_VARIABLE = "NEGATIVA_REDIRECT_TABLE"
LOGS_VARIABLE = "NEGATIVA_REDIRECT_LOGS"

_TABLE_HEAD = "negativa-redirect 1"
# PATH_MAX of linux/limits.h, which counts the final zero byte.
_PATH_MAX = 4096
_KINDS = {"copy", "original", "unknown", "driver", "lost", "disabled"}
_FIELDS = 4
_NUMBER = re.compile(r"[0-9]{1,20}")
# By name_log in native/files.h: id and start of the process, and a random number.
_LOG_NAME = re.compile(r"([0-9]{1,20})\.([0-9]{1,20})\.[0-9]{1,20}" + re.escape(REDIRECT_SUFFIX))
_LOG_HEAD = "negativa-redirect-log 1"


class LoggedLine(NamedTuple):
    """Record of a log about the exec'd process, or about a child that it forked.

    Attributes:
        kind: ``copy``, ``original`` or ``driver``. Libraries that a child inherited are in its
            parent's lines only.
        path: of an original; or the library that CUDA's driver was to load, empty for none.
        opened: the path by which an original was opened.
    """

    pid: int
    kind: str
    path: str
    opened: str = ""


@dataclass(frozen=True, slots=True)
class RedirectedProcess:
    """A process that was exec'd with the redirect, and the children that it forked.

    Attributes:
        executable: its path; empty if unknown.
        started_ns: when it was exec'd, nanoseconds since the epoch.
        lines: records of the log, in its order.
        problems: why the log is incomplete, or why nothing was redirected. With a problem, the
            log does not prove that no original was mapped.
    """

    log: Path
    pid: int
    executable: str
    started_ns: int
    lines: tuple[LoggedLine, ...]
    problems: tuple[str, ...]

    @property
    def copies(self) -> frozenset[str]:
        """Paths of originals whose copy was mapped by any process."""
        return frozenset(line.path for line in self.lines if line.kind == "copy")

    @property
    def originals(self) -> frozenset[tuple[str, str]]:
        """Paths of originals that were mapped themselves, each with the path that was opened."""
        return frozenset((x.path, x.opened) for x in self.lines if x.kind == "original")


def why_unsupported() -> str | None:
    """Reason for which this machine can't redirect processes; None if it can."""
    return why_no_auditor(REDIRECT)


# ---- The table ----


def copy_path(root: str | Path, original: str | Path) -> str:
    """The path of an original's copy: the original's real path below the root."""
    return os.path.realpath(root) + os.path.realpath(original)


def why_not_replaceable(
    root: str | Path, original: str | Path, programs: Collection[str] = ()
) -> str | None:
    """Reason for which no copy can take a library's place; None if a row of a table does it.

    Args:
        programs: real paths of executables, which the kernel maps before the loader runs.
    """
    path, copy = os.path.realpath(original), copy_path(root, original)
    if path in programs:
        return (
            "it is a program, and only libraries are replaced by their copies: build its GPU code "
            "into a shared library to prove it"
        )
    try:
        encoded = copy.encode("utf-8")
    except UnicodeEncodeError:
        return "its path is not UTF-8"
    if any(c < 0x20 or c == 0x7F for c in encoded):
        return "its path has a control character, such as a tab or a newline"
    # The loader replaces $ORIGIN, $LIB and $PLATFORM in names that it gets from LD_AUDIT.
    if "$" in copy:
        return "its path has a '$', which the dynamic loader takes for one of its tokens"
    if len(encoded) >= _PATH_MAX:
        return (
            f"the path of its copy has {len(encoded)} bytes, at most {_PATH_MAX - 1} are possible"
        )
    if os.path.commonpath([path, os.path.realpath(root)]) == os.path.realpath(root):
        return f"it lies below {os.path.realpath(root)}, where the copies are"
    return None


def write_table(path: Path, root: str | Path, originals: Iterable[str | Path]) -> None:
    """Write the table of originals whose copies lie below the root, for processes to come.

    Running processes keep theirs. The folders of the copies become passable for other users, like
    those of the originals.

    Raises:
        NegativaError: a path can't stand in a table, a copy does not exist, or the root's file
            system is mounted noexec.
        StoreError: the file can't be written.
    """
    rows: dict[str, str] = {}
    root = os.path.realpath(root)
    with contextlib.suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_NOEXEC:
            raise NegativaError(
                f"{root} is on a file system mounted noexec: no library can be loaded from there; "
                "choose a run folder elsewhere"
            )
    for original in originals:
        problem = why_not_replaceable(root, original)
        if problem is not None:
            raise NegativaError(f"{os.fspath(original)!r} can't be replaced by its copy: {problem}")
        real, copy = os.path.realpath(original), copy_path(root, original)
        try:
            ids = _file_id(real), _file_id(copy)
        except OSError as e:
            raise NegativaError(
                f"{real} can't be replaced by its copy: {e.filename}: {e.strerror}"
            ) from e
        if os.path.realpath(copy) != copy or not Path(copy).is_file():
            raise NegativaError(
                f"{copy}: expected the copy of {real}, a regular file and no symbolic link"
            )
        if ids[0] == ids[1]:
            raise NegativaError(f"{copy} and {real} are one file (a hard link?), expected a copy")
        rows[real] = "\t".join(("library", *ids, copy))
        make_passable(Path(copy).parent, Path(root))
    table = "\n".join((f"{_TABLE_HEAD}\t{root}", *rows.values(), f"end\t{len(rows)}\n"))
    # Processes of other users read it, too.
    write_atomically(path, table.encode("utf-8"), mode=0o644)


def _file_id(path: str) -> str:
    status = Path(path).stat()
    return f"{os.major(status.st_dev)}\t{os.minor(status.st_dev)}\t{status.st_ino}"


# ---- The environment ----


def redirect_environment(environ: Mapping[str, str], table: Path, logs: Path) -> dict[str, str]:
    """The variables to set so that processes are redirected.

    A user's own auditors stay, behind ours, so they see the names of the copies.

    Raises:
        NegativaError: this machine can't do it.
    """
    return {
        **with_auditor(environ, REDIRECT),
        TABLE_VARIABLE: str(table.absolute()),
        LOGS_VARIABLE: str(logs.absolute()),
    }


# ---- The logs ----


def read_logs(folder: Path) -> tuple[RedirectedProcess, ...]:
    """Read the logs of all processes, in the order of their start; none if there is no folder.

    A log that can't be read yields a process with a problem, not an error. A process that was
    killed or had no space left says nothing about the others.
    """
    processes = [
        _read_log(path, *map(int, name.groups()))
        for path in files_in(folder, REDIRECT_SUFFIX)
        if (name := _LOG_NAME.fullmatch(path.name)) is not None
    ]
    return tuple(sorted(processes, key=lambda process: (process.started_ns, process.log)))


def _read_log(path: Path, pid: int, started_ns: int) -> RedirectedProcess:
    problems: list[str] = []
    try:
        # Any user can write into the folder: a pipe would hang, a link mislead.
        text = read_regular(path, follow=False).decode("utf-8", "surrogateescape")
    except OSError as e:
        text = ""
        problems.append(f"the log can't be read: {e.strerror}")
    *fields, torn = text.split("\0")
    if torn or len(fields) % _FIELDS:
        problems.append(f"the last record is not whole: {torn[:80]!r}")
    head, *records = [*zip(*[iter(fields)] * _FIELDS, strict=False)] or [()]
    if head[:1] != (_LOG_HEAD,):
        problems.append("the log has no head; was the disk full?")
    lines = []
    for process, kind, first, second in records:
        if not _NUMBER.fullmatch(process) or kind not in _KINDS:
            problems.append(f"a record can't be read: {(process, kind)!r:.80}")
        elif kind == "lost":
            problems.append(f"{first} records of process {process} could not be written")
        elif kind == "disabled":
            problems.append(f"nothing was redirected: {first}: {second}")
        elif kind == "unknown":
            problems.append(f"{first} can't be told from its copy")
        else:
            lines.append(LoggedLine(int(process), kind, first, second))
    return RedirectedProcess(
        log=path,
        pid=pid,
        executable=head[1] if head else "",
        started_ns=started_ns,
        lines=tuple(lines),
        problems=tuple(problems),
    )
