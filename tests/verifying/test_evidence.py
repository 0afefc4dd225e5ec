"""Which processes were redirected, by the logs of rounds and the traces."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import SessionResult
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.round import RoundKind
from pytest_negativa.models.trace import LibraryUsage, UsageProcess
from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.verifying.evidence import gather_loads
from pytest_negativa.verifying.rounds import RoundResult
from tests.support.faults import PlantedFault
from tests.support.libraries import MULTIARCH
from tests.support.reconstructing import planned_of
from tests.support.traces import header
from tests.support.usages import usage_of

NO_COPIES = Reconstruction(root="/", fill=1, libraries=(), refused={})
PYTHON = os.path.realpath(sys.executable)


def a_round(folder: Path, *logged: tuple[int, str]) -> RoundResult:
    """A round with the redirect's logs of processes: id and executable."""
    run = Run(folder)
    run.redirect_logs.mkdir(parents=True)
    for pid, executable in logged:
        text = f"negativa-redirect-log 1\0{executable}\0\0\0"
        (run.redirect_logs / f"{pid}.5.1.log").write_text(text)
    session = SessionResult(
        tests=(), collection_errors=(), command=(), duration=0, longest_silence=0, exit_status=0
    )
    return RoundResult(run.run_id, RoundKind.VERIFY, run, session, 0, silent=False, seconds=1)


@pytest.mark.planted_fault(
    "A static program, which no redirect reaches, loads an original, and has the process id of one "
    "that had a log.",
    says="process 7 (/usr/bin/python3) had the original mapped",
)
def test_a_process_without_a_log_shows_by_the_original(tmp_path: Path, fault: PlantedFault) -> None:
    original = Path(shutil.copy(MULTIARCH, tmp_path / "lib.so"))
    made = reconstruct([planned_of(original)], tmp_path / "copies")
    use = LibraryUsage(library=identify_library(str(original)), images=(), processes=(0,))
    rounds = [a_round(tmp_path / "001-verify", (7, PYTHON))]
    fault.check(str(gather_loads(rounds, usage_of(use), made, {}).originals))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "planned otherwise"])
def test_hard_links_are_one_file_if_their_copies_are_alike(tmp_path: Path, alike: bool) -> None:
    names = tmp_path / "a.so", tmp_path / "b.so"
    shutil.copy(MULTIARCH, names[0])
    names[1].hardlink_to(names[0])
    made = reconstruct([planned_of(name) for name in names], tmp_path / "copies")
    first, second = made.libraries
    if not alike:
        second = replace(second, copy_sha256="0" * 64)
    made = replace(made, libraries=(first, second))
    result = a_round(tmp_path / "001-verify", (7, PYTHON))
    [log] = result.run.redirect_logs.iterdir()
    log.write_text(f"{log.read_text()}7\0copy\0{names[0]}\0\0")
    loaded = gather_loads([result], usage_of(), made, {}).copies
    assert set(loaded) == {str(name) for name in (names if alike else names[:1])}


@pytest.mark.parametrize(
    ("lines", "is_lack"),
    [
        ("7 driver {other}", True),
        ("7 driver ", True),
        ("7 driver {ours}", False),
        # Loaded by children that it forked: an untraced one, one that the native library traces.
        ("8 driver ", True),
        ("9 driver ", False),
        ("", False),
    ],
)
def test_a_process_that_loads_the_driver_and_leaves_no_trace(
    tmp_path: Path, lines: str, is_lack: bool
) -> None:
    result = a_round(tmp_path / "001-verify", (7, PYTHON))
    log = result.run.redirect_logs / "7.5.1.log"
    text = lines.format(ours=injection_library(), other="/other/injection.so").replace(" ", "\0")
    if text:
        log.write_text(f"{log.read_text()}7\0copy\0/lib.so\0\0{text}\0\0")
    traced = replace(header(9, run_id="001-verify"), executable=PYTHON)
    process = UsageProcess(header=traced, trace="t.jsonl", ended=True)
    usage = replace(usage_of(), processes=(process,))
    found = gather_loads([result], usage, NO_COPIES, {}).incomplete
    assert (found is not None) == is_lack
    without = gather_loads([result], usage, NO_COPIES, {}, traces_children=False)
    assert without.incomplete is None and (without.untraced is not None) == is_lack
    # A program that it executes keeps its id, not its trace.
    earlier = replace(process, header=replace(traced, pid=7, start_ns=4))
    found = gather_loads([result], replace(usage, processes=(earlier,)), NO_COPIES, {}).incomplete
    assert (found is not None) == (is_lack or lines.startswith("9"))
    # What a process forks before the plugin traces it lacks the variable, too.
    own = replace(process, header=replace(traced, pid=7))
    usage = replace(usage, processes=(own, process))
    found = gather_loads([result], usage, NO_COPIES, {}).incomplete
    assert (found is not None) == (is_lack and lines.startswith("8"))
