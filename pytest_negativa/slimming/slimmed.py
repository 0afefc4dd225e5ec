"""The fate of each slimmed library (damaged, upgraded, uninstalled ...), and its original.

The manifest lists slimmed libraries. A library with a spare says itself what its original was, so
it needs no entry.
"""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.elf_tables import EHDR
from pytest_negativa.gpucode.slimmed import is_slimmed, read_marker
from pytest_negativa.gpucode.source import digest_of, read_fact
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile
from pytest_negativa.slimming.manifest import (
    is_reinstalled,
    is_uninstalled,
    may_be_kept,
)
from pytest_negativa.slimming.spares import find_spare, note_of
from pytest_negativa.slimming.tree import MANIFEST_NAME, FileGroup, Tree

UNREADABLE = "it cannot be read"


class Fate(enum.Enum):
    """State of the file at a name of a slimmed library; each has rules of its own."""

    RESULT = "what slim wrote"
    DAMAGED = "a file of ours that is not what slim wrote there last, or can't be read"
    ORIGINAL = "the original"
    ANOTHER = "a file that is not ours, or nothing, since its distribution was uninstalled"
    GONE = "nothing"


_RESULT = (Fate.RESULT, None)


def fate_of(
    tree: Tree, name: str, entry: SlimmedFile, *, by_digest: bool = True
) -> tuple[Fate, str | None]:
    """The fate of a name of a slimmed library, and in words what brought it about, if known.

    Args:
        tree: of the folder.
        name: the name.
        entry: what the manifest says.
        by_digest: some tools give all files the same time, so time and size tell nothing;
            otherwise they tell a result.
    """
    if (group := tree.group_of(name)) is None:
        if is_uninstalled(tree.root, entry):
            why = "it is no longer there, and its distribution is no longer installed"
            return Fate.ANOTHER, why
        return Fate.GONE, None
    if not by_digest and (group.size, group.state.mtime_ns) == (entry.size, entry.mtime_ns):
        return _RESULT
    digest = tree.digest(group)
    known = {
        entry.original_sha256: (Fate.ORIGINAL, "the original is back"),
        entry.replaced: (
            Fate.DAMAGED,
            "the result of an earlier run: a killed one did not replace it",
        ),
        None: (Fate.DAMAGED, None),
        entry.sha256: _RESULT,
    }
    if digest is None or digest in known:
        return known[digest]
    records = tree.records(name)
    if record_digest(digest) in records:
        return Fate.ANOTHER, "another one was installed since: RECORD has its digest"
    is_ours = not (entry.is_removed or is_reinstalled(entry, records))
    is_ours = is_ours and _is_made_from(tree.root / name, entry)
    return Fate.DAMAGED if is_ours else Fate.ANOTHER, None


def _is_made_from(path: Path, entry: SlimmedFile) -> bool:
    """Whether the file looks like the result, but cut off or changed."""
    if is_slimmed(path):
        marker = read_fact(path, lambda source: read_marker(source, read_host_elf(source)))
        return marker is None or marker.size_before == entry.original_size
    # Section headers end the files that slimming writes, so a cut file tells the size it had.
    header = read_fact(path, lambda source: EHDR.unpack_from(source.read(0, EHDR.size)))
    if header is None or not header.e_ident.startswith(ELF_MAGIC):
        return False
    return header.e_shoff + header.e_shentsize * header.e_shnum == entry.size


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A slimmed library, and what became of it.

    Attributes:
        key: of its entry.
        entry: what the manifest says, or the library itself.
        fates: of each of its names, see ``fate_of``.
        sha256: of the first of ``results``; None: there is none, or one can't be read.
    """

    key: str
    entry: SlimmedFile
    fates: Mapping[str, tuple[Fate, str | None]]
    sha256: str | None

    def _names_of(self, *fates: Fate) -> tuple[str, ...]:
        return tuple(name for name, (fate, _) in self.fates.items() if fate in fates)

    @property
    def results(self) -> tuple[str, ...]:
        """The names that lead to the result, or to what became of it."""
        return self._names_of(Fate.RESULT, Fate.DAMAGED)

    @property
    def originals(self) -> tuple[str, ...]:
        """The names that lead to the original, because a run was killed between the names."""
        return self._names_of(Fate.ORIGINAL)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are to lead to the same file."""
        return (*self.results, *self.originals)

    @property
    def is_whole(self) -> bool:
        """Whether all of ``names`` lead to the result, as it was written."""
        return {self.fates[name] for name in self.names} == {_RESULT}

    @property
    def another(self) -> str | None:
        """Why it is not ours any more; None: it is."""
        found = (why for fate, why in self.fates.values() if fate is Fate.ANOTHER)
        return next((why or "another file took its place since" for why in found), None)

    @property
    def is_past(self) -> bool:
        """Whether its entry is of no use any more: no file needs it as the way to its original.

        The original is back, another file took its place, or the library was uninstalled. One that
        is away for a while may come back.
        """
        if self.results or self.originals:
            return not self.results
        if self.entry.is_removed:
            return self.another is not None
        if may_be_kept(self.entry):
            return False
        return self.another is not None or self.entry.spare is None


def find_slimmed(tree: Tree, manifest: SlimManifest, *, by_digest: bool) -> Iterator[Slimmed]:
    """The slimmed libraries of the manifest.

    Args:
        tree, manifest: of the folder.
        by_digest: see ``fate_of``.
    """
    for key, entry in manifest.slimmed.items():
        if tree.covers(entry.names):
            fates = {name: fate_of(tree, name, entry, by_digest=by_digest) for name in entry.names}
            found = Slimmed(key, entry, fates, entry.sha256)
            if not found.is_whole:
                here = filter(None, map(tree.group_of, found.results))
                digests = [tree.digest(group) for group in here]
                found = replace(
                    found, sha256=None if None in digests else next(iter(digests), None)
                )
            yield found


def unlisted(tree: Tree, manifest: SlimManifest) -> Iterator[FileGroup]:
    """The libraries that the manifest does not name."""
    known = {name for entry in manifest.slimmed.values() for name in entry.names}
    return (g for g in tree.groups if known.isdisjoint(g.names) and tree.is_library(g))


def find_unlisted(tree: Tree, manifest: SlimManifest) -> tuple[list[Slimmed], dict[FileGroup, str]]:
    """The slimmed libraries that the manifest does not name, with entries as of a manifest.

    Returns:
        Those that a spare makes whole; and the problem of the others.
    """
    found, lost = [], {}
    for group in (one for one in unlisted(tree, manifest) if tree.facts(one).is_slimmed):
        try:
            entry = _read_entry(tree, group)
        except NegativaError as e:
            lost[group] = str(e)
        else:
            fates = dict.fromkeys(group.names, _RESULT)
            found.append(Slimmed(group.name, entry, fates, entry.sha256))
    return found, lost


def _read_entry(tree: Tree, group: FileGroup) -> SlimmedFile:
    """The entry for a library with a spare, as of a manifest. It has the times of its original.

    Raises:
        ReconstructError: the library and its spare don't give the original.
    """
    path = tree.root / group.name
    detail = "was slimmed, and no manifest here has its original; install it again"
    # Another manifest is that of a folder around the file.
    for folder in path.parents:
        if folder != tree.root and (folder / MANIFEST_NAME).is_file():
            undo = f"negativa slim undo {shlex.quote(str(folder))}"
            raise ReconstructError(
                f"{detail}, or slim {folder}, which has its manifest, or run {undo}"
            )
    try:
        # If it is damaged, the facts don't say so.
        note, sha256 = tree.facts(group).note or note_of(path), tree.digest(group)
        spare = None if note is None else find_spare(path, note)
    except NegativaError as e:
        raise ReconstructError(f"{detail}: {str(e).removeprefix(f'{path}: ')}") from e
    if note is None or sha256 is None:
        raise ReconstructError(detail)
    found = (tree.records(name).get(record_digest(sha256)) for name in group.names)
    return SlimmedFile(
        names=group.names,
        original_sha256=note.original.hex(),
        original_size=note.original_size,
        sha256=sha256,
        size=group.size,
        mtime_ns=group.state.mtime_ns,
        recipe="",
        source="",
        gpu_code_removed=0,
        records=tuple(os.path.relpath(record, tree.root) for record in found if record),
        spare=str(spare),
    )


def kept_original(tree: Tree, entry: SlimmedFile) -> Path | None:
    """The file of an original that was kept; None: the library and its spare give it.

    Raises:
        ReconstructError: it is neither here nor in a spare.
    """
    kept = None if entry.original is None else Path(entry.original)
    if kept is not None and digest_of(kept) == entry.original_sha256:
        return kept
    if entry.spare is not None:
        return None
    why = "was not kept" if kept is None else f"({kept}) is gone, or no longer that file"
    raise ReconstructError(
        f"was slimmed, and its original {why}; {tree.how_to_reinstall(*entry.names)}"
    )
