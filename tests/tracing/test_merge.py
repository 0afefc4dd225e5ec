"""Merging: the union, what came first, and what is missing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.trace import (
    UNENDED,
    AnyTraceRecord,
    Context,
    ContextRecord,
    DataKind,
    DataRecord,
    DeviceRecord,
    EndRecord,
    EnumerationRecord,
    GapEndRecord,
    GapRecord,
    ImageForm,
    ImageRecord,
    KernelRecord,
    LaunchRecord,
    LibraryRecord,
    Phase,
    Refusal,
    RefusalRecord,
    Replay,
    Role,
    TracedLibrary,
    WarningRecord,
)
from pytest_negativa.storage.results import save_digests
from pytest_negativa.storage.runs import TRACE_SUFFIX, Run
from pytest_negativa.tracing.merge import STILL_RUNNING, merge_traces, merge_when_ended
from pytest_negativa.tracing.trace_files import TraceWriter
from tests.support.faults import PlantedFault
from tests.support.traces import DEVICE, LIBRARY, header, records, write


def context(id: int, nodeid: str, time_ns: int = 1) -> ContextRecord:
    return ContextRecord(id=id, context=Context(phase=Phase.CALL, nodeid=nodeid), time_ns=time_ns)


def test_union_of_two_processes(tmp_path: Path) -> None:
    a = write(tmp_path, header(7), records("k1", "k2", nodeid="a", time_ns=200))
    b = write(tmp_path, header(8, Role.WORKER), records("k2", "k3", nodeid="b", time_ns=100))
    usage = merge_traces([a, b])
    (library,) = usage.libraries
    assert library.library == LIBRARY and library.processes == (0, 1)
    (image,) = library.images
    assert image.offset == 0x40 and image.processes == (0, 1)
    firsts = {k: usage.contexts[first.context].nodeid for k, first in image.kernels.items()}
    assert firsts == {"k1": "a", "k2": "b", "k3": "b"}
    assert usage.devices == (DEVICE,)
    assert not usage.incomplete and not usage.warnings
    third = write(tmp_path, header(9, Role.WORKER), records("k3", nodeid="c", time_ns=300))
    usage = merge_traces([third, b, a])
    (library,) = usage.libraries
    (image,) = library.images
    assert library.processes == image.processes == (0, 1, 2)
    again = {k: usage.contexts[first.context].nodeid for k, first in image.kernels.items()}
    assert again == firsts


@pytest.mark.planted_fault(
    "A child in another namespace has the process id of the session, and its trace has no end.",
    says="its trace has no end, and nothing tells whether it has ended",
)
def test_a_child_with_the_id_of_the_session(tmp_path: Path, fault: PlantedFault) -> None:
    own = write(tmp_path, header(7), records("k1"), end=False)
    child = write(tmp_path, header(7, Role.CHILD, start_ns=6), records("k2"), end=False)
    # As on a file system without locks.
    child.write_bytes(child.read_bytes().replace(b'"locked":true,', b""))
    usage = merge_traces([own, child], running=[7])
    assert [process.ended for process in usage.processes] == [True, False]
    [lack] = usage.incomplete
    fault.check(lack.text)


@pytest.mark.planted_fault(
    "The driver tells one process nothing of its GPU, which may have another arch",
    says="nothing tells its devices",
)
def test_a_process_that_names_no_device(tmp_path: Path, fault: PlantedFault) -> None:
    a = write(tmp_path, header(7), records("k1"))
    silent = [record for record in records("k1") if not isinstance(record, DeviceRecord)]
    b = write(tmp_path, header(8, Role.WORKER), silent)
    [lack] = merge_traces([a, b]).incomplete
    assert lack.process is None, "it concerns every library"
    fault.check(lack.text)


def test_the_order_of_files_and_of_lines_makes_no_difference(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, header(pid), records(f"k{pid}", "k", nodeid=f"t{pid}", offset=999 - pid))
        for pid in (7, 8, 9)
    ]
    other = LibraryRecord(id=1, library=TracedLibrary(path="/other.so", size=10))
    lines = [other if isinstance(r, LibraryRecord) else r for r in records("k")]
    paths.append(write(tmp_path, header(10), lines))
    usages = [merge_traces(order) for order in itertools.permutations(paths)]
    assert all(usage == usages[0] for usage in usages)
    assert [found.processes for found in usages[0].libraries] == [(3,), (0, 1, 2)]
    assert [image.processes for image in usages[0].libraries[1].images] == [(2,), (1,), (0,)]
    device, *lines = records()
    uses: tuple[AnyTraceRecord, ...] = (
        KernelRecord(image=3, name="k", context=2),
        RefusalRecord(call="get", code=500, context=2, image=3, name="k"),
        RefusalRecord(call="load", code=200, context=2, library=1, offset=0x40),
        LaunchRecord(name="k", count=2, context=2),
    )
    for use in uses:
        merged = [
            merge_traces([write(tmp_path, header(), [device, *order])])
            for order in itertools.permutations([*lines, use])
        ]
        found = [(u.libraries, u.refusals, u.launches, u.incomplete) for u in merged]
        assert found == [found[0]] * len(found) and not found[0][-1]


def test_killed_processes_are_reported_and_their_uses_kept(tmp_path: Path) -> None:
    path = write(tmp_path, header(), records("k1", "k2"), end=False)
    path.write_bytes(path.read_bytes()[:-3])
    usage = merge_traces([path])
    assert not usage.processes[0].ended and usage.processes[0].torn
    assert list(usage.libraries[0].images[0].kernels) == ["k1"]
    assert [(lack.code, lack.process) for lack in usage.incomplete] == [(UNENDED, None)]


def test_what_cannot_be_read_makes_the_usage_incomplete(tmp_path: Path) -> None:
    good = write(tmp_path, header(), records("k1"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    damaged = write(tmp_path, header(8), records("k2"))
    damaged.write_bytes(damaged.read_bytes().replace(b'"name":"k2"', b'"name":2'))
    usage = merge_traces([good, empty, damaged, tmp_path / "missing.jsonl"])
    assert [(w.code, w.process) for w in usage.incomplete] == [
        ("trace-damaged", None),
        ("trace-unreadable", None),
        ("trace-unreadable", None),
    ]
    assert len(usage.processes) == 2


def test_an_unreadable_sample_is_no_lack(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trace_dir.mkdir()
    empty = run.trace_dir / "empty.jsonl"
    empty.touch()
    assert [w.code for w in merge_traces([empty]).incomplete] == ["trace-unreadable"]
    run.mark("samples", "made by negativa trace --attach-env")
    usage = merge_traces([empty])
    assert [w.code for w in usage.warnings] == ["trace-unreadable"] and not usage.incomplete


def test_the_merge_waits_for_children(tmp_path: Path) -> None:
    child = TraceWriter(tmp_path / f"child{TRACE_SUFFIX}", header(8, Role.CHILD))
    [lack] = merge_when_ended(lambda: [child.path], seconds=0).incomplete
    assert lack.code == STILL_RUNNING
    looks = itertools.count()

    def find() -> list[Path]:
        if next(looks) == 1:
            child.write(EndRecord(time_ns=1000))
            child.close()
        return [child.path]

    assert merge_when_ended(find).processes[0].ended and next(looks) == 2
    assert not merge_when_ended(find).incomplete and next(looks) == 4


def test_the_first_of_several_calls_that_load_an_image(tmp_path: Path) -> None:
    def load(call: str, context: int) -> ImageRecord:
        return ImageRecord(
            id=3, form=ImageForm.FATBIN, call=call, context=context, library=1, offset=0x40
        )

    lines = [*records(), context(4, "before", time_ns=50), load("other", 4), load("third", 2)]
    [library] = merge_traces([write(tmp_path, header(), lines)]).libraries
    [image] = library.images
    assert image.calls == ("cuLibraryLoadData", "other", "third")
    assert image.first.time_ns == 50


def test_dangling_references_are_incomplete(tmp_path: Path) -> None:
    lines: list[AnyTraceRecord] = [
        KernelRecord(image=99, name="k", context=98),
        ImageRecord(id=1, form=ImageForm.FATBIN, call="c", context=97, library=96, offset=0),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    (problem,) = usage.incomplete
    assert problem.code == "trace-damaged"
    assert problem.text.endswith(": context 97, image 99, library 96")


def test_images_in_memory_and_compiled_ones_are_apart(tmp_path: Path) -> None:
    def image(id: int, form: ImageForm, sha256: str) -> ImageRecord:
        return ImageRecord(id=id, form=form, call="load", context=1, sha256=sha256 * 64, size=5)

    lines: list[AnyTraceRecord] = [
        context(1, "t"),
        image(2, ImageForm.CUBIN, "a"),
        image(3, ImageForm.PTX, "b"),
        image(4, ImageForm.LINKED, "c"),
        image(5, ImageForm.CUBIN, "c"),  # what the linker made is then loaded
        KernelRecord(image=5, name="linked", context=1),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    assert [(m.sha256[0], m.size) for m in usage.memory_images] == [("a", 5)]
    assert [m.sha256[0] for m in usage.compiled] == ["b", "c"]
    assert list(usage.compiled[1].kernels) == ["linked"]


def test_unknown_images_are_incomplete_and_name_what_was_used(tmp_path: Path) -> None:
    lines: list[AnyTraceRecord] = [
        context(1, "t"),
        ImageRecord(id=2, form=ImageForm.UNKNOWN, call="before cuLibraryGetKernel", context=1),
        KernelRecord(image=2, name="k9", context=1),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    (problem,) = usage.incomplete
    assert problem.code == "image-unknown" and "k9" in problem.text


def test_data_enumerations_and_prelinked(tmp_path: Path) -> None:
    lines = [
        *records("k"),
        DataRecord(image=3, name="d", kind=DataKind.MANAGED, context=2),
        EnumerationRecord(image=3, call="cuModuleEnumerateFunctions", context=2),
        EnumerationRecord(image=3, call="cuLibraryEnumerateKernels", context=2),
        LaunchRecord(name="k", count=2, context=2, gpu_ns=70),
        LaunchRecord(name="k", count=3, context=2, gpu_ns=50),
        LaunchRecord(name="k", count=1, context=2, gpu_ns=9, ranges=("outer", "inner")),
        LaunchRecord(name="old", count=1, context=2, gpu_ns=1, ranges=("inner",)),
        # As of a recording without times.
        LaunchRecord(name="old", count=1, context=2, gpu_ns=9),
        LaunchRecord(name="old", count=1, context=2),
        LaunchRecord(name="old", count=1, context=2, gpu_ns=9),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    use = usage.libraries[0].images[0]
    assert (use.data, use.functions) == (("d",), ())
    assert use.enumerated_by == ("cuLibraryEnumerateKernels", "cuModuleEnumerateFunctions")
    assert use.whole
    assert [
        (name, row.count, row.gpu_ns, usage.ranges_of(row)) for name, row in usage.iter_launches()
    ] == [
        ("k", 5, 120, ()),
        ("k", 1, 9, ("outer", "inner")),
        ("old", 3, None, ()),
        ("old", 1, 1, ("inner",)),
    ]
    assert usage.processes[0].counts_launches
    assert not merge_traces([write(tmp_path, header(), records("k"))]).processes[0].counts_launches
    # The file has each name once.
    assert list(usage.launches) == ["k", "old"]
    assert usage.ranges == (("inner",), ("outer", "inner"))


def test_an_image_without_look_ups_counts_as_whole(tmp_path: Path) -> None:
    (path_a, path_b) = (
        write(tmp_path, header(7), records()),
        write(tmp_path, header(7), records("k")),
    )
    assert merge_traces([path_a]).libraries[0].images[0].whole
    assert not merge_traces([path_b]).libraries[0].images[0].whole


@pytest.mark.parametrize("ended", [True, False])
def test_gaps_are_incomplete(tmp_path: Path, ended: bool) -> None:
    lines: list[AnyTraceRecord] = [
        context(1, "test_profiler"),
        GapRecord(id=2, reason="negativa_off", context=1, time_ns=10),
        *([GapEndRecord(id=2, time_ns=20)] if ended else []),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    assert usage.incomplete[0].code == "gap"
    state = "was off" if ended else "went off and stayed so"
    assert usage.incomplete[0].text.endswith(f"test_profiler: the detector {state}: negativa_off")


def test_refusals_tell_the_place_of_their_image(tmp_path: Path) -> None:
    lines = [
        # A thread may write what it refers to later.
        RefusalRecord(call="get", code=500, context=2, image=3, name="early"),
        *records("k", nodeid="a", time_ns=100),
        context(4, "b", time_ns=50),
        RefusalRecord(call="load", code=209, context=2, library=1, offset=0x80),
        RefusalRecord(call="load", code=200, context=4, library=1, offset=0x80),
        RefusalRecord(call="get", code=500, context=2, image=3, name="x"),
        RefusalRecord(call="load", code=218, context=2),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])

    def row(refusal: Refusal) -> tuple[object, ...]:
        nodeid = usage.contexts[refusal.first.context].nodeid
        return (
            refusal.call,
            refusal.name,
            refusal.code,
            refusal.path,
            refusal.offset,
            nodeid,
        )

    # The first of two at one place counts, by the time of its context.
    assert [row(refusal) for refusal in usage.refusals] == [
        ("load", None, 200, LIBRARY.path, 0x80, "b"),
        ("get", "early", 500, LIBRARY.path, 0x40, "a"),
        ("get", "x", 500, LIBRARY.path, 0x40, "a"),
        ("load", None, 218, None, None, "a"),
    ]
    assert not usage.incomplete


def test_samples_alone_tell_no_devices(tmp_path: Path) -> None:
    session = write(tmp_path, header(7), [])
    sample = write(tmp_path, header(8, Role.SAMPLE), records("k"))
    [lack] = merge_traces([session, sample]).incomplete
    assert (lack.code, lack.text) == ("devices-unknown", "samples alone tell their devices")
    assert not merge_traces([sample]).incomplete
    session = write(tmp_path, header(7), records("k"))
    assert not merge_traces([session, sample]).incomplete


def test_a_gap_whose_context_was_lost(tmp_path: Path) -> None:
    gap = GapRecord(id=2, reason="negativa_off", context=1, time_ns=10)
    usage = merge_traces([write(tmp_path, header(), [gap])])
    assert usage.incomplete[0].text.startswith("process: the detector")


def test_warnings(tmp_path: Path) -> None:
    lines: list[AnyTraceRecord] = [
        WarningRecord(code="a", text="1"),
        WarningRecord(code="b", text="2", incomplete=True),
        WarningRecord(code="a", text="1"),
    ]
    usage = merge_traces([write(tmp_path, header(), lines)])
    assert [w.code for w in usage.warnings] == ["a"]
    assert [w.code for w in usage.incomplete] == ["b"]


def test_two_runs_are_told_apart(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, header(run_id="run-1"), records("k")),
        write(tmp_path, header(run_id="run-2"), records("k")),
    ]
    assert merge_traces(paths).run_ids == ("run-1", "run-2")


def test_a_replay_in_one_process_is_that_of_the_run(tmp_path: Path) -> None:
    replay = Replay(device="NVIDIA H200", recorded_ns=1)
    heads = header(7), replace(header(8, Role.WORKER), replay=replay)
    paths = [write(tmp_path, head, records("k")) for head in heads]
    assert merge_traces(paths).replay == replay
    assert merge_traces(paths[:1]).replay is None


@pytest.mark.parametrize(
    ("code", "ended", "concerns_all"),
    [
        ("gap", True, False),
        ("image-unknown", True, False),
        ("gap", False, True),
        ("cupti-taken", True, True),
        ("cupti-unavailable", True, True),
        ("cupti-unavailable", False, True),
        ("children-untraced", True, True),
        ("a code of the future", True, True),
    ],
)
def test_which_libraries_a_lack_concerns(
    tmp_path: Path, code: str, ended: bool, concerns_all: bool
) -> None:
    """Only the trace of a process that ended lists all that the process had mapped."""
    lines: list[AnyTraceRecord] = [WarningRecord(code=code, text="why", incomplete=True)]
    usage = merge_traces([write(tmp_path, header(), lines, end=ended)])
    lack, *others = usage.incomplete
    assert [other.code for other in others] == ([] if ended else [UNENDED])
    assert (lack.process is None) is concerns_all
    assert lack.text == ("process 7 (python3): why" if concerns_all else "why")


def test_digests_beside_the_traces_complete_their_libraries(tmp_path: Path) -> None:
    path = write(tmp_path, header(), records("k"))
    (library,) = merge_traces([path]).libraries
    hashed = replace(library.library, sha256="ab" * 32)
    save_digests(tmp_path, [hashed, LIBRARY])
    (found,) = merge_traces([path]).libraries
    assert found == replace(library, library=hashed)


@pytest.mark.planted_fault(
    "the file of digests beside a run's traces is damaged",
    says="digests.json: not digests of libraries of this release",
)
def test_digests_that_cannot_be_read(tmp_path: Path, fault: PlantedFault) -> None:
    path = write(tmp_path, header(), records("k"))
    (tmp_path / "digests.json").write_text('{"format":1,"libraries":[')
    (warning,) = merge_traces([path]).incomplete
    assert warning.process is None
    fault.check(warning.text)


@pytest.mark.planted_fault(
    "a process loads GPU code from a file that was deleted before tracing saw it",
    says="/tmp/copy.so: GPU code was loaded from this file after it had been deleted or replaced",
)
def test_an_image_of_a_file_that_was_gone_may_be_of_any_library(
    tmp_path: Path, fault: PlantedFault
) -> None:
    gone = LibraryRecord(id=1, library=TracedLibrary(path="/tmp/copy.so"))
    lines = [gone if isinstance(r, LibraryRecord) else r for r in records("k")]
    (warning,) = merge_traces([write(tmp_path, header(), lines)]).incomplete
    assert warning.process is None
    fault.check(warning.text)
    # Nothing was loaded from it.
    assert not merge_traces([write(tmp_path / "b", header(9), lines[:2])]).incomplete
