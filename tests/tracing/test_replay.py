"""Replaying what was recorded on an H200."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.trace import Context, Phase, Role, TracedLibrary, Usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.detector import TraceError
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.replay import relocate
from pytest_negativa.tracing.start import start_tracing
from tests.support.libraries import PLAIN, TRACES


def replayed(tmp_path: Path, recording: Path, nodeids: tuple[str, ...] = ()) -> Usage:
    run = Run(tmp_path / "run-1")
    tracing = start_tracing(run, Role.SOLO, root=tmp_path, replay=recording, environ={})
    for nodeid in nodeids:
        tracing.detector.set_context(Context(phase=Phase.CALL, nodeid=nodeid))
    tracing.stop()
    return merge_traces(run.trace_files())


@pytest.mark.parametrize("name", ["h200-ops", "h200-children"])
def test_a_replay_tells_what_the_recording_tells(tmp_path: Path, name: str) -> None:
    recorded = merge_traces((TRACES / name).glob("*.jsonl"))
    usage = replayed(tmp_path, TRACES / name)
    assert not recorded.incomplete and not usage.incomplete
    assert usage.replay is not None and "NVIDIA H200" in usage.replay.device
    assert usage.replay.recorded_ns == min(p.header.start_ns for p in recorded.processes)
    assert usage.devices == recorded.devices

    def kernels(u: Usage) -> set[tuple[str, int, str]]:
        return {
            (library.library.path, image.offset, kernel)
            for library in u.libraries
            for image in library.images
            for kernel in image.kernels
        }

    assert kernels(usage) == kernels(recorded)
    assert {m.sha256 for m in usage.memory_images} == {m.sha256 for m in recorded.memory_images}
    assert set(usage.contexts) == set(recorded.contexts)
    assert {w.code for w in usage.warnings} >= {"library-not-here", "replay-partial"}


def test_tests_that_ran_are_matched_by_node_id(tmp_path: Path) -> None:
    contexts = merge_traces((TRACES / "h200-ops").glob("*.jsonl")).contexts
    nodeids = tuple(c.nodeid for c in contexts if c.nodeid is not None)
    usage = replayed(tmp_path, TRACES / "h200-ops", nodeids)
    assert not [w for w in usage.warnings if w.code == "replay-partial"]


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recorded trace"):
        replayed(tmp_path, tmp_path)


def test_libraries_are_found_where_this_machine_has_them(tmp_path: Path) -> None:
    fixture = PLAIN
    here = tmp_path / "new" / "lib"
    here.mkdir(parents=True)
    shutil.copy(fixture, here / "libx.so")
    found = identify_library(str(here / "libx.so"))
    recorded = replace(found, path="/old/lib/libx.so", mtime_ns=1)
    assert relocate(recorded, "/old", str(tmp_path / "new"), ()) == found
    assert relocate(recorded, "/old/", str(tmp_path / "elsewhere"), ()) is None
    packaged = replace(recorded, path="/else/libx.so", package_path="lib/libx.so")
    assert relocate(packaged, "/old", "/none", ["", str(tmp_path / "new")]) == found
    assert relocate(replace(packaged, size=1), "/old", "/none", [str(tmp_path / "new")]) is None
    assert relocate(TracedLibrary(path="/nowhere"), "/old", "/none", ()) is None


def test_a_library_without_a_build_id_is_found_by_its_digest_alone(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"\x7fELF no library")
    found = identify_library(str(path))
    assert found.build_id is None and found.sha256 is not None
    recorded = replace(found, mtime_ns=1)
    assert relocate(recorded, "/old", "/new", ()) == found
    assert relocate(replace(recorded, sha256=None), "/old", "/new", ()) is None
