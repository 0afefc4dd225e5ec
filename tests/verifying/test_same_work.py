"""Usage of the traced run and of the copies to differences in their work."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.trace import (
    LAUNCHES_CUT,
    Context,
    FirstUse,
    ImageForm,
    ImageUse,
    LibraryUsage,
    Phase,
    Refusal,
    TracedLibrary,
    Usage,
    UsageWarning,
)
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.rewriting.compact.records import CompactOptions
from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.verifying.same_work import (
    Places,
    Work,
    compare_work,
    details_by_library,
    name_holders,
    reasons_of_work,
    refused_work,
)
from tests.support.analyses import settings, used
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.usages import Launched, usage_of, with_launches

NO_COPIES = Places(Reconstruction(root="/", fill=1, libraries=(), refused={}))
A, B = (Context(phase=Phase.CALL, nodeid=f"test_a.py::test_{name}") for name in "ab")
CONTEXTS = (A, B)
PROCESS = Context(phase=Phase.PROCESS)


def image(kernels: Sequence[str], context: int = 0) -> ImageUse:
    first = FirstUse(process=0, context=context, time_ns=0)
    return ImageUse(
        form=ImageForm.FATBIN,
        calls=("cuLibraryLoadData",),
        kernels=dict.fromkeys(kernels, first),
        data=(),
        enumerated_by=(),
        first=first,
        processes=(0,),
    )


def usage(
    libraries: Mapping[str, Mapping[int, Sequence[str]]] | None = None,
    *,
    memory: Mapping[str, Sequence[str]] | None = None,
    launched: Mapping[int, Sequence[str]] | None = None,
    context: int = 0,
) -> Usage:
    """Kernels by library and offset; of images in memory by digest; launches by context."""
    rows = [
        LibraryUsage(
            library=TracedLibrary(path=path),
            images=tuple(
                replace(image(kernels, context), offset=offset)
                for offset, kernels in images.items()
            ),
            processes=(0,),
        )
        for path, images in (libraries or {}).items()
    ]
    usage = replace(
        usage_of(*rows),
        contexts=(*CONTEXTS, PROCESS),
        memory_images=tuple(
            replace(image(kernels, context), sha256=sha256, size=1)
            for sha256, kernels in (memory or {}).items()
        ),
    )
    launches = (
        Launched(name, context=number, launches=1)
        for number, names in (launched or {}).items()
        for name in names
    )
    return with_launches(usage, *launches)


def compare(
    traced: Usage,
    copies: Usage,
    *,
    flaky: Sequence[str] = (),
    launches: bool = False,
) -> tuple[Need, ...]:
    return compare_work(
        Work.of(traced, NO_COPIES),
        Work.of(copies, NO_COPIES),
        flaky,
        launches=launches,
    )


def texts(*args: Usage, **options: object) -> list[str]:
    return [d.detail for d in compare(*args, **options)]  # type: ignore[arg-type]


TRACED = usage({"/lib/a.so": {16: ["k", "l"], 64: []}}, memory={"d1": ["m"], "d2": []})


def test_equal_use_is_no_difference() -> None:
    assert compare(TRACED, TRACED) == ()
    more = usage({"/lib/a.so": {16: ["k", "l", "n"], 64: ["o"]}}, memory={"d3": ["m"], "d2": []})
    assert compare(TRACED, more) == (), "more is used on the copies, and d1 was trimmed"


@pytest.mark.parametrize(
    ("copies", "left_out"),
    [
        (usage({"/lib/a.so": {16: ["l"], 64: []}}, memory={"d1": ["m"], "d2": []}), ["k of a.so"]),
        (
            usage({"/lib/a.so": {64: []}}, memory={"d1": ["m"], "d2": []}),
            ["k of a.so", "l of a.so"],
        ),
        (
            usage({"/lib/a.so": {16: ["k", "l"]}}, memory={"d1": ["m"], "d2": []}),
            ["the image at 0x40 of a.so"],
        ),
        (usage({"/lib/a.so": {16: ["k", "l"], 64: []}}, memory={"d2": []}), ["m"]),
        (
            usage({"/lib/a.so": {16: ["k", "l"], 64: []}}, memory={"d1": ["m"]}),
            ["the image at d2"],
        ),
    ],
)
def test_what_is_left_out_is_named(copies: Usage, left_out: list[str]) -> None:
    assert texts(TRACED, copies) == [f"{what}, first used in {A}" for what in left_out]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"data": ("table",)}, "table"),
        ({"functions": ("callback",)}, "callback"),
        (
            {"enumerated_by": ("cuLibraryEnumerateKernels",)},
            "all kernels, by cuLibraryEnumerateKernels,",
        ),
    ],
    ids=["variable", "function", "enumeration"],
)
def test_variables_and_enumerations_are_work_too(
    asked: Mapping[str, Sequence[str]], what: str
) -> None:
    traced = usage({"/lib/a.so": {16: ["k"]}}, memory={"d1": ["m"]})
    [library], [memory] = traced.libraries, traced.memory_images
    asking = replace(
        traced,
        libraries=(replace(library, images=(replace(library.images[0], **asked),)),),
        memory_images=(replace(memory, **asked),),
    )
    assert texts(asking, traced) == [
        f"{name}, first used in an unknown test" for name in (what, f"{what} of a.so")
    ]
    assert compare(asking, asking) == compare(traced, asking) == ()


def test_a_kernel_of_another_place_is_another_kernel() -> None:
    moved = usage({"/lib/a.so": {16: ["l"], 64: ["k"]}}, memory={"d1": ["m"], "d2": []})
    assert texts(TRACED, moved) == [f"k of a.so, first used in {A}"]
    # A library without a copy may lie in a folder of its own in every run.
    elsewhere = usage({"/tmp/7/a.so": {16: ["k", "l"], 64: []}}, memory={"d1": ["m"], "d2": []})
    assert compare(TRACED, elsewhere) == ()


def test_launches_are_compared_test_by_test() -> None:
    lookups = {"/lib/a.so": {16: ["k", "l"]}}
    traced = usage(lookups, launched={0: ["k", "l"], 1: ["k"], 2: ["l"]})
    copies = usage(lookups, launched={0: ["k"], 1: ["k", "l"], 2: ["l"]})
    assert compare(traced, copies) == ()
    found = compare(traced, copies, launches=True)
    assert [(d.witness, d.detail) for d in found] == [(Witness.NOT_LAUNCHED, f"l, in {A.nodeid}")]
    assert compare(traced, copies, launches=True, flaky=[str(A.nodeid)]) == ()
    # Without counts, nothing tells which other tests use what a flaky one used first.
    lacking = usage({"/lib/a.so": {16: ["l"]}})
    assert [d.kernel for d in compare(traced, lacking, flaky=[str(A.nodeid)])] == ["k"]


def test_launches_of_a_killed_child_are_not_asked_for() -> None:
    lookups = {"/lib/a.so": {16: ["k", "l"]}}
    traced = usage(lookups, launched={0: ["k", "l"], 1: ["k", "l"]})
    copies = usage(lookups, launched={0: ["k"], 1: ["k"]})
    [process] = copies.processes
    killed = replace(
        copies,
        processes=(replace(process, last=A),),
        warnings=(UsageWarning(code=LAUNCHES_CUT, text="it was killed", process=0),),
    )
    found = compare(traced, killed, launches=True)
    assert [d.nodeid for d in found] == [CONTEXTS[1].nodeid]


def refusing(**fields: object) -> Usage:
    first = FirstUse(process=0, context=0, time_ns=0)
    given = {"call": "cuLibraryGetKernel", "code": 500, "path": "/lib/a.so", "offset": 16}
    refusal = Refusal(**{**given, "name": "k", **fields}, first=first)  # type: ignore[arg-type]
    return replace(usage(), refusals=(refusal,))


def refused(traced: Usage, copies: Usage) -> tuple[Need, ...]:
    return refused_work(Work.of(traced, NO_COPIES), Work.of(copies, NO_COPIES))


def test_what_the_driver_refused_on_the_copies_alone() -> None:
    [work] = refused(usage(), refusing())
    assert (work.witness, work.library, work.image, work.kernel) == (
        Witness.REFUSED,
        "a.so",
        "0x10",
        "k",
    )
    assert (work.test, work.nodeid) == (str(A), A.nodeid)
    assert work.note == "cuLibraryGetKernel ended with error 500"
    # Of an image in memory, or of no known place, the name tells.
    for place in {"path": None, "offset": None}, {"offset": None}, {"path": None}:
        [work] = refused(usage(), refusing(**place))
        assert (work.library, work.image, work.kernel) == (None, None, "k")


@pytest.mark.parametrize(
    "fields",
    [{"code": code} for code in (2, 3, 4, 46, 100, 101, 201, 304, 600, 700, 721, 802, 810, 900)]
    + [{"code": code} for code in (911, 999)]
    + [{"path": None, "name": None}],
    ids=str,
)
def test_refusals_that_tell_of_no_code(fields: Mapping[str, object]) -> None:
    assert refused(usage(), refusing(**fields)) == ()


def test_refusals_on_the_originals_are_no_difference() -> None:
    assert refused(refusing(), refusing()) == ()
    # The same call and kernel, whatever the code; another place or call is another refusal.
    assert refused(refusing(code=209), refusing()) == ()
    for other in {"offset": 64}, {"path": "/lib/b.so"}, {"call": "cuModuleGetFunction"}:
        assert len(refused(refusing(**other), refusing())) == 1


def test_reasons_name_the_first_and_count_the_rest() -> None:
    work = compare(TRACED, usage())
    [reason] = reasons_of_work(work, TRACED)
    assert reason == (f"used when traced, but not on the copies: m, first used in {A} and 4 more")
    assert details_by_library(work) == {
        "a.so": f"used when traced, but not on the copies: k of a.so, first used in {A} and 2 more"
    }
    of_a = [d for d in work if d.library]
    [two] = reasons_of_work(of_a[:2], TRACED)
    assert two.endswith(f"k of a.so, first used in {A} and 1 more")
    gap = UsageWarning(code="gap", text="the detector was off", process=0)
    assert list(reasons_of_work(work, replace(TRACED, incomplete=(gap,)))) == [
        reason,
        "tracing on the copies was incomplete: the detector was off",
    ]


def test_a_kernel_in_memory_is_traced_to_its_library(tmp_path: Path) -> None:
    library = Path(shutil.copy(QUICKSTART_LIBRARY, tmp_path))
    [planned] = analyze(used(library), settings(tmp_path)).libraries
    [work] = name_holders(compare(usage(memory={"d": ["vector_add"]}), usage()), [planned])
    assert work.library == str(library)


@pytest.mark.parametrize("compact", [None, CompactOptions(min_gain=0)], ids=["same", "compacted"])
def test_places_in_copies_are_those_of_the_originals(
    tmp_path: Path, compact: CompactOptions | None
) -> None:
    library = Path(shutil.copy(QUICKSTART_LIBRARY, tmp_path))
    analysis = analyze(used(library, regions=(3,)), settings(tmp_path))
    made = reconstruct(analysis.libraries, tmp_path / "copies", compact=compact)
    [copied] = made.libraries
    assert (copied.compaction is not None) == (compact is not None)
    original = {r.span.start for r in read_library(library, Scope()).iter_regions()}
    in_copy = [r.span.start for r in read_library(Path(copied.copy), Scope()).iter_regions()]
    places = Places(made)
    found = [places.find(copied.copy, offset) for offset in in_copy]
    assert found and {path for path, _ in found} == {str(library)}
    assert {offset for _, offset in found} <= original
    assert places.find(str(library), 7) == (str(library), 7)
    if copied.compaction is not None:
        assert [offset for _, offset in found] != in_copy
        kept = copied.compaction.kept
        assert {places.find(copied.copy, k.target)[1] for k in kept} == {k.start for k in kept}
        for k, behind in itertools.pairwise(kept):
            size = k.end - k.start
            assert places.find(copied.copy, k.target + size - 1) == (str(library), k.end - 1)
            if k.target + size < behind.target:
                assert places.find(copied.copy, k.target + size) == (str(library), -1)
        assert places.find(copied.copy, 1 << 40) == (str(library), -1)
