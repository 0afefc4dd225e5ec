"""Snapshots of maps, plans and locks, and how two of them differ."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.snapshot import (
    Change,
    CodeChange,
    KernelChanges,
    Snapshot,
    SnapshotLibrary,
    SnapshotRow,
)
from pytest_negativa.planning.snapshot import (
    compare_snapshots,
    make_snapshot,
    short_names,
    snapshot_lock,
    snapshot_map,
    stable_name,
)
from pytest_negativa.reporting.difference import render_difference
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.sites import lock_of


def library(name: str, **archs: int) -> SnapshotLibrary:
    """A library without a plan, with bytes by arch."""
    rows = tuple(SnapshotRow(arch, None, False, 1, size) for arch, size in archs.items())
    return SnapshotLibrary(name=name, rows=rows, size=sum(archs.values()))


def planned(name: str, loaded: int, unused: int, used: str, there: str) -> SnapshotLibrary:
    return SnapshotLibrary(
        name=name,
        rows=(
            SnapshotRow("sm_90", "loaded", False, 1, loaded),
            SnapshotRow("sm_80", "wrong-arch", True, 1, unused),
        ),
        size=loaded + unused,
        kernels=tuple(there),
        used_kernels=tuple(used),
    )


def snapshot(title: str, *libraries: SnapshotLibrary) -> Snapshot:
    return make_snapshot(title, libraries)


def text(before: Snapshot, after: Snapshot, top: int = 10) -> str:
    return "\n\n".join(render_difference(compare_snapshots(before, after), top))


def test_a_library_as_its_map_tells() -> None:
    found = snapshot_map(read_library(QUICKSTART_LIBRARY, Scope()))
    assert found.name == str(QUICKSTART_LIBRARY)
    assert (found.code_bytes, found.unused_bytes, sum(row.elements for row in found.rows)) == (
        67200,
        0,
        28,
    )
    # PTX is not machine code of its arch.
    assert {row.arch: row.elements for row in found.rows if "120" in str(row.arch)} == {
        "sm_120": 4,
        "ptx sm_120": 4,
    }
    assert found.kernels is not None and "vector_add" in found.kernels
    headers = snapshot_map(read_library(QUICKSTART_LIBRARY, Scope(headers_only=True)))
    assert (headers.kernels, headers.rows) == (None, found.rows)


def test_libraries_are_named_by_file_and_if_need_be_by_path() -> None:
    found = snapshot("x", library("/r/a/one.so"), library("/r/a/two.so"), library("/r/b/two.so"))
    assert [one.name for one in found.libraries] == ["a/two.so", "b/two.so", "one.so"]
    # Another folder for all of them changes no name.
    assert short_names(["/1/x/a/l.so", "/1/y/a/l.so", "/1/l.so"]) == (
        "x/a/l.so",
        "y/a/l.so",
        "1/l.so",
    )
    assert short_names(["l.so", "l.so", "x/l.so"]) == ("l.so", "l.so", "x/l.so")


def test_libraries_are_paired_whatever_else_was_loaded() -> None:
    one, two = (
        replace(library(f"/v/site-packages/{name}/l.so", sm_80=size), place=f"{name}/l.so")
        for name, size in (("a", 100), ("b", 50))
    )
    for few, many in (([one], [one, two]), ([two], [two, one])):
        [added] = {found.place for found in many} - {few[0].place}
        grown = compare_snapshots(snapshot("1", *few), snapshot("2", *many)).libraries
        assert {c.name: c.code.before for c in grown} == {
            few[0].place: few[0].code_bytes,
            added: None,
        }
        shrunk = compare_snapshots(snapshot("1", *many), snapshot("2", *few)).libraries
        assert [c.code.after for c in shrunk if c.name == "l.so"] == [few[0].code_bytes]
        assert [c.code.after for c in shrunk if c.name == added] == [None]


def test_one_path_of_two_sites_counts_together_in_a_lock() -> None:
    lock = lock_of(QUICKSTART_LIBRARY)
    [one] = lock.libraries
    other = replace(one, sha256="0" * 64, version="2.0", code_bytes=100, unused_bytes=40)
    both = snapshot_lock(replace(lock, libraries=(replace(one, version="1.0"), other)), "lock")
    [change] = compare_snapshots(snapshot_lock(lock, "one"), both).libraries
    assert change.code == Change(one.code_bytes, one.code_bytes + 100)
    assert change.unused == Change(one.unused_bytes, one.unused_bytes + 40)
    assert change.versions[1] == "1.0, 2.0"


def test_libraries_without_a_place_are_paired_by_the_end_of_one_name() -> None:
    before = snapshot("1", library("l.so", sm_80=100))
    after = snapshot("2", library("/x/a/l.so", sm_80=100))
    assert [one.code.growth for one in compare_snapshots(before, after).libraries] == [0]
    longer = replace(after, libraries=(replace(after.libraries[0], name="a/l.so"),))
    [change] = compare_snapshots(before, longer).libraries
    assert (change.name, change.code) == ("a/l.so", Change(100, 100))
    # Either could be the one of before.
    both = snapshot("2", library("/x/a/l.so", sm_80=100), library("/x/b/l.so", sm_80=100))
    assert len(compare_snapshots(before, both).libraries) == 3


def test_what_grew_appeared_and_went() -> None:
    before = snapshot("1.0", library("a.so", sm_80=100, sm_90=50), library("old.so", sm_80=10))
    after = snapshot("2.0", library("a.so", sm_80=90, sm_100=200), library("new.so", sm_90=5))

    found = compare_snapshots(before, after)

    assert [(one.name, one.code) for one in found.libraries] == [
        ("a.so", Change(150, 290)),
        ("old.so", Change(10, None)),
        ("new.so", Change(None, 5)),
    ]
    assert found.code == (
        CodeChange("a.so", "sm_100", None, Change(None, 200)),
        CodeChange("a.so", "sm_90", None, Change(50, None)),
        CodeChange("a.so", "sm_80", None, Change(100, 90)),
        CodeChange("old.so", "sm_80", None, Change(10, None)),
        CodeChange("new.so", "sm_90", None, Change(None, 5)),
    )
    assert found.kernels == ()


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
    sides = [replace(library("a.so"), kernels=(name,)) for name in (before, after)]
    found = compare_snapshots(snapshot("1", sides[0]), snapshot("2", sides[1]))
    assert found.kernels == ()


def test_kernels_of_two_files_are_two() -> None:
    name = "_Z43_GLOBAL__N__50f1b6c4_10_Dropout_cu_0e96ed38v"
    other = name.replace("10_Dropout", "10_Another")
    assert stable_name(name) != stable_name(other)
    # A length beyond the end, as only a hostile file has it.
    assert stable_name("_Z9999_GLOBAL__N__50f1b6c4_99_x") == "_Zx"


def test_between_runs_reasons_and_used_kernels_are_compared() -> None:
    before = snapshot("run 1", planned("a.so", 100, 50, used="ab", there="abcx"))
    after = snapshot("run 2", planned("a.so", 100, 80, used="bcd", there="abcd"))

    found = compare_snapshots(before, after)

    assert found.code == (CodeChange("a.so", "sm_80", "wrong-arch", Change(50, 80)),)
    [kernels] = found.kernels
    assert kernels == KernelChanges("a.so", ("d",), ("x",), ("c",), ("a",))


@pytest.mark.parametrize("reason", [None, "loaded"])
def test_what_one_side_does_not_tell_is_not_compared(reason: str | None) -> None:
    one = planned("a.so", 100, 50, used="a", there="ab")
    other = replace(one, rows=(SnapshotRow(None, reason, False, 1, 160),), used_kernels=None)
    [*changes] = compare_snapshots(snapshot("a", one), snapshot("b", other)).code
    if reason is None:
        assert changes == [CodeChange("a.so", None, None, Change(150, 160))]
    else:
        assert changes == [
            CodeChange("a.so", None, "kept", Change(100, 160)),
            CodeChange("a.so", None, "unused", Change(50, None)),
        ]


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
    before = snapshot("1.0", library("a.so", sm_80=100, sm_90=50), library("old.so", sm_80=10))
    after = snapshot("2.0", library("a.so", sm_80=90, sm_100=200), library("new.so", sm_90=5))
    shown = [" ".join(line.split()) for line in text(before, after, top=1).splitlines()]
    assert [line for line in shown if "--" not in line] == [
        " ".join(line.split()) for line in GOLDEN.splitlines() if "--" not in line
    ]
    assert "more" not in text(before, after, top=0)
    assert text(before, before).endswith("No code differs in 2 libraries.")


def test_hostile_names_are_escaped() -> None:
    bad = planned("a\x1b[2J.so", 1, 1, used="", there="\x1b")
    assert "\x1b" not in text(snapshot("\x1b"), snapshot("b", bad))
