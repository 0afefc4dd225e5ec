"""``negativa slim``: makes the libraries of folders smaller. The entry to this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import OptionError
from pytest_negativa.gpucode.elf_tables import ELF_MAGIC
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.slimming import PROBLEMS, UNMET, SlimRow
from pytest_negativa.slimming.code_files import head_of
from pytest_negativa.slimming.folder_locks import hold
from pytest_negativa.slimming.journal import Journal, remove_leftovers
from pytest_negativa.slimming.recipes import by_archs, strip_only
from pytest_negativa.slimming.slimmer import Slimmer, SlimOptions
from pytest_negativa.slimming.spares import least_hole
from pytest_negativa.slimming.tree import (
    MANIFEST_NAME,
    Tree,
    scan_files,
    scan_folder,
)
from pytest_negativa.slimming.worklist import (
    find_by_archs,
    find_by_lock,
)
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.shared_folders import refuse_shared

_NO_LIBRARY = (
    "not a shared library (ELF, *.so*); slim takes folders, libraries, and one wheel with "
    "--target; of an image, slim the folder of its packages while it is built"
)

OnProgress = Callable[[int, int], None]
"""Called with the bytes of the libraries that are done, and of all."""


@dataclass(frozen=True, slots=True)
class SlimRequest:
    """A request to slim.

    The *others* of a lock are the other libraries of its distributions and of the distributions
    that these require. Without a lock, they are all libraries.

    Attributes:
        paths: folders and libraries.
        lock: what to keep; without it, ``devices`` tell.
        devices: whose code to keep; with a lock, in the others.
        keep_ptx: with ``devices``, keep all PTX, too.
        strip_others: strip also those of the others that lose no GPU code.
        drop_never_loaded: with a lock, remove all GPU code of others that its run did not load.
        spare_never_loaded: with a lock and a spare, move all code that can come back of libraries
            that no test is known to have loaded.
        require: do nothing unless all libraries of the lock are there.
        target: the folder for a smaller wheel; None: slim in place.
        options: how to do it.
    """

    paths: tuple[Path, ...] = ()
    lock: Lock | None = None
    devices: tuple[ComputeCapability, ...] = ()
    keep_ptx: bool = False
    strip_others: bool = False
    drop_never_loaded: bool = False
    spare_never_loaded: bool = False
    require: bool = False
    target: Path | None = None
    options: SlimOptions = field(default_factory=SlimOptions)


@dataclass(frozen=True, slots=True)
class SlimReport:
    """The outcome of slimming.

    Attributes:
        rows: one for each library, by path.
        stopped: nothing was done, because a library of the lock is missing or another file.
        holes: how many the libraries of the folders have, for pages that lie in spares.
        min_hole: bytes; shorter ones stayed in the libraries that were slimmed now.
    """

    rows: tuple[SlimRow, ...]
    stopped: bool = False
    holes: int = 0
    min_hole: int = 0

    @property
    def failed(self) -> bool:
        """Whether slimming stopped early, or any row is a problem."""
        return self.stopped or any(row.status in PROBLEMS for row in self.rows)


def slim_trees(
    request: SlimRequest,
    on_progress: OnProgress = lambda done, total: None,
) -> SlimReport:
    """Slim libraries.

    Args:
        request: what to slim, and how.
        on_progress: told of the work.

    Raises:
        OptionError: the request contradicts itself; nothing was done.
        NegativaError: a folder can't be read or written. What was done stays done, and the same
            call does the rest.
    """
    if request.drop_never_loaded and request.lock is not None:
        _require_known(request.lock)
    if request.target is not None:
        raise OptionError(
            "--target takes a wheel; to leave a folder as it is, copy it (cp -a PATH COPY) and "
            "slim the copy"
        )
    roots = roots_of(request.paths)
    refuse_other_files(request.paths)
    for root in roots:
        _check_aside(request.options, root)
    with hold(*roots):
        trees = scan_held(request.paths, dry_run=request.options.dry_run)
        slimmers, unmet = _plan(request, trees)
        if request.require:
            known = (row for slimmer in slimmers for row in slimmer.work.rows)
            # They won't become what the lock wants.
            missed = (*unmet, *(row for row in known if row.status in PROBLEMS | UNMET))
            if missed:
                return SlimReport(missed, stopped=True)
        return _run(request, slimmers, unmet, on_progress)


def _require_known(lock: Lock) -> None:
    """Refuse a lock that doesn't prove what was loaded.

    Raises:
        OptionError: the lock is not proved, has no libraries, or its run may have loaded more.
    """
    proof = lock.proof
    if not proof.proved:
        raise OptionError("--drop-never-loaded goes with a proved lock; this one is not proved")
    if proof.incomplete:
        raise OptionError(
            "--drop-never-loaded: the run of the lock may have loaded more libraries: "
            f"{'; '.join(proof.incomplete)}"
        )
    if not lock.libraries:
        raise OptionError("--drop-never-loaded: the lock has no libraries, so it proves nothing")


def scan(paths: Sequence[Path]) -> list[Tree]:
    """List the folders and files of these paths.

    Raises:
        OptionError: a path does not exist, or lies in another one.
        StoreError: one can't be listed.
    """
    folders, files = _folders_and_files(paths)
    return [*map(scan_folder, folders), *(scan_files(files) if files else ())]


def roots_of(paths: Sequence[Path]) -> list[Path]:
    """The roots of the trees that ``scan`` lists, to hold them first.

    Raises:
        OptionError: see ``scan``.
    """
    folders, files = _folders_and_files(paths)
    return sorted({*folders, *(file.resolve().parent for file in files)})


def _folders_and_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            is_name = len(path.parts) == 1 and not path.suffix
            hint = "; slim takes paths, not names of distributions" if is_name else ""
            raise OptionError(f"{path}: no such file or folder{hint}") from None
        except OSError as e:
            raise OptionError(f"{path}: cannot be read: {e.strerror}") from e
    folders = sorted({path.resolve() for path in paths if path.is_dir()})
    files = [path for path in paths if not path.is_dir()]
    for inner in (*folders, *(file.resolve() for file in files)):
        if outer := next((f for f in folders if f in inner.parents), None):
            raise OptionError(f"{inner} is in {outer}; give one of them")
    return folders, files


def scan_held(paths: Sequence[Path], *, dry_run: bool) -> list[Tree]:
    """List them, while this process holds them, without what killed runs left.

    Args:
        paths: folders and files.
        dry_run: remove nothing.

    Raises:
        OptionError: see ``scan``.
        StoreError: a manifest can't be read.
    """
    trees = scan(paths)
    changed = False
    for tree in trees if not dry_run else ():
        changed |= remove_leftovers(tree)
    return scan(paths) if changed else trees


def _plan(request: SlimRequest, trees: Sequence[Tree]) -> tuple[list[Slimmer], list[SlimRow]]:
    held = [tree.root for tree in trees]
    journals = [Journal(tree, held=held) for tree in trees]
    options = request.options
    keeps_originals = options.keep_originals is not None
    unmet: list[SlimRow] = []
    others = strip_only() if request.strip_others else None
    if request.devices or request.lock is None:
        others = by_archs(
            request.devices,
            keep_ptx=request.keep_ptx,
            strip=options.strip,
            strip_others=request.strip_others,
            spare=options.spare,
        )
    if request.lock is not None:
        lists, unmet = find_by_lock(
            [(journal.tree, journal.manifest) for journal in journals],
            request.lock,
            strip=options.strip,
            others=others,
            unloaded=request.drop_never_loaded,
            spare=options.spare,
            spare_unloaded=request.spare_never_loaded,
            keeps_originals=keeps_originals,
            jobs=options.jobs,
        )
    else:
        assert others is not None
        lists = [
            find_by_archs(
                one.tree,
                one.manifest,
                others,
                keep_ptx=request.keep_ptx,
                keeps_originals=keeps_originals,
            )
            for one in journals
        ]
    pairs = zip(journals, lists, strict=True)
    return [Slimmer(journal, work, options) for journal, work in pairs], unmet


def _run(
    request: SlimRequest,
    slimmers: Sequence[Slimmer],
    unmet: Sequence[SlimRow],
    on_progress: OnProgress,
) -> SlimReport:
    total = sum(task.size for slimmer in slimmers for task in slimmer.work.tasks)
    total += sum(package.size for slimmer in slimmers for package in slimmer.work.packages)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, total)

    rows = list(unmet)
    holes = min_hole = 0
    if (spare := request.options.spare) is not None:
        holes = sum(slimmer.count_holes(without_tasks=True) for slimmer in slimmers)
        sizes = [size for slimmer in slimmers for size in slimmer.foresee_holes()]
        min_hole = least_hole(sizes, spare.most_holes - holes)
        holes += sum(size >= min_hole for size in sizes)
        for slimmer in slimmers:
            slimmer.min_hole = min_hole
    for slimmer in slimmers:
        rows += slimmer.run(count)
    if not request.options.dry_run:
        holes = sum(slimmer.count_holes() for slimmer in slimmers)
    return SlimReport(tuple(sorted(rows, key=lambda row: row.path)), holes=holes, min_hole=min_hole)


def refuse_other_files(paths: Sequence[Path]) -> None:
    """Refuse named files that can't be libraries, such as images.

    Raises:
        OptionError: one is. A damaged library, which the manifest beside it may name, is none.
    """
    for path in paths:
        head = head_of(path)
        if (
            head is not None
            and not head.startswith(ELF_MAGIC)
            and not path.resolve().with_name(MANIFEST_NAME).exists()
        ):
            raise OptionError(f"{path}: {_NO_LIBRARY}")


def _check_aside(options: SlimOptions, root: Path) -> None:
    """Refuse folders for originals or spares in a folder to slim, or around it.

    Raises:
        OptionError: a folder is.
        ReconstructError: see ``refuse_shared``.
    """
    spares = None if options.spare is None else options.spare.folder
    for aside, what in ((options.keep_originals, "originals"), (spares, "spares")):
        if aside is None:
            continue
        if utf8(str(aside)) != str(aside):
            raise OptionError(
                f"{aside}: its path is not UTF-8, and {MANIFEST_NAME} can't hold it; name another "
                f"folder for {what}"
            )
        refuse_shared(aside)
        real = Path(os.path.realpath(aside))
        if real == root or root in real.parents:
            raise OptionError(
                f"{aside}: {what} can't be kept in the folder to slim; name one outside"
            )
        # No scan enters such a folder, so check and undo would not find what was slimmed.
        if real in root.parents:
            raise OptionError(
                f"{aside}: {root} is in it, and is to be slimmed; name a folder for {what} alone"
            )
