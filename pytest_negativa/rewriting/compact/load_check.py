"""Loads a compacted library in a child process, with the system's loader.

The child also looks for the library's unwinding table at the address that the loader gives, and
asks libgcc for its entries. A library with damaged program headers may load without an error, and
then the first exception ends the process.

Loading runs the library's initialisers. The child can gain no privileges, and a child of root has
no capabilities and, where the kernel allows that, no network. A library that somebody else may have
written is not loaded at all.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.gpucode.elf_tables import DT_RPATH, DT_RUNPATH, DT_STRTAB, PT_GNU_EH_FRAME
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.guards import read_dynamic
from pytest_negativa.rewriting.compact.original_tables import ElfTables, read_at

LOADED = "loaded"

_TIMEOUT = 300
_MAX_PATH = 64 << 10
# argv: the library; "unwinding" if it has an unwinding table. Prints one line of JSON. Leaves by
# _exit: finalisers of a library that was only loaded have nothing to do, and may fail.
_SCRIPT = r"""
import ctypes, json, os, struct, sys

def drop_privileges():
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if os.geteuid() == 0:
        libc.unshare(0x40000000)  # CLONE_NEWNET
        # capset(2): version 3, of this process; no capability in any set.
        libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))

def answer(**facts):
    os.write(1, b"\n" + json.dumps(facts).encode() + b"\n")
    os._exit(0)

class Info(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("name", ctypes.c_char_p),
                ("headers", ctypes.c_void_p), ("count", ctypes.c_uint16)]

def unwinding(path):
    found = []
    def visit(info, size, data):
        if info.contents.name == path:
            rows = ctypes.string_at(info.contents.headers, 56 * info.contents.count)
            found.append((info.contents.base, list(struct.iter_unpack("<IIQQQQQQ", rows))))
        return 0
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(kind(visit), None)
    if not found:
        return "the loader does not list it"
    base, rows = found[0]
    for row in rows:
        if row[0] == 0x6474e550:
            table = base + row[3]
            # Version 1; count as udata4, pairs of sdata4 relative to the table: what all linkers
            # for Linux write. See the LSB, .eh_frame_hdr.
            if ctypes.string_at(table, 4)[::2] != b"\x01\x03" or row[6] < 12:
                known = ctypes.string_at(table, 1) == b"\x01"
                return None if known else "its unwinding table is gone"
            count = ctypes.c_uint32.from_address(table + 8).value
            if row[6] < 12 + 8 * count:
                return "its unwinding table is cut off"
            try:
                find = ctypes.CDLL("libgcc_s.so.1")._Unwind_Find_FDE
            except (OSError, AttributeError):
                return None
            find.restype = ctypes.c_void_p
            find.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
            for index in {0, count // 2, count - 1} if count else ():
                start = ctypes.c_int32.from_address(table + 12 + 8 * index).value
                if not find(table + start, ctypes.create_string_buffer(64)):
                    return "no unwinding entry is found for its functions"
            return None
    return "the loader finds no unwinding table" if sys.argv[2] == "unwinding" else None

path = sys.argv[1]
drop_privileges()
try:
    ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
except OSError as e:
    answer(error=str(e).replace(path, "LIBRARY"), problem=None)
answer(error=None, problem=unwinding(os.fsencode(path)))
"""


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """The outcome of loading the result.

    Attributes:
        problem: why the result must not be used, or None.
        outcome: ``LOADED``, or why loading tells nothing.
    """

    problem: str | None
    outcome: str


def why_not_loaded(path: str | os.PathLike[str]) -> str | None:
    """Why a library is not loaded to check it; None if it is.

    It is if only root and the caller can write it, and the child can get at it.
    """
    for place in (Path(path), Path(path).parent):
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {status.st_uid}, who is neither root nor the caller"
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            return f"any user can write to {place}"
    if os.geteuid() == 0:
        for folder in Path(path).resolve().parents:
            if not _may_enter(folder.stat()):
                return f"root without capabilities can't enter {folder}"
    return None


def _may_enter(status: os.stat_result) -> bool:
    """Whether root without capabilities may use a folder (path_resolution(7), permissions)."""
    if status.st_uid == 0:
        return bool(status.st_mode & stat.S_IXUSR)
    is_own_group = status.st_gid in (os.getegid(), *os.getgroups())
    return bool(status.st_mode & (stat.S_IXGRP if is_own_group else stat.S_IXOTH))


def check_loading(
    original: ByteSource,
    tables: ElfTables,
    compacted: Path,
    variables: Mapping[str, str] | None = None,
) -> LoadCheck:
    """Load the result; if it fails, load the original and compare the errors.

    The result may lie elsewhere, so the child gets the folders of the original's search path
    (``DT_RUNPATH``) to find the dependencies.

    Args:
        original, tables, compacted: the library before and after.
        variables: for the child's environment.
    """
    if (reason := why_not_loaded(original.path)) is not None:
        return LoadCheck(None, f"not load-checked: {reason}")
    folders = _search_path(original, tables)
    unwinding = any(s.p_type == PT_GNU_EH_FRAME for s in tables.segments)
    result = _load(str(compacted), folders, variables, unwinding=unwinding)
    if result is None:
        return LoadCheck(None, LOADED)
    if result.startswith("unwinding:"):
        return LoadCheck(result.removeprefix("unwinding: "), "failed")
    before = _load(original.path, folders, variables, unwinding=unwinding)
    if before is None:
        return LoadCheck(f"it can't be loaded, though the original can: {result}", "failed")
    if before != result:
        return LoadCheck(
            f"it can't be loaded, for another reason than the original: {result}; the "
            f"original: {before}",
            "failed",
        )
    return LoadCheck(None, f"not load-checked: the original can't be loaded here either: {before}")


def _load(
    path: str, folders: list[str], variables: Mapping[str, str] | None, *, unwinding: bool
) -> str | None:
    """Why a library can't be loaded, or None."""
    environment = {**os.environ, **(variables or {})}
    if folders:
        inherited = environment.get("LD_LIBRARY_PATH")
        joined = folders + ([inherited] if inherited else [])
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(joined)
    # Variables that redirect libraries to copies, or trace them.
    for name in ("LD_AUDIT", "LD_PRELOAD", "CUDA_INJECTION64_PATH"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, path, "unwinding" if unwinding else ""],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT} s"
    except OSError as e:
        return f"no child process to load it in: {e.strerror}"
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        # ld.so ends the process if it fails on a table.
        return f"the process ended with status {done.returncode}"
    try:
        # Initialisers may have printed something before.
        facts = json.loads(lines[-1])
        error, problem = facts["error"], facts["problem"]
    except (ValueError, TypeError, KeyError):
        # An initialiser may even end the process.
        return "the process ended before the loader was done"
    if error is not None:
        return str(error)
    return None if problem is None else f"unwinding: {problem}"


def _search_path(source: ByteSource, tables: ElfTables) -> list[str]:
    dynamic = read_dynamic(source, tables)
    folder = str(Path(source.path).parent)
    folders = [folder]
    for tag in (DT_RUNPATH, DT_RPATH):
        if tag in dynamic and DT_STRTAB in dynamic:
            where = dynamic[DT_STRTAB] + dynamic[tag]
            text = read_at(source, tables, where, _MAX_PATH, partly=True).split(b"\0")[0]
            entries = os.fsdecode(text).split(":")
            folders += [
                entry.replace("${ORIGIN}", folder).replace("$ORIGIN", folder)
                for entry in entries
                if entry
            ]
            break
    return folders
