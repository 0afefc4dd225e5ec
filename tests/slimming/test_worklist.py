"""What a recipe makes of a library, decided without slimming one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.models.slimming import LeftFile, SlimmedFile, SlimRow, SlimStatus
from pytest_negativa.slimming.recipes import (
    NO_GPU_CODE,
    Recipe,
    by_archs,
    never_loaded,
    strip_only,
)
from pytest_negativa.slimming.tree import Tree, scan_folder
from pytest_negativa.slimming.worklist import KnownResult, Task, classify
from tests.support.libraries import PLAIN

ARCHS = by_archs((ComputeCapability(9, 0),), keep_ptx=False, strip=True, strip_others=False)
NAMES = ("liba.so", "libb.so")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / NAMES[0]).write_bytes(PLAIN.read_bytes())
    (folder / NAMES[1]).hardlink_to(folder / NAMES[0])
    (folder / "text.so").write_text("no library")
    return scan_folder(folder)


def left_by(tree: Tree, recipe: Recipe, reason: str) -> LeftFile:
    group = tree.groups[0]
    return LeftFile(size=group.size, mtime_ns=group.mtime_ns, recipe=recipe.digest, reason=reason)


def test_library_is_a_task(tree: Tree) -> None:
    task = classify(tree, tree.groups[0], None, ARCHS)
    assert task == Task(ARCHS, tree.root / NAMES[0], NAMES, PLAIN.stat().st_size)


def test_other_files_are_not(tree: Tree) -> None:
    assert classify(tree, tree.groups[1], None, ARCHS) is None


def test_name_outside_of_the_folder_counts(tree: Tree) -> None:
    (tree.root.parent / "outside.so").hardlink_to(tree.root / NAMES[0])
    task = classify(tree, scan_folder(tree.root).groups[0], None, ARCHS)
    assert isinstance(task, Task) and task.outside == 1


class TestLeftByAnEarlierRun:
    def test_stays_so(self, tree: Tree) -> None:
        row = classify(tree, tree.groups[0], left_by(tree, ARCHS, "too small"), ARCHS)
        size = PLAIN.stat().st_size
        assert row == SlimRow.unchanged(NAMES[0], SlimStatus.LEFT, size, "too small")

    def test_without_gpu_code_it_is_not_told_again(self, tree: Tree) -> None:
        assert classify(tree, tree.groups[0], left_by(tree, ARCHS, NO_GPU_CODE), ARCHS) is None

    def test_stripping_others_asks_anew(self, tree: Tree) -> None:
        strips = by_archs(ARCHS.devices, keep_ptx=False, strip=True, strip_others=True)
        left = left_by(tree, ARCHS, NO_GPU_CODE)
        assert isinstance(classify(tree, tree.groups[0], left, strips), Task)

    @pytest.mark.parametrize("change", [{"size": 1}, {"mtime_ns": 1}, {"recipe": "other"}])
    def test_another_file_or_recipe_asks_anew(self, tree: Tree, change: dict[str, object]) -> None:
        left = replace(left_by(tree, ARCHS, "too small"), **change)
        assert isinstance(classify(tree, tree.groups[0], left, ARCHS), Task)


class TestSlimmedBefore:
    def entry(self, recipe: Recipe, original: Path | None, removed: int = 100) -> SlimmedFile:
        return SlimmedFile(
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
        )

    def outcome(self, tree: Tree, entry: SlimmedFile, recipe: Recipe) -> Task | SlimRow | None:
        return classify(tree, KnownResult(NAMES[0], entry, NAMES[:1], ()), None, recipe)

    def test_in_the_same_way(self, tree: Tree) -> None:
        row = self.outcome(tree, self.entry(ARCHS, None), ARCHS)
        assert isinstance(row, SlimRow)
        assert (row.status, row.before, row.after, row.others) == (SlimStatus.ALREADY, 8, 5, 1)

    def test_in_another_way_with_its_original(self, tree: Tree, tmp_path: Path) -> None:
        original = tmp_path / "original"
        original.write_bytes(b"original")
        entry = self.entry(strip_only(), original)
        task = self.outcome(tree, entry, ARCHS)
        assert task == Task(ARCHS, original, NAMES[:1], 8, before=entry)
        original.write_bytes(b"damaged.")
        assert isinstance(self.outcome(tree, entry, ARCHS), SlimRow)

    @pytest.mark.parametrize(
        ("removed", "recipe", "status"),
        [
            # Some of what is gone may be what the recipe keeps.
            (100, ARCHS, SlimStatus.FAILED),
            (0, ARCHS, SlimStatus.LEFT),
            (100, strip_only(), SlimStatus.LEFT),
            (100, never_loaded("lock", strip=True, strip_others=False), SlimStatus.LEFT),
        ],
    )
    def test_in_another_way_without(
        self, tree: Tree, removed: int, recipe: Recipe, status: SlimStatus
    ) -> None:
        before = by_archs((), keep_ptx=True, strip=False, strip_others=False)
        row = self.outcome(tree, self.entry(before, None, removed), recipe)
        assert isinstance(row, SlimRow) and row.status is status
