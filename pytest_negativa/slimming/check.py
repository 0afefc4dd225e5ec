"""Checks that slimmed libraries are still what slimming made of them."""

from __future__ import annotations

import concurrent.futures
import shlex
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.slimmed import has_marker
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.code_files import check_files
from pytest_negativa.slimming.manifest import (
    how_to_reinstall,
    is_uninstalled,
    manifest_of,
)
from pytest_negativa.slimming.spares import is_moved, note_of, problem_of
from pytest_negativa.slimming.tree import FileGroup, Records, Tree
from pytest_negativa.storage.system import available_cores

_INTERRUPTED = (
    "a run is at work here, or was killed: check again when it has ended, or let the next negativa "
    "slim or undo of this folder finish it"
)

_Judgement = tuple[SlimStatus, str | None]


def check_tree(
    tree: Tree, on_done: Callable[[int, int], None] = lambda done, total: None
) -> list[SlimRow]:
    """Compare libraries with the manifest, and look for slimmed ones that it doesn't list.

    A library whose digest differs from the manifest's is a problem, unless it is the original, or
    the RECORD of its distribution has that digest. Then it was installed again.

    Args:
        tree: a folder.
        on_done: told of the bytes of slimmed libraries that were read, and of all.

    Returns:
        A row for each slimmed library, and one if a run is at work or was killed: the libraries and
        RECORD agree only when it has ended.

    Raises:
        NegativaError: the manifest or a RECORD can't be read.
    """
    manifest = manifest_of(tree)
    known = {name: e for e in manifest.slimmed.values() if tree.covers(e.names) for name in e.names}
    others = [
        group
        for group in tree.groups
        if not known.keys() & set(group.names) and tree.is_library(group)
    ]
    rows = []
    if manifest.run is not None:
        rows = [SlimRow.unchanged(f"{tree.root}/", SlimStatus.INTERRUPTED, 0, _INTERRUPTED)]
    # Hashing takes the time, and leaves Python's lock to others.
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        names = sorted(known)
        done, total = 0, sum(entry.size for entry in known.values())
        on_done(done, total)
        checked = pool.map(lambda name: _check_entry(tree, name, known[name]), names)
        for name, row in zip(names, checked, strict=True):
            rows.append(row)
            done += known[name].size
            on_done(done, total)
    judged = ((group, _judge_unknown(tree, group)) for group in others)
    unknown = (SlimRow.unchanged(one.name, why[0], one.size, why[1]) for one, why in judged if why)
    return [*rows, *check_files(tree, manifest), *unknown]


def _check_entry(tree: Tree, name: str, entry: SlimmedFile) -> SlimRow:
    group = tree.group_of(name)
    if group is not None:
        judged = _judge(tree.root, name, entry, tree.records(name))
    elif is_uninstalled(tree.root, entry):
        judged = SlimStatus.DIFFERENT, "it was slimmed; its distribution is no longer installed"
    else:
        judged = (
            SlimStatus.GONE,
            f"it was slimmed, and is no longer there; {_remedy(tree.root, entry)}",
        )
    return SlimRow.unchanged(name, judged[0], 0 if group is None else group.size, judged[1])


def _judge(root: Path, name: str, entry: SlimmedFile, records: Records) -> _Judgement:
    path = root / name
    digest = digest_of(path)
    if digest is None:
        return SlimStatus.FAILED, "it cannot be read"
    if digest == entry.sha256:
        wrong = [record for line, record in records.items() if line != record_digest(digest)]
        if wrong:
            return SlimStatus.DAMAGED, f"{wrong[0]} has another digest; run negativa slim again"
        if entry.spare is not None and (judged := problem_of(path)) is not None:
            return judged
        fits = "moved whole; its spare fits" if is_moved(path) else "its spare fits"
        return SlimStatus.SOUND, None if entry.spare is None else fits
    if digest == entry.original_sha256:
        return SlimStatus.DIFFERENT, "the original is back"
    if record_digest(digest) in records:
        return SlimStatus.DIFFERENT, "another one was installed since: RECORD has its digest"
    # A patch and a page of kernels that a disk lost look alike.
    return SlimStatus.CHANGED, f"differs from what was written; {_remedy(root, entry)}"


def _remedy(root: Path, entry: SlimmedFile) -> str:
    undo = "" if entry.original is None else f"negativa slim undo {shlex.quote(str(root))}, or "
    return undo + how_to_reinstall(entry.reinstall)


def _judge_unknown(tree: Tree, group: FileGroup) -> _Judgement | None:
    """Judge a library that the manifest doesn't list, by its lines of RECORD."""
    path = tree.root / group.name
    lines = {line for name in group.names for line in tree.records(name)}
    try:
        with ByteSource(path) as source:
            if not has_marker(source):
                return None
    except FormatError as e:
        return SlimStatus.FAILED, e.problem
    judged = problem_of(path) if note_of(path) is not None else None
    if judged is not None and judged[0] is SlimStatus.DAMAGED:
        return judged
    digest = digest_of(path)
    if digest is not None and record_digest(digest) in lines:
        return judged or (SlimStatus.SOUND, "not in the manifest; RECORD has its digest")
    why = "and its digest is not the one in RECORD" if lines else "so what was written is not known"
    return SlimStatus.CHANGED, f"not in the manifest, {why}; reinstall"
