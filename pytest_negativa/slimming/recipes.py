"""What is to be done to one library: from a file to its compacted form.

A recipe's digest tells whether a library that was slimmed before was slimmed in the same way. It
holds what the outcome depends on and nothing else: not the names of the tests, nor the release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import FormatError, StaleLibraryError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import Span
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import FileState, RepackedCubin
from pytest_negativa.planning.by_arch import plan_for_devices, plan_for_none
from pytest_negativa.planning.lock import needs_content, plan_from_lock
from pytest_negativa.rewriting.compact.compact import compact_library, foresee_compaction
from pytest_negativa.rewriting.compact.records import (
    Compacted,
    CompactOptions,
    Forecast,
    NotCompacted,
)
from pytest_negativa.rewriting.copies import state_of
from pytest_negativa.rewriting.edits import Edits
from pytest_negativa.rewriting.trim_kernels import trim_kernels

ALL_NEVER_LOADED = "never loaded: all its GPU code"
"""Said of a result that has none left."""

NO_GPU_CODE = "it has no GPU code"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A library and what is to be removed from it; without map and plan it is only stripped.

    Attributes:
        state: of the file before it was read, if the plan knows no digest.
        trimmed: bytes of code that ``edits`` take out of cubins that stay: as many as these get
            smaller, or the code itself where they are not compressed.
    """

    library_map: LibraryMap | None = None
    plan: LibraryPlan | None = None
    edits: Edits | None = None
    state: FileState | None = None
    trimmed: int = 0
    notes: tuple[str, ...] = ()

    def code_removed(self, spared: Sequence[Span]) -> int:
        """Bytes of GPU code that are gone, or zeros, when all is done but for ``spared``."""
        if self.plan is None:
            return 0
        return self.plan.unused_bytes - sum(span.size for span in spared) + self.trimmed


class Recipe(Protocol):
    """One way of slimming."""

    @property
    def digest(self) -> str: ...

    @property
    def source(self) -> str:
        """Who says what stays, for people."""
        ...

    def prepare(self, path: Path) -> Prepared | str:
        """Read a library; or why it is left as it is.

        Raises:
            NegativaError: it can't be done.
        """
        ...


@dataclass(frozen=True)
class ByLock:
    """Keep what a lock keeps."""

    locked: LockedLibrary
    fill: int
    strip: bool
    source: str

    @property
    def digest(self) -> str:
        kept = [(code.offset, code.functions) for code in self.locked.kept]
        fill = self.fill if needs_content(self.locked) else None
        return _digest("lock", self.locked.sha256, kept, fill, self.strip)

    def prepare(self, path: Path) -> Prepared | str:
        locked = self.locked
        unpacked = frozenset(c.offset for c in locked.kept if c.functions is not None)
        scope = Scope(starts=unpacked) if unpacked else Scope(headers_only=True)
        with ByteSource(path) as source:
            # The digest is compared where the file is written.
            if source.size != locked.size:
                raise StaleLibraryError(f"{path} is another file than the lock's {locked.name}")
            library_map = _with_digest(read_library(path, scope), locked.sha256)
            plan = plan_from_lock(locked, library_map)
            if not plan.trimmed:
                return Prepared(library_map, plan)
            edits, cubins = trim_kernels(source, library_map, plan, self.fill)
        left = [cubin for cubin in cubins if cubin.left_alone is not None]
        notes = (f"{len(left):,} cubins stay whole: {left[0].left_alone}",) if left else ()
        removed = sum(map(_removed_from, cubins))
        return Prepared(library_map, plan, edits, trimmed=removed, notes=notes)


@dataclass(frozen=True)
class ByArchs:
    """Keep what devices can load; strip what has no GPU code, or leave it."""

    devices: tuple[ComputeCapability, ...]
    keep_ptx: bool
    strip: bool
    strip_others: bool

    @property
    def source(self) -> str:
        return f"what devices of {', '.join(map(str, self.devices))} can load"

    @property
    def digest(self) -> str:
        archs = sorted(map(str, self.devices))
        # Not whether others are stripped: what it makes of GPU code doesn't depend on that.
        return _digest("archs", archs, self.keep_ptx, self.strip)

    def prepare(self, path: Path) -> Prepared | str:
        def plan_for(library_map: LibraryMap) -> LibraryPlan:
            return plan_for_devices(library_map, self.devices, keep_ptx=self.keep_ptx)

        return _prepare_by_headers(path, plan_for, strip_others=self.strip_others)


@dataclass(frozen=True)
class NeverLoaded:
    """Keep no GPU code: the run of the lock did not load the library.

    What has no GPU code is stripped, or left.
    """

    lock: str
    strip: bool
    strip_others: bool

    @property
    def source(self) -> str:
        return f"{self.lock}, which never loaded some libraries: nothing of these stayed"

    @property
    def digest(self) -> str:
        return _digest("never loaded", self.strip)

    def prepare(self, path: Path) -> Prepared | str:
        return _prepare_by_headers(path, plan_for_none, strip_others=self.strip_others)


@dataclass(frozen=True)
class Strip:
    """Only drop what is never loaded."""

    source = "nothing but what is never loaded"

    @property
    def digest(self) -> str:
        return _digest("strip")

    def prepare(self, path: Path) -> Prepared | str:
        return Prepared()


def apply(
    prepared: Prepared, path: Path, target: Path, *, strip: bool, load_check: bool
) -> Compacted | NotCompacted:
    """Write the compacted library to ``target``.

    Raises:
        NegativaError: it can't be done; nothing is left there.
    """
    return compact_library(
        path,
        target,
        prepared.library_map,
        prepared.plan,
        prepared.edits,
        CompactOptions(strip=strip, load_check=load_check),
        state=prepared.state,
    )


def foresee(prepared: Prepared, path: Path, *, strip: bool) -> Forecast | NotCompacted:
    """What ``apply`` would write, or why it would write nothing; loading is not tried.

    Raises:
        NegativaError: the library can't be read.
    """
    options = CompactOptions(strip=strip)
    return foresee_compaction(path, prepared.library_map, prepared.plan, prepared.edits, options)


def _removed_from(cubin: RepackedCubin) -> int:
    # By the code where packing gains nothing: it is gone all the same.
    saved = max(cubin.stored_before - cubin.stored_after, 0)
    return saved or sum(code.size for code in cubin.filled)


def _prepare_by_headers(
    path: Path, plan_for: Callable[[LibraryMap], LibraryPlan], *, strip_others: bool
) -> Prepared | str:
    """For plans that need no cubin unpacked; what has no GPU code is stripped, or left."""
    with ByteSource(path) as source:
        state = state_of(source.fileno())
    try:
        library_map = read_library(path, Scope(headers_only=True))
    except FormatError as e:
        return e.problem
    if not library_map.sections:
        return Prepared() if strip_others else NO_GPU_CODE
    return Prepared(library_map, plan_for(library_map), state=state)


def _with_digest(library_map: LibraryMap, sha256: str) -> LibraryMap:
    library = msgspec.structs.replace(library_map.library, sha256=sha256)
    return msgspec.structs.replace(library_map, library=library)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
