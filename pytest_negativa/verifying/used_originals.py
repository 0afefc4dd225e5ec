"""Originals in use beside copies: opened, held, twins, lingering; verify.opened_originals.

A process may open one, have it open from before, or map a file with its content, which may have
another name. Files that are GPU code themselves have no copies: what was opened of them is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import TracedLibrary, Usage
from pytest_negativa.models.verdict import LibraryStatus, ProvedLibrary
from pytest_negativa.processes.file_users import FileUser
from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.reporting.units import format_items, format_names
from pytest_negativa.settings.globs import matches_command, matches_library, names_of
from pytest_negativa.tracing.libraries import hash_library

# No process loads a library from there, and some have very many files.
_NOT_SEARCHED = frozenset({".git", "__pycache__", "node_modules"})
_INSTALLED_ANEW = "its RECORD is another one than when it was traced"
_NO_FILES = frozenset({"/dev", "/proc", "/sys"})
_OR_NAME = "or name the library or the process's command in verify.opened_originals"


class NamedUses:
    """Uses of originals that the settings name: they are noted, and speak against nothing.

    Args:
        globs: of libraries and of commands, see ``verify.opened_originals``.
        originals: the libraries.
    """

    def __init__(
        self, globs: Sequence[str] = (), originals: Iterable[LibraryIdentity] = ()
    ) -> None:
        self._globs, self._owners = globs, Owners()
        self._libraries = frozenset(one.path for one in originals if self._names(one))

    def _names(self, library: LibraryIdentity) -> bool:
        if not self._globs:
            return False
        owner = self._owners.of(library.path).distribution
        names = names_of(library, owner)
        return any(matches_library(glob, names) for glob in self._globs)

    def cover(self, original: str, users: Collection[FileUser] = ()) -> bool:
        """Whether they name the library, or the command of each of its users."""
        return original in self._libraries or (
            bool(users)
            and all(any(matches_command(g, user.command) for g in self._globs) for user in users)
        )


_NONE = NamedUses()


def opened_originals(
    rounds: Sequence[Opens],
    twins: Mapping[str, str] = MappingProxyType({}),
    copies: Mapping[str, str] = MappingProxyType({}),
    named: NamedUses = _NONE,
) -> tuple[dict[str, str], dict[str, str]]:
    """By real path of an original: who opened it, or why that could not be watched; and what to do.

    Args:
        rounds: what was seen in each round on the copies. This package opens no original meanwhile.
        twins: by path of another file with the content of an original: the original.
        copies: by path of a copy: the original.
        named: what is a note.

    Returns:
        What speaks against a library, and notes.
    """
    against: dict[str, str] = {}
    noted: dict[str, str] = {}

    def add(original: str, reason: str, users: Collection[FileUser] = ()) -> None:
        found = noted if named.cover(original, users) else against
        found.setdefault(original, reason)

    originals = {**twins, **copies}
    for opens in rounds:
        for path, times in opens.times.items():
            users = opens.openers.get(path, ())
            reason = _opened(path, times, users, is_twin=path in twins)
            add(twins.get(path, path), reason, () if path in opens.unexplained else users)
        for path, reason in opens.unseen.items():
            add(
                originals.get(path, path),
                "nothing tells whether a process opened the original while the tests ran on the "
                f"copies ({reason}); mend this, or name the library in verify.opened_originals",
            )
        for path, users in opens.strangers.items():
            add(
                copies[path],
                f"{_list(users)} used the copy without the redirect, so what it needed was not "
                f"seen; pass the environment on to child processes, end what else uses the copy, "
                f"{_OR_NAME}",
                users,
            )
    return against, noted


def _list(users: Iterable[FileUser]) -> str:
    return ", ".join(dict.fromkeys(user.who for user in users))


def held_originals(
    held: Iterable[tuple[str, FileUser]],
    since: float,
    twins: Mapping[str, str] = MappingProxyType({}),
    named: NamedUses = _NONE,
) -> tuple[dict[str, str], dict[str, str]]:
    """By real path of an original: who had it open or mapped before a round began.

    Args:
        held: an original or a twin, and a process that used it.
        twins, named: see ``opened_originals``.
        since: when the traced run began, seconds since the epoch.

    Returns:
        The processes that a test may have started, for they are younger than the traced run, or
        may talk to, for they listen; and as notes those that are named, and other older ones.
    """
    against: dict[str, str] = {}
    noted: dict[str, str] = {}
    for path, user in held:
        original = twins.get(path, path)
        found = noted if named.cover(original, [user]) else against
        what = f"{user.who} had the original open or mapped before the tests ran on the copies"
        if user.may_be_younger(since):
            found[original] = (
                f"{what}, and began after the traced run: a test may have started it or use it; "
                f"end it, {_OR_NAME}"
            )
        elif user.listens:
            found[original] = f"{what}, and listens: a test may talk to it; end it, {_OR_NAME}"
        else:
            noted[original] = f"{what}; if a test uses this process, end it and verify again"
    return against, noted


def lingering_processes(processes: Iterable[str]) -> Iterator[str]:
    """Reasons against rounds: a process outlived one, may answer the next, and goes on unwatched.

    Args:
        processes: those that used a copy between rounds or after the last one, or CUDA's driver.
    """
    for who in dict.fromkeys(processes):
        yield (
            f"{who} outlived the traced run or a round, and still used a copy or the CUDA driver: "
            "a test may have talked to it, and nothing shows what it needs later; let the test "
            "that starts this process end it"
        )


def _opened(path: str, times: int, openers: Sequence[FileUser], *, is_twin: bool) -> str:
    what = f"{path}, which has the content of the original," if is_twin else "the original"
    who = f"{_list(openers)} had it open or mapped then" if openers else "its opener is unknown"
    return (
        f"a process opened {what} {format_items(times, 'time', 'times')} while the tests ran "
        f"on the copies ({who}) and may have run on it; pass the environment on to child "
        "processes, stop what else reads the file (another session, a linker, a scanner), "
        f"{_OR_NAME}"
    )


def loaded_originals(
    usage: Usage, reconstruction: Reconstruction
) -> tuple[dict[str, str], str | None]:
    """The originals among the files that traced processes had mapped, under any path.

    Of files that could be originals, those that are still there are hashed.

    Args:
        usage: what the traces of the rounds add up to.
        reconstruction: the copies that the tests ran on.

    Returns:
        By real path of an original: the process that had its content mapped, in words; and the
        process that loaded GPU code from a file that nothing identifies, if one did.
    """
    copies = {copy.copy for copy in reconstruction.libraries}
    found: dict[str, str] = {}
    unknown: str | None = None
    for used in usage.libraries:
        if used.library.path in copies or not used.processes:
            continue
        process = usage.processes[used.processes[0]].header
        who = f"process {process.pid} ({process.executable})"
        if used.library.size is None and used.images:
            unknown = unknown or f"{who} loaded GPU code from {used.library.path}, which was gone"
        for copy in reconstruction.libraries:
            if (what := _why_original(used.library, copy.library)) is not None:
                found.setdefault(copy.library.path, f"{who} had {what} mapped")
    return found, unknown


def _why_original(traced: TracedLibrary, original: LibraryIdentity) -> str | None:
    """Name of a file that was or may have been an original; None for another library."""
    if traced.path == original.path:
        return "the original"
    if (traced.size, traced.build_id) != (original.size, original.build_id):
        return None
    digest = hash_library(traced).sha256
    if digest is not None:
        return f"{traced.path}, a copy of the original," if digest == original.sha256 else None
    return f"{traced.path}, which has changed or is gone and may have been a copy of the original,"


def find_twins(
    folders: Iterable[str | os.PathLike[str]],
    originals: Iterable[LibraryIdentity],
    apart_from: Iterable[str | os.PathLike[str]] = (),
) -> dict[str, str]:
    """By real path of another file with the content of an original: the original.

    The lock is applied by content, so ``slim`` takes code out of these files, too. Hard links are
    no other files. Links in the folders are not followed.

    Args:
        folders: where to look, at any depth.
        apart_from: folders that are left out.
    """
    wanted: dict[int, dict[str, str]] = defaultdict(dict)
    known = set()
    for original in originals:
        if original.sha256 is not None:
            wanted[original.size][original.sha256] = original.path
            with contextlib.suppress(OSError):
                status = os.stat(original.path)  # noqa: PTH116
                known.add((status.st_dev, status.st_ino))
    twins: dict[str, str] = {}
    for entry in _files(map(os.path.realpath, folders), {*map(os.path.realpath, apart_from)}):
        with contextlib.suppress(OSError, FormatError):
            status = entry.stat(follow_symlinks=False)
            if status.st_size in wanted and (status.st_dev, status.st_ino) not in known:
                with ByteSource(entry.path) as source:
                    twin_of = wanted[status.st_size].get(source.sha256())
                if twin_of is not None:
                    twins[entry.path] = twin_of
    return twins


def _files(folders: Iterable[str], seen: set[str]) -> Iterator[os.DirEntry[str]]:
    """The regular files below some folders, each once."""
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        if folder in seen or folder in _NO_FILES:
            continue
        seen.add(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry
                elif entry.is_dir(follow_symlinks=False) and entry.name not in _NOT_SEARCHED:
                    waiting.append(entry.path)


def unused_paths(plan: LibraryPlan) -> dict[str, Span]:
    """By real path: the unused files of a distribution, and where each is in its library."""
    site = plan.library.path.rpartition("/")[0]
    return {f"{site}/{d.detail}": Span(d.start, d.end) for d in plan.decisions if not d.kept}


def judge_files(
    plans: Sequence[LibraryPlan], rounds: Sequence[Opens], installed: Collection[tuple[str, str]]
) -> Iterator[ProvedLibrary]:
    """Rows of the files that the traced run did not open, from what the rounds opened.

    Nothing replaces the files: a program that opens one gets it, and the file is needed from then
    on. So the tests can't fail for lack of a file, and the watch alone is the proof.

    Args:
        plans: what was planned for the files of each distribution.
        rounds: what was seen in each round, whether on copies or on the originals.
        installed: what is there now: path and digest of each distribution's files as a library.
    """
    # A lock can't tell two folders with the same files apart.
    opened: defaultdict[str | None, set[Span]] = defaultdict(set)
    for plan in plans:
        paths = unused_paths(plan)
        opened[plan.library.sha256] |= {paths[p] for o in rounds for p in o.times if p in paths}
    for plan in plans:
        library, paths = plan.library, unused_paths(plan)
        unseen = [] if (library.path, library.sha256) in installed else [_INSTALLED_ANEW]
        unseen += [o.unseen[p] for o in rounds for p in o.unseen if p in paths]
        stays = opened[library.sha256]
        spans = tuple(span for span in paths.values() if span not in stays)
        status, detail = LibraryStatus.PROVED, None
        notes: tuple[str, ...] = ()
        if unseen:
            detail = f"all files are kept: nothing tells what the tests opened: {unseen[0]}"
            status = LibraryStatus.NOT_PROVED
        elif not paths:
            status = LibraryStatus.NOTHING_UNUSED
        if stays:
            names = (str(d.detail) for d in plan.decisions if (d.start, d.end) in stays)
            notes = (f"opened while the tests ran on the copies, so kept: {format_names(names)}",)
        unused = sum(span.size for span in spans)
        yield replace(
            ProvedLibrary.unproved(plan),
            status=status,
            detail=detail,
            unused_bytes=unused,
            unused_elements=len(spans),
            left_bytes=plan.code_bytes - unused,
            spans=spans,
            notes=notes,
        )
