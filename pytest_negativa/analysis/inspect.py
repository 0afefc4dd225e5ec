"""``negativa inspect``: mapped libraries, and gates of wheels (archs, dead code).

Gates are for those who build wheels: code for each deployed GPU, and little or none for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_negativa.arch import ComputeCapability, SmArch
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest, OnDone, map_libraries
from pytest_negativa.gpucode.summary import loadable_code
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.images.layers import is_container
from pytest_negativa.installed.libraries import LibrarySet, find_libraries
from pytest_negativa.models.file_kinds import FileKind
from pytest_negativa.models.library import RELOCATABLE, LibraryMap, Scope
from pytest_negativa.models.summary import (
    InspectedLibrary,
    Inspection,
    LibrarySummary,
    LoadableCode,
)
from pytest_negativa.reporting import inspection
from pytest_negativa.reporting.text import printable
from pytest_negativa.storage.records import utf8

if TYPE_CHECKING:
    from pytest_negativa.gpucode.cache import MapCache

Take = Callable[[MappedLibrary], MappedLibrary]


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """Options of ``negativa inspect``."""

    devices: tuple[ComputeCapability, ...]
    kernels: bool
    elements: bool
    headers_only: bool
    globs: tuple[str, ...] = ()
    required: tuple[ComputeCapability, ...] = ()

    @property
    def details(self) -> bool:
        """Whether rows of single kernels or elements are asked for."""
        return self.kernels or self.elements

    @property
    def map_request(self) -> MapRequest:
        """Request for the map of each library."""
        devices = tuple(sorted(map(str, self.devices))) or None
        return MapRequest(
            scope=(
                Scope(headers_only=True)
                if self.headers_only
                else Scope(devices=devices, calls=False)
            ),
            devices=self.devices,
            with_map=self.details or bool(self.required),
            slimmed=True,
            # Empty cubins may be all that is left for a device.
            left_scope=(
                Scope(devices=tuple(sorted(map(str, self.required))), calls=False)
                if self.required
                else None
            ),
            any_file=True,
        )


class InspectedSet(NamedTuple):
    """One argument and what came of its libraries, in order."""

    libraries: LibrarySet
    mapped: tuple[MappedLibrary, ...]


def inspect_libraries(
    arguments: Sequence[str],
    request: MapRequest,
    cache: MapCache | None = None,
    workers: Workers | None = None,
    on_done: OnDone | None = None,
    take: Take | None = None,
    *,
    with_dependencies: bool = False,
) -> tuple[InspectedSet, ...]:
    """Map all libraries that the arguments stand for, of slimmed ones what is left.

    Args:
        arguments: paths, or names of distributions.
        request: how to read a library.
        take: called with each library once it is read; its result is kept. None keeps all.

    Raises:
        OptionError: an argument stands for nothing.
    """
    take = take or (lambda mapped: mapped)
    sets = [
        _read_container(Path(argument), request, workers, on_done, take)
        if is_container(Path(argument))
        else find_libraries(argument, with_dependencies=with_dependencies)
        for argument in arguments
    ]
    files = [one for one in sets if isinstance(one, LibrarySet)]
    paths = dict.fromkeys(path for one in files for path in one.paths)
    found = map_libraries(tuple(paths), request, cache, workers, on_done)
    mapped = {library.path: take(library) for library in found}
    return tuple(
        InspectedSet(one, tuple(mapped[path] for path in one.paths))
        if isinstance(one, LibrarySet)
        else one
        for one in sets
    )


def _read_container(
    path: Path, request: MapRequest, workers: Workers | None, on_done: OnDone | None, take: Take
) -> InspectedSet:
    # The readers of all archives take 15 ms to import.
    from pytest_negativa.images.tree import read_tree

    tree = read_tree(path, request, None, workers, on_done)
    mapped = tuple(tree.libraries[name] for name in sorted(tree.libraries))
    libraries = LibrarySet(
        str(path),
        tuple(one.path for one in mapped),
        explicit=False,
        distribution=" ".join(tree.distribution) if tree.distribution else None,
    )
    problems = (MappedLibrary(Path(e.path), error=e) for e in tree.problems)
    return InspectedSet(libraries, tuple(map(take, (*mapped, *problems))))


def inspection_of(inspected: Sequence[InspectedSet], request: InspectionRequest) -> Inspection:
    """The JSON output; ``negativa schema inspection`` prints its schema."""
    return Inspection(
        libraries=tuple(
            InspectedLibrary(
                summary=m.summary,
                map=m.library_map if request.details else None,
                removed=m.removed,
                loadable=what_devices_load(m.library_map, request.required),
            )
            for one in inspected
            for m in one.mapped
            if m.summary is not None
        ),
        errors=tuple(utf8(str(error)) for one in inspected for error in errors_of(one)),
    )


def render_text(inspected: Sequence[InspectedSet], request: InspectionRequest) -> Iterator[str]:
    """The tables, a text for each library or set."""
    if request.required:
        maps = [
            m.library_map
            for s in inspected
            for m in s.mapped
            if m.library_map is not None and is_checked(s.libraries, m)
        ]
        yield from inspection.render_loadable(
            {m.library.path: what_devices_load(m, request.required) for m in maps}
        )
    for one in inspected:
        summaries = [(m.summary, m.removed) for m in one.mapped if m.summary is not None]
        if request.required:
            pass
        elif one.libraries.explicit:
            yield from (inspection.library_report(*row) for row in summaries)
        elif not one.libraries.paths and not one.mapped:
            yield f"{printable(one.libraries.label)}: no libraries and no files of GPU code"
        elif summaries:
            yield inspection.set_report(
                one.libraries.label,
                [summary for summary, _ in summaries],
                [removed for _, removed in summaries if removed is not None],
            )
        for mapped in one.mapped:
            if mapped.library_map is None or not mapped.library_map.sections:
                continue
            path = printable(str(mapped.path))
            if request.elements:
                yield f"{path}, elements:"
                yield inspection.element_table(
                    mapped.library_map, request.devices, slimmed=mapped.removed is not None
                )
            if request.kernels:
                yield f"{path}, kernels:"
                yield "\n".join(inspection.kernel_lines(mapped.library_map, request.globs))


def errors_of(inspected: InspectedSet) -> Iterator[Exception]:
    """Errors of the libraries of the set, and of folders with some."""
    yield from inspected.libraries.unlisted
    yield from (mapped.error for mapped in inspected.mapped if mapped.error is not None)


def what_devices_load(
    library_map: LibraryMap | None, devices: Sequence[ComputeCapability]
) -> tuple[LoadableCode, ...]:
    """Code that each device could load; empty for a library without GPU code."""
    if library_map is None or not library_map.sections:
        return ()
    return tuple(loadable_code(library_map, device) for device in devices)


def is_checked(libraries: LibrarySet, mapped: MappedLibrary) -> bool:
    """Whether a file must have code for each deployed device.

    In a folder these are libraries. The other files are for one arch each, or for linkers alone.
    """
    return libraries.explicit or (
        mapped.summary is not None and mapped.summary.file_kind is FileKind.LIBRARY
    )


def missing_archs(
    inspected: Sequence[InspectedSet], devices: Sequence[ComputeCapability]
) -> Iterator[str]:
    """Libraries that can't run on the devices, a sentence for each library and device."""
    for libraries, mapped_libraries in inspected:
        with_code = [
            m
            for m in mapped_libraries
            if m.summary is not None and m.summary.sections and is_checked(libraries, m)
        ]
        if not with_code and _loads_nothing(mapped_libraries):
            yield f"{libraries.label}: no GPU code that devices load, so none for {_names(devices)}"
        for mapped in with_code:
            assert mapped.library_map is not None
            for device in devices:
                if loadable_code(mapped.library_map, device).is_missing:
                    yield (
                        f"{mapped.path}: no code that {_names([device])} can load; it has "
                        f"{_archs_of(mapped.library_map)}"
                    )


def too_much_dead(inspected: Sequence[InspectedSet], limit: float) -> Iterator[str]:
    """Arguments with more code for other GPUs than a limit in percent, or without code.

    The GPUs are those of the summaries.
    """
    for libraries, mapped_libraries in inspected:
        if _loads_nothing(mapped_libraries):
            yield f"{libraries.label}: no GPU code that devices load, so --max-dead checks nothing"
        summaries = _loaded(mapped_libraries)
        code = sum(s.code_bytes for s in summaries)
        loaded = sum(s.loaded_bytes or 0 for s in summaries)
        if code and (share := 100 * (code - loaded) / code) > limit:
            yield (
                f"{libraries.label}: {share:.1f}% of the GPU code is for other GPUs, more than "
                f"{limit:g}%"
            )


def _loaded(mapped_libraries: Sequence[MappedLibrary]) -> list[LibrarySummary]:
    """Those with GPU code that are not for linkers alone."""
    return [
        m.summary
        for m in mapped_libraries
        if m.summary is not None and m.summary.sections and not m.summary.file_kind.is_link_time
    ]


def _loads_nothing(found: Sequence[MappedLibrary]) -> bool:
    """Whether devices load no file of these: a gate that checks nothing must not pass."""
    return not _loaded(found) and not any(m.error for m in found)


def _archs_of(library_map: LibraryMap) -> str:
    """The kinds and archs of its code; a device may not load that of relocatable sections."""
    found = {
        (block.arch, block.kind.value, " for a linker" if section.name == RELOCATABLE else "")
        for section in library_map.sections
        for block in section.iter_code()
    }
    return ", ".join(f"{kind} {arch}{for_linker}" for arch, kind, for_linker in sorted(found))


def _names(devices: Sequence[ComputeCapability]) -> str:
    return ", ".join(str(SmArch(device.major, device.minor)) for device in devices)
