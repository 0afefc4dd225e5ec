"""The use of a part of the tests, and how alike groups of tests are."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import OptionError
from pytest_negativa.models.coverage import KernelRun
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.trace import (
    Context,
    FirstUse,
    ImageUse,
    LibraryUsage,
    Phase,
    Role,
    TracedLibrary,
    Usage,
    UsageProcess,
)
from pytest_negativa.planning.by_tests import (
    compare_groups,
    kernels_of_tests,
    launches_by_range,
    select_tests,
    usage_of_tests,
)
from tests.support.traces import header
from tests.support.usages import Launched, image_use, usage_of, with_launches

A, B, FIXTURE = 0, 1, 2
CONTEXTS = (
    Context(phase=Phase.CALL, nodeid="t.py::a"),
    Context(phase=Phase.CALL, nodeid="t.py::b"),
    Context(phase=Phase.FIXTURE, nodeid="t.py", detail="model"),
)


def image(loaded: int, **kernels: int) -> ImageUse:
    """An image that was loaded in a context, with kernels by the context of their look-up."""
    first = FirstUse(process=0, context=loaded, time_ns=loaded)
    return replace(
        image_use(),
        first=first,
        kernels={name: replace(first, context=context) for name, context in kernels.items()},
    )


def usage(*images: ImageUse, **launches: tuple[int, ...]) -> Usage:
    """A usage with launches by the contexts of each kernel."""
    library = LibraryUsage(
        library=TracedLibrary(path="/lib.so"),
        images=tuple(replace(use, offset=n) for n, use in enumerate(images)),
        processes=(0,),
    )
    process = UsageProcess(
        header=header(role=Role.SOLO), trace="t", ended=True, counts_launches=True
    )
    counted = (
        Launched(name, context=context, launches=3)
        for name, contexts in launches.items()
        for context in contexts
    )
    whole = replace(usage_of(library), contexts=CONTEXTS, processes=(process,))
    return with_launches(whole, *counted)


def used_by(whole: Usage, *tests: str) -> dict[int, set[str]]:
    """The kernels that tests use alone, by image."""
    [library] = usage_of_tests(whole, tests).libraries
    return {image.offset: set(image.kernels) for image in library.images}


def test_a_test_needs_what_it_launched_though_another_looked_it_up() -> None:
    whole = usage(image(A, x=A, y=A), image(A, z=A), x=(A, B), y=(A,), z=(A,))
    assert used_by(whole, "t.py::a") == {0: {"x", "y"}, 1: {"z"}}
    assert used_by(whole, "t.py::b") == {0: {"x"}}
    part = usage_of_tests(whole, {"t.py::b"})
    # No context of a test that is left out.
    assert {context for _, context in part.first_uses()} == {part.contexts[B]}
    assert [row.context for _, row in part.iter_launches()] == [B]
    assert kernels_of_tests(whole, "t.py::b") == {"x": KernelRun("t.py::b", 3)}
    assert kernels_of_tests(whole, "t.py::c") == {}


def test_launches_and_gpu_time_add_up_by_range() -> None:
    whole = with_launches(
        usage(image(A, x=A, y=A)),
        Launched("x", context=A, launches=2, gpu_ns=100, ranges=("forward", "mm")),
        Launched("x", context=A, launches=1, gpu_ns=40),
        Launched("launched without a look-up", context=A, launches=1, gpu_ns=7),
        Launched("x", context=FIXTURE, launches=1, gpu_ns=5),
        Launched("x", context=B, launches=1),
    )
    a, fixture = "t.py::a", "t.py (fixture)"
    assert kernels_of_tests(whole, a) == {"x": KernelRun(a, 3, 140)}
    assert kernels_of_tests(whole, "t.py::b") == {"x": KernelRun("t.py::b", 1, None)}
    assert kernels_of_tests(whole, "t.py::*") == {"x": KernelRun(a, 4, None)}
    assert launches_by_range(whole) == {
        a: {
            ("forward", "mm"): {"x": KernelRun(a, 2, 100)},
            (): {
                "x": KernelRun(a, 1, 40),
                "launched without a look-up": KernelRun(a, 1, 7),
            },
        },
        fixture: {(): {"x": KernelRun(fixture, 1, 5)}},
        "t.py::b": {(): {"x": KernelRun("t.py::b", 1, None)}},
    }


def test_a_look_up_stands_for_launches_that_were_not_counted() -> None:
    whole = replace(usage(image(B, x=B)), processes=())
    assert launches_by_range(whole) == {"t.py::b": {(): {"x": KernelRun("t.py::b", None)}}}


@pytest.mark.parametrize(
    ("use", "launches", "kernels"),
    [
        pytest.param(image(FIXTURE, f=FIXTURE), {"f": (FIXTURE,)}, {"f"}, id="a fixture launched"),
        pytest.param(image(FIXTURE, f=A), {"f": (A,)}, set(), id="a fixture loaded"),
        pytest.param(image(A, f=A), {}, {"f"}, id="looked up, never launched"),
        pytest.param(image(A), {}, set(), id="no look-up was seen"),
        pytest.param(
            replace(image(A, f=A), enumerated_by=("cuModuleEnumerateFunctions",)),
            {"f": (A,)},
            {"f"},
            id="enumerated",
        ),
        pytest.param(
            replace(image(A, f=A), data=("v",)),
            {"f": (A,)},
            {"f"},
            id="a variable",
        ),
        pytest.param(
            replace(image(A, f=A), functions=("g",)),
            {"f": (A,)},
            {"f"},
            id="a function",
        ),
        pytest.param(
            replace(image(A, f=A), processes=(0, 1)), {"f": (A,)}, {"f"}, id="a child used it"
        ),
    ],
)
def test_what_belongs_to_no_test_counts_for_every_test(
    use: ImageUse, launches: dict[str, tuple[int, ...]], kernels: set[str]
) -> None:
    whole = usage(use, x=(A,), **launches)
    child = replace(whole.processes[0], counts_launches=False)
    assert used_by(replace(whole, processes=(*whole.processes, child)), "t.py::b") == {0: kernels}


def result(
    nodeid: str, markers: tuple[str, ...] = (), keywords: tuple[str, ...] = ()
) -> TestResult:
    return TestResult(
        nodeid=nodeid, outcome=Outcome.PASSED, duration=0, markers=markers, keywords=keywords
    )


TESTS = (
    result("a/t.py::f[1]", ("gpu", "slow"), ("t.py", "f[1]", "gpu", "slow")),
    result("a/t.py::TestX::g", ("gpu",), ("t.py", "TestX", "g", "gpu")),
    result("ab.py::h", (), ("ab.py", "h")),
)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"markers": "gpu and not slow"}, {1}),
        ({"markers": "gp"}, None),
        ({"keywords": "testx or AB"}, {1, 2}),
        ({"keywords": "f", "markers": "gpu"}, {0}),
        ({"nodeids": ["a"]}, {0, 1}),
        ({"nodeids": ["a/t.py::f", "ab.py"]}, {0, 2}),
        ({"nodeids": ["a/t.py::TestX"]}, {1}),
        ({"nodeids": ["a/"], "keywords": "g"}, {0, 1}),
        ({"nodeids": ["b"]}, None),
        ({"markers": "gpu("}, None),
        ({"keywords": "("}, None),
        ({"markers": "gpu(n=1)"}, None),
    ],
)
def test_selection(given: dict[str, Any], chosen: set[int] | None) -> None:
    if chosen is None:
        with pytest.raises(OptionError):
            select_tests(TESTS, **given)
    else:
        assert select_tests(TESTS, **given) == tuple(
            test for n, test in enumerate(TESTS) if n in chosen
        )


def test_tests_without_keywords_cannot_be_selected_by_them() -> None:
    with pytest.raises(OptionError, match="has no keywords"):
        select_tests([result("t.py::f")], keywords="f")
    assert select_tests([result("t.py::f", ("gpu",))], markers="gpu")


@pytest.mark.parametrize(("markers", "known"), [(("slow", "gpu"), "gpu, slow"), ((), "none")])
def test_markers_that_no_test_has(markers: tuple[str, ...], known: str) -> None:
    with pytest.raises(OptionError, match=f"1 tests matches; the run's markers: {known}$"):
        select_tests([result("t.py::f", markers)], markers="nope")


def test_jaccard_similarity() -> None:
    found = compare_groups({"c": {"x"}, "a": {"x", "y"}, "b": {"x", "y", "z"}, "none": set()})
    assert [(one.left, one.right, one.shared, one.either) for one in found] == [
        ("a", "b", 2, 3),
        ("a", "c", 1, 2),
        ("b", "c", 1, 3),
    ]
    assert found[1].similarity == 0.5
