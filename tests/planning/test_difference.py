"""Sides of a comparison, and how two of them differ."""

from __future__ import annotations

import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.difference import Change, Difference, SideLibrary
from pytest_negativa.models.library import Scope
from pytest_negativa.planning.difference import (
    compare,
    make_baseline,
    short_names,
    side_of_map,
    side_of_report,
    stable_name,
)
from pytest_negativa.reporting.difference import render_difference
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.reports import report, row


def library(path: str, **archs: int) -> SideLibrary:
    """A library without a plan, with bytes by arch."""
    size = sum(archs.values())
    return SideLibrary(path, size, size, archs=archs)


def planned(path: str, loaded: int, unused: int, used: str, there: str) -> SideLibrary:
    return SideLibrary(
        path,
        loaded + unused,
        loaded + unused,
        unused=unused,
        reasons={"loaded": loaded, "wrong-arch": unused},
        kernels=set(there),
        used=set(used),
    )


def text(before: list[SideLibrary], after: list[SideLibrary], top: int = 10) -> str:
    found = Difference(before="1.0", after="2.0", libraries=compare(before, after))
    return "\n\n".join(render_difference(found, top))


def test_a_library_as_its_map_tells() -> None:
    found = side_of_map(read_library(QUICKSTART_LIBRARY, Scope()))
    assert found.path == str(QUICKSTART_LIBRARY)
    assert (found.code, found.unused, found.archs and sum(found.archs.values())) == (
        67200,
        None,
        67200,
    )
    # PTX is not machine code of its arch.
    assert found.archs and {"sm_120", "ptx sm_120"} < found.archs.keys()
    assert found.kernels is not None and "vector_add" in found.kernels
    headers = side_of_map(read_library(QUICKSTART_LIBRARY, Scope(headers_only=True)))
    assert (headers.kernels, headers.archs) == (None, found.archs)


def test_a_baseline_lists_no_used_kernels() -> None:
    one = report(row(used_kernels=2))
    [full], [committed] = side_of_report(one), side_of_report(make_baseline(one))
    assert committed.used is None and committed.path == "libours.so"
    assert (committed.code, committed.reasons) == (full.code, full.reasons)


def test_libraries_are_named_by_file_and_if_need_be_by_path() -> None:
    assert short_names(["/1/x/a/l.so", "/1/y/a/l.so", "/1/l.so"]) == (
        "x/a/l.so",
        "y/a/l.so",
        "1/l.so",
    )
    assert short_names(["l.so", "l.so", "x/l.so"]) == ("l.so", "l.so", "x/l.so")


def test_libraries_are_paired_by_the_longest_end_of_their_paths() -> None:
    one, two = library("/v/site-packages/a/l.so", sm_80=100), library("/v/b/l.so", sm_80=50)
    for before in ([one], [two], [one, two], [two, one]):
        moved = [each._replace(path=each.path.replace("/v/", "/w/x/")) for each in (two, one)]
        found = {change.name: change.code for change in compare(before, moved)}
        assert [change.growth for change in found.values() if change.before is not None] == [
            0 for _ in before
        ]
        assert len(found) == 2
    [gone] = [c for c in compare([one, two], [two]) if c.code.after is None]
    assert (gone.name, gone.path) == ("a/l.so", one.path)


def test_a_library_that_could_be_either_of_two_is_paired_with_none() -> None:
    before = [library("l.so", sm_80=100)]
    [change] = compare(before, [library("/x/a/l.so", sm_80=100)])
    assert (change.name, change.path, change.code) == ("l.so", "/x/a/l.so", Change(100, 100))
    both = [library("/x/a/l.so", sm_80=100), library("/x/b/l.so", sm_80=100)]
    assert len(compare(before, both)) == 3


def test_what_grew_appeared_and_went() -> None:
    before = [library("a.so", sm_80=100, sm_90=50), library("old.so", sm_80=10)]
    after = [library("a.so", sm_80=90, sm_100=200), library("new.so", sm_90=5)]

    found = compare(before, after)

    assert [(one.name, one.code) for one in found] == [
        ("a.so", Change(150, 290)),
        ("old.so", Change(10, None)),
        ("new.so", Change(None, 5)),
    ]
    assert [one.parts for one in found] == [
        {"sm_80": Change(100, 90), "sm_90": Change(50, None), "sm_100": Change(None, 200)},
        {"sm_80": Change(10, None)},
        {"sm_90": Change(None, 5)},
    ]
    assert found[0].appeared is None


# Kernels of libtorch_cuda.so of PyTorch 2.11.0 and 2.13.0, and of two releases of CUB.
SAME_KERNELS = (
    (
        "_ZN2at6native29vectorized_elementwise_kernelILi2EZNS0_43_GLOBAL__N__50f1b6c4_10_Dropout_cu_"
        "0e96ed3819masked_scale_kernelIhffEEvRNS_6TensorERKS4_S7_T1_EUlfhE_St5arrayIPcLm3EEEEviT0_S8_",
        "_ZN2at6native29vectorized_elementwise_kernelILi2EZNS0_43_GLOBAL__N__1131530d_10_Dropout_cu_"
        "0e96ed3819masked_scale_kernelIhffEEvRNS_6TensorERKS4_S7_T1_EUlfhE_St5arrayIPcLm3EEEEviT0_S8_",
    ),
    (
        "_ZN2at6native29vectorized_elementwise_kernelILi8EZZZN37_INTERNAL_5cd812b1_7_Loss_cu_"
        "5b0651e139_GLOBAL__N__5cd812b1_7_Loss_cu_5b0651e140binary_cross_entropy_backward_out_kernel"
        "ERNS_6TensorERKS4_S7_S7_ENKUlvE_clEvENKUlvE_clEvEUldddE_St5arrayIPcLm4EEEEviT0_T1_",
        "_ZN2at6native29vectorized_elementwise_kernelILi8EZZZN37_INTERNAL_6bd09d29_7_Loss_cu_"
        "5b0651e139_GLOBAL__N__6bd09d29_7_Loss_cu_5b0651e140binary_cross_entropy_backward_out_kernel"
        "ERNS_6TensorERKS4_S7_S7_ENKUlvE_clEvENKUlvE_clEvEUldddE_St5arrayIPcLm4EEEEviT0_T1_",
    ),
    (
        "_ZN3cub45CUB_300001_SM_750_800_860_900_1000_1200_NS11EmptyKernelIvEEvv",
        "_ZN3cub40CUB_300102_SM_800_860_900_1000_1200_NS11EmptyKernelIvEEvv",
    ),
)


@pytest.mark.parametrize(("before", "after"), SAME_KERNELS)
def test_a_kernel_of_an_internal_namespace_is_the_same_in_the_next_build(
    before: str, after: str
) -> None:
    assert stable_name(before) == stable_name(after)
    sides = [library("a.so")._replace(kernels=(name,)) for name in (before, after)]
    [found] = compare(sides[:1], sides[1:])
    assert (found.appeared, found.went) == ((), ())


def test_kernels_of_two_files_are_two() -> None:
    name = "_Z43_GLOBAL__N__50f1b6c4_10_Dropout_cu_0e96ed38v"
    other = name.replace("10_Dropout", "10_Another")
    assert stable_name(name) != stable_name(other)
    # A length beyond the end, as only a hostile file has it.
    assert stable_name("_Z9999_GLOBAL__N__50f1b6c4_99_x") == "_Zx"


def test_between_runs_reasons_and_used_kernels_are_compared() -> None:
    before = planned("a.so", 100, 50, used="ab", there="abcx")
    after = planned("a.so", 100, 80, used="bcd", there="abcd")
    [found] = compare([before], [after])
    assert found.parts == {"wrong-arch": Change(50, 80)}
    assert (found.appeared, found.went) == (("d",), ("x",))
    assert (found.newly_used, found.newly_unused) == (("c", "d"), ("a",))
    shown = text([before], [after])
    assert "for other GPUs" in shown and "1 kernel newly unused:\n  a.so: a" in shown


def test_what_one_side_does_not_tell_is_not_compared() -> None:
    [found] = compare([library("a.so", sm_80=140)], [planned("a.so", 100, 50, "a", "ab")])
    assert (found.code, found.unused) == (Change(140, 150), Change(None, 50))
    assert (found.parts, found.appeared, found.newly_used) == ({}, None, None)


GOLDEN = """\
GPU code of 2.0, compared with 1.0: 160 B -> 295 B (+135 B, +84.4%)

library      before    after         change
---------  --------  -------  -------------
a.so          150 B    290 B         +140 B
2 more         10 B      5 B           -5 B

what changed    code      before    after           change
--------------  ------  --------  -------  ---------------
a.so            sm_100             200 B  appeared +200 B
4 more                     160 B     95 B            -65 B"""


def test_the_top_rows_and_the_rest_folded() -> None:
    before = [library("a.so", sm_80=100, sm_90=50), library("old.so", sm_80=10)]
    after = [library("a.so", sm_80=90, sm_100=200), library("new.so", sm_90=5)]
    shown = [" ".join(line.split()) for line in text(before, after, top=1).splitlines()]
    assert [line for line in shown if "--" not in line] == [
        " ".join(line.split()) for line in GOLDEN.splitlines() if "--" not in line
    ]
    assert "more" not in text(before, after, top=0)
    assert text(before, before).endswith("No code differs in 2 libraries.")


def test_hostile_names_are_escaped() -> None:
    assert "\x1b" not in text([], [planned("a\x1b[2J.so", 1, 1, used="", there="\x1b")])
