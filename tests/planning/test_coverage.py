"""Kernel coverage: from a plan and a usage to the tests that ran each kernel."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_negativa.models.coverage import KernelRun, LibraryCoverage
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.plan import KernelUse, LibraryPlan
from pytest_negativa.models.trace import (
    Context,
    LibraryUsage,
    Phase,
    Role,
    TracedLibrary,
    Usage,
    UsageProcess,
)
from pytest_negativa.planning.by_tests import cover_library, split_signature
from tests.support.traces import header
from tests.support.usages import TEST, Launched, image_use, usage_of, with_launches

FIXTURE = Context(phase=Phase.FIXTURE, nodeid="tests/test_a.py", detail="model")
SETUP = Context(phase=Phase.SETUP, nodeid="tests/test_a.py::test_c")
PATH = "/project/libours.so"
USED = LibraryUsage(
    library=TracedLibrary(path=PATH),
    images=(image_use(("a", "b", "m1")),),
    processes=(0,),
)


def plan(*used: str, unused: tuple[str, ...] = ()) -> LibraryPlan:
    return LibraryPlan(
        library=LibraryIdentity(path=PATH, size=1, mtime_ns=1, build_id=None, soname=None),
        devices=("9.0",),
        decisions=(),
        used_kernels=tuple(KernelUse(name, TEST) for name in used),
        unused_kernels=unused,
    )


def usage(*launches: Launched, counts: bool = True) -> Usage:
    process = UsageProcess(
        header=header(role=Role.SOLO), trace="t", ended=True, counts_launches=counts
    )
    whole = replace(usage_of(USED), contexts=(TEST, FIXTURE, SETUP), processes=(process,))
    return with_launches(whole, *launches)


def runs(found: LibraryCoverage) -> dict[str, list[tuple[str, int | None]]]:
    return {
        kernel.name: [(run.test, run.launches) for run in kernel.runs] for kernel in found.kernels
    }


def test_at_level_launch_a_kernel_ran_in_the_tests_that_launched_it() -> None:
    launches = (
        Launched("a", context=0, launches=2),
        Launched("a", context=1, launches=1),
        Launched("a", context=2, launches=4),
        # Of another library: the plan has it as unused.
        Launched("c", context=0, launches=1),
    )
    found = cover_library(plan("a", "b", unused=("c",)), USED, usage(*launches))
    assert runs(found) == {
        "a": [
            ("tests/test_a.py (fixture)", 1),
            ("tests/test_a.py::test_b", 2),
            ("tests/test_a.py::test_c", 4),
        ],
        # Looked up, and never launched.
        "b": [],
        "c": [],
    }
    assert (found.run_kernels, found.word) == (1, "run")


def test_a_process_that_counts_no_launches_runs_what_it_looks_up() -> None:
    launch = Launched("a", context=0, launches=2)
    found = cover_library(plan("a", "b"), USED, usage(launch, counts=False))
    assert runs(found)["b"] == [("tests/test_a.py::test_b", None)]


def test_groups_by_source_file_or_namespace() -> None:
    signatures = {
        "m1": "void ns::f<int>(int)",
        "m2": "void ns::f<float>(float)",
        "m3": "other::g()",
        "m4": "h",
    }
    places = {"m3": ("src/g.cu", 7)}
    found = cover_library(
        plan("m1", unused=("m2", "m3", "m4")),
        USED,
        usage(counts=False),
        signatures.__getitem__,
        places,
    )
    groups = [(name, [k.name for k in kernels]) for name, kernels in found.groups().items()]
    assert groups == [("", ["m4"]), ("ns", ["m1", "m2"]), ("src/g.cu", ["m3"])]
    assert [kernel.template for kernel in found.kernels] == ["f", "f", "g", "h"]
    [g] = (kernel for kernel in found.kernels if kernel.name == "m3")
    assert (g.line, g.runs) == (7, ())
    assert found.kernels[0].runs == (KernelRun(TEST.place, None),)


@pytest.mark.parametrize(
    ("signature", "scope", "name"),
    [
        ("vector_add", "", "vector_add"),
        ("scale(float*, float)", "", "scale"),
        ("void matrices::multiply<16>(float const*, int)", "matrices", "multiply"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul>>(int, at::native::CUDAFunctor_add<float>)",
            "at::native",
            "vectorized_elementwise_kernel",
        ),
        (
            "void at::(anonymous namespace)::k<(anonymous namespace)::T>(int)",
            "at::(anonymous namespace)",
            "k",
        ),
        (
            "void k<f(int)::{lambda(float)#1}::operator()(float) const::{lambda()#2}>(int)",
            "",
            "k",
        ),
        ("void ns::box<int [3]>::k<(&(ns::f))>(void (*)(int))", "ns::box", "k"),
        # Unbalanced: the name as a whole.
        ("void k<&(operator< )>(int)", "", "void k<&(operator< )>(int)"),
        ("", "", ""),
    ],
)
def test_a_signature_without_arguments(signature: str, scope: str, name: str) -> None:
    assert split_signature(signature) == (scope, name)
