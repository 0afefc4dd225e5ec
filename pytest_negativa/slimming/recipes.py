"""Recipes: by a lock, archs, never loaded, strip alone; which plan each takes; files kept whole.

A recipe's digest tells whether a library was slimmed in the same way before. It covers what the
outcome depends on and nothing else: neither the names of the tests, nor the release.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_negativa.arch import ComputeCapability, SmArch, is_for_any
from pytest_negativa.errors import FormatError, StaleLibraryError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.files import bare_arch, read_tables
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.file_kinds import FileKind, kind_of
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import Lock, LockedLibrary
from pytest_negativa.models.plan import KeepReason, LibraryPlan
from pytest_negativa.models.spans import Range, intersection, size
from pytest_negativa.planning.decide import plan_for_devices, plan_for_none
from pytest_negativa.planning.lock import needs_content, plan_from_lock
from pytest_negativa.rewriting.compact.compact import compact_library, design_compaction
from pytest_negativa.rewriting.compact.cut import design_cut, hole_sizes
from pytest_negativa.rewriting.compact.records import (
    CannotCompactError,
    CompactOptions,
    Smaller,
)
from pytest_negativa.rewriting.layout import Edits
from pytest_negativa.rewriting.plan_edits import trim_kernels
from pytest_negativa.slimming.request import SlimRequest
from pytest_negativa.slimming.spares import LEAST_HOLE, SpareTarget, cut, plan_cut

NO_GPU_CODE = "it has no GPU code"


@dataclass(frozen=True, slots=True)
class Removal:
    """A library, what is to be removed from it, and what was made of it.

    Without map and plan it is only stripped.

    Attributes:
        library_map, plan: of the original, both or none.
        edits: what changes within the cubins that stay.
        trimmed: bytes that cubins that stay lose by ``edits``. Compressed cubins count by how much
            smaller they get, others by the code that is taken out.
        useless_for: the named devices if no code for any of them stays.
        notes: what a reader of the report should know.
        needed, containers: for a library with a spare, see ``plan_cut``.
        hole_sizes: in bytes, of the holes that it could have.
        size_after: bytes of the new file, or of the one that would be written.
        gpu_code_removed: bytes of GPU code that are gone, zeros, or in the spare.
        made: what was written; None: nothing was.
        whole: why the original comes back, and nothing is removed; None: it doesn't.
    """

    library_map: LibraryMap | None = None
    plan: LibraryPlan | None = None
    edits: Edits | None = None
    trimmed: int = 0
    useless_for: tuple[ComputeCapability, ...] = ()
    notes: tuple[str, ...] = ()
    needed: tuple[Range, ...] | None = None
    containers: tuple[Range, ...] = ()
    hole_sizes: tuple[int, ...] = ()
    size_after: int = 0
    gpu_code_removed: int = 0
    made: Smaller | None = None
    whole: str | None = None


class Kind(enum.Enum):
    """Ways of slimming."""

    LOCK = "keep what a lock keeps"
    ARCHS = "keep what devices can load; strip libraries without GPU code, or leave them"
    NEVER_LOADED = "keep no GPU code; with a spare, no code that can come back"
    STRIP = "only drop symbol tables and debug information"
    PAGES = "keep all GPU code, and the CPU code that a run touched"
    WHOLE = "keep all of it"
    REMOVED = "remove the file, which is GPU code itself"


@dataclass(frozen=True)
class Recipe:
    """One way of slimming.

    Attributes:
        kind: the way.
        source: the lock or the archs that tell what stays, for people.
        key: what the outcome depends on, beside the spare.
        plan: reads a library that is open, and finds what to remove from it. It raises
            ``CannotCompactError`` if the library is left as it is, or another ``NegativaError``.
        spare: where removed code goes; None: it is lost.
        strips_others: libraries without GPU code are stripped, not left.
        keeps_file: whether a file that is GPU code stays, by its path and its first bytes.
        pages: of the library, what a lock says of its pages, which may leave for the spare.
        takes_cpu_code: without ``pages``, all CPU code leaves that can come back.
    """

    kind: Kind
    source: str
    key: tuple[Any, ...]
    plan: Callable[[Recipe, ByteSource], Removal]
    spare: SpareTarget | None = None
    strips_others: bool = False
    keeps_file: Callable[[Path, bytes], bool] = lambda _path, _head: True
    pages: LockedLibrary | None = None
    takes_cpu_code: bool = False

    @functools.cached_property
    def digest(self) -> str:
        """Digest by which a manifest knows the recipe."""
        spare, pages = self.spare, self.pages and self.pages.pages
        place = spare and (str(spare.folder), spare.most_holes)
        parts = (*self.key, place and (*place, self.kind.name, self.takes_cpu_code, pages))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    @property
    def takes_pages(self) -> bool:
        """Whether CPU code may leave."""
        return self.takes_cpu_code or (self.pages is not None and self.pages.loaded)

    @property
    def takes_others(self) -> bool:
        """Whether libraries that have no GPU code may change, which are most."""
        by_code = self.kind in (Kind.ARCHS, Kind.NEVER_LOADED)
        return not by_code or self.strips_others or self.takes_pages

    @property
    def why(self) -> str | None:
        """The detail of a library that lost its code because no run loaded it."""
        return "not loaded by any test" if self.kind is Kind.NEVER_LOADED else None


def lock_in_words(lock: Lock) -> str:
    """A lock in words, for people who meet a slimmed library later."""
    proof = lock.proof
    if not proof.proved:
        return f"the lock of run {proof.run}, NOT PROVED"
    devices = [f"{d.name} ({d.compute_capability})" for d in proof.devices] or proof.processors
    return (
        f"the lock of run {proof.run}, proved by {sum(proof.tests.values()):,} tests on "
        f"{', '.join(devices) or 'no device'}" + (f", {proof.date}" if proof.date else "")
    )


def by_lock(
    locked: LockedLibrary, fill: int, source: str, *, strip: bool, spare: SpareTarget | None = None
) -> Recipe:
    """Keep what a lock keeps of the GPU code of a library."""
    kept = [(code.offset, code.functions) for code in locked.kept]
    filled = fill if needs_content(locked) else None
    key = ("lock", locked.sha256, kept, filled, strip)
    return Recipe(Kind.LOCK, source, key, functools.partial(_plan_by_lock, locked, fill), spare)


def _plan_by_lock(locked: LockedLibrary, fill: int, recipe: Recipe, source: ByteSource) -> Removal:
    unpacked = frozenset(c.offset for c in locked.kept if c.functions is not None)
    scope = Scope(starts=unpacked) if unpacked else Scope(headers_only=True)
    # The writer of the file compares the digest.
    if source.size != locked.size:
        raise StaleLibraryError(f"{source.path} is another file than the lock's {locked.name}")
    library_map = map_library(source, read_host_elf(source), scope)
    library = msgspec.structs.replace(library_map.library, sha256=locked.sha256)
    library_map = msgspec.structs.replace(library_map, library=library)
    plan = plan_from_lock(locked, library_map)
    # The code within a cubin comes back with the cubin or not at all.
    if not plan.trimmed or recipe.spare is not None:
        return Removal(library_map, plan)
    edits, cubins = trim_kernels(source, library_map, plan, fill)
    left = [cubin for cubin in cubins if cubin.left_alone is not None]
    notes = (f"{len(left):,} cubins stay whole: {left[0].left_alone}",) if left else ()
    # If packing gains nothing, the code itself counts: it is gone all the same.
    removed = sum(
        max(one.stored_before - one.stored_after, 0) or sum(code.size for code in one.filled)
        for one in cubins
    )
    return Removal(library_map, plan, edits, trimmed=removed, notes=notes)


def by_archs(
    devices: tuple[ComputeCapability, ...],
    *,
    keep_ptx: bool,
    strip: bool,
    strip_others: bool,
    spare: SpareTarget | None = None,
) -> Recipe:
    """Keep what devices can load."""

    plan_for = functools.partial(plan_for_devices, devices=devices, keep_ptx=keep_ptx)

    def plan(recipe: Recipe, source: ByteSource) -> Removal:
        found = _plan_by_headers(plan_for, recipe, source)
        if found.plan is None or not found.plan.decisions:
            return found
        loadable = any(d.reason == KeepReason.ARCH_POLICY.value for d in found.plan.decisions)
        return found if loadable else replace(found, useless_for=devices)

    keeps_file = functools.partial(_keeps_file, plan_for, devices, keep_ptx)
    by = f"what devices of {', '.join(map(str, devices))} can load"
    # Whether others are stripped doesn't change what becomes of GPU code.
    key = ("archs", sorted(map(str, devices)), keep_ptx, strip)
    return Recipe(Kind.ARCHS, by, key, plan, spare, strip_others, keeps_file)


def _keeps_file(
    plan_for: Callable[[LibraryMap], LibraryPlan],
    devices: tuple[ComputeCapability, ...],
    keep_ptx: bool,
    path: Path,
    head: bytes,
) -> bool:
    kind = kind_of(head)
    if kind is not FileKind.FATBIN:
        arch = bare_arch(head)
        is_ptx = kind is FileKind.PTX
        return arch is None or (is_ptx and keep_ptx) or is_for_any(arch, devices, is_ptx=is_ptx)
    try:
        with ByteSource(path) as source:
            plan = plan_for(map_library(source, read_tables(source), Scope(headers_only=True)))
    except FormatError:
        return True
    return not plan.decisions or any(decision.kept for decision in plan.decisions)


def never_loaded(request: SlimRequest, lock: Lock) -> Recipe:
    """Keep no GPU code, or no code that can come back: the run of a lock loaded no such library."""
    spare = request.options.spare
    return Recipe(
        Kind.NEVER_LOADED,
        f"{lock_in_words(lock)}, which never loaded some libraries",
        ("never loaded", request.options.strip),
        functools.partial(_plan_by_headers, plan_for_none),
        spare,
        strips_others=spare is None and request.strip_others,
        takes_cpu_code=spare is not None and lock.has_pages,
    )


def for_others(request: SlimRequest) -> Recipe | None:
    """The recipe for the others of a request (see there), or for all; None: they stay."""
    if request.devices or request.lock is None:
        return by_archs(
            request.devices,
            keep_ptx=request.keep_ptx,
            strip=request.options.strip,
            strip_others=request.strip_others,
            spare=request.options.spare,
        )
    return strip_only() if request.strip_others else None


def by_digest(request: SlimRequest, lock: Lock) -> dict[str, Recipe]:
    """The recipes for the libraries that a lock knows: by their GPU code, their pages, or both."""
    source, spare, recipes = lock_in_words(lock), request.options.spare, {}
    by_arch = for_others(request) if request.devices else None
    pages = Recipe(Kind.PAGES, source, ("pages",), _plan_nothing, spare) if spare else None
    spared = never_loaded(request, lock) if request.never_loaded and spare else None
    for row in lock.libraries:
        recipe = (
            by_lock(row, lock.proof.fill, source, strip=request.options.strip, spare=spare)
            if row.code_sha256 is not None
            else (by_arch or pages)
            if row.loaded
            else (spared or by_arch)
        )
        if recipe is not None:
            recipes[row.sha256] = replace(recipe, pages=None if spare is None else row)
    return recipes


def strip_only() -> Recipe:
    """Only drop symbol tables and debug information."""
    return Recipe(
        Kind.STRIP,
        "stripping, which removes no GPU code",
        ("strip",),
        _plan_nothing,
        strips_others=True,
    )


def keep_whole(reason: str = "") -> Recipe:
    """Keep all of a library: the original of a slimmed one comes back."""
    return Recipe(Kind.WHOLE, reason, ("whole",), _plan_nothing)


def remove_file(source: str, key: tuple[Any, ...]) -> Recipe:
    """Remove a file that is GPU code itself; see ``Recipe``."""
    return Recipe(Kind.REMOVED, source, key, _plan_nothing)


def _plan_nothing(_recipe: Recipe, _source: ByteSource) -> Removal:
    return Removal()


def plan_library(recipe: Recipe, source: ByteSource) -> Removal:
    """Find what a recipe removes from a library, which is open.

    Raises:
        CannotCompactError: it is left as it is.
        NegativaError: it can't be done.
    """
    removal = recipe.plan(recipe, source)
    spare, pages = recipe.spare, recipe.pages
    # Of what is only stripped, nothing goes into a spare.
    if spare is None or (removal.library_map is None and not recipe.takes_pages):
        return removal
    needed, containers = plan_cut(
        source, removal.library_map, removal.plan, pages, takes_all=recipe.takes_cpu_code
    )
    options = spare.options_for(Path(source.path).name, recipe.source)
    return replace(
        removal,
        needed=needed,
        containers=containers,
        hole_sizes=tuple(hole_sizes(source, needed, options, containers)),
    )


def slim_library(
    recipe: Recipe,
    source: ByteSource,
    target: Path | None,
    name: str,
    removal: Removal,
    *,
    strip: bool,
    min_hole: int = LEAST_HOLE,
) -> Removal:
    """Write what a recipe makes of a library, or forecast its size.

    Args:
        recipe: what to remove.
        source: the original.
        target: the new file; nothing is left there on any failure. None: nothing is written.
        name: file name of the library.
        removal: what ``plan_library`` found.
        strip: whether to drop what is never loaded, such as symbol tables.
        min_hole: with a spare, shorter holes stay in the file; in bytes.

    Raises:
        CannotCompactError: it is left as it is.
        NegativaError: it can't be done.
    """
    made: Smaller
    plan, containers = removal.plan, removal.containers
    if recipe.spare is not None and (needed := removal.needed) is not None:
        options = recipe.spare.options_for(name, recipe.source, min_hole)
        if target is None:
            return replace(removal, size_after=design_cut(source, needed, options, containers).size)
        library, decisions = (None, ()) if plan is None else (plan.library, plan.decisions)
        made = cut(source, target, needed, containers, recipe.spare, options, library)
        unused = ((one.start, one.end) for one in decisions if not one.kept)
        gone = size(intersection(unused, made.holes))
    else:
        given = removal.library_map, plan, removal.edits
        compact = CompactOptions(strip=strip, takes_place=True)
        if target is None:
            return replace(removal, size_after=design_compaction(source, *given, compact).size)
        made = compact_library(source, target, *given, compact)
        gone = 0 if plan is None else plan.unused_bytes + removal.trimmed
    return replace(removal, size_after=made.size_after, gpu_code_removed=gone, made=made)


def _plan_by_headers(
    plan_for: Callable[[LibraryMap], LibraryPlan], recipe: Recipe, source: ByteSource
) -> Removal:
    """The removal by a plan that needs no cubin unpacked."""
    try:
        library_map = map_library(source, read_host_elf(source), Scope(headers_only=True))
    except FormatError as e:
        raise CannotCompactError(source.path, e.problem) from e
    if library_map.sections:
        return Removal(library_map, plan_for(library_map))
    if not recipe.takes_others:
        raise CannotCompactError(source.path, NO_GPU_CODE)
    return Removal()


def names_of(devices: Iterable[ComputeCapability]) -> str:
    """The archs of devices in words: ``sm_80, sm_90``."""
    return ", ".join(str(SmArch(device.major, device.minor)) for device in devices)
