"""Writes a checked copy of a library with edits. The original is only read.

The copy gets its name after it has been read back and compared.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.errors import FormatError, ReconstructError, StaleLibraryError, refusing
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.reconstruction import FileState
from pytest_negativa.rewriting.layout import Edits, FileLayout, StoppedError, write_layout
from pytest_negativa.storage.atomic import new_file

STEP = 512 << 10
"""Bytes that are compared in one go. Buffers that fit a processor's cache take half the time."""


def write_copy(
    original: LibraryIdentity,
    target: Path,
    edits: Edits,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[str, FileState, FileState]:
    """Write ``original`` with ``edits`` to ``target``, replacing what was there.

    The copy has the original's permissions without setuid, setgid and the sticky bit. Its times are
    those of the writing.

    Args:
        original: the library and the digest of its bytes.
        target: the copy; its folder must exist.
        edits: what differs from the original.
        should_stop: asked before each step.

    Returns:
        The copy's SHA-256 in hex, and the states of copy and original when the copy was checked.

    Raises:
        StaleLibraryError: the original is not the file that was analyzed.
        FormatError: the original can't be read.
        ReconstructError: the copy can't be written or is wrong.
        StoppedError: ``should_stop`` returned true.
    """
    with refusing(target, "written", ReconstructError), ByteSource(original.path) as source:
        check_size(source, original)
        # Taken before the file is read: a later write makes another state.
        state = state_of(source.fileno())
        # A link at the target is replaced; the file it leads to stays.
        if not target.is_symlink() and target.exists() and target.samefile(source.path):
            raise ReconstructError(f"{target}: is the original itself")
        with new_file(target) as new:
            try:
                write_layout(FileLayout.of_copy(edits), source, new.fd, should_stop)
                sha256 = _check(source, new.path(), edits, original, should_stop)
            except FormatError as e:
                if source.is_unchanged():
                    raise
                problem = "changed since it was traced: it got shorter while it was copied"
                raise StaleLibraryError(
                    f"{source.path} {problem}; run pytest --negativa again"
                ) from e
            os.fchmod(new.fd, stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o777)
            new.publish()
            return sha256, state_of(new.fd), state


def check_digest(original: LibraryIdentity) -> FileState:
    """Hash an original, compare it with the digest that was analyzed, and return its state.

    Raises:
        StaleLibraryError: the file is not the one that was analyzed.
        FormatError: the file can't be read.
    """
    with ByteSource(original.path) as source:
        check_size(source, original)
        state = state_of(source.fileno())
        check_sha256(original, source.sha256())
        return state


def check_size(source: ByteSource, original: LibraryIdentity) -> None:
    """Refuse an original if its size differs from the analyzed file's, or if no digest is known.

    Raises:
        StaleLibraryError: the file is another one, or nothing shows that it is the same.
    """
    if original.sha256 is None:
        raise StaleLibraryError(
            f"{original.path}: its digest isn't known, because it changed while it was read, or "
            "an earlier release read it; run pytest --negativa again"
        )
    if source.size != original.size:
        raise StaleLibraryError(
            f"{original.path} changed since it was traced: {source.size:,} bytes, expected "
            f"{original.size:,}; run pytest --negativa again"
        )


def check_sha256(original: LibraryIdentity, found: str) -> None:
    """Refuse an original if its SHA-256 in hex differs from the analyzed file's.

    Raises:
        StaleLibraryError: the file is another one.
    """
    if found != original.sha256:
        raise StaleLibraryError(
            f"{original.path} changed since it was traced: sha256 {found}, expected "
            f"{original.sha256}; run pytest --negativa again"
        )


def state_of(file: int | str | os.PathLike[str]) -> FileState:
    """The state of a file, given its descriptor or its path.

    Raises:
        OSError: the file can't be found.
    """
    return FileState.of(os.stat(file))  # noqa: PTH116 (takes open files, too)


def state_at(path: Path) -> FileState | None:
    """The state of a file; None if there is none, or a link, which is no copy."""
    try:
        return None if path.is_symlink() else state_of(path)
    except OSError:
        return None


def _check(
    source: ByteSource,
    target: Path,
    edits: Edits,
    original: LibraryIdentity,
    should_stop: Callable[[], bool],
) -> str:
    """Compare the copy with the original, which is edited again in memory; return the digest.

    One pass reads both files. The check shares only the edits with the writer.
    """
    of_original, of_copy = hashlib.sha256(), hashlib.sha256()
    fault: int | None = None
    with ByteSource(target) as copy:
        if copy.size != edits.size:
            raise ReconstructError(
                f"{original.path}: its copy has {copy.size:,} bytes, not {edits.size:,}"
            )
        for start in range(0, copy.size, STEP):
            if should_stop():
                raise StoppedError
            end = min(start + STEP, copy.size)
            wanted, found = source.read(start, end - start), copy.read(start, end - start)
            of_original.update(wanted)
            of_copy.update(found)
            if fault is None and edits.applied_to(wanted, start) != found:
                fault = start
    # If the files differ, a changed original is the likelier cause.
    check_sha256(original, of_original.hexdigest())
    if fault is not None:
        raise ReconstructError(
            f"{original.path}: its copy reads back wrong, in the {STEP:,} bytes from offset "
            f"{fault:#x}; is the disk sound?"
        )
    return of_copy.hexdigest()
