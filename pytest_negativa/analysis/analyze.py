"""Libraries of a run to maps and plans: changed, unread, covered ones; globs without a match."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import asdict, replace

from pytest_negativa.analysis.runtime_code import find_runtime_code
from pytest_negativa.arch import ComputeCapability, SmArch
from pytest_negativa.errors import FormatError, NotElfError
from pytest_negativa.gpucode.cache import open_cache
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.installed.owners import Owners, OwnLibraries
from pytest_negativa.installed.record import record_digest
from pytest_negativa.installed.sites import is_installed
from pytest_negativa.models.analysis import Analysis, AnalyzedLibrary
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.coverage import LibraryCoverage
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import Place
from pytest_negativa.models.plan import LibraryPlan, LocatedLibrary
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import (
    ImageForm,
    LibraryUsage,
    TracedLibrary,
    Usage,
    UsageWarning,
)
from pytest_negativa.models.verdict import Need
from pytest_negativa.planning.by_tests import cover_library
from pytest_negativa.planning.code_files import names_of_file, plan_files
from pytest_negativa.planning.decide import KeepElement, KeepPolicy, plan_library
from pytest_negativa.planning.locate import Content, Contents, locate_library
from pytest_negativa.reporting.units import format_names
from pytest_negativa.settings.globs import (
    GlobSet,
    LibraryNames,
    ask_for_distributions,
    first_glob,
    is_selected,
    limit_of,
    names_of,
    unmatched_globs,
    unmatched_libraries,
)
from pytest_negativa.storage.system import head_of
from pytest_negativa.tracing.libraries import state_of

_MOST_NAMED = 10


def analyze(
    usage: Usage,
    settings: Settings,
    *,
    added: Sequence[str] = (),
    vetoes: tuple[KeepElement, ...] = (),
    healed: tuple[Need, ...] = (),
    watched: Sequence[WatchedFiles] = (),
    workers: Workers | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Map, locate and plan every library that the usage names.

    Libraries that can't be read are left alone and named in the result.

    Args:
        added: paths of further libraries, which plugins add.
        vetoes: by which plugins keep elements.
        watched: files that are GPU code themselves; those of a distribution are one library.
    """
    usage = replace(usage, incomplete=(*usage.incomplete, *_images_elsewhere(usage)))
    return _Analyzer(usage, settings, added, vetoes, healed, watched).run(workers, on_done)


def _images_elsewhere(usage: Usage) -> Iterator[UsageWarning]:
    """GPU code that lies within a file that is no library, such as a library in an archive."""
    for used in usage.libraries:
        path = used.library.path
        # PTX may lie in any file; what a library has of it lies in a fatbin.
        if not any(i.offset and i.form is not ImageForm.PTX for i in used.images):
            continue
        magic = head_of(path)[: len(ELF_MAGIC)]
        # A build id is a library's. A file without one may have been an archive.
        if not magic and used.library.build_id is not None:
            continue
        if magic != ELF_MAGIC:
            what = "is no library" if magic else "is gone"
            text = f"{path}: GPU code was loaded from within this file, which {what}"
            yield UsageWarning(code="image-elsewhere", text=text, process=None)


def loaded_digests(usage: Usage) -> set[str]:
    """RECORD's digest field of each image in memory, and of each file with images."""
    digests: set[str | None] = {i.sha256 for i in (*usage.memory_images, *usage.compiled)}
    # The file may lie in another environment, which nothing watched.
    digests |= {used.library.sha256 for used in usage.libraries if used.images}
    return {record_digest(sha256) for sha256 in digests if sha256 is not None}


class _Analyzer:
    def __init__(
        self,
        usage: Usage,
        settings: Settings,
        added: Sequence[str],
        vetoes: tuple[KeepElement, ...],
        healed: tuple[Need, ...],
        watched: Sequence[WatchedFiles],
    ) -> None:
        self._usage = usage
        self._settings = settings
        self._added = added
        self._vetoes = vetoes
        self._healed = healed
        found = {ComputeCapability.parse(device.compute_capability) for device in usage.devices}
        self._devices = tuple(sorted(found))
        self._extra_devices = tuple(
            ComputeCapability(a.major, a.minor) for a in map(SmArch.parse, settings.keep.archs)
        )
        self._kernel_globs = GlobSet(settings.keep.kernels)
        self._owners = Owners()
        self._asks_for_all = ask_for_distributions(settings)
        self._names: list[LibraryNames] = []
        self._watched = watched
        self._files = [names_of_file(one, name) for one in watched for name in one.files]
        self._located: list[LocatedLibrary] = []
        self._own = OwnLibraries(process.header.root for process in usage.processes)

    def run(self, workers: Workers | None, on_done: Callable[[int, int], None] | None) -> Analysis:
        paths = dict.fromkeys((*(u.library.path for u in self._usage.libraries), *self._added))
        unreadable: list[str] = []
        analyzed: list[AnalyzedLibrary] = []
        hashes: set[str] = set()
        mapped = self._map(list(paths), unreadable, workers, on_done)
        found = [(library_map, library) for library_map, library in mapped if library_map.sections]
        # A plan needs the digests of the others.
        contents = Contents(self._usage, (library for _, library in found))
        for library_map, library in found:
            hashes.update(f.digest for f in library_map.iter_frames() if f.digest is not None)
            place = Place(library.path)
            if self._asks_for_all or is_installed(library.path):
                place = self._owners.of(library.path)
            self._names.append(names_of(library_map.library, place.distribution))
            if is_selected(self._settings.libraries, self._names[-1]):
                analyzed.append(self._plan(library_map, contents.of(library), place))
        incomplete, loaded = self._usage.why_incomplete(), loaded_digests(self._usage)
        analyzed += plan_files(self._watched, self._usage, self._settings, incomplete, loaded)
        unchecked = tuple(self._unchecked())
        return Analysis(
            usage=contents.usage,
            libraries=tuple(sorted(analyzed, key=lambda a: a.plan.library.path)),
            runtime=find_runtime_code(self._usage, self._located, self._known_images(hashes)),
            unreadable=tuple(sorted(unreadable)),
            warnings=(*unchecked, *self._glob_warnings(analyzed)),
            unchecked=unchecked,
        )

    def _map(
        self,
        paths: list[str],
        unreadable: list[str],
        workers: Workers | None,
        on_done: Callable[[int, int], None] | None,
    ) -> Iterator[tuple[LibraryMap, TracedLibrary]]:
        devices = (*self._devices, *self._extra_devices)
        # Without a known device nothing can be called unused: the headers tell all there is.
        scope = (
            Scope(devices=tuple(sorted(set(map(str, devices)))))
            if devices
            else Scope(headers_only=True)
        )
        cache = open_cache(self._settings.cache_dir)
        states = {p: s for p in paths if Path(p).is_file() and (s := state_of(p)) is not None}
        # The kernel's own object in memory, a deleted file, a library of another machine.
        unreadable.extend(f"{p}: not found" for p in paths if p not in states)
        request = MapRequest(scope=scope, with_map=True, with_summary=False, with_digest=True)
        for mapped in map_libraries([*map(Path, states)], request, cache, workers, on_done):
            path = str(mapped.path)
            if mapped.library_map is not None:
                yield mapped.library_map, _present(path, states[path], mapped.library_map)
            elif mapped.error is not None and not isinstance(mapped.error, NotElfError):
                unreadable.append(str(mapped.error))

    def _plan(self, library_map: LibraryMap, content: Content, place: Place) -> AnalyzedLibrary:
        names = names_of(library_map.library, place.distribution)
        glob = first_glob(self._settings.keep.libraries, names)
        policy = KeepPolicy(
            whole_library=None if glob is None else f"keep.libraries: {glob}",
            kernels=self._kernel_globs,
            devices=self._extra_devices,
            ptx=self._settings.keep.ptx.value,
            demangle=demangle,
            vetoes=self._vetoes,
            granularity=self._settings.granularity.value,
            healed=self._healed,
        )
        used, changed, lack = content
        located = locate_library(library_map, used, self._usage, changed)
        self._located.append(located)
        plan = plan_library(located, self._devices, policy, self._incomplete(used) or lack)
        coverage = self._cover(library_map, plan, used, names)
        return AnalyzedLibrary(library_map, plan, coverage, place.distribution, place.version)

    def _cover(
        self, library_map: LibraryMap, plan: LibraryPlan, used: LibraryUsage, names: LibraryNames
    ) -> LibraryCoverage | None:
        wanted = self._settings.coverage
        limit = limit_of(wanted.fail_under.libraries, names)
        if wanted.libraries:
            is_covered = first_glob(wanted.libraries, names) is not None
        else:
            is_covered = plan.library.path in self._own
        if limit is None and not is_covered:
            return None
        return cover_library(
            plan, used, self._usage, demangle, self._source_lines(library_map), limit=limit
        )

    def _source_lines(self, library_map: LibraryMap) -> dict[str, tuple[str, int]]:
        """Source file and line of kernels; a file in a root folder is relative to it."""
        # It takes 60 ms to import.
        from pytest_negativa.gpucode.source_lines import read_source_lines

        try:
            lines = read_source_lines(library_map)
        except FormatError:
            return {}  # it changed meanwhile
        roots = dict.fromkeys(process.header.root for process in self._usage.processes)
        return {name: (_below(roots, file), line) for name, (file, line) in lines.items()}

    def _incomplete(self, library_usage: LibraryUsage) -> str | None:
        """The reason that more of the library may have been used than is known, or None."""
        own = {None, *library_usage.processes}
        return next((lack.text for lack in self._usage.incomplete if lack.process in own), None)

    def _known_images(self, frames: set[str]) -> set[str]:
        """SHA-256 of the images in memory that may come from a library or a package's file."""
        suspects = {i.sha256 for one in self._located for i in one.suspects.values()}
        files = {digest for one in self._watched for digest, _ in one.files.values()}
        packaged = {i.sha256 for i in self._usage.memory_images if record_digest(i.sha256) in files}
        return frames | suspects | packaged

    def _unchecked(self) -> Iterator[str]:
        """Reasons that limits can't count all that the settings name."""
        names = [*self._names, *self._files]
        yield from unmatched_libraries(self._settings, "libraries.include", names)
        wanted = self._settings.libraries
        if names and not any(is_selected(wanted, one) for one in names):
            left_out = dict.fromkeys(Path(one.path).name for one in names)
            options = [f"libraries.{key}" for key in ("include", "exclude") if getattr(wanted, key)]
            named = format_names(left_out, _MOST_NAMED)
            yield f"nothing is left to look at; left out by {' and '.join(options)}: {named}"
        if not names and any(used.images for used in self._usage.libraries):
            yield "no library whose GPU code was used is here to look at"

    def _glob_warnings(self, analyzed: Sequence[AnalyzedLibrary]) -> Iterator[str]:
        for option in ("libraries.exclude", "keep.libraries"):
            names = [*self._names, *self._files]
            yield from unmatched_libraries(self._settings, option, names)
        # The kernels of files that are GPU code are not known, so nothing covers them.
        yield from unmatched_libraries(self._settings, "coverage.libraries", self._names)
        for library in analyzed:
            # Planning asks for a glob only if nothing else keeps the code.
            if not set(self._kernel_globs.globs) <= self._kernel_globs.matched:
                for name in library.library_map.names:
                    self._kernel_globs.match(name, demangle(name))
        yield from unmatched_globs(self._settings, "keep.kernels", self._kernel_globs.matched)


def _below(roots: Iterable[str], file: str) -> str:
    path = Path(os.path.normpath(file))
    root = next((root for root in roots if path.is_relative_to(root)), None)
    return str(path if root is None else path.relative_to(root))


def _present(path: str, state: FileState, library_map: LibraryMap) -> TracedLibrary:
    """The library that lies at a path.

    Args:
        state: of the file before it was read.
        library_map: of it. It has the digest only if the file did not change while it was read.
    """
    found = library_map.library
    library = TracedLibrary(
        path=path, size=found.size, build_id=found.build_id, sha256=found.sha256
    )
    if state_of(path) != state:
        return library
    return replace(library, **asdict(state))
