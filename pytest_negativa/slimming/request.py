"""A request to slim, what contradicts itself in it, and the report of what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import OptionError
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.slimming import PROBLEMS, SlimRow
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.shared_folders import refuse_shared

OnProgress = Callable[[int, int], None]
"""Called with the bytes of the libraries that are done, and of all."""

OnDone = Callable[[int], None]
"""Called with the bytes of each library that is done."""


def counter(total: int, on_progress: OnProgress) -> OnDone:
    """Add up what is done; ``total`` in bytes. ``on_progress`` is told at once, and each time."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_progress(done, total)

    count(0)
    return count


@dataclass(frozen=True, slots=True)
class SlimOptions:
    """The choices for slimming.

    Attributes:
        strip: drop symbol tables and debug information. A spare keeps them.
        dry_run: report what would be done, and write nothing.
        keep_originals: the folder for the originals; None: keep none.
        spare: where removed code goes, so that it comes back; None: it is lost.
        jobs: how many libraries to slim at a time.
    """

    strip: bool = True
    dry_run: bool = False
    keep_originals: Path | None = None
    spare: SpareTarget | None = None
    jobs: int = 1


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
        never_loaded: with a lock, remove all GPU code of others that its run did not load. With a
            spare, too, move all code that can come back of libraries that no test is known to have
            loaded.
        require: do nothing unless all libraries of the lock are there.
        target: the folder for a smaller package; None: slim in place.
        options: how to do it.
    """

    paths: tuple[Path, ...] = ()
    lock: Lock | None = None
    devices: tuple[ComputeCapability, ...] = ()
    keep_ptx: bool = False
    strip_others: bool = False
    never_loaded: bool = False
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


def refuse_contradictions(request: SlimRequest, roots: Iterable[Path]) -> None:
    """Refuse a request that contradicts itself.

    Args:
        request: to slim folders.
        roots: the folders.

    Raises:
        OptionError: a folder for originals or spares lies in a folder to slim, or around it; or
            without a spare, ``never_loaded`` has a lock that doesn't prove what was loaded.
        ReconstructError: see ``refuse_shared``.
    """
    if request.never_loaded and request.lock is not None and request.options.spare is None:
        proof = request.lock.proof
        if not proof.proved:
            raise OptionError(
                "--never-loaded goes with a proved lock, or with --spare; this lock is not proved"
            )
        if proof.incomplete:
            raise OptionError(
                "--never-loaded: the run of the lock may have loaded more libraries: "
                f"{'; '.join(proof.incomplete)}"
            )
        if not request.lock.gpu_libraries:
            raise OptionError("--never-loaded: the lock has no GPU code, so it proves nothing")
    for root in roots:
        _refuse_aside(request.options, root)


def _refuse_aside(options: SlimOptions, root: Path) -> None:
    spares = None if options.spare is None else options.spare.folder
    given = ((options.keep_originals, "originals"), (spares, "spares"))
    for aside, what in ((path, what) for path, what in given if path is not None):
        if utf8(str(aside)) != str(aside):
            raise OptionError(
                f"{aside}: its path is not UTF-8, and {MANIFEST_NAME} can't hold it; name another "
                f"folder for {what}"
            )
        refuse_shared(aside)
        real = Path(os.path.realpath(aside))
        if real.is_relative_to(root):
            raise OptionError(
                f"{aside}: {what} can't be kept in the folder to slim; name one outside"
            )
        # No scan enters such a folder, so check and undo would not find what was slimmed.
        if root.is_relative_to(real):
            raise OptionError(
                f"{aside}: {root} is in it, and is to be slimmed; name a folder for {what} alone"
            )
