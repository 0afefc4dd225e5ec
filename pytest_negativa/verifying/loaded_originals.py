"""Originals that traced processes had mapped while the tests ran on the copies, under any path."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.trace import LibraryUsage, TracedLibrary, Usage
from pytest_negativa.tracing.mappings import hash_library


@dataclass(frozen=True, slots=True)
class LoadedOriginals:
    """What the traces of the rounds tell.

    Attributes:
        processes: by real path of an original: the process that had its content mapped, in words.
        unknown: the process that loaded GPU code from a file that nothing identifies, in words.
    """

    processes: dict[str, str]
    unknown: str | None


def loaded_originals(usage: Usage, reconstruction: Reconstruction) -> LoadedOriginals:
    """Find the originals among the files that traced processes had mapped.

    Of files that could be originals, those that are still there are hashed.

    Args:
        usage: what the traces of the rounds add up to.
        reconstruction: the copies that the tests ran on.
    """
    copies = {copy.copy for copy in reconstruction.libraries}
    found: dict[str, str] = {}
    unknown: str | None = None
    for used in usage.libraries:
        if used.library.path in copies or not used.processes:
            continue
        who = _who(used, usage)
        if used.library.size is None and used.images:
            unknown = unknown or f"{who} loaded GPU code from {used.library.path}, which was gone"
        for copy in reconstruction.libraries:
            if (what := _why_original(used.library, copy.library)) is not None:
                found.setdefault(copy.library.path, f"{who} had {what} mapped")
    return LoadedOriginals(found, unknown)


def _who(used: LibraryUsage, usage: Usage) -> str:
    process = usage.processes[used.processes[0]].header
    return f"process {process.pid} ({process.executable})"


def _why_original(traced: TracedLibrary, original: LibraryIdentity) -> str | None:
    """What a file was, if it was or may have been an original; None if it was another library."""
    if traced.path == original.path:
        return "the original"
    if (traced.size, traced.build_id) != (original.size, original.build_id):
        return None
    digest = hash_library(traced).sha256
    if digest is not None:
        return f"{traced.path}, a copy of the original," if digest == original.sha256 else None
    return f"{traced.path}, which has changed or is gone and may have been a copy of the original,"
