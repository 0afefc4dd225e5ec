"""Whether slimmed libraries are still what slimming made of them."""

from __future__ import annotations

import os

from pytest_negativa.errors import FormatError
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.rewriting.compact_damage import diagnose
from pytest_negativa.slimming.manifests import digest_of, load_manifest
from pytest_negativa.slimming.recordfile import read_lines, record_digest
from pytest_negativa.slimming.sites import Site
from pytest_negativa.slimming.tree import Tree


def check(tree: Tree) -> list[SlimRow]:
    """Compare digests with the manifest, and look for what other tools do to compacted files.

    Compacted libraries that no manifest knows are looked at, too.

    Raises:
        NegativaError: the manifest or a RECORD can't be read.
    """
    manifest = load_manifest(tree.root)
    rows = []
    known: set[str] = set()
    for _, entry in sorted(manifest.slimmed.items()):
        known.update(entry.names)
        rows += [_check_entry(tree, name, entry) for name in entry.names]
    for group in tree.groups:
        if not known.intersection(group.names) and tree.is_library(group):
            path = tree.root / group.name
            try:
                diagnosis = diagnose(path)
            except FormatError as e:
                rows.append(_row(group.name, SlimStatus.FAILED, group.size, e.problem))
                continue
            if diagnosis.damage is not None:
                rows.append(_row(group.name, SlimStatus.DAMAGED, group.size, diagnosis.damage))
            elif diagnosis.compacted:
                rows.append(_row(group.name, SlimStatus.ALREADY, group.size, "not in the manifest"))
    return rows + _check_records(tree, manifest)


def _check_entry(tree: Tree, name: str, entry: SlimmedFile) -> SlimRow:
    group = tree.group_of(name)
    if group is None:
        return _row(name, SlimStatus.MISSING, 0, "the manifest names it")
    path = tree.root / name
    if digest_of(path) == entry.sha256:
        return _row(name, SlimStatus.ALREADY, group.size, None)
    try:
        diagnosis = diagnose(path)
    except FormatError as e:
        return _row(name, SlimStatus.FAILED, group.size, e.problem)
    if diagnosis.damage is not None:
        return _row(name, SlimStatus.DAMAGED, group.size, diagnosis.damage)
    if diagnosis.compacted:
        why = "another tool changed it since; nothing was found that harms"
        return _row(name, SlimStatus.DIFFERENT, group.size, why)
    return _row(name, SlimStatus.DIFFERENT, group.size, "another file took its place")


def _check_records(tree: Tree, manifest: SlimManifest) -> list[SlimRow]:
    wanted = {
        os.path.join(tree.root, name): (name, entry)
        for entry in manifest.slimmed.values()
        for name in entry.names
    }
    rows = []
    for site in tree.sites:
        for installed in Site(site).installed():
            files = installed.files & wanted.keys()
            if not files:
                continue
            for path, line in read_lines(installed.record, site, files).items():
                name, entry = wanted[path]
                if digest_of(tree.root / name) == entry.sha256 and line.digest != record_digest(
                    entry.sha256
                ):
                    why = f"{installed.record} has another digest; run negativa slim again"
                    rows.append(_row(name, SlimStatus.DAMAGED, entry.size, why))
    return rows


def _row(name: str, status: SlimStatus, size: int, why: str | None) -> SlimRow:
    return SlimRow(path=name, status=status, before=size, after=size, why=why)
