"""The stage behind ``negativa inspect``: arguments to mapped libraries, and their printing."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pytest_negativa.analysis.arch_gates import is_checked, what_devices_load
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.mapping import MappedLibrary, MapRequest, map_libraries
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.images.layers import is_container
from pytest_negativa.installed.libraries import LibrarySet, find_libraries
from pytest_negativa.models.library import Scope
from pytest_negativa.models.summary import InspectedLibrary, Inspection
from pytest_negativa.reporting import inspection
from pytest_negativa.reporting.text import printable
from pytest_negativa.storage.records import encode_hook, utf8

if TYPE_CHECKING:
    from pytest_negativa.gpucode.cache import MapCache

JSON_VERSION = 3
"""Of the JSON output. History: 3 has no code by distribution; 2 has a list of
devices in each summary; 1 is the first."""

_NO_LIBRARIES = '"libraries": []'

OnDone = Callable[[int, int], None]
"""Called with the bytes of libraries done and of all libraries."""

Take = Callable[[MappedLibrary], MappedLibrary]


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """Options of ``negativa inspect``."""

    devices: tuple[ComputeCapability, ...]
    kernels: bool
    elements: bool
    headers_only: bool
    globs: tuple[str, ...] = ()
    top: int = 0
    demangled: bool = False
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
    groups = itertools.groupby(arguments, lambda argument: is_container(Path(argument)))
    take = take or (lambda mapped: mapped)
    found: list[InspectedSet] = []
    for archives, group in groups:
        if archives:
            read = (_inspect_archive(Path(a), request, workers, on_done) for a in group)
            found += (s._replace(mapped=tuple(map(take, s.mapped))) for s in read)
        else:
            sets = (find_libraries(a, with_dependencies=with_dependencies) for a in group)
            found += _inspect_files(tuple(sets), request, cache, workers, on_done, take)
    return tuple(found)


def _inspect_archive(
    path: Path, request: MapRequest, workers: Workers | None, on_done: OnDone | None
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
    return InspectedSet(libraries, (*mapped, *problems))


def _inspect_files(
    sets: Sequence[LibrarySet],
    request: MapRequest,
    cache: MapCache | None,
    workers: Workers | None,
    on_done: OnDone | None,
    take: Take,
) -> tuple[InspectedSet, ...]:
    paths = dict.fromkeys(path for s in sets for path in s.paths)
    found = map_libraries(tuple(paths), request, cache, workers, on_done)
    mapped = {library.path: take(library) for library in found}
    return tuple(InspectedSet(s, tuple(mapped[path] for path in s.paths)) for s in sets)


def take_json(
    request: InspectionRequest, texts: dict[Path, bytes], mapped: MappedLibrary
) -> MappedLibrary:
    """Note the JSON of a library; returns the library without what only the JSON needs.

    Args:
        texts: deflated, for those of a folder may not fit in memory.
    """
    if mapped.summary is None:
        return mapped
    loaded_map = mapped.library_map
    library = InspectedLibrary(
        summary=mapped.summary,
        map=loaded_map if request.details else None,
        removed=mapped.removed,
        loadable=what_devices_load(loaded_map, request.required) if loaded_map else (),
    )
    text = msgspec.json.format(msgspec.json.encode(library, enc_hook=encode_hook), indent=1)
    texts[mapped.path] = zlib.compress(text, 1)
    return mapped if request.required else mapped._replace(library_map=None)


def render_json(inspected: Sequence[InspectedSet], texts: Mapping[Path, bytes]) -> Iterator[str]:
    """The JSON output in parts; ``negativa schema inspection`` prints its schema."""
    document = Inspection(
        format_version=JSON_VERSION,
        libraries=(),
        errors=tuple(utf8(str(e)) for s in inspected for e in errors_of(s)),
    )
    data = msgspec.json.encode(document, enc_hook=encode_hook)
    begin, libraries, end = msgspec.json.format(data, indent=1).decode().partition(_NO_LIBRARIES)
    yield begin
    paths = [m.path for s in inspected for m in s.mapped if m.summary is not None]
    if not paths:
        yield libraries
    for number, path in enumerate(paths):
        yield ",\n  " if number else '"libraries": [\n  '
        yield zlib.decompress(texts[path]).decode().replace("\n", "\n  ")
    if paths:
        yield "\n ]"
    yield f"{end}\n"


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
        windows = one.libraries.windows
        if request.required:
            pass
        elif one.libraries.explicit:
            yield from (inspection.library_report(*row) for row in summaries)
        elif not one.libraries.paths and not one.mapped:
            found = f"no libraries and no files of GPU code{inspection.windows_text(windows)}"
            yield f"{printable(one.libraries.label)}: {found}"
        elif summaries:
            yield inspection.set_report(
                one.libraries.label,
                [summary for summary, _ in summaries],
                [removed for _, removed in summaries if removed is not None],
                windows,
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
                lines = inspection.kernel_lines(
                    mapped.library_map, request.globs, request.top, demangled=request.demangled
                )
                yield "\n".join(lines)


def errors_of(inspected: InspectedSet) -> Iterator[Exception]:
    """Errors of the libraries of the set, and of folders with some."""
    yield from inspected.libraries.unlisted
    yield from (mapped.error for mapped in inspected.mapped if mapped.error is not None)
