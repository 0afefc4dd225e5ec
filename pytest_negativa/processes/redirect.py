"""Replaces libraries by their copies in processes to come, and reads which of the two were loaded.

glibc loads ``redirect.c`` into every process whose LD_AUDIT names it. This module writes the table
that ``redirect.c`` reads, and reads the logs that it writes. It starts no process.

The table has lines of fields parted by tabs::

    negativa-redirect 1     <root>
    library <original: major> <minor> <inode> <copy: major> <minor> <inode> <copy>
    end     <number of libraries>

A log, one file for each exec'd process, has records of four fields, each with a zero byte behind
it. Fields that are not named here are empty::

    negativa-redirect-log 1 <executable>
    <pid>   copy        <original>              its copy was mapped
    <pid>   original    <original> <opened as>  the original itself was mapped
    <pid>   unknown     <opened as>             original or copy: not known
    <pid>   driver      <injection>             CUDA's driver was mapped; the CUDA_INJECTION64_PATH
                                                that the exec'd process began with, or nothing
    <pid>   lost        <number>                records could not be written
    <pid>   disabled    <reason> <table>        nothing was redirected in this process

The process's id and its start, in nanoseconds since 1970, are in the file's name. The pid of a
record differs from the name's in forked children.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import FormatError, NegativaError
from pytest_negativa.gpucode.elf import find_interpreter
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.processes.auditors import why_no_auditor, with_auditor
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.shared_folders import make_passable
from pytest_negativa.storage.system import read_regular

TABLE_VARIABLE = "NEGATIVA_REDIRECT_TABLE"
LOGS_VARIABLE = "NEGATIVA_REDIRECT_LOGS"

_TABLE_HEAD = "negativa-redirect 1"
# PATH_MAX of linux/limits.h, which counts the final zero byte.
_PATH_MAX = 4096
_KINDS = {"copy", "original", "unknown", "driver", "lost", "disabled"}
_FIELDS = 4
_NUMBER = re.compile(r"[0-9]{1,20}")
_LOG_NAME = re.compile(r"[0-9]{1,20}\.[0-9]{1,20}\.[0-9]{1,20}\.log")
_LOG_HEAD = "negativa-redirect-log 1"


class RedirectError(NegativaError):
    """Libraries cannot be replaced by their copies."""


class FileId(NamedTuple):
    """The identity of a file, independent of its name."""

    major: int
    minor: int
    inode: int

    @classmethod
    def of(cls, path: str) -> FileId:
        """The identity of an existing file.

        Raises:
            OSError: the file can't be read.
        """
        status = Path(path).stat()
        return cls(os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One row of the table: real paths and identities of an original and its copy."""

    original: str
    copy: str
    original_id: FileId
    copy_id: FileId


@dataclass(frozen=True, slots=True)
class RedirectTable:
    """The replacements. Each copy lies at ``root`` followed by its original's path."""

    root: str
    replacements: tuple[Replacement, ...]


@dataclass(frozen=True, slots=True)
class ProcessLoads:
    """Which libraries of the table one process mapped.

    Attributes:
        pid: the exec'd process or a child that it forked. Libraries that a child inherited
            are in the parent's loads only.
        copies: originals whose copy was mapped.
        originals: originals that were mapped themselves, with the path that was opened.
        unknown: paths of libraries that may be original or copy.
        injections: the libraries that CUDA's driver was to load into it, if it mapped the driver;
            an empty path for none.
    """

    pid: int
    copies: frozenset[str]
    originals: frozenset[tuple[str, str]]
    unknown: frozenset[str]
    injections: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RedirectedProcess:
    """A process that was exec'd with the redirect, and the children that it forked.

    Attributes:
        executable: its path; empty if unknown.
        started_ns: when it was exec'd, nanoseconds since the epoch.
        loads: one for each pid that mapped a library, in the order of the log.
        problems: why the log is incomplete, or why nothing was redirected. With a problem, the
            log does not prove that no original was mapped.
    """

    log: Path
    pid: int
    executable: str
    started_ns: int
    loads: tuple[ProcessLoads, ...]
    problems: tuple[str, ...]

    @property
    def copies(self) -> frozenset[str]:
        """Paths of originals whose copy was mapped by any process."""
        return frozenset().union(*(load.copies for load in self.loads))

    @property
    def originals(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(load.originals for load in self.loads))

    @property
    def unknown(self) -> frozenset[str]:
        return frozenset().union(*(load.unknown for load in self.loads))


def redirect_library() -> Path | None:
    """The library for LD_AUDIT; None: it was not built."""
    path = Path(__file__).with_name("_redirect.so")
    return path if path.is_file() else None


def why_unsupported() -> str | None:
    """Why processes can't be redirected on this machine; None if nothing speaks against it."""
    return why_no_auditor(redirect_library())


# ---- The table ----


def copy_path(root: str | Path, original: str | Path) -> str:
    """The path of an original's copy: the original's real path below the root."""
    return os.path.realpath(root) + os.path.realpath(original)


def why_not_replaceable(root: str | Path, original: str | Path) -> str | None:
    """Why the path of a library or its copy can't stand in a table; None if both can."""
    path, copy = os.path.realpath(original), copy_path(root, original)
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


def make_table(root: str | Path, originals: Iterable[str | Path]) -> RedirectTable:
    """Make the table of originals whose copies lie below the root.

    The folders of the copies become passable for other users, like those of the originals.

    Raises:
        RedirectError: a path can't stand in a table, a copy does not exist, or the root's file
            system is mounted noexec.
    """
    replacements: dict[str, Replacement] = {}
    root = os.path.realpath(root)
    with contextlib.suppress(OSError):
        if os.statvfs(root).f_flag & os.ST_NOEXEC:
            raise RedirectError(
                f"{root} is on a file system mounted noexec: no library can be loaded from there; "
                "choose a run folder elsewhere"
            )
    for original in originals:
        problem = why_not_replaceable(root, original)
        if problem is not None:
            raise RedirectError(f"{os.fspath(original)!r} can't be replaced by its copy: {problem}")
        path, copy = os.path.realpath(original), copy_path(root, original)
        try:
            row = Replacement(path, copy, FileId.of(path), FileId.of(copy))
        except OSError as e:
            raise RedirectError(
                f"{path} can't be replaced by its copy: {e.filename}: {e.strerror}"
            ) from e
        if os.path.realpath(copy) != copy or not Path(copy).is_file():
            raise RedirectError(
                f"{copy}: expected the copy of {path}, a regular file and no symbolic link"
            )
        if row.original_id == row.copy_id:
            raise RedirectError(f"{copy} and {path} are one file (a hard link?), expected a copy")
        replacements[path] = row
        make_passable(Path(copy).parent, Path(root))
    return RedirectTable(root, tuple(replacements.values()))


def write_table(table: RedirectTable, path: Path) -> None:
    """Write the table for processes to come; running processes keep theirs.

    Raises:
        StoreError: the file can't be written.
    """
    rows = [
        "\t".join(("library", *map(str, (*row.original_id, *row.copy_id)), row.copy))
        for row in table.replacements
    ]
    lines = (f"{_TABLE_HEAD}\t{table.root}", *rows, f"end\t{len(rows)}")
    # Processes of other users read it, too.
    write_atomically(path, ("\n".join(lines) + "\n").encode("utf-8"), mode=0o644)


def redirected_originals(table: Path) -> tuple[str, ...]:
    """Real paths of the originals in a table.

    Raises:
        OSError: the table can't be read.
    """
    (_, root), *rows = (line.split("\t") for line in table.read_text("utf-8").splitlines())
    return tuple(row[-1].removeprefix(root) for row in rows if row[0] == "library")


# ---- The environment ----


def redirect_environment(environ: Mapping[str, str], table: Path, logs: Path) -> dict[str, str]:
    """The variables to set so that processes are redirected.

    A user's own auditors stay, behind ours, so they see the names of the copies.

    Raises:
        RedirectError: the native library was not built.
    """
    library = redirect_library()
    if library is None:
        raise RedirectError(why_unsupported() or "the native library was not built")
    return {
        **with_auditor(environ, library),
        TABLE_VARIABLE: str(table.absolute()),
        LOGS_VARIABLE: str(logs.absolute()),
    }


# ---- The logs ----


def read_logs(folder: Path) -> tuple[RedirectedProcess, ...]:
    """Read the logs of all processes, in the order of their start.

    A log that can't be read yields a process with a problem, not an error. A process that was
    killed or had no space left says nothing about the others.
    """
    processes = [_read_log(path) for path in folder.iterdir() if _LOG_NAME.fullmatch(path.name)]
    return tuple(sorted(processes, key=lambda process: (process.started_ns, process.log)))


def _read_log(path: Path) -> RedirectedProcess:
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
    loads: dict[int, dict[str, set[tuple[str, str]]]] = {}
    for pid, kind, first, second in records:
        if not _NUMBER.fullmatch(pid) or kind not in _KINDS:
            problems.append(f"a record can't be read: {(pid, kind)!r:.80}")
        elif kind == "lost":
            problems.append(f"{first} records of process {pid} could not be written")
        elif kind == "disabled":
            problems.append(f"nothing was redirected: {first}: {second}")
        else:
            loads.setdefault(int(pid), defaultdict(set))[kind].add((first, second))
    return RedirectedProcess(
        log=path,
        pid=int(path.name.split(".")[0]),
        executable=head[1] if head else "",
        started_ns=int(path.name.split(".")[1]),
        loads=tuple(
            ProcessLoads(
                pid=pid,
                copies=frozenset(first for first, _ in found["copy"]),
                originals=frozenset(found["original"]),
                unknown=frozenset(first for first, _ in found["unknown"]),
                injections=frozenset(first for first, _ in found["driver"]),
            )
            for pid, found in loads.items()
        ),
        problems=tuple(problems),
    )


# ---- Processes without a log ----


def why_not_redirected(executable: str | Path) -> str | None:
    """Why a process of this executable leaves no log; None if nothing speaks against a log."""
    try:
        source = ByteSource(executable)
    except FormatError:
        return None
    try:
        interpreter, bits = find_interpreter(source)
    except FormatError:
        return None  # a script: its interpreter counts, and that is another executable
    finally:
        source.close()
    if bits != 64:
        return f"it is a {bits}-bit executable, and the library for LD_AUDIT a 64-bit one"
    if interpreter is None:
        return "it is a static executable, which no dynamic loader starts"
    if "ld-musl" in interpreter:
        return f"its dynamic loader is musl's ({interpreter}), which knows no LD_AUDIT"
    mode = Path(executable).stat().st_mode
    if mode & stat.S_ISUID or mode & stat.S_ISGID:
        return "it is set-user-ID or set-group-ID: the dynamic loader ignores LD_AUDIT"
    try:
        os.getxattr(executable, "security.capability")
    except OSError:
        return None
    return "it has file capabilities: the dynamic loader ignores LD_AUDIT"
