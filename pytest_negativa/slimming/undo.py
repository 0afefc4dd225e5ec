"""Originals back in their places."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_negativa.errors import FormatError, NegativaError, ReconstructError
from pytest_negativa.gpucode.elf import ELF_HEADER, ELF_MAGIC
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.slimming import SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.rewriting.compact_damage import diagnose
from pytest_negativa.slimming.engine import only_one, write_records
from pytest_negativa.slimming.manifests import (
    digest_of,
    is_original,
    is_result,
    load_manifest,
    save_manifest,
)
from pytest_negativa.slimming.placing import copy, link, staged_name, take_place
from pytest_negativa.slimming.recordfile import RecordLine
from pytest_negativa.slimming.sites import Site
from pytest_negativa.slimming.tree import Tree


def undo(tree: Tree, *, dry_run: bool = False) -> list[SlimRow]:
    """Put back all originals that were kept; entries that are done with leave the manifest.

    A slimmed library that was damaged since gets its original, too. One that was replaced by
    something else, such as another version, is left alone.

    Raises:
        NegativaError: manifest or RECORD can't be read or written.
    """
    with only_one(tree.root):
        manifest = load_manifest(tree.root)
        rows = []
        lines: dict[str, RecordLine] = {}
        try:
            for key, entry in sorted(manifest.slimmed.items()):
                if not tree.covers(entry.names):
                    continue
                try:
                    row = _undo_one(tree, key, entry, dry_run=dry_run)
                except NegativaError as e:
                    row = _row(key, entry, SlimStatus.FAILED, entry.size, str(e))
                rows.append(row)
                if row.status is not SlimStatus.FAILED and not dry_run:
                    del manifest.slimmed[key]
                if row.status is SlimStatus.UNDONE:
                    lines.update(_lines(tree.root, entry))
        finally:
            if not dry_run:
                # RECORD first: a run that is killed in between finds the entries again.
                write_records([Site(site) for site in tree.sites], lines)
                if not manifest.slimmed:
                    manifest.left.clear()
                save_manifest(tree.root, manifest)
        return rows


def _undo_one(tree: Tree, key: str, entry: SlimmedFile, *, dry_run: bool) -> SlimRow:
    results = [
        name
        for name in entry.names
        if is_result(tree, name, entry) or _is_damaged_result(tree, name, entry)
    ]
    if not results:
        if any(is_original(tree, name, entry) for name in entry.names):
            status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
            return _row(key, entry, status, entry.original_size, "it was back already")
        if all(tree.group_of(name) is None for name in entry.names):
            return _undo_gone(tree, key, entry, dry_run=dry_run)
        return _row(key, entry, SlimStatus.LEFT, entry.size, "another file took its place since")
    aside = _kept_original(key, entry)
    if not dry_run:
        _put_back(aside, [tree.root / name for name in results])
        for name in entry.names:
            # A run that was killed between the names of one file.
            if name not in results and is_original(tree, name, entry):
                link(tree.root / results[0], tree.root / name)
    status = SlimStatus.WOULD_UNDO if dry_run else SlimStatus.UNDONE
    return _row(key, entry, status, entry.original_size, None)


def _undo_gone(tree: Tree, key: str, entry: SlimmedFile, *, dry_run: bool) -> SlimRow:
    """A library that somebody deleted; where its folder is gone, its package was removed."""
    names = [tree.root / name for name in entry.names]
    ours = all(
        not os.path.lexists(name) and name.parent.is_dir() and name.parent.resolve() == name.parent
        for name in names
    )
    if entry.original is None or not ours:
        return _row(key, entry, SlimStatus.LEFT, 0, "it is no longer there")
    aside = _kept_original(key, entry)
    if dry_run:
        return _row(key, entry, SlimStatus.WOULD_UNDO, entry.original_size, None)
    _put_back(aside, names)
    return _row(key, entry, SlimStatus.UNDONE, entry.original_size, None)


def _kept_original(key: str, entry: SlimmedFile) -> Path:
    if entry.original is None:
        raise ReconstructError(f"{key}: its original was not kept; install what it belongs to anew")
    aside = Path(entry.original)
    if digest_of(aside) != entry.original_sha256:
        raise ReconstructError(f"{aside}: is gone, or no longer the original of {key}")
    return aside


def _is_damaged_result(tree: Tree, name: str, entry: SlimmedFile) -> bool:
    """Whether a file with another digest is what slimming made, cut off or changed since."""
    group = tree.group_of(name)
    if group is None or is_original(tree, name, entry):
        return False
    path = tree.root / name
    try:
        if diagnose(path).compacted:
            return True
        with ByteSource(path) as source:
            if source.size < ELF_HEADER.size:
                return False
            header = ELF_HEADER.unpack(source.read(0, ELF_HEADER.size))
    except FormatError:
        return False
    # Section headers end the files that we write: so a cut one tells what size it had.
    sections_at, entry_size, count = header[6], header[11], header[12]
    is_elf: bool = header[0].startswith(ELF_MAGIC)
    return is_elf and int(sections_at + entry_size * count) == entry.size


def _put_back(aside: Path, names: list[Path]) -> None:
    staged = staged_name(names[0])
    try:
        # Not a link: what is written to the library must not change what is kept.
        copy(aside, staged)
        take_place(staged, names)
    except OSError as e:
        raise ReconstructError(f"{names[0]}: cannot be put back: {e.strerror}") from e


def _lines(root: Path, entry: SlimmedFile) -> dict[str, RecordLine]:
    return {
        os.path.join(root, row.name): RecordLine(row.digest, row.size)
        for row in entry.rows
        if digest_of(root / row.name) == entry.original_sha256
    }


def _row(key: str, entry: SlimmedFile, status: SlimStatus, after: int, why: str | None) -> SlimRow:
    return SlimRow(path=key, status=status, before=entry.size, after=after, why=why)
