"""Spares: 2,500 holes of 16 KiB or more, trust (owner, mode, noexec), folders, removal.

The library itself names its spare, so a copied folder needs no manifest to find it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import (
    FormatError,
    NegativaError,
    ReconstructError,
    StaleLibraryError,
    refusing,
)
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import LibraryIdentity, LibraryMap
from pytest_negativa.models.lock import LockedLibrary
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.slimming import SlimManifest, SlimStatus
from pytest_negativa.models.spans import PAGE_SIZE, Range, intersection, minus, union
from pytest_negativa.pages.note import (
    MAX_COPIED,
    SPARE_FOLDER,
    Note,
    last_trailer,
)
from pytest_negativa.reporting.text import printable
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.rebuild import (
    check_pair,
    read_note,
    read_trailer,
)
from pytest_negativa.rewriting.compact.records import MIN_GAIN, Cut
from pytest_negativa.rewriting.plan_edits import removable_code
from pytest_negativa.slimming.manifest import load_manifest, spares_of
from pytest_negativa.slimming.tree import ORIGINALS_MARK
from pytest_negativa.storage.atomic import remove_file, sync_folder, write_atomically
from pytest_negativa.storage.flock import held
from pytest_negativa.storage.shared_folders import (
    ALONE,
    refuse_shared,
    set_mode,
    who_may_write,
    why_shared,
)
from pytest_negativa.storage.system import read_regular

_NAME = re.compile(r".+\.[0-9a-f]{16}\.spare", re.DOTALL)
UNCHECKED = ".unchecked"
"""A folder in that of spares, with those of a run that are not checked yet."""

# A thread that loads a library with so many segments needs 192 KiB of stack.
_MAX_LOADS = 1600
MOST_HOLES = 2500
"""Of all libraries of an environment. Each costs two mappings, and fork copies each mapping."""
LEAST_HOLE = 16 << 10
"""Bytes; what is shorter stays in the file."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SpareAwayError(ReconstructError):
    """The spare of a library lies in no folder in which it would look."""


@dataclass(frozen=True, slots=True)
class SpareTarget:
    """Where the spares lie.

    Attributes:
        folder: absolute path; the libraries name it.
        most_holes: how many holes all libraries of the folders may have together.
    """

    folder: Path
    most_holes: int = MOST_HOLES

    def options_for(self, name: str, source: str, min_hole: int = LEAST_HOLE) -> CutOptions:
        """The options for a library of that file name.

        Args:
            source: what told what stays.
            min_hole: bytes; shorter holes stay in the file.
        """
        remedy = (
            f"Slimmed by {source}. Put it into {self.folder}, or install the library again. "
            "negativa misses tells what is needed, to keep it."
        )
        return CutOptions(
            min_hole=min_hole,
            max_loads=_MAX_LOADS,
            min_gain=MIN_GAIN,
            name=name,
            folders=(str(self.folder),),
            # ld.so prints it unescaped.
            remedy=printable(remedy),
        )


def plan_cut(
    source: ByteSource,
    library_map: LibraryMap | None,
    plan: LibraryPlan | None,
    pages: LockedLibrary | None = None,
    *,
    takes_all: bool = False,
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Turn decisions on GPU code, and what is known of its pages, into ranges.

    Args:
        source: the original.
        library_map, plan: both or none.
        pages: what a lock says of the library's pages, if it does.
        takes_all: all leaves that can come back, and not the unused GPU code alone.

    Returns:
        Ranges of file offsets that stay, and those with GPU code that may go.

    Raises:
        FormatError: the file can't be read.
        StaleLibraryError: it is another file than the lock's.
    """
    if pages is not None and pages.pages and source.sha256() != pages.sha256:
        raise StaleLibraryError(f"{source.path} is another file than the lock's {pages.path}")
    containers = (
        [] if library_map is None or plan is None else removable_code(source, library_map, plan)
    )
    free: Iterable[Range] = [(0, source.size)] if takes_all else containers
    if pages is not None and pages.loaded:
        # What a lock keeps of GPU code lies among constants of some libraries.
        gpu_code = () if library_map is None else library_map.iter_code()
        free = (*free, *minus(pages.spans, union(one.payload for one in gpu_code)))
    elif pages is not None:
        free = intersection(union(free), pages.spans)
    return tuple(minus([(0, source.size)], union(free))), tuple(containers)


def least_hole(sizes: Iterable[int], most: int) -> int:
    """The size in bytes from which on holes leave: the largest ones, ``most`` of them.

    Args:
        sizes: of all holes that libraries could have.
        most: how many there may be.
    """
    stay = sorted(sizes, reverse=True)[max(most, 0) :]
    return max([LEAST_HOLE, *(size + PAGE_SIZE for size in stay[:1])])


def cut(
    source: ByteSource,
    target: Path,
    needed: Iterable[Range],
    containers: Iterable[Range],
    policy: SpareTarget,
    options: CutOptions,
    library: LibraryIdentity | None = None,
) -> Cut:
    """Write a library without what may go, and its spare.

    Args:
        source: the original.
        target: the new file.
        needed, containers: see ``cut_library``.
        policy: where the spare goes; its folder is held.
        options: as it has them.
        library: see ``cut_library``.

    Raises:
        CannotCompactError: the library must stay as it is.
        NegativaError: it can't be done.
    """
    with refusing(policy.folder, "written", ReconstructError):
        owner = policy.folder.stat().st_uid
        if owner not in (0, os.geteuid(), os.fstat(source.fileno()).st_uid):
            raise ReconstructError(
                f"{policy.folder} belongs to user {owner}, so no process would use this library's "
                "spare there; name another folder"
            )
        own = Path(tempfile.mkdtemp(dir=policy.folder / UNCHECKED))
        return cut_library(source, target, own, needed, options, containers, library=library)


def publish(spare: Path, place: Path) -> None:
    """Give a spare its name, once a manifest has it: so none is left that nobody knows.

    It may replace an equal one, which libraries use already.

    Raises:
        ReconstructError: it can't be renamed.
    """
    with refusing(place, "written", ReconstructError):
        spare.replace(place)
        sync_folder(place.parent)


@contextlib.contextmanager
def hold_folder(folder: Path, tree: Path | None = None) -> Iterator[None]:
    """Make a folder of spares and keep others out, and remove what killed runs left there.

    Args:
        folder: absolute path.
        tree: the folder of the libraries. Who can exchange that one needs no spare to do harm,
            unless root is at work.

    Raises:
        ReconstructError: it can't be written, or other users may write to it.
    """
    refuse = functools.partial(_refuse_shared, tree=tree)
    with contextlib.ExitStack() as stack:
        with refusing(folder, "written", ReconstructError):
            for one in reversed((folder, *folder.parents)):
                if not one.exists():
                    refuse(one)
                    with contextlib.suppress(FileExistsError):
                        one.mkdir(0o755)
                        # Processes of all users who can read the libraries need it. setgid stays.
                        set_mode(one, 0o755, add=True)
            stack.enter_context(hold_alone(folder, refuse))
            stack.callback(_remove_note, folder)
            remove_unchecked(folder)
            # The note also keeps scans out: spares begin like libraries.
            if tree not in (known := owners_of(folder)):
                _note_owners(folder, [*known, *([tree] if tree else [])])
            (folder / UNCHECKED).mkdir()
        stack.callback(remove_unchecked, folder)
        yield


def owners_of(folder: Path) -> list[Path]:
    """The folders whose libraries have their spares in a folder, see ``release``.

    Raises:
        ReconstructError: its note can't be read.
    """
    note, found = folder / ORIGINALS_MARK, b""
    with refusing(note, "read", ReconstructError), contextlib.suppress(FileNotFoundError):
        found = read_regular(note, follow=False)
    return [Path(os.fsdecode(path)) for path in found.split(b"\0") if path]


def _note_owners(folder: Path, owners: Sequence[Path]) -> None:
    write_atomically(folder / ORIGINALS_MARK, b"\0".join(map(os.fsencode, owners)), mode=0o644)


def release(
    before: Set[Path], tree: Path, manifest: SlimManifest, own: Sequence[Path] = ()
) -> None:
    """Remove the spares that the libraries of a folder needed, and none needs now.

    A spare stays if the manifest of another folder with spares there has it, or if such a folder
    has no manifest now: it may be away. In a folder that is not noted as ours, all stay.

    Args:
        before: the spares that libraries had.
        tree: the folder of the libraries.
        manifest: what it says now.
        own: the folders of spares that this process holds.
    """
    needed = spares_of(manifest.slimmed.values())
    for folder in {spare.parent for spare in before - needed}:
        if tree.is_relative_to(folder):
            continue  # No folder of spares lies around a tree: this process holds it.
        # A manifest names the folder, and may have come with an image.
        hold = contextlib.nullcontext() if folder in own else hold_alone(folder)
        with contextlib.suppress(OSError, NegativaError), hold:
            owners = owners_of(folder)
            others = {owner: load_manifest(owner) for owner in owners if owner != tree}
            if tree not in owners or not all(other.slimmed for other in others.values()):
                continue
            names = {
                name
                for root, known in {**others, tree: manifest}.items()
                for name in _needed_names(root, known)
            }
            for spare in before:
                is_ours = _NAME.fullmatch(spare.name) and spare.parent == folder
                if is_ours and spare.name not in names:
                    with contextlib.suppress(FormatError):
                        last_trailer(spare)  # It refuses what is no spare.
                        remove_file(spare)
            if folder not in {spare.parent for spare in needed}:
                _note_owners(folder, [owner for owner in owners if owner != tree])


def _needed_names(tree: Path, manifest: SlimManifest) -> Iterator[str]:
    """The names of the spares of libraries, by the manifest and by themselves.

    The two differ if a run was killed or interrupted before it replaced the library.

    Raises:
        FormatError: a library can't be read, so its spare is not known.
    """
    for entry in manifest.slimmed.values():
        yield from (spare.name for spare in spares_of([entry]))
        for path in (tree / name for name in entry.names):
            if path.exists() and (note := note_of(path)) is not None:
                yield note.spare_name


def remove_unchecked(folder: Path) -> None:
    """Remove the spares that are not checked from a folder of spares, which is locked.

    After an interrupt, threads may still be at work: they can make nothing there any more.
    """
    left = folder / UNCHECKED
    gone = left.with_name(f"{UNCHECKED}-gone")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(left.rename(gone), ignore_errors=True)


def clear_abandoned(manifest: SlimManifest) -> set[Path]:
    """Remove what killed runs left in folders of spares.

    Returns:
        The spares that libraries had, now or before a run that was killed: see ``release``.
    """
    known = {Path(path) for path in manifest.run_spares}
    for folder in known:
        # A manifest names the folder, and may have come with an image.
        if (folder / ORIGINALS_MARK).is_file():
            with contextlib.suppress(ReconstructError), hold_alone(folder):
                remove_unchecked(folder)
    spares = {path for path in known if _NAME.fullmatch(path.name)}
    return spares | spares_of(manifest.slimmed.values())


def _remove_note(folder: Path) -> None:
    """Remove the note of a folder of spares, if no spare came."""
    with contextlib.suppress(OSError):
        if all(path.name == ORIGINALS_MARK for path in folder.iterdir()):
            (folder / ORIGINALS_MARK).unlink()


@contextlib.contextmanager
def hold_alone(folder: Path, refuse: Callable[[Path], None] = refuse_shared) -> Iterator[None]:
    """Keep others from putting spares into a folder that is there.

    Args:
        folder: the folder.
        refuse: raises if other users may write to it.

    Raises:
        ReconstructError: it can't be locked, or ``refuse`` raises.
    """
    refuse(folder)
    with held(folder):
        # Until then, another user may have made it.
        refuse(folder)
        yield


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


# ---- The way back ----


def note_of(library: Path) -> Note | None:
    """The note of a library with a spare; None: it has none.

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
    """The reason to refuse a spare; None: the library takes it.

    ``open_spare`` of ``spare/stub.c`` judges alike: change both.

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


def _why_noexec(spare: Path, note: Note) -> str | None:
    """The reason not to map a spare that is too large to be copied; as in fill_holes of stub.c."""
    size = sum(hole.end - hole.start for hole in note.holes)
    if not os.statvfs(spare).f_flag & os.ST_NOEXEC or size <= MAX_COPIED:
        return None
    return f"{spare} lies on a file system mounted noexec, and is too large to be copied"


def find_spare(library: Path, note: Note | None = None, *, trusted: bool = False) -> Path:
    """The spare of a library, where it would find it.

    Args:
        library: the library.
        note: of the library, if it was read before.
        trusted: take none that it would not use. Those others still give the original.

    Raises:
        FormatError: the library is damaged.
        SpareAwayError: nothing of the spare's name is there.
        ReconstructError: the library has no spare, none that fits is there, or the caller may not
            search one of the folders.
    """
    if (note := note or note_of(library)) is None:
        raise ReconstructError(f"{library}: is no library with a spare")
    folders, problem = spare_folders(library, note), None
    for spare in (Path(folder, note.spare_name) for folder in folders):
        try:
            with ByteSource(spare) as source:
                read_trailer(source, note)
            reason = why_untrusted(library, spare) or _why_noexec(spare, note) if trusted else None
        except (FormatError, OSError) as e:
            if not isinstance(e.__cause__, (FileNotFoundError, NotADirectoryError)):
                problem = str(e)
        else:
            if reason is None:
                return spare
            problem = f"{reason}, so it is not used"
    error = ReconstructError if problem else SpareAwayError
    raise error(
        f"{library}: its spare {note.spare_name} can't be used ({', '.join(folders)}): "
        f"{problem or 'it is in none of these folders'}; bring it back, or set {SPARE_FOLDER} to "
        "its folder"
    )


def problem_of(
    library: Path, note: Note | None = None, *, thorough: bool = True
) -> tuple[SlimStatus, str] | None:
    """The fault of a library or its spare, and the status; None: the two fit.

    Args:
        library, note: see ``find_spare``.
        thorough: read all of both, and refuse a spare that the library would not use.
    """
    try:
        spare = find_spare(library, note, trusted=thorough)
        if thorough:
            check_pair(library, spare, note)
    except (NegativaError, OSError) as e:
        # It may lie in another image layer, or be fetched before the program starts.
        is_away = isinstance(e, SpareAwayError)
        status = SlimStatus.SPARE_AWAY if is_away else SlimStatus.DAMAGED
        return status, str(e).removeprefix(f"{library}: ")
    return None
