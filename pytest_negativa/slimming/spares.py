"""Libraries with a spare: how they are cut, checked, and made whole again.

The library itself names its spare, so a copied folder needs no manifest to find it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pytest_negativa.errors import FormatError, NegativaError, OptionError, ReconstructError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.base import Span
from pytest_negativa.models.hostcode import HostLibrary, HostUsage
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.reporting.text import printable
from pytest_negativa.rewriting.compact.cut import (
    Cut,
    CutOptions,
    cut_library,
    foresee_cut,
)
from pytest_negativa.rewriting.compact.original_tables import Range
from pytest_negativa.rewriting.compact.pages import merged, minus
from pytest_negativa.rewriting.compact.rebuild import (
    check_pair,
    read_note,
    read_trailer,
    rebuild_original,
)
from pytest_negativa.rewriting.compact.regions import removable_code
from pytest_negativa.slimming.tree import ORIGINALS_MARK
from pytest_negativa.spare.misses import Misses
from pytest_negativa.spare.note import SPARE_FOLDER, Note
from pytest_negativa.storage.atomic import new_file, sync_folder
from pytest_negativa.storage.locks import lock, open_to_lock
from pytest_negativa.storage.shared_folders import (
    ALONE,
    refuse_shared,
    set_mode,
    who_may_write,
    why_shared,
)
from pytest_negativa.storage.system import read_regular

UNCHECKED = ".unchecked-"
"""Begins the names of folders with a spare that is not checked yet."""

# Begins the names of files that note which folders were slimmed into a folder of spares.
_TREE = ".tree-"
# As compaction has them: 64 KiB is not worth another file. A thread that loads a library with so
# many segments needs 192 KiB of stack.
MIN_GAIN = 64 << 10
"""Bytes; a library that would lose less stays as it is."""
_MAX_LOADS = 1600
# Each gap costs two mappings. Of PyTorch's stack for one arch, gaps of less have a quarter of the
# mappings and 2% of the bytes.
_MIN_CODE = 32 << 10
# To make a folder that other runs remove, and to share it with them.
_TRIES = 100
_PAUSE_S = 0.05
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SpareAwayError(ReconstructError):
    """The spare of a library lies in no folder in which it would look."""


@dataclass(frozen=True, slots=True)
class SparePolicy:
    """Where the spares lie, and which CPU code goes there.

    Attributes:
        folder: absolute path; the libraries name it.
        traced: CPU code that a run touched, by SHA-256 of the library; the rest that the run
            watched goes. All CPU code of other libraries stays.
        by_arch: GPU code goes by archs, and not by a lock.
        loaded: all libraries that the run of the trace loaded; None: there is no trace.
        came_back: pages that came back to libraries that were not traced, by SHA-256.
        unneeded: the libraries were loaded by no test, so all goes that did not come back: the GPU
            code and, if there is a trace, the CPU code.
    """

    folder: Path
    traced: Mapping[str, HostLibrary] = field(default_factory=dict)
    by_arch: bool = False
    loaded: tuple[HostLibrary, ...] | None = None
    came_back: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    unneeded: bool = False

    @classmethod
    def of(cls, folder: Path, usage: HostUsage | None, *, by_arch: bool = False) -> SparePolicy:
        """The policy for a trace of CPU code, if there is one.

        Raises:
            OptionError: processes may have touched more than the trace has.
        """
        if usage is None:
            return cls(folder, by_arch=by_arch)
        if usage.incomplete:
            raise OptionError(
                f"the trace of CPU code is not complete: {usage.incomplete[0]}; trace again"
            )
        traced = {one.sha256: one for one in usage.libraries if one.unwatched is None}
        return cls(folder, traced, by_arch, loaded=usage.libraries)

    def with_misses(self, logs: Iterable[Misses]) -> SparePolicy:
        """The policy that also keeps what came back.

        Of traced libraries, that is CPU code. Of those that no test loaded, it is GPU code, too.
        """
        traced, came_back = dict(self.traced), dict(self.came_back)
        for misses in logs:
            sha256 = misses.original.hex()
            one = traced.get(sha256)
            if one is None:
                both = merged((*came_back.get(sha256, ()), *misses.ranges()))
                came_back[sha256] = tuple(both)
            else:
                touched = ((span.start, span.end) for span in one.touched)
                both = merged((*touched, *misses.ranges()))
                spans = tuple(Span(start, end) for start, end in both)
                traced[one.sha256] = msgspec.structs.replace(one, touched=spans)
        return replace(self, traced=traced, came_back=came_back)

    def for_unneeded(self) -> SparePolicy:
        """The policy for libraries that no test loaded."""
        return replace(self, traced={}, unneeded=True)

    @property
    def key(self) -> tuple[str, ...]:
        """What the results depend on."""
        rows = sorted((sha256, one.watched, one.touched) for sha256, one in self.traced.items())
        digest = hashlib.sha256(msgspec.json.encode(rows)).hexdigest() if rows else ""
        common = str(self.folder), digest
        if not self.unneeded:
            return common
        back = hashlib.sha256(msgspec.json.encode(sorted(self.came_back.items()))).hexdigest()
        return *common, "unneeded", "GPU" if self.loaded is None else "GPU and CPU", back

    def may_know(self, size: int) -> bool:
        """Whether CPU code of a library of so many bytes may go."""
        all_goes = self.unneeded and self.loaded is not None
        return all_goes or any(one.size == size for one in self.traced.values())

    def options_for(self, name: str, source: str) -> CutOptions:
        """How to cut a library of that file name; ``source`` told what stays."""
        return CutOptions(
            max_loads=_MAX_LOADS,
            min_gain=MIN_GAIN,
            name=name,
            folders=(str(self.folder),),
            # ld.so prints it unescaped.
            remedy=printable(
                f"Slimmed by {source}. Put it into {self.folder} (negativa slim fetch can), or "
                f"install the library again. {self._keeping}"
            ),
        )

    @property
    def _keeping(self) -> str:
        """How to keep what came back."""
        ways = []
        if self.unneeded:
            ways.append("negativa slim with --spare-never-loaded and --add-misses DIR")
        elif not self.by_arch:
            ways.append("negativa lock --add-misses DIR, and slim again")
        if self.traced:
            ways.append("negativa slim with --cpu-pages and --add-misses DIR")
        logged = 'run this after eval "$(negativa misses --attach-env DIR)"'
        if not ways:
            return (
                f"To see what is needed, {logged}, then negativa misses DIR; negativa slim --arch "
                "can keep the code of more archs."
            )
        return f"To keep such code, {logged}, then {'; or '.join(ways)}."


@dataclass(frozen=True, slots=True)
class CutPlan:
    """What of a library may go, and what stays; ranges of file offsets."""

    containers: tuple[Range, ...]
    needed: tuple[Range, ...]


def plan_cut(
    path: Path, library_map: LibraryMap | None, plan: LibraryPlan | None, policy: SparePolicy
) -> CutPlan:
    """Turn decisions on GPU code, and what is known of CPU code, into ranges.

    Args:
        path: the original.
        library_map, plan: both or none.
        policy: see there.

    Raises:
        FormatError: the file can't be read.
    """
    with ByteSource(path) as source:
        containers: list[Range] = []
        if library_map is not None and plan is not None:
            containers = [
                (start, end)
                for start, end in removable_code(source, library_map, plan)
                if end - start >= _MIN_CODE
            ]
        free = list(containers)
        if policy.unneeded:
            if policy.loaded is not None:
                free = [(0, source.size)]
            back = policy.came_back.get(source.sha256(), ())
            free = [rest for start, end in merged(free) for rest in minus(start, end, back)]
        elif policy.may_know(source.size):
            traced = policy.traced.get(source.sha256())
            if traced is not None:
                touched = [(span.start, span.end) for span in traced.touched]
                for watched in traced.watched:
                    free += minus(watched.start, watched.end, touched)
        return CutPlan(tuple(containers), tuple(minus(0, source.size, sorted(free))))


def cut(
    path: Path,
    target: Path,
    planned: CutPlan,
    policy: SparePolicy,
    name: str,
    source: str,
    unchecked: Path,
    *,
    load_check: bool,
) -> Cut:
    """Write a library without what may go, and its spare.

    Args:
        path: the original.
        target: the new file; nothing is left there on any failure.
        planned: what may go.
        policy: where the spare goes.
        name: file name of the library.
        source: what told what stays, for people.
        unchecked: see ``hold_folder``.
        load_check: load the result in a child process.

    Raises:
        CannotCompactError: the library must stay as it is.
        NegativaError: it can't be done.
    """
    options = replace(policy.options_for(name, source), load_check=load_check, takes_place=True)
    try:
        # A spare with its name is never removed: a copy of the library may use it already.
        owner = policy.folder.stat().st_uid
        if owner not in (0, os.geteuid(), path.stat().st_uid):
            raise ReconstructError(
                f"{policy.folder} belongs to user {owner}, so no process would use this library's "
                "spare there; name another folder"
            )
        with tempfile.TemporaryDirectory(dir=unchecked) as own:
            done = cut_library(path, target, Path(own), planned.needed, options, planned.containers)
            spare = done.spare.replace(policy.folder / done.spare.name)
            sync_folder(policy.folder)
    except BaseException as e:
        target.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise ReconstructError(f"{policy.folder}: cannot be written: {e.strerror}") from e
        raise
    return replace(done, spare=spare)


@contextlib.contextmanager
def hold_folder(folder: Path, tree: Path | None = None) -> Iterator[Path]:
    """Make a folder of spares while libraries are cut, and remove what killed runs left there.

    Yields a folder in it for spares that are not checked yet, which goes at the end.

    What was made for it goes again if no spare came.

    Args:
        folder: absolute path.
        tree: the folder of the libraries. Who can exchange that one needs no spare to do harm,
            unless root is at work.

    Raises:
        ReconstructError: it can't be written, other users may write to it, or ``slim prune`` is at
            work there.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as stack:
        try:
            descriptor = _lock_folder(folder, tree, stack, made)
            mark = folder / ORIGINALS_MARK
            # Spares begin like libraries: no scan may take them for some.
            if not mark.exists():
                mark.touch()
                made.append(mark)
            unchecked = Path(tempfile.mkdtemp(dir=folder, prefix=UNCHECKED))
        except BaseException as e:
            _remove_made(made)
            if isinstance(e, OSError):
                raise ReconstructError(f"{folder}: cannot be written: {e.strerror}") from e
            raise
        try:
            yield unchecked
        finally:
            discard_unchecked(unchecked)
            with contextlib.suppress(OSError):
                # A run on another folder may need what this one made.
                if made and lock(descriptor, wait=False) and not _has_others(folder, made):
                    _remove_made(made)


def _lock_folder(
    folder: Path, tree: Path | None, stack: contextlib.ExitStack, made: list[Path]
) -> int:
    """Make a folder, lock it, and remove what killed runs left; its descriptor.

    ``made`` gets the folders that were not there.

    Raises:
        OSError: it can't be made or opened.
        ReconstructError: see ``hold_folder``.
    """
    for _ in range(_TRIES):
        # Another process may make or remove it meanwhile.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            for one in reversed((folder, *folder.parents)):
                if not one.exists():
                    _refuse_shared(one, tree)
                    one.mkdir(0o755)
                    made.append(one)
                    # Processes of all users who can read the libraries need it. setgid stays.
                    set_mode(one, 0o755, add=True)
            descriptor = stack.enter_context(open_to_lock(folder, os.O_RDONLY | os.O_DIRECTORY))
            _refuse_shared(folder, tree)
            # Runs on other folders may put spares here, too.
            with contextlib.suppress(OSError):
                if lock(descriptor, wait=False):
                    remove_unchecked(folder)
                _share(descriptor, folder)
            # A run that found nothing to cut may just have removed it.
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def unchecked_in(folder: Path) -> list[Path]:
    """What a ``slim`` that is at work, or was killed, has in a folder of spares."""
    return sorted(folder.glob(f"{UNCHECKED}*"))


def remove_unchecked(folder: Path) -> None:
    """Remove what killed runs left in a folder of spares, which is locked."""
    for left in unchecked_in(folder):
        shutil.rmtree(left, ignore_errors=True)


def discard_unchecked(unchecked: Path) -> None:
    """Remove the folder of ``hold_folder``, if it is still there.

    After an interrupt, threads may still be at work: they can make nothing there any more.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(unchecked.rename(f"{unchecked}-gone"), ignore_errors=True)


def clear_abandoned(folder: Path) -> None:
    """Remove what killed runs left in a folder of spares, unless a run is at work there."""
    # A manifest names the folder, and may have come with an image.
    if (folder / ORIGINALS_MARK).is_file():
        with contextlib.suppress(ReconstructError), hold_alone(folder):
            remove_unchecked(folder)


def _share(descriptor: int, folder: Path) -> None:
    """Keep ``slim prune`` from removing what this run puts there.

    Another run holds the folder alone for a moment. Another user may hold it for ever.
    """
    for _ in range(_TRIES):
        if lock(descriptor, shared=True, wait=False):
            return
        time.sleep(_PAUSE_S)
    raise ReconstructError(f"{folder}: in use by negativa slim prune; try again later")


def _has_others(folder: Path, made: Sequence[Path]) -> bool:
    return any(path not in made and path.name != ORIGINALS_MARK for path in folder.iterdir())


def _remove_made(made: Sequence[Path]) -> None:
    """Remove the files and folders that were made, the last first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()


@contextlib.contextmanager
def hold_alone(folder: Path) -> Iterator[None]:
    """Keep others from putting spares into a folder.

    Raises:
        ReconstructError: one is at work there, or the folder can't be locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_to_lock(folder, os.O_RDONLY | os.O_DIRECTORY))
            # Not before: until then, another user may make it.
            refuse_shared(folder)
            if not lock(descriptor, wait=False):
                raise ReconstructError(f"{folder}: in use by negativa slim; try again later")
        except OSError as e:
            raise ReconstructError(f"{folder}: cannot be locked: {e.strerror}") from e
        yield


def note_tree(folder: Path, tree: Path) -> None:
    """Note in a folder of spares that libraries of another folder need some of them.

    Raises:
        ReconstructError: it can't be written.
    """
    note = _note_for(folder, tree)
    if note.exists():
        return
    try:
        with new_file(note) as new:
            os.write(new.fd, os.fsencode(tree))
            os.fchmod(new.fd, 0o644)
            new.publish()
    except OSError as e:
        raise ReconstructError(f"{note}: cannot be written: {e.strerror}") from e


def forget_tree(folder: Path, tree: Path) -> None:
    """Remove such a note: its libraries need no spare there any more."""
    with contextlib.suppress(OSError):
        _note_for(folder, tree).unlink()


def noted_trees(folder: Path) -> dict[Path, Path]:
    """The folders whose libraries need spares of a folder, by the file that notes each.

    Raises:
        ReconstructError: one can't be read, or is damaged.
    """
    found = {}
    for note in sorted(folder.glob(f"{_TREE}*")):
        try:
            path = read_regular(note, follow=False)
        except OSError as e:
            raise ReconstructError(f"{note}: cannot be read: {e.strerror}") from e
        if b"\0" in path:
            # No path has one, and Python's functions raise ValueError for it.
            raise ReconstructError(f"{note}: not a note of negativa slim: a zero byte in a path")
        found[note] = Path(os.fsdecode(path))
    return found


def _note_for(folder: Path, tree: Path) -> Path:
    return folder / f"{_TREE}{hashlib.sha256(os.fsencode(tree)).hexdigest()[:16]}"


def _refuse_shared(folder: Path, tree: Path | None) -> None:
    """Refuse a folder, which need not be there yet, in which others could put or exchange spares.

    Raises:
        ReconstructError: see ``hold_folder``.
    """
    reason, remedy = None, "name another folder"
    if os.environ.get(ALONE) != "1":
        remedy += f", or set {ALONE}=1 if nobody else can get in (an image build)"
        within = () if tree is None or os.geteuid() == 0 else (tree, *tree.parents)
        reason = why_shared(folder, {0, os.geteuid()}, within)
    # No library would use a spare there, in any case.
    if reason is None and folder.exists() and folder.stat().st_mode & _OTHERS_WRITE:
        reason = who_may_write(folder, folder.stat())
    if reason is not None:
        where = "" if str(folder) in reason else f"{folder}: "
        raise ReconstructError(
            f"{where}{reason}, so spares, whose code processes run, could be exchanged there; "
            f"{remedy}"
        )


def foresee(path: Path, planned: CutPlan, policy: SparePolicy, name: str, source: str) -> int:
    """Size in bytes that the library would have; nothing is written.

    Raises:
        CannotCompactError: the library must stay as it is.
        NegativaError: it can't be read.
    """
    options = policy.options_for(name, source)
    return foresee_cut(path, planned.needed, options, planned.containers)


# ---- The way back ----


def note_of(library: Path) -> Note | None:
    """What a library with a spare says about itself; None: it has none.

    Raises:
        FormatError: the file or its note is damaged.
    """
    with ByteSource(library) as source:
        return read_note(source)


def spare_folders(library: Path, note: Note) -> list[str]:
    """The folders in which it would look for the spare of a library."""
    set_by_user = os.environ.get(SPARE_FOLDER)
    return [*note.folders, str(library.parent), *([set_by_user] if set_by_user else [])]


def why_untrusted(library: Path, spare: Path) -> str | None:
    """Why a library would not use a spare; None: it would. As open_spare of stub.c judges.

    Raises:
        OSError: a file is gone.
    """
    owner, folder = library.stat(), spare.parent.stat()
    harmless = 0
    places = [(spare, spare.lstat())]
    if os.path.samestat(folder, library.parent.stat()):
        harmless = owner.st_mode
        if folder.st_mode & stat.S_ISVTX:
            return f"any user can put files into {spare.parent}"
    else:
        places.append((spare.parent, folder))
    for place, status in places:
        if stat.S_ISLNK(status.st_mode):
            return f"{place} is a link"
        if status.st_uid not in (0, owner.st_uid):
            return (
                f"{place} belongs to user {status.st_uid}: neither to root nor to the library's "
                "owner"
            )
        if status.st_mode & _OTHERS_WRITE & ~harmless:
            return f"other users may write to {place} (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def find_spare(library: Path, *, trusted: bool = False) -> Path:
    """The spare of a library, where it would find it.

    Args:
        library: the library.
        trusted: take none that it would not use. Those others still give the original.

    Raises:
        FormatError: the library is damaged.
        SpareAwayError: nothing of the spare's name is there.
        ReconstructError: the library has no spare, none that fits is there, or the caller may not
            search one of the folders.
    """
    note = note_of(library)
    if note is None:
        raise ReconstructError(f"{library}: is no library with a spare")
    folders = spare_folders(library, note)
    problem = None
    for folder in folders:
        spare = Path(folder, note.spare_name)
        try:
            spare.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # A folder may be another user's. Opening the spare tells the problem.
        try:
            with ByteSource(spare) as source:
                read_trailer(source, note)
            reason = why_untrusted(library, spare) if trusted else None
        except (FormatError, OSError) as e:
            problem = str(e)
            continue
        if reason is None:
            return spare
        problem = f"{reason}, so it is not used"
    error = ReconstructError if problem else SpareAwayError
    problem = problem or "it is in none of these folders"
    raise error(
        f"{library}: its spare {note.spare_name} can't be used ({', '.join(folders)}): {problem}; "
        f"bring it back (negativa slim fetch does, if slim push sent it), or set {SPARE_FOLDER} to "
        "its folder"
    )


def rebuild(library: Path, target: Path, mtime_ns: int | None = None) -> None:
    """Write the original of a library with a spare; its digest is checked.

    Args:
        library, target, mtime_ns: see ``rebuild_original``.

    Raises:
        NegativaError: the spare is gone, or one of the two is damaged.
    """
    rebuild_original(library, find_spare(library), target, mtime_ns)


def problem_of(library: Path) -> str | None:
    """Why a library with a spare can't do its work here; None: the two fit.

    Raises:
        FormatError: the library can't be read.
        SpareAwayError: see ``find_spare``.
    """
    try:
        check_pair(library, find_spare(library, trusted=True))
    except SpareAwayError:
        raise
    except (NegativaError, OSError) as e:
        return str(e).removeprefix(f"{library}: ")
    return None
