"""Proofs on overwritten copies and on compacted ones in one session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.settings import CopyKind
from pytest_negativa.models.verdict import Healing, LibraryStatus, TestVerdict
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.verifying.copy_kinds import join_verdicts
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, MULTIARCH
from tests.support.sites import planned_of, verdict_of
from tests.support.verified import VerifiedProject

BOTH = CopyKind.BOTH.kinds
OVERWRITTEN = verdict_of(planned_of(MULTIARCH), planned_of(BIN / "libnames.so"))
COMPACTED = replace(OVERWRITTEN, copies="compacted", gpu_tests=1)
FAILED = replace(
    COMPACTED,
    proved=False,
    reasons=("1 test ended with another outcome than in the traced run",),
    tests=(
        TestVerdict(nodeid="test_b", before=Outcome.SKIPPED, after=Outcome.FAILED),
        TestVerdict(nodeid="test_a", before=Outcome.PASSED, after=Outcome.PASSED),
    ),
)


def test_one_kind_stays_as_it_is() -> None:
    assert join_verdicts(CopyKind.COMPACTED.kinds, [COMPACTED]) is COMPACTED


def test_both_agree() -> None:
    joined = join_verdicts(BOTH, [OVERWRITTEN, COMPACTED])
    assert joined.proved
    assert joined.reasons == ()
    assert joined.copies == "both"
    assert joined.gpu_tests == 1
    assert joined.parts == (OVERWRITTEN, COMPACTED)
    assert joined.libraries == COMPACTED.libraries


def test_the_second_kind_fails() -> None:
    joined = join_verdicts(BOTH, [OVERWRITTEN, FAILED])
    assert not joined.proved
    assert joined.reasons == (f"on compacted copies: {FAILED.reasons[0]}",)
    assert [test.nodeid for test in joined.tests] == ["test_b", "test_a"]
    assert [test.nodeid for test in joined.differences] == ["test_b"]


def test_the_second_kind_is_not_tried() -> None:
    joined = join_verdicts(BOTH, [replace(FAILED, copies="overwritten")])
    assert not joined.proved
    assert joined.reasons[-1] == "the tests did not run on compacted copies"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_library_is_proved_on_all_kinds_or_not_at_all(failing: int) -> None:
    verdicts = [OVERWRITTEN, COMPACTED]
    first, second = OVERWRITTEN.libraries
    bad = replace(first, status=LibraryStatus.NOT_SUBSTITUTED, detail="it was not loaded")
    # In any order.
    verdicts[failing] = replace(verdicts[failing], libraries=(second, bad))
    rows = {row.path: row for row in join_verdicts(BOTH, verdicts).libraries}
    assert rows == {first.path: bad, second.path: second}


def test_healings_add_up() -> None:
    one = Healing(needed=(), runs=2, seconds=1.5, complete=True)
    two = replace(one, complete=False, reason="a limit was reached")
    healing = join_verdicts(BOTH, [OVERWRITTEN, COMPACTED], [one, two]).healing
    assert healing == Healing(
        needed=(), runs=4, seconds=3.0, complete=False, reason="a limit was reached"
    )


# Of libquickstart.so: a payload for sm_80, which an H200 does not load.
HIDDEN = 14992
SUITE = """
def test_use():
    use(LIB, 0, 1)

def test_skips():
    pytest.skip("no second GPU")
"""


def project_of(folder: Path, suite: str) -> VerifiedProject:
    """A project whose library has debug information, so that compaction saves enough."""
    project = VerifiedProject(folder / "project", suite)
    library, debug = project.folder / "lib.so", project.write("debug", "x" * 100_000)
    subprocess.run(["objcopy", f"--add-section=.debug_info={debug}", library], check=True)
    return project


@pytest.mark.slow
@needs_compiler
def test_both_in_a_session(tmp_path: Path) -> None:
    project = project_of(tmp_path, SUITE)
    shown = project.verify("--negativa", "--negativa-copies=both")
    assert "PROVED on overwritten and compacted copies: " in shown
    assert "On overwritten copies: proved" in shown
    assert "On compacted copies: proved" in shown
    verdict = project.verdict
    assert [part["copies"] for part in verdict["parts"]] == ["overwritten", "compacted"]
    digests = [part["libraries"][0]["copy_sha256"] for part in verdict["parts"]]
    assert len(set(digests)) == 2
    assert [r["name"] for r in verdict["rounds"]] == ["001-verify", "002-verify"]

    project.negativa("lock")
    lock = load_lock(project.folder / "negativa.lock")
    assert lock.proof.copies == ("overwritten", "compacted")


@pytest.mark.nightly
@needs_compiler
@pytest.mark.planted_fault(
    "A test passes on overwritten copies and fails on the compacted files that slim would write.",
    says="on compacted copies: 1 test ended with another outcome than in the traced run",
)
def test_a_fault_of_compaction_alone(tmp_path: Path, fault: PlantedFault) -> None:
    suite = (
        SUITE
        + """
def test_size():
    maps = Path("/proc/self/maps").read_text().splitlines()
    [copy] = {line.split()[-1] for line in maps if line.endswith("/lib.so")}
    assert Path(copy).stat().st_size > 80_000
"""
    )
    project = project_of(tmp_path, suite)
    project.verify("--negativa")
    shown = project.verify("--negativa-copies=both", status=1)
    fault.check(shown)
    assert "On overwritten copies: proved" in shown
    refused = project.negativa("lock", status=1)
    assert "on compacted copies: 1 test" in refused.stderr


@pytest.mark.nightly
@needs_compiler
def test_healing_on_compacted_copies_proves_both_again(tmp_path: Path) -> None:
    """Overwritten code is 0x01, and removed code reads as zeros."""
    suite = f"""{SUITE}
from pytest_negativa.storage.system import ProcessMemory
from standin_gpu import _address

def test_need():
    load(LIB)
    assert any(ProcessMemory().read(_address(LIB, {HIDDEN}), 16))
"""
    project = project_of(tmp_path, suite).trace()
    shown = project.heal("--negativa-copies=both")
    assert "PROVED on overwritten and compacted copies: " in shown
    assert shown.count("proving on overwritten copies") == 2
    assert [s["start"] for s in project.verdict["healing"]["needed"]] == [HIDDEN]
    assert all(part["proved"] for part in project.verdict["parts"])


@pytest.mark.slow
@needs_compiler
def test_healing_on_both(tmp_path: Path) -> None:
    """What one kind gives back, both are proved with."""
    suite = (
        SUITE
        + """
def test_need():
    need(LIB, 14992)
"""
    )
    project = project_of(tmp_path, suite).trace()
    shown = project.heal("--negativa-copies=both")
    assert "PROVED on overwritten and compacted copies: " in shown
    assert [s["start"] for s in project.verdict["healing"]["needed"]] == [14992]
    assert all(part["proved"] for part in project.verdict["parts"])


PROGRAM = """
import atexit
from standin_gpu import trace_program, use

atexit.register(trace_program().stop)
use("lib.so", 0)
"""


@pytest.mark.slow
@needs_compiler
def test_a_program_without_pytest(tmp_path: Path) -> None:
    project = project_of(tmp_path, "")
    project.write("program.py", PROGRAM)
    project.negativa("debloat", "--", sys.executable, "program.py")
    shown = project.negativa("verify", "--copies", "both").stdout
    assert "PROVED on overwritten and compacted copies: " in shown
    limit = "thresholds: {min_used_kernels: 1000}\n"
    project.write("negativa.yaml", f"verify: {{copies: both}}\n{limit}")
    healed = project.negativa("verify", "--heal", status=1)
    assert "PROVED on overwritten and compacted copies: " in healed.stdout
    assert healed.stderr.endswith("1 kernel is used, the limit is 1,000\n")
    project.negativa("lock")
    made = load_lock(project.folder / "negativa.lock")
    assert made.proof.copies == ("overwritten", "compacted")
    assert [library.copies for library in made.libraries] == [()]
