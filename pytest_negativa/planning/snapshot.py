"""Snapshots of maps, plans and locks, their differences, names of kernels across builds. No I/O."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

from msgspec.structs import replace

from pytest_negativa.arch import ElementKind
from pytest_negativa.models.code_files import name_of_files
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import LibraryIdentity, LibraryMap
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.snapshot import (
    Change,
    CodeChange,
    KernelChanges,
    LibraryChange,
    Snapshot,
    SnapshotDifference,
    SnapshotLibrary,
    SnapshotRow,
)

_KEPT, _UNUSED = "kept", "unused"


def make_snapshot(title: str, libraries: Iterable[SnapshotLibrary]) -> Snapshot:
    """A snapshot whose libraries have names of their own.

    Args:
        libraries: named by their paths. Those that share one count as one: a lock has a library of
            two sites twice, and all files of a distribution that are GPU code have one name.
    """
    by_path: defaultdict[str, list[SnapshotLibrary]] = defaultdict(list)
    for one in libraries:
        by_path[one.name].append(one)
    found = tuple(same[0] if len(same) == 1 else _sum(same) for same in by_path.values())
    names = short_names(one.name for one in found)
    named = (replace(one, name=name) for one, name in zip(found, names, strict=True))
    return Snapshot(
        title=title,
        libraries=tuple(sorted(named, key=lambda one: one.name)),
    )


def _sum(same: Sequence[SnapshotLibrary]) -> SnapshotLibrary:
    return replace(
        same[0],
        version=", ".join(sorted({one.version for one in same if one.version})) or None,
        size=sum(one.size or 0 for one in same),
        rows=tuple(_add_up(row for one in same for row in one.rows)),
        kernels=_union(one.kernels for one in same),
        used_kernels=_union(one.used_kernels for one in same),
    )


def _add_up(rows: Iterable[SnapshotRow]) -> Iterator[SnapshotRow]:
    """The sums of the rows that share arch and reason."""
    alike: defaultdict[tuple[str | None, str | None, bool], list[SnapshotRow]] = defaultdict(list)
    for row in rows:
        alike[row.arch, row.reason, row.is_unused].append(row)
    for key, same in alike.items():
        yield SnapshotRow(*key, sum(r.elements for r in same), sum(r.bytes for r in same))


def _union(lists: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """The names of all lists; None if one is unknown."""
    names: set[str] = set()
    for one in lists:
        if one is None:
            return None
        names.update(one)
    return tuple(sorted(names))


def short_names(paths: Iterable[str]) -> tuple[str, ...]:
    """The shortest ends of paths that tell them apart, such as their file names.

    Two releases in different folders have the same names, so that they can be paired.
    """
    parts = [PurePath(path).parts for path in paths]
    lengths = [1] * len(parts)
    while True:
        ends = [one[-length:] for one, length in zip(parts, lengths, strict=True)]
        counts = Counter(ends)
        longer = [
            length + (counts[end] > 1 and length < len(one))
            for one, end, length in zip(parts, ends, lengths, strict=True)
        ]
        if longer == lengths:
            return tuple(str(PurePath(*end)) for end in ends)
        lengths = longer


def name_of(library: LibraryIdentity) -> str:
    """The name of a library before names are shortened: the files of two sites share theirs."""
    is_files = library.file_kind is FileKind.FILES
    return library.path.rpartition("/")[2] if is_files else library.path


def snapshot_map(
    library_map: LibraryMap,
    plan: LibraryPlan | None = None,
    version: str | None = None,
    place: str | None = None,
) -> SnapshotLibrary:
    """A library as its map tells, by reason if there is a plan.

    With a plan the kernels are those that the traced devices could load.
    """
    decisions = {decision.start: decision for decision in (plan.decisions if plan else ())}
    # The arch of a file that nothing read is unknown.
    is_files = library_map.library.file_kind is FileKind.FILES
    rows: list[SnapshotRow] = []
    kernels: set[str] = set()
    for block in library_map.iter_code():
        decision = decisions.get(block.payload.start)
        is_unused = decision is not None and not decision.kept
        reason = None if decision is None else decision.reason
        # PTX that goes is no smaller machine code: what later devices can load changes.
        is_machine = block.kind is ElementKind.CUBIN
        arch = str(block.arch) if is_machine else f"{block.kind.value} {block.arch}"
        known_arch = None if is_files else arch
        rows.append(SnapshotRow(known_arch, reason, is_unused, 1, block.payload.size))
        if plan is None:
            kernels.update(kernel.name for kernel in library_map.kernels_of(block.content))
    used = [kernel.name for kernel in plan.used_kernels] if plan else []
    if plan is not None:
        kernels.update((*used, *plan.unused_kernels))
    is_listed = plan is not None or not library_map.scope.headers_only
    return SnapshotLibrary(
        name=name_of(library_map.library),
        place=place,
        version=version,
        size=library_map.library.size,
        rows=tuple(
            sorted(_add_up(rows), key=lambda r: (r.arch or "", r.reason or "", r.is_unused))
        ),
        kernels=tuple(sorted(kernels)) if is_listed else None,
        used_kernels=None if plan is None else tuple(sorted(used)),
    )


def snapshot_lock(lock: Lock, title: str) -> Snapshot:
    """The libraries of a lock, which tells neither archs nor reasons."""
    libraries = (
        SnapshotLibrary(
            name=one.path,
            place=None if PurePath(one.path).is_absolute() else one.path,
            version=one.version,
            size=one.size,
            rows=(
                SnapshotRow(
                    None, _KEPT, False, one.kept_elements, one.code_bytes - one.unused_bytes
                ),
                SnapshotRow(
                    None, _UNUSED, True, one.elements - one.kept_elements, one.unused_bytes
                ),
            ),
        )
        for one in (*lock.gpu_libraries, *lock.files)
    )
    return make_snapshot(title, libraries)


def fold_file(one: SnapshotLibrary, holder: str) -> SnapshotLibrary:
    """A file that is GPU code itself, as a part of all those that its distribution or folder has.

    ``make_snapshot`` adds them up. A run and a lock name those of a distribution the same.
    """
    name = name_of_files(holder)
    return replace(one, name=name, place=name)


def with_names_of(before: Snapshot, after: Snapshot) -> Snapshot:
    """``before`` with the names that its libraries have in ``after``.

    A name depends on what else was loaded, a place does not. Libraries are paired by place, then by
    name, then by a name that is the end of one other name.
    """
    names: dict[str, str] = {}
    for is_same in (_share_place, _share_name, _is_end):
        taken = set(names.values())
        pairs = [
            (old.name, new.name)
            for old in before.libraries
            for new in after.libraries
            if old.name not in names and new.name not in taken and is_same(old, new)
        ]
        # Two sites may have the same place.
        olds, news = Counter(old for old, _ in pairs), Counter(new for _, new in pairs)
        names.update((old, new) for old, new in pairs if olds[old] == news[new] == 1)
    return replace(
        before,
        libraries=tuple(
            replace(one, name=names.get(one.name, one.name)) for one in before.libraries
        ),
    )


def _share_place(one: SnapshotLibrary, other: SnapshotLibrary) -> bool:
    return one.place is not None and one.place == other.place


def _share_name(one: SnapshotLibrary, other: SnapshotLibrary) -> bool:
    return one.name == other.name


def _is_end(one: SnapshotLibrary, other: SnapshotLibrary) -> bool:
    names = f"/{one.name}", f"/{other.name}"
    return names[0].endswith(names[1]) or names[1].endswith(names[0])


def compare_snapshots(before: Snapshot, after: Snapshot) -> SnapshotDifference:
    """Growth of code, and kernels that came or went, by library, arch, reason and kernel."""
    before = with_names_of(before, after)
    old = {one.name: one for one in before.libraries}
    new = {one.name: one for one in after.libraries}
    names = sorted({*old, *new})
    libraries = [_compare_library(name, old.get(name), new.get(name)) for name in names]
    return SnapshotDifference(
        before=before.title,
        after=after.title,
        libraries=tuple(sorted(libraries, key=lambda one: (-abs(one.code.growth), one.name))),
        code=tuple(_compare_code(before, after)),
        kernels=tuple(
            changes
            for name in names
            if any((changes := _compare_kernels(name, old.get(name), new.get(name))).names())
        ),
    )


def _compare_library(
    name: str, old: SnapshotLibrary | None, new: SnapshotLibrary | None
) -> LibraryChange:
    sides = (old, new)
    return LibraryChange(
        name=name,
        versions=(
            None if old is None else old.version,
            None if new is None else new.version,
        ),
        code=Change(*(None if one is None else one.code_bytes for one in sides)),
        unused=Change(*map(_unused, sides)),
        size=Change(*(None if one is None else one.size for one in sides)),
    )


def _unused(one: SnapshotLibrary | None) -> int | None:
    """The unused bytes; None without a plan."""
    is_planned = one is not None and all(row.reason is not None for row in one.rows)
    return one.unused_bytes if one is not None and is_planned else None


def _compare_code(before: Snapshot, after: Snapshot) -> list[CodeChange]:
    both = (*before.libraries, *after.libraries)
    # Figures of a library are compared by what both sides tell.
    without_arch = {one.name for one in both if any(row.arch is None for row in one.rows)}
    without_reason = {one.name for one in both if any(row.reason is None for row in one.rows)}

    def reason_of(name: str, row: SnapshotRow) -> str | None:
        if name in without_reason:
            return None
        # A lock gives no reasons for what is unused.
        if name in without_arch:
            return _UNUSED if row.is_unused else _KEPT
        return row.reason

    def sums(snapshot: Snapshot) -> Mapping[tuple[str, str | None, str | None], int]:
        found: defaultdict[tuple[str, str | None, str | None], int] = defaultdict(int)
        for one in snapshot.libraries:
            for row in one.rows:
                arch = None if one.name in without_arch else row.arch
                found[one.name, arch, reason_of(one.name, row)] += row.bytes
        return found

    old, new = sums(before), sums(after)
    changes = (CodeChange(*key, Change(old.get(key), new.get(key))) for key in {**old, **new})
    return sorted(
        (change for change in changes if change.bytes.growth),
        key=lambda one: (-abs(one.bytes.growth), one.library, one.arch or "", one.reason or ""),
    )


def _compare_kernels(
    name: str, old: SnapshotLibrary | None, new: SnapshotLibrary | None
) -> KernelChanges:
    there = [{} if one is None else _by_stable_name(one.kernels) for one in (old, new)]
    used = [{} if one is None else _by_stable_name(one.used_kernels) for one in (old, new)]
    both = (there[0] or {}).keys() & (there[1] or {}).keys()
    return KernelChanges(
        name,
        appeared=_minus(there[1], there[0]),
        went=_minus(there[0], there[1]),
        newly_used=_minus(used[1], used[0], both),
        newly_unused=_minus(used[0], used[1], both),
    )


# nvcc names an internal namespace by the hashes of a translation unit and of its options.
_INTERNAL = re.compile(r"(\d+)_(?:GLOBAL__N__|INTERNAL_)[0-9a-f]{8}_(\d+)_")
# Thrust and CUB name an inline namespace by their version and all archs (config/namespace.h).
_VERSIONED = re.compile(r"\d+(THRUST|CUB)_\d+_SM_[0-9_]+_NS")


def stable_name(mangled: str) -> str:
    """A kernel's mangled name without what differs in each build. It can't be demangled."""
    parts, at = [], 0
    # The hash at the end of a name may run into the length of the next one.
    while (found := _INTERNAL.search(mangled, at)) is not None:
        file = mangled[found.end() : found.end() + int(found[2])]
        parts += [mangled[at : found.start()], file]
        at = found.end(1) + int(found[1])
    return _VERSIONED.sub(r"\1", "".join((*parts, mangled[at:])))


def _by_stable_name(names: tuple[str, ...] | None) -> dict[str, str] | None:
    return None if names is None else {stable_name(name): name for name in names}


def _minus(
    left: Mapping[str, str] | None,
    right: Mapping[str, str] | None,
    among: Collection[str] | None = None,
) -> tuple[str, ...]:
    """The names of one side alone; none if either side lists no names."""
    if left is None or right is None:
        return ()
    found = left.keys() - right.keys()
    return tuple(sorted(left[name] for name in found if among is None or name in among))
