"""Copies of traces that mean the same on every machine.

A copy knows libraries by their SHA-256, which lies beside the original in ``digests.json``, and not
by inodes and times. Its paths are those of this machine, and its name is a digest of its bytes. So
the same trace has the same copy whatever it came through, and two shards share their libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pytest_negativa.errors import StoreError
from pytest_negativa.models.base import UNDECODABLE
from pytest_negativa.models.trace import (
    Header,
    LibraryRecord,
    Role,
    TracedLibrary,
)
from pytest_negativa.settings.globs import PathRules
from pytest_negativa.storage.runs import TRACE_SUFFIX, holds_samples
from pytest_negativa.storage.system import open_regular
from pytest_negativa.tracing.trace_files import decode_record, read_lines

_MARK = b'"record":"library"'
_encode = msgspec.json.Encoder().encode


def copy_portable(
    trace: Path, folder: Path, digests: Mapping[TracedLibrary, TracedLibrary], paths: PathRules
) -> str:
    """Copy a trace and return the name of its copy, which may have been there before.

    Lines that can't be read are copied as they are, so that a reader of the copy finds them.

    Args:
        trace: the file of a process that has ended.
        folder: for the copy.
        digests: of its libraries, see ``load_digests``.
        paths: rules for the paths of libraries and of the project's root.

    Raises:
        StoreError: the trace can't be read, or the copy can't be written.
    """
    digest = hashlib.sha256()
    part = folder / f".{os.getpid()}.part"
    of_samples = holds_samples(trace.parent)
    try:
        with open_regular(trace, follow=False) as source, part.open("wb") as target:
            for number, line in enumerate(read_lines(source)):
                # Few lines name a path; decoding all of them would take most of the time. The
                # header is decoded however it is written: a sample must not pass as a session.
                portable = line
                if number == 0 or _MARK in line:
                    portable = _portable(line, digests, paths, of_samples=of_samples)
                digest.update(portable)
                target.write(portable)
        name = f"{digest.hexdigest()[:32]}{TRACE_SUFFIX}"
        part.replace(folder / name)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink()
        raise StoreError(f"{trace}: cannot be copied to {folder}: {e.strerror}") from e
    return name


def _portable(
    line: bytes,
    digests: Mapping[TracedLibrary, TracedLibrary],
    paths: PathRules,
    *,
    of_samples: bool,
) -> bytes:
    try:
        record = decode_record(line)
    except UNDECODABLE:
        return line
    if isinstance(record, Header):
        role = Role.SAMPLE if of_samples else record.role
        changed = replace(record, root=paths.apply(record.root), role=role)
        return line if changed == record else _encode(changed) + b"\n"
    if not isinstance(record, LibraryRecord):
        return line
    library = digests.get(record.library, record.library)
    library = replace(library, path=paths.apply(library.path))
    if library.sha256 is not None:
        library = replace(library, device=None, inode=None, mtime_ns=None, ctime_ns=None)
    return _encode(replace(record, library=library)) + b"\n"
