"""``negativa slim check``: each slimmed library against the manifest, and unlisted ones."""

from __future__ import annotations

import concurrent.futures
import shlex

from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.slimming import SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.code_files import together
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import OnProgress, counter
from pytest_negativa.slimming.slimmed import UNREADABLE, Fate, fate_of, unlisted
from pytest_negativa.slimming.spares import problem_of
from pytest_negativa.slimming.tree import FileGroup, Tree
from pytest_negativa.storage.system import available_cores

_INTERRUPTED = (
    "a run is at work here, or was killed: check again when it has ended, or let the next negativa "
    "slim or undo of this folder finish it"
)

_Judgement = tuple[SlimStatus, str | None]


def check_tree(tree: Tree, on_done: OnProgress = lambda done, total: None) -> list[SlimRow]:
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
    manifest = load_manifest(tree.root)
    known: dict[str, SlimmedFile | FileGroup] = {
        name: e for e in manifest.slimmed.values() if tree.covers(e.names) for name in e.names
    }
    tree.hashed = {entry.size for entry in known.values()}
    for group in unlisted(tree, manifest):
        if (facts := tree.facts(group)).is_slimmed or facts.problem is not None:
            known[group.name] = group
    # Here: from Python 3.12 on, functools.cached_property has no lock. Each thread would read all
    # RECORD files, and those that hash would wait for Python's lock.
    for name in known:
        tree.records(name)
    rows = []
    if manifest.run is not None:
        rows = [SlimRow.unchanged(f"{tree.root}/", SlimStatus.INTERRUPTED, 0, _INTERRUPTED)]
    # Hashing takes the time, and leaves Python's lock to others.
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        # The largest first, so that none is left to be read alone at the end.
        names = sorted(known, key=lambda name: -known[name].size)
        count = counter(sum(one.size for one in known.values()), on_done)
        judgements = pool.map(lambda name: _judge(tree, name, known[name]), names)
        for name, (status, why) in zip(names, judgements, strict=True):
            found = tree.group_of(name)
            rows.append(SlimRow.unchanged(name, status, 0 if found is None else found.size, why))
            count(known[name].size)
    return sorted(together(rows), key=lambda row: row.path)


def _judge(tree: Tree, name: str, entry: SlimmedFile | FileGroup) -> _Judgement:
    if isinstance(entry, FileGroup):
        return _judge_unlisted(tree, entry)
    group, (fate, why) = tree.group_of(name), fate_of(tree, name, entry)
    if fate is Fate.RESULT:
        return _judge_result(tree, name, entry)
    if why is not None:
        return SlimStatus.DIFFERENT, why
    if fate is Fate.GONE and entry.is_removed:
        return SlimStatus.SOUND, None
    # A patch and a page of kernels that a disk lost look alike: what is not here has changed.
    status, detail = SlimStatus.CHANGED, "differs from what was written"
    if group is None:
        status, detail = SlimStatus.GONE, "it was slimmed, and is no longer there"
    elif tree.digest(group) is None:
        return SlimStatus.FAILED, UNREADABLE
    undo = f"negativa slim undo {shlex.quote(str(tree.root))}, or " if entry.original else ""
    return status, f"{detail}; {undo}{tree.how_to_reinstall(name)}"


def _judge_result(tree: Tree, name: str, entry: SlimmedFile) -> _Judgement:
    records, path = tree.records(name), tree.root / name
    wrong = [record for line, record in records.items() if line != record_digest(entry.sha256)]
    if wrong:
        return SlimStatus.DAMAGED, f"{wrong[0]} has another digest; run negativa slim again"
    if entry.spare is None:
        return SlimStatus.SOUND, None
    return problem_of(path, tree.note(name)) or (SlimStatus.SOUND, "its spare fits")


def _judge_unlisted(tree: Tree, group: FileGroup) -> _Judgement:
    """Judge a library that the manifest doesn't list, by its lines of RECORD."""
    path, facts = tree.root / group.name, tree.facts(group)
    if facts.problem is not None:
        return SlimStatus.FAILED, facts.problem
    judged = None if facts.note is None else problem_of(path, facts.note)
    if judged is not None and judged[0] is SlimStatus.DAMAGED:
        return judged
    lines = {line for name in group.names for line in tree.records(name)}
    digest = tree.digest(group)
    if digest is not None and record_digest(digest) in lines:
        return judged or (SlimStatus.SOUND, "not in the manifest; RECORD has its digest")
    why = "and its digest is not the one in RECORD" if lines else "so what was written is not known"
    return SlimStatus.CHANGED, f"not in the manifest, {why}; reinstall"
