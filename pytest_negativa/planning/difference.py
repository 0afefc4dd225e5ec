"""Sides of a comparison, their differences, names of kernels across builds. No I/O."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePath

from msgspec.structs import replace

from pytest_negativa.arch import ElementKind
from pytest_negativa.models.coverage import KernelCoverage
from pytest_negativa.models.difference import Change, LibraryChange, SideLibrary
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.report import RunReport


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


def side_of_map(library_map: LibraryMap) -> SideLibrary:
    """A library by its map."""
    archs: Counter[str] = Counter()
    kernels: set[str] = set()
    for block in library_map.iter_code():
        # PTX that goes is no smaller machine code: what later devices can load changes.
        kind = "" if block.kind is ElementKind.CUBIN else f"{block.kind.value} "
        archs[f"{kind}{block.arch}"] += block.payload.size
        kernels.update(kernel.name for kernel in library_map.kernels_of(block.content))
    return SideLibrary(
        path=library_map.library.path,
        size=library_map.library.size,
        code=archs.total(),
        archs=archs,
        kernels=None if library_map.scope.headers_only else kernels,
    )


def side_of_report(report: RunReport) -> tuple[SideLibrary, ...]:
    """The libraries of a run. It lists the kernels of the project's own libraries alone."""
    listed = {one.path: {kernel.name for kernel in one.kernels} for one in report.coverage}
    return tuple(
        SideLibrary(
            path=row.path,
            version=row.version,
            size=row.size,
            code=row.code_bytes,
            unused=row.unused_bytes,
            reasons={part.reason: part.bytes for part in (*row.kept, *row.unused)},
            kernels=listed.get(row.path),
            # A baseline has their number alone.
            used=(
                {use.name for use in row.first_uses}
                if len(row.first_uses) == row.used_kernels
                else None
            ),
        )
        for row in report.libraries
    )


def make_baseline(report: RunReport) -> RunReport:
    """The part of a report that a project commits: figures, and names of its own kernels."""
    paths = [row.path for row in report.libraries]
    names = dict(zip(paths, short_names(paths), strict=True))
    return replace(
        report,
        directory="",
        libraries=tuple(
            replace(row, path=names[row.path], first_uses=(), unused_kernels=(), notes=())
            for row in report.libraries
        ),
        runtime=(),
        not_covered=(),
        warnings=(),
        crossed=(),
        files=(),
        coverage=tuple(
            replace(
                one,
                path=names[one.path],
                kernels=tuple(KernelCoverage(name=kernel.name, runs=()) for kernel in one.kernels),
            )
            for one in report.coverage
        ),
        proof=None,
        compared=(),
        unchecked=(),
    )


def compare(
    before: Sequence[SideLibrary], after: Sequence[SideLibrary]
) -> tuple[LibraryChange, ...]:
    """Changes of the libraries of two sides, the largest first."""
    pairs = tuple(_pair(before, after))
    paths = [next(one.path for one in reversed(sides) if one is not None) for sides in pairs]
    changes = map(_compare, short_names(paths), paths, pairs)
    return tuple(sorted(changes, key=lambda one: (-abs(one.code.growth), one.name)))


_Pair = tuple[SideLibrary | None, SideLibrary | None]


def _pair(before: Sequence[SideLibrary], after: Sequence[SideLibrary]) -> Iterator[_Pair]:
    """Pairs of libraries that share the longest end of their paths, and what is left of each side.

    A library that could be paired with either of two stays alone.
    """
    left = [{one.path: one for one in side} for side in (before, after)]
    longest = max((len(PurePath(one.path).parts) for one in (*before, *after)), default=0)
    for length in range(longest, 0, -1):
        olds, news = (_by_end(side.values(), length) for side in left)
        for end in olds.keys() & news.keys():
            if len(olds[end]) == len(news[end]) == 1:
                [old], [new] = olds[end], news[end]
                del left[0][old.path], left[1][new.path]
                yield old, new
    yield from ((old, None) for old in left[0].values())
    yield from ((None, new) for new in left[1].values())


def _by_end(
    libraries: Iterable[SideLibrary], length: int
) -> defaultdict[tuple[str, ...], list[SideLibrary]]:
    found = defaultdict(list)
    for one in libraries:
        found[PurePath(one.path).parts[-length:]].append(one)
    return found


def _compare(name: str, path: str, pair: _Pair) -> LibraryChange:
    def change(figure: str) -> Change:
        return Change(*(getattr(one, figure, None) for one in pair))

    old, new = (one or SideLibrary(path, 0, 0, None, 0, {}, {}, (), ()) for one in pair)
    return LibraryChange(
        name=name,
        path=path,
        versions=(old.version, new.version),
        code=change("code"),
        unused=change("unused"),
        size=change("size"),
        parts={
            part: Change(before.get(part), after.get(part))
            for before, after in ((old.archs, new.archs), (old.reasons, new.reasons))
            # Figures of a library are compared by what both sides tell.
            if before is not None and after is not None
            for part in {**before, **after}
            if before.get(part) != after.get(part)
        },
        appeared=_only(new.kernels, old.kernels),
        went=_only(old.kernels, new.kernels),
        newly_used=_only(new.used, old.used),
        newly_unused=_only(old.used, new.used),
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


def _only(left: Collection[str] | None, right: Collection[str] | None) -> tuple[str, ...] | None:
    """The kernels of one side alone; None if either side doesn't list them."""
    if left is None or right is None:
        return None
    known = set(map(stable_name, right))
    return tuple(sorted(name for name in left if stable_name(name) not in known))
