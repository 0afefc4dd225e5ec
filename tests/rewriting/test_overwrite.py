"""Edits, and how maps and plans become some: what is unused, no byte more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.plan import Decision, KeepReason, LibraryPlan, UnusedReason
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting.layout import Edits, Fill, Patch, merge_edits
from pytest_negativa.rewriting.plan_edits import overwrite
from tests.support.libraries import BIN, SHARED_OBJECTS
from tests.support.reconstructing import apply, plan_of, planned_of

SIZE = 1000


class TestEdits:
    @pytest.mark.parametrize(
        ("fills", "patches", "problem"),
        [
            ([(0, 10), (9, 20)], [], "overlap at 0x9"),
            ([(0, 10)], [(9, b"ab")], "overlap at 0x9"),
            ([(5, 10)], [(0, b"123456")], "not in order"),
            ([], [(0, b"ab"), (1, b"c")], "overlap at 0x1"),
            ([(20, 30), (0, 10)], [], "not in order"),
            ([], [(20, b"a"), (0, b"b")], "not in order"),
            ([(990, 1001)], [], "ends at 0x3e9, the file at 0x3e8"),
            ([], [(999, b"ab")], "ends at 0x3e9, the file at 0x3e8"),
        ],
    )
    def test_broken(
        self, fills: list[tuple[int, int]], patches: list[tuple[int, bytes]], problem: str
    ) -> None:
        with pytest.raises(ValueError, match=problem):
            Edits(SIZE, (*(Fill(*f, 1) for f in fills), *(Patch(*p) for p in patches)))

    @given(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8), st.booleans()), max_size=12),
        st.randoms(use_true_random=False),
    )
    def test_merge(self, parts: list[tuple[int, int, bool]], chance: random.Random) -> None:
        """In whatever order: the same, or refused if and only if a byte would be in two."""
        size = 64
        every = [
            Fill(start, start + length, chance.randrange(256))
            if is_fill
            else Patch(start, chance.randbytes(length))
            for start, length, is_fill in parts
        ]
        bytes_changed = [b for e in every for b in range(e.start, e.end)]
        sound = len(set(bytes_changed)) == len(bytes_changed) and max(bytes_changed, default=0) < 64
        try:
            sources = [Edits.of(size, [edit]) for edit in every]
            merged = merge_edits(Edits(size), *sources)
        except ValueError:
            assert not sound
            return
        assert sound
        chance.shuffle(sources)
        assert merge_edits(Edits(size), *sources) == merged == Edits.of(size, every)
        assert sum(span.size for span in merged.filled) == sum(
            e.end - e.start for e in every if isinstance(e, Fill)
        )
        before = bytes(size)
        expected = bytearray(before)
        for edit in every:
            content = (
                edit.data
                if isinstance(edit, Patch)
                else bytes([edit.value]) * (edit.end - edit.start)
            )
            expected[edit.start : edit.end] = content
        assert apply(before, merged) == bytes(expected)


@pytest.fixture
def multiarch() -> LibraryMap:
    return planned_of(BIN / "libmultiarch.so").library_map


@pytest.mark.parametrize("library", SHARED_OBJECTS, ids=lambda path: path.stem)
def test_every_unused_byte_and_no_other(library: Path) -> None:
    planned = planned_of(library)
    before = library.read_bytes()
    edits = overwrite(planned.library_map, planned.plan, 0xA5)
    after = apply(before, edits)

    blocks = planned.library_map.iter_code()
    headers = {e.payload.start: e.header_offset for e in blocks if e.region is not None}
    position = 0
    for decision in planned.plan.decisions:
        between = bytearray(before[position : decision.start])
        if not decision.kept and decision.size and decision.start in headers:
            header = headers[decision.start] - position
            between[header : header + 2] = b"\0\0"
            between[header + 0x1C : header + 0x20] = (999).to_bytes(4, "little")
        assert after[position : decision.start] == between
        code = before[decision.start : decision.end]
        assert after[decision.start : decision.end] == (
            code if decision.kept else b"\xa5" * len(code)
        )
        position = decision.end
    assert after[position:] == before[position:]
    assert sum(s.size for s in edits.filled) == planned.plan.unused_bytes


@pytest.mark.parametrize("fill", [0, 1, 0xFF])
@pytest.mark.parametrize("library", SHARED_OBJECTS, ids=lambda path: path.stem)
def test_what_is_left_can_be_read(library: Path, fill: int, tmp_path: Path) -> None:
    """All chains are sound; what is overwritten is kept, were it planned anew, and says why."""
    planned = planned_of(library)
    copy = tmp_path / library.name
    edits = overwrite(planned.library_map, planned.plan, fill)
    copy.write_bytes(apply(library.read_bytes(), edits))

    before, after = (read_library(path, Scope()) for path in (library, copy))

    kept = {d.start for d in planned.plan.decisions if d.kept or not d.size}
    assert len(after.problems) == len(before.problems)
    elements = ((e for e in m.iter_code() if e.region is not None) for m in (before, after))
    for old, new in zip(*elements, strict=True):
        if old.payload.start in kept:
            assert replace(new, content=None) == replace(old, content=None)
            assert type(new.content) is type(old.content)
        else:
            assert new.unreadable is not None and new.unreadable.startswith("overwritten:")
            assert (new.payload, new.content) == (old.payload, None)
    assert [f.span for f in after.iter_frames()] == [
        f.span for f in before.iter_frames() if f.span.start in kept
    ]
    again = plan_of(after)
    assert all(d.kept for d in again.decisions if d.start not in kept)
    assert {d.reason for d in again.decisions if d.start not in kept} <= {
        KeepReason.UNREADABLE.value
    }


def edited(plan: LibraryPlan, *decisions: Decision) -> LibraryPlan:
    return replace(plan, decisions=tuple(sorted(decisions, key=lambda d: d.start)))


class TestWrongPlan:
    @pytest.fixture
    def plan(self, multiarch: LibraryMap) -> LibraryPlan:
        return plan_of(multiarch)

    def refused(self, library_map: LibraryMap, plan: LibraryPlan, reason: str) -> None:
        with pytest.raises(ReconstructError, match=reason) as caught:
            overwrite(library_map, plan, 1)
        assert str(caught.value).startswith(f"{plan.library.path}: ")

    def test_of_another_library(self, multiarch: LibraryMap) -> None:
        self.refused(multiarch, planned_of(BIN / "libmode_none.so").plan, "not of the same file")

    def test_of_another_content(self, multiarch: LibraryMap, plan: LibraryPlan) -> None:
        other = replace(plan, library=replace(plan.library, sha256="0" * 64))
        self.refused(multiarch, other, "not of the same file")

    def test_missing_decision(self, multiarch: LibraryMap, plan: LibraryPlan) -> None:
        """It is kept."""
        unused = next(d for d in plan.decisions if not d.kept)
        fewer = edited(plan, *(d for d in plan.decisions if d != unused))
        before, after = (overwrite(multiarch, one, 1).fills for one in (plan, fewer))
        assert {(f.start, f.end) for f in before} - {(f.start, f.end) for f in after} == {
            (unused.start, unused.end)
        }

    def test_moved_decision(self, multiarch: LibraryMap, plan: LibraryPlan) -> None:
        first, *others = plan.decisions
        for start, end in ((first.start - 8, first.end), (first.start, first.end + 8)):
            moved = Decision(start, end, False, first.reason)
            self.refused(multiarch, edited(plan, moved, *others), "is not in its map")

    def test_code_that_is_not_understood(self, multiarch: LibraryMap, plan: LibraryPlan) -> None:
        section = multiarch.sections[0]
        region = section.regions[0]
        odd = replace(region.elements[0], unreadable="a riddle")
        region = replace(region, elements=(odd, *region.elements[1:]))
        section = replace(section, regions=(region, *section.regions[1:]))
        changed = replace(multiarch, sections=(section,))
        self.refused(changed, plan, "not understood: a riddle")

    def test_past_the_end(self, multiarch: LibraryMap, plan: LibraryPlan) -> None:
        """A map and a plan that agree on a file that is too short for them."""
        identity = replace(multiarch.library, size=plan.decisions[0].start + 8)
        small_map, small_plan = (
            replace(multiarch, library=identity),
            replace(plan, library=identity),
        )
        self.refused(small_map, small_plan, "contradicts itself: an edit ends at")

    def test_overlapping_elements(self, multiarch: LibraryMap) -> None:
        section = multiarch.sections[0]
        region = section.regions[0]
        first = region.elements[0]
        lie = replace(first, payload=Span(first.payload.start, first.payload.end + 200))
        region = replace(region, elements=(lie, *region.elements[1:]))
        section = replace(section, regions=(region, *section.regions[1:]))
        changed = replace(multiarch, sections=(section,))
        everything = edited(
            plan_of(multiarch),
            *(
                Decision(e.payload.start, e.payload.end, False, UnusedReason.WRONG_ARCH.value)
                for e in changed.iter_code()
            ),
        )
        self.refused(changed, everything, "contradicts itself: edits overlap")
