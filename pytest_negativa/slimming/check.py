"""Checks that slimmed libraries are still what slimming made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.rewriting.compact.damage import diagnose
from pytest_negativa.slimming.identity import is_uninstalled
from pytest_negativa.slimming.manifest import digest_of, load_manifest
from pytest_negativa.slimming.tree import FileGroup, Tree

_Recorded = Mapping[str, Mapping[str, Path]]


def check_tree(tree: Tree) -> list[SlimRow]:
    """Compare libraries with the manifest, and look for slimmed ones that it doesn't list.

    A library whose digest differs from the manifest's is a problem, unless it is the original, or
    the RECORD of its distribution has that digest. Then it was installed again.

    Returns:
        A row for each slimmed library.

    Raises:
        NegativaError: the manifest or a RECORD can't be read.
    """
    manifest = load_manifest(tree.root)
    known = {name: e for e in manifest.slimmed.values() if tree.covers(e.names) for name in e.names}
    others = [
        group
        for group in tree.groups
        if not known.keys() & set(group.names) and tree.is_library(group)
    ]
    records = tree.recorded({*known, *(name for group in others for name in group.names)})
    rows = tree.unlisted_rows()
    rows += [_check_entry(tree, name, known[name], records) for name in sorted(known)]
    for group in others:
        row = _check_unknown(tree, group, records)
        if row is not None:
            rows.append(row)
    return rows


def _check_entry(tree: Tree, name: str, entry: SlimmedFile, all_records: _Recorded) -> SlimRow:
    group = tree.group_of(name)
    remedy = "reinstall" if entry.original is None else "reinstall, or negativa slim undo"
    records = all_records.get(name, {})
    if group is None and tree.is_hidden((name,)):
        return _row(name, SlimStatus.FAILED, 0, "its folder cannot be listed")
    if group is None and is_uninstalled(name, entry, records):
        why = "it was slimmed; its distribution is no longer installed"
        return _row(name, SlimStatus.DIFFERENT, 0, why)
    if group is None:
        return _row(name, SlimStatus.GONE, 0, f"it was slimmed, and is no longer there; {remedy}")
    digest = digest_of(tree.root / name)
    if digest is None:
        return _row(name, SlimStatus.FAILED, group.size, "it cannot be read")
    if digest == entry.sha256:
        wrong = [path for line, path in records.items() if line != record_digest(digest)]
        if wrong:
            why = f"{wrong[0]} has another digest; run negativa slim again"
            return _row(name, SlimStatus.DAMAGED, group.size, why)
        return _row(name, SlimStatus.SOUND, group.size, None)
    if digest == entry.original_sha256:
        return _row(name, SlimStatus.DIFFERENT, group.size, "the original is back")
    if record_digest(digest) in records:
        why = "another one was installed since: RECORD has its digest"
        return _row(name, SlimStatus.DIFFERENT, group.size, why)
    try:
        damage = diagnose(tree.root / name).damage
    except FormatError as e:
        return _row(name, SlimStatus.FAILED, group.size, e.problem)
    if damage is not None:
        return _row(name, SlimStatus.DAMAGED, group.size, f"{damage}; {remedy}")
    # A patch and a page of kernels that a disk lost look alike.
    why = f"differs from what was written; {remedy}"
    return _row(name, SlimStatus.CHANGED, group.size, why)


def _check_unknown(tree: Tree, group: FileGroup, all_records: _Recorded) -> SlimRow | None:
    path = tree.root / group.name
    try:
        diagnosis = diagnose(path)
    except FormatError as e:
        return _row(group.name, SlimStatus.FAILED, group.size, e.problem)
    if diagnosis.damage is not None:
        return _row(group.name, SlimStatus.DAMAGED, group.size, diagnosis.damage)
    if not diagnosis.compacted:
        return None
    lines = {line for name in group.names for line in all_records.get(name, {})}
    digest = digest_of(path)
    if digest is not None and record_digest(digest) in lines:
        why = "not in the manifest; RECORD has its digest"
        return _row(group.name, SlimStatus.SOUND, group.size, why)
    if lines:
        why = "not in the manifest, and its digest is not the one in RECORD; reinstall"
        return _row(group.name, SlimStatus.CHANGED, group.size, why)
    why = "not in the manifest, so what was written is not known; reinstall"
    return _row(group.name, SlimStatus.CHANGED, group.size, why)


def _row(name: str, status: SlimStatus, size: int, why: str | None) -> SlimRow:
    return SlimRow(path=name, status=status, before=size, after=size, why=why)
