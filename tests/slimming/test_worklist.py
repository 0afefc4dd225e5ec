"""What a recipe makes of a library, decided without slimming one."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.models.slimming import SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.recipes import Kind, Recipe, by_archs, strip_only
from pytest_negativa.slimming.slimmed import Fate, Slimmed
from pytest_negativa.slimming.tree import Tree, scan_folder
from pytest_negativa.slimming.worklist import Task, _libraries_of_negativa, classify
from tests.support.libraries import MULTIARCH

ARCHS = by_archs((ComputeCapability(9, 0),), keep_ptx=False, strip=True, strip_others=False)
BEFORE = by_archs((), keep_ptx=True, strip=False, strip_others=False)
NAMES = ("liba.so", "libb.so")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / NAMES[0]).write_bytes(MULTIARCH.read_bytes())
    (folder / NAMES[1]).hardlink_to(folder / NAMES[0])
    (folder / "text.so").write_text("no library")
    return scan_folder(folder)


def test_library_is_a_task(tree: Tree) -> None:
    task = classify(tree, tree.groups[0], ARCHS)
    assert task == Task(ARCHS, tree.root / NAMES[0], NAMES, MULTIARCH.stat().st_size)


def test_other_files_are_not(tree: Tree) -> None:
    assert classify(tree, tree.groups[1], ARCHS) is None


def test_name_outside_of_the_folder_counts(tree: Tree) -> None:
    (tree.root.parent / "outside.so").hardlink_to(tree.root / NAMES[0])
    task = classify(tree, scan_folder(tree.root).groups[0], ARCHS)
    assert isinstance(task, Task) and task.outside == 1


class TestSlimmedBefore:
    def slimmed(
        self,
        recipe: Recipe,
        original: Path | None = None,
        removed: int = 100,
        originals: bool = False,
        spare: str | None = None,
    ) -> Slimmed:
        entry = SlimmedFile(
            names=NAMES,
            original_sha256=hashlib.sha256(b"original").hexdigest(),
            original_size=8,
            sha256="0" * 64,
            size=5,
            mtime_ns=1,
            recipe=recipe.digest,
            source="",
            gpu_code_removed=removed,
            original=None if original is None else str(original),
            spare=spare,
        )
        other = Fate.ORIGINAL if originals else Fate.GONE
        fates = {NAMES[0]: (Fate.RESULT, None), NAMES[1]: (other, None)}
        return Slimmed(NAMES[0], entry, fates, "0" * 64)

    def test_in_the_same_way(self, tree: Tree) -> None:
        row = classify(tree, self.slimmed(ARCHS), ARCHS)
        assert isinstance(row, SlimRow)
        assert (row.status, row.before, row.after, row.others) == (SlimStatus.ALREADY, 8, 5, 1)
        assert not row.notes
        kept = classify(tree, self.slimmed(ARCHS), ARCHS, keeps_original=True)
        assert isinstance(kept, SlimRow) and "no original is kept" in kept.notes[0]

    def test_in_another_way_with_its_original(self, tree: Tree, tmp_path: Path) -> None:
        original = tmp_path / "original"
        original.write_bytes(b"original")
        slimmed = self.slimmed(strip_only(), original)
        task = classify(tree, slimmed, ARCHS)
        assert task == Task(ARCHS, original, NAMES[:1], 8, slimmed)
        original.write_bytes(b"damaged.")
        assert isinstance(classify(tree, slimmed, ARCHS), SlimRow)

    def test_a_name_that_leads_to_the_original_gives_it(self, tree: Tree) -> None:
        """A run was killed between the names of one file."""
        slimmed = self.slimmed(ARCHS, originals=True)
        task = classify(tree, slimmed, ARCHS)
        assert task == Task(ARCHS, tree.root / NAMES[1], NAMES, 8, slimmed)

    def test_a_spare_that_would_be_lost_or_is_away_gives_none(self, tree: Tree) -> None:
        slimmed = self.slimmed(BEFORE, spare="/spares/a.spare")
        row = classify(tree, slimmed, ARCHS)
        assert isinstance(row, SlimRow) and row.status is SlimStatus.FAILED
        assert "would go with its original" in str(row.detail)
        kept = classify(tree, slimmed, ARCHS, keeps_original=True)
        assert isinstance(kept, SlimRow) and "is no library with a spare" in str(kept.detail)

    @pytest.mark.parametrize(
        ("removed", "recipe", "status"),
        [
            # Some of what is gone may be what the recipe keeps.
            (100, ARCHS, SlimStatus.FAILED),
            (0, ARCHS, SlimStatus.LEFT),
            (100, strip_only(), SlimStatus.LEFT),
            (100, replace(ARCHS, kind=Kind.NEVER_LOADED), SlimStatus.LEFT),
        ],
    )
    def test_in_another_way_without(
        self, tree: Tree, removed: int, recipe: Recipe, status: SlimStatus
    ) -> None:
        row = classify(tree, self.slimmed(BEFORE, None, removed), recipe)
        assert isinstance(row, SlimRow) and row.status is status
        assert "was slimmed, and its original was not kept; install it again" in str(row.detail)


def test_the_python_that_runs_negativa_stays(tree: Tree) -> None:
    own = Path(sysconfig.get_config_var("DESTSHARED")).resolve()
    libraries = _libraries_of_negativa(tree)
    assert {str(path) for path in own.glob("*.so")} <= libraries
    assert any("libc.so" in path for path in libraries)
