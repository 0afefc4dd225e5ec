"""Sessions in which every test ends as before, or nearly, and that prove nothing all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.compiling import compile_shared, needs_compiler
from tests.support.faults import PlantedFault
from tests.support.verified import VerifiedProject

UNTRACED = """
CODE = '''
import ctypes, os, sys
from standin_gpu import USED, need
ctypes.CDLL(os.environ["DRIVER"])
try:
    need(sys.argv[1], USED[3])
except RuntimeError:
    print("no GPU: on the CPU, then")
'''

def test_use():
    use(LIB, 0)

def test_child():
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    subprocess.run([sys.executable, "-c", CODE, LIB], env=environ, check=True)
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test takes the variables of CUDA out of a child's environment, so that nothing traces the "
    "child, and the child goes on without the GPU on the copies.",
    says="it loaded the CUDA driver without the CUDA_INJECTION64_PATH of the session",
)
def test_a_child_that_nothing_traces_falls_back(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", UNTRACED)
    driver = compile_shared("libcuda.c", tmp_path / "driver" / "libcuda.so.1")
    project.environ["DRIVER"] = str(driver)
    fault.check(project.trace().verify(status=1))
    assert not project.verdict["proved"]
    # Where children are not to be traced, a touch of what was removed still counts.
    project.write("negativa.yaml", "trace: {children: false}\n")
    assert "removed, and touched on the copies: image_blur" in project.trace().verify(status=1)


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A test that fails on the copies leaves something behind, and fails for it once more on the "
    "originals, as a flaky test might.",
    says="1 test ended with another outcome than in the traced run",
)
def test_what_a_failure_leaves_behind_makes_no_test_flaky(
    tmp_path: Path, fault: PlantedFault
) -> None:
    suite = """
def test_use():
    use(LIB, 0)

def test_lock():
    lock = Path("lock")
    if lock.exists():
        lock.unlink()
        raise RuntimeError("another one is running, or was killed")
    lock.touch()
    need(LIB, USED[3])
    lock.unlink()
"""
    project = VerifiedProject(tmp_path / "project", suite).trace()
    fault.check(project.verify(status=1))
    assert not any(t["flaky"] for t in project.verdict["tests"])


@pytest.mark.slow
def test_a_file_that_is_gone_proves_nothing(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB)
    assert Path("needed").exists()
""",
    )
    needed = project.write("needed", "")
    project.trace()
    needed.unlink()
    shown = project.verify(status=1)
    assert not project.verdict["proved"]
    assert "no test ended as in the traced run" in shown


@pytest.mark.slow
def test_a_crash_behind_the_last_test(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
import atexit

def test_use():
    use(LIB)
    if FAULT == "late":
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
""",
    ).trace()
    shown = project.verify(status=1, FAULT="late")
    assert "ended with signal SIGSEGV after its session, expected was exit status 0" in shown
    assert project.statuses()["lib.so"][0] == "not proved"


@pytest.mark.slow
def test_an_exit_status_that_differs(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "\ndef test_use():\n    use(LIB)\n")
    project.write(
        "conftest.py",
        "import os\n"
        "def pytest_sessionfinish(session):\n"
        "    if 'verify' in os.environ.get('NEGATIVA_ROUND', ''):\n"
        "        session.exitstatus = 3\n",
    )
    project.trace()
    shown = project.verify(status=1)
    assert "exit status 3, with 0 when it was traced" in shown


@pytest.mark.nightly
def test_a_verdict_of_before_does_not_outlive_a_verification(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB)
    if FAULT == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
""",
    ).trace()
    project.verify()
    assert project.verdict["proved"]
    project.pytest("-q", "--negativa-verify", status=-9, FAULT="supervisor")
    assert not (project.run_folder / "verdict.json").exists()


@pytest.mark.slow
def test_a_crossed_threshold_counts_though_the_plan_is_proved(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "\ndef test_use():\n    use(LIB)\n")
    limit = "--negativa-max-unused-percent=1"
    done = project.pytest("-q", "--negativa", "--negativa-verify", limit, status=1)
    assert "max_unused_percent" in done.stdout
    assert json.loads((project.run_folder / "verdict.json").read_text())["proved"]


OTHER_CAUSE = """
CAUSE = "CUDA error: invalid device function" if ROUND == "verify" else "a bug"

def test_use():
    use(LIB, 0)

def test_fails():
    raise ValueError(CAUSE)

@pytest.fixture
def broken():
    raise ValueError(CAUSE)

def test_error(broken):
    pass
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test that failed for a bug when traced, or its fixture, fails for GPU code on the copies, "
    "by an error of the same type.",
    says="2 tests ended with the same outcome as in the traced run, but not alike",
)
def test_a_failure_of_another_cause(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", OTHER_CAUSE)
    project.pytest("-q", "--negativa", status=1)
    fault.check(project.verify("--negativa-rerun=1", status=1))


TWO = """
def test_use(request):
    use(LIB, 0)
    request.session.shouldstop = os.environ.get("STOPS", False)

def test_other():
    use(LIB, 1)
    assert "BREAKS" not in os.environ
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "--lf selects a part of the tests for the trace, and all of them are proved.",
    says="1 test ran that the traced run doesn't have",
)
def test_a_part_is_traced_and_all_is_verified(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", TWO)
    # The cache of pytest is off in other tests.
    project.environ["PYTEST_ADDOPTS"] = "-p standin_gpu"
    project.pytest("-q", status=1, BREAKS="1")
    project.trace("--lf")
    fault.check(project.verify(status=1))


@pytest.mark.slow
def test_a_test_that_stops_its_session_plans_nothing(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", TWO)
    done = project.pytest("-q", "--negativa", status=2, STOPS="enough")
    assert "nothing is planned from this run: it was interrupted" in done.stdout
