"""``negativa inspect`` by package: what a suite needs, what is slimmable, by which match.

The needs of a suite in libraries come from a traced run or a lock.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.gpucode.cache import MapCache
from pytest_negativa.gpucode.mapping import MapRequest, OnDone
from pytest_negativa.gpucode.workers import Workers
from pytest_negativa.images.layers import is_container
from pytest_negativa.images.owners import find_owners
from pytest_negativa.images.tree import read_tree
from pytest_negativa.models.code_files import name_of_files
from pytest_negativa.models.file_kinds import CODE_SUFFIXES, LOADABLE
from pytest_negativa.models.image import (
    ImageLibrary,
    ImagePackage,
    ImageReport,
    PackageRow,
    SlimmableBy,
    SuiteUse,
)
from pytest_negativa.models.library import (
    LibraryIdentity,
    LibraryMap,
    Removed,
    Scope,
    add_foreign,
)
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.plan import KeepReason, LibraryPlan, may_be
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.results import load_plans, load_usage
from pytest_negativa.storage.runs import Run


def report_image(
    folder: Path,
    suite: Suite | None = None,
    devices: Sequence[ComputeCapability] = (),
    cache: MapCache | None = None,
    workers: Workers | None = None,
    on_done: OnDone | None = None,
) -> ImageReport:
    """Find the GPU code in a tree, and the part of it that a suite needs.

    Args:
        folder: the root of the tree, an archive of it, or a saved image.
        suite: the suite; None: only archs tell what is slimmable.
        devices: code that none of them loads is slimmable by arch; empty: those of the suite.
        cache: where the maps of the libraries are kept; None: nowhere.
        workers: who reads; None: a process for each processor.

    Raises:
        OptionError: the folder can't be listed, or it is a file of another kind.
    """
    devices = tuple(devices) or (() if suite is None else suite.devices)
    matcher = _Matcher(suite, devices)
    if not (folder.is_dir() or is_container(folder)):
        raise OptionError(
            f"{folder}: is neither a folder nor an archive that is read; --packages, --run and "
            "--lock take an unpacked image, an environment or an archive of one"
        )
    request = MapRequest(
        Scope(headers_only=True),
        with_map=True,
        with_summary=False,
        with_digest=matcher.digest_sizes,
        slimmed=True,
        any_file=True,
    )
    tree = read_tree(folder, request, cache, workers, on_done, by_package=True)
    errors = {path: one.error for path, one in tree.libraries.items() if one.error is not None}
    removed = {path: one.removed for path, one in tree.libraries.items() if one.removed is not None}
    maps = {p: one.library_map for p, one in tree.libraries.items() if one.library_map is not None}
    without = [one.library.size for one in maps.values() if not one.sections]
    files = {p: one for p, one in maps.items() if one.library.file_kind in LOADABLE}
    owners = find_owners(tree, [path for path, one in maps.items() if one.sections])
    rows = [
        *(
            matcher.row(one, path, owners.get(path), removed.get(path))
            for path, one in maps.items()
            if one.sections and path not in files
        ),
        *_code_file_rows(files, devices, owners),
    ]
    libraries = sorted(rows, key=lambda row: (-row.code_bytes, row.path))
    return ImageReport(
        root=utf8(str(tree.root)),
        run_id=None if suite is None else suite.run_id,
        devices=tuple(map(str, devices)),
        libraries=tuple(libraries),
        packages=tuple(sorted(_package_rows(libraries), key=lambda row: -row.code_bytes)),
        without_code=len(without),
        without_code_bytes=sum(without),
        unreadable=tuple(utf8(str(one)) for one in (*tree.problems, *errors.values())),
        notes=tuple(_notes(suite, libraries)),
        slimmed=tuple(sorted(removed)),
        hidden=len(tree.hidden),
        hidden_bytes=sum(tree.hidden),
        foreign=add_foreign([code for one in maps.values() for code in one.foreign]),
    )


def _code_file_rows(
    files: Mapping[str, LibraryMap],
    devices: Sequence[ComputeCapability],
    owners: Mapping[str, ImagePackage],
) -> Iterator[ImageLibrary]:
    """The files that are GPU code themselves, as one library for each package."""
    groups: defaultdict[ImagePackage | None, list[str]] = defaultdict(list)
    for path in files:
        groups[owners.get(path)].append(path)
    for package, paths in groups.items():
        sizes = {path: files[path].library.size for path in paths}
        # Those that ``slim --arch`` would remove.
        unused = [
            size
            for path, size in sizes.items()
            if path.endswith(CODE_SUFFIXES) and _is_for_others(files[path], devices)
        ]
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
        name = name_of_files("no package" if package is None else package.name)
        yield ImageLibrary(
            path=os.path.join(folder, name),
            size=sum(sizes.values()),
            build_id=None,
            package=package,
            code_bytes=sum(sizes.values()),
            suite=None,
            slimmable_bytes=sum(unused) if devices else None,
            slimmable_by=SlimmableBy.ARCH if devices else None,
            problems=0,
            files=len(paths),
        )


def _is_for_others(code_file: LibraryMap, devices: Sequence[ComputeCapability]) -> bool:
    """Whether no device runs the code, by the arch in its first bytes. A fatbin has none there."""
    return any(
        block.is_plain and block.unreadable is None and not any(map(block.runs_on, devices))
        for block in code_file.iter_code()
    )


class _Matcher:
    """Matches libraries of the tree with those that the suite loaded.

    Attributes:
        digest_sizes: of the libraries for which the suite may have a plan, bytes.
    """

    def __init__(self, suite: Suite | None, devices: Sequence[ComputeCapability]) -> None:
        self._suite = suite
        self._devices = devices
        known = () if suite is None else suite.libraries
        # The suite may have used one of two copies with the same content.
        self._by_digest = {one.sha256: one for one in sorted(known, key=lambda one: one.used)}
        self._by_build_id: dict[str | None, list[KnownLibrary]] = defaultdict(list)
        for library in known:
            self._by_build_id[library.build_id].append(library)
        # Of libraries with neither build id nor digest, at most the size is known.
        nameless = self._by_build_id.pop(None, [])
        self._nameless_sizes = {one.size for one in nameless if one.sha256 is None}
        sizes = (one.size for sha256, one in self._by_digest.items() if sha256 is not None)
        self.digest_sizes = frozenset(size for size in sizes if size is not None)

    def row(
        self,
        library_map: LibraryMap,
        path: str,
        package: ImagePackage | None,
        removed: Removed | None,
    ) -> ImageLibrary:
        library = library_map.library
        known = None if library.sha256 is None else self._by_digest.get(library.sha256)
        slimmable, slimmable_by = None, None
        if removed is not None:
            pass  # A slimmed library can't be slimmed again.
        elif self._suite is not None and known is not None and known.unused_bytes is not None:
            slimmable, slimmable_by = known.unused_bytes, self._suite.slimmable_by
        elif self._devices:
            slimmable = wrong_arch_bytes(library_map, self._devices)
            slimmable_by = SlimmableBy.ARCH
        return ImageLibrary(
            path=path,
            size=library.size,
            build_id=library.build_id,
            package=package,
            code_bytes=(
                sum(block.payload.size for block in library_map.iter_code())
                if removed is None
                else removed.stored_bytes
            ),
            suite=None if self._suite is None else self._use(self._suite, library, known),
            slimmable_bytes=slimmable,
            slimmable_by=slimmable_by,
            problems=len(library_map.problems),
        )

    def _use(self, suite: Suite, library: LibraryIdentity, known: KnownLibrary | None) -> SuiteUse:
        same = self._by_build_id.get(library.build_id, []) if known is None else [known]
        if same:
            return SuiteUse.USED if any(one.used for one in same) else SuiteUse.LOADED
        # This may be a library that the suite loaded and that can't be recognised.
        nameless = library.size in self._nameless_sizes or None in self._nameless_sizes
        if nameless or library.path.rpartition("/")[2] in suite.nameless:
            return SuiteUse.UNKNOWN
        return SuiteUse.NEVER_LOADED


def wrong_arch_bytes(library_map: LibraryMap, devices: Sequence[ComputeCapability]) -> int:
    """Bytes of GPU code that none of the devices would load; unreadable code does not count."""
    loaded = library_map.needed_starts(devices)
    return sum(
        block.payload.size
        for block in library_map.iter_code()
        if block.payload.start not in loaded
        and not (block.kind.is_opaque or block.is_plain or block.unreadable is not None)
    )


def _package_rows(found: Iterable[ImageLibrary]) -> Iterator[PackageRow]:
    groups: defaultdict[ImagePackage | None, list[ImageLibrary]] = defaultdict(list)
    for one in found:
        groups[one.package].append(one)
    for package, group in groups.items():
        never = [row for row in group if row.suite is SuiteUse.NEVER_LOADED]
        known = [row.slimmable_bytes for row in group if row.slimmable_bytes is not None]
        yield PackageRow(
            package=package,
            libraries=sum(not row.files for row in group),
            code_files=sum(row.files for row in group),
            size=sum(row.size for row in group),
            code_bytes=sum(row.code_bytes for row in group),
            slimmable_bytes=sum(known) if known else None,
            never_loaded=len(never),
            never_loaded_bytes=sum(row.size for row in never),
        )


def _notes(suite: Suite | None, libraries: Sequence[ImageLibrary]) -> Iterator[str]:
    if suite is None:
        return
    yield from suite.notes
    unknown = sum(row.suite is SuiteUse.UNKNOWN for row in libraries)
    if unknown:
        yield (
            f"files that the suite may have loaded: {unknown:,}; it loaded libraries without a "
            "build id or digest, which can't be recognised"
        )


# ---- The needs of a suite in libraries ----

# The run had loaded code that a plan keeps for one of these reasons.
_LOADED = (KeepReason.LOADED, KeepReason.MEMORY_IMAGE)


@dataclass(frozen=True, slots=True)
class KnownLibrary:
    """A library that the suite loaded.

    Attributes:
        size: bytes, if known.
        used: whether the suite loaded GPU code from it.
        unused_bytes: of the content ``sha256``; None if there is no plan for it, or no proof.
    """

    sha256: str | None
    build_id: str | None
    size: int | None
    used: bool
    unused_bytes: int | None


@dataclass(frozen=True, slots=True)
class Suite:
    """Facts about a suite.

    Attributes:
        run_id: of the traced run.
        slimmable_by: the source of ``unused_bytes``.
        devices: compute capabilities that it ran on.
        nameless: base names of libraries that it loaded, if nothing else is known of them.
        notes: what a reader of the report should know.
    """

    run_id: str
    slimmable_by: SlimmableBy
    devices: tuple[ComputeCapability, ...]
    libraries: tuple[KnownLibrary, ...]
    nameless: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def load_suite(run: Run) -> Suite:
    """Read the suite from the files of a traced run.

    Raises:
        StoreError: it is no traced run, is not located yet, or a file can't be read.
    """
    usage = load_usage(run)
    if usage is None:
        run.require_gpu_trace()
        raise StoreError(
            f"{run}: no traced run here, or one that is not located yet: no {run.usage_file.name}"
        )
    # A run that failed has no plans.
    return suite_of_run(run.run_id, usage, load_plans(run) if run.plan_files() else ())


def suite_of_run(
    run_id: str,
    usage: Usage,
    plans: Sequence[LibraryPlan],
) -> Suite:
    """Make the suite from the records of a traced run.

    Args:
        plans: of its libraries; empty if the run planned nothing.
    """
    by_path = {plan.library.path: plan for plan in plans}
    libraries = []
    for loaded in usage.libraries:
        plan = by_path.get(loaded.library.path)
        if plan is not None and not may_be(loaded.library, plan.library):
            plan = None
        libraries.append(
            KnownLibrary(
                sha256=loaded.library.sha256 if plan is None else plan.library.sha256,
                build_id=loaded.library.build_id,
                size=loaded.library.size,
                used=bool(loaded.images),
                unused_bytes=None if plan is None else plan.unused_bytes,
            )
        )
    return Suite(
        run_id=run_id,
        slimmable_by=SlimmableBy.PLAN,
        devices=_devices(device.compute_capability for device in usage.devices),
        libraries=tuple(libraries),
        notes=tuple(_notes_of_run(run_id, usage, plans)),
    )


def _notes_of_run(run_id: str, usage: Usage, plans: Sequence[LibraryPlan]) -> Iterator[str]:
    if not plans:
        yield f"run {run_id} planned nothing, so no bytes are slimmable by plan"
    if usage.incomplete:
        yield (
            f"the trace of run {run_id} is incomplete, so it may have loaded libraries that are "
            f"reported as never loaded: {usage.incomplete[0].text}"
        )
    if usage.replay is not None:
        yield f"run {run_id} replays a trace that was recorded on another machine"


def suite_of_lock(lock: Lock) -> Suite:
    """Read the suite from a lock file; libraries without a proof are not slimmable by it."""
    return Suite(
        run_id=lock.proof.run,
        slimmable_by=SlimmableBy.LOCK,
        devices=_devices(device.compute_capability for device in lock.proof.devices),
        libraries=tuple(
            KnownLibrary(
                sha256=library.sha256,
                build_id=library.build_id,
                size=library.size,
                used=any(code.reason in _LOADED for code in library.kept),
                unused_bytes=library.unused_bytes if library.not_proved is None else None,
            )
            for library in lock.gpu_libraries
        ),
        nameless=frozenset(left.path.rpartition("/")[2] for left in lock.left_out),
        notes=() if lock.proof.proved else ("nothing in the lock was proved",),
    )


def _devices(found: Iterator[str]) -> tuple[ComputeCapability, ...]:
    return tuple(map(ComputeCapability.parse, dict.fromkeys(found)))
