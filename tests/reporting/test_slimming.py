"""The report of slimming."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.reporting.slimming import render_holes, render_problems, render_rows


def failed(path: str, detail: str) -> SlimRow:
    return SlimRow.unchanged(path, SlimStatus.FAILED, 1, detail)


def test_many_libraries_with_one_problem_share_a_line() -> None:
    many = [failed(f"lib{number}.so", "install it again: pip install a") for number in range(4)]
    rows = [*many, failed("one.so", "not the same"), failed("two.so", "not the same")]
    rows.append(SlimRow.unchanged("sound.so", SlimStatus.SOUND, 1, None))
    assert list(render_problems(rows)) == [
        "lib0.so and 3 more libraries: failed: install it again: pip install a",
        "one.so: failed: not the same",
        "two.so: failed: not the same",
    ]


def test_a_problem_that_names_each_library_is_one() -> None:
    full = "cannot be written: No space left on device"
    rows = [failed(f"a/lib{number}.so", f"/site/a/.lib{number}.so: {full}") for number in range(7)]
    assert list(render_problems(rows)) == [f"a/lib0.so and 6 more libraries: failed: {full}"]
    # The folder of spares is full, not that of the libraries.
    rows = [failed(f"lib{number}.so", f"/spares: {full}") for number in range(7)]
    assert list(render_problems(rows)) == [f"lib0.so and 6 more libraries: failed: /spares: {full}"]


def test_the_largest_have_rows_of_their_own() -> None:
    rows = [SlimRow.unchanged(f"{n}.so", SlimStatus.SOUND, n * 1000, "fits") for n in range(1, 9)]
    rows += [replace(row, status=SlimStatus.SLIMMED, before=9000) for row in rows[:3]]
    changed, sound, details = render_rows(rows, "", top=2).split("\n\n")
    assert [line.split() for line in sound.splitlines()[2:]] == [
        ["8.so", "8.0", "kB", "sound"],
        ["7.so", "7.0", "kB", "sound"],
        ["6", "more", "21.0", "kB", "sound"],
        ["-----------", "-------", "-----"],
        ["8", "libraries", "36.0", "kB"],
    ]
    assert details.startswith("1.so and 7 more libraries: sound, fits\n1.so: slimmed, fits\n")
    assert " ".join(changed.splitlines()[-1].split()) == "3 libraries 27.0 kB 6.0 kB 22.2%"
    assert "1 more" in changed and "more" not in render_rows(rows, "").split("\n\n")[0]


def test_holes_are_named_if_a_fork_is_slower() -> None:
    assert render_holes(300, 16 << 10) is None
    text = render_holes(2_500, 64 << 10) or ""
    assert text.startswith("the libraries have 2,500 holes: a fork of a process that loads them ")
    assert "about 6.5 ms more. Shorter ones than 65.5 kB stay" in text


def test_a_line_comes_once() -> None:
    """Two copies of a folder have the same libraries and distributions."""
    left = SlimRow.unchanged("numba 1.0", SlimStatus.LEFT, 1, "a spare brings no files")
    note = replace(failed("lib.so", "a"), status=SlimStatus.ALREADY, notes=("its owner is root",))
    text = render_rows([left, note, left, note], "")
    assert text.count(left.detail or "") == text.count("lib.so: its owner is root") == 1
    assert list(render_problems([failed("lib.so", "it cannot be read")] * 2)) == [
        "lib.so: failed: it cannot be read"
    ]
