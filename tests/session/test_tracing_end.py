"""GPU code that is used after the tests: in hooks at the session's end, at exit, in threads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.sessions import used_kernels
from tests.support.verified import HEAD, VerifiedProject

SUITE = "\ndef test_use():\n    use(LIB, 0)\n"
LATE = {
    "sessionfinish": """
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    use(LIB, 1)
""",
    "outermost sessionfinish": """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    result = yield
    use(LIB, 1)
    return result
""",
    "terminal_summary": "\ndef pytest_terminal_summary():\n    use(LIB, 1)\n",
    "unconfigure": "\ndef pytest_unconfigure():\n    use(LIB, 1)\n",
    "atexit": "\nimport atexit\natexit.register(use, LIB, 1)\n",
    "thread": """
import threading

def later():
    threading.main_thread().join()
    use(LIB, 1)

def pytest_configure():
    threading.Thread(target=later).start()
""",
}
MULTIPLY = "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"


def project_using(folder: Path, late: str) -> VerifiedProject:
    project = VerifiedProject(folder / "project", SUITE)
    # conftest.py is imported twice with another name, so it has no FAULT of its own.
    project.write("conftest.py", HEAD + LATE[late])
    return project


MULTIPLY_ELEMENT = 32936


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "arguments"),
    [
        *((late, ()) for late in LATE),
        ("atexit", ("-n2",)),
        ("unconfigure", ("--negativa-verify",)),
        ("thread", ("--negativa-verify", "-n2")),
    ],
)
def test_what_is_used_late_is_kept(tmp_path: Path, late: str, arguments: tuple[str, ...]) -> None:
    project = project_using(tmp_path, late)

    done = project.pytest("-q", "--negativa", *arguments)

    assert MULTIPLY in used_kernels(project.latest("usage.json"))
    assert [d[2] for d in project.plan("lib.so") if d[0] == MULTIPLY_ELEMENT] == [True]
    # The report is made when the workers have ended.
    is_late = "-n2" not in arguments and late not in ("sessionfinish", "terminal_summary")
    assert (f"used after the report: kernel {MULTIPLY}" in done.stderr) is is_late
    if "--negativa-verify" not in arguments:
        project.verify(*arguments)
    assert project.verdict["proved"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "The traced process ends by os._exit after its report, before it could say what it used late",
    says="its pytest process was not seen to end after the report",
)
def test_a_process_that_is_not_seen_to_end(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write("conftest.py", "import atexit, os\natexit.register(os._exit, 0)\n")
    project.pytest("-q", "--negativa")

    for command in ("lock", "reconstruct", "kernels"):
        fault.check(project.negativa(command, status=1).stderr)
    fault.check(project.verify(status=1))
    fault.check(project.negativa("runs").stdout)
    # The trace has no end: a plan of it needs the user's word.
    assert "did not end by itself" in project.negativa("locate", status=1).stderr


@pytest.mark.nightly
def test_a_plan_that_cannot_be_made_anew_is_refused_until_it_is_located(tmp_path: Path) -> None:
    project = project_using(tmp_path, "unconfigure")
    project.write(
        "conftest.py",
        (project.folder / "conftest.py").read_text()
        + """
CALLS = []

def pytest_negativa_libraries():
    CALLS.append(1)
    if len(CALLS) > 1:
        raise RuntimeError("boom")
""",
    )
    done = project.pytest("-q", "--negativa")
    assert "no plan of the complete trace: RuntimeError: boom" in done.stderr
    assert "negativa locate --run" in project.negativa("lock", status=1).stderr

    project.negativa("locate")
    assert [d[2] for d in project.plan("lib.so") if d[0] == MULTIPLY_ELEMENT] == [True]
    project.verify()
    assert project.verdict["proved"]


@pytest.mark.slow
def test_a_report_file_is_written_anew_and_a_stream_is_not(tmp_path: Path) -> None:
    project = project_using(tmp_path, "unconfigure")
    formats = ("--negativa-report=json:report.json", "--negativa-report=markdown:-")
    done = project.pytest("-q", "--negativa", *formats)
    assert "used after the report" in done.stderr
    assert done.stdout.count("# GPU code used b") == 1
    [row] = json.loads((project.folder / "report.json").read_text())["libraries"]
    assert row["used_kernels"] == 2


@pytest.mark.slow
def test_sessions_of_one_process_are_traced_in_turn(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write(
        "twice.py",
        """
import sys, pytest
from standin_gpu import use

assert pytest.main(["-q", "--negativa"]) == 0
use("lib.so", 1)
assert pytest.main(["-q", "--negativa"]) == 0
use("lib.so", 2)
""",
    )
    done = project.run(sys.executable, "twice.py")
    kernels = [
        used_kernels(json.loads((folder / "usage.json").read_text())) for folder in project.runs()
    ]
    assert kernels == [{"vector_add", MULTIPLY}, {"vector_add", "statistics_weighted_sum"}]
    assert done.stderr.count("used after the report") == 2


def test_a_forked_child_does_not_end_the_run(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
import atexit

def test_use():
    use(LIB, 0)
    if os.fork() == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
    use(LIB, 1)
""",
    ).trace()
    usage = project.latest("usage.json")
    assert usage["processes"][0]["ended"]
    assert used_kernels(usage) == {"vector_add", MULTIPLY}
    assert not (project.run_folder / "incomplete").exists()


@pytest.mark.slow
def test_a_session_within_a_test_does_not_end_the_outer_one(tmp_path: Path) -> None:
    """What pytester does with ``runpytest_inprocess``."""
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB, 0)
    assert pytest.main(["-q", "--negativa", "inner"]) == 0
    use(LIB, 1)
""",
    )
    project.write("inner/test_inner.py", "def test_inner():\n    pass\n")
    project.pytest("-q", "--negativa", "test_a.py")
    found = [json.loads((folder / "usage.json").read_text()) for folder in project.runs()]
    assert all(process["ended"] for usage in found for process in usage["processes"])
    assert not list(project.results.glob("*/incomplete"))


POOL = (
    """
import atexit

CHILD = """
    + repr(
        "import os, sys; from standin_gpu import trace_program, use\n"
        "trace_program(); use('lib.so', 1); print(flush=True); sys.stdin.read(); os._exit(0)"
    )
    + """

def test_use_a_pool():
    from standin_gpu import child_environ
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD]
    child = subprocess.Popen(command, env=child_environ(), stdin=pipe, stdout=pipe)
    child.stdout.readline()
    # As a pool of processes ends, which a module holds.
    atexit.register(child.communicate)
    use(LIB, 0)
"""
)


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A process of a pool still uses the GPU when the report is made", says="it is still running"
)
def test_a_pool_that_ends_with_its_process(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", POOL)
    fault.check(project.pytest("-q", "--negativa").stdout)
    # It ended before its parent did, so the plan is complete.
    assert project.latest("usage.json")["incomplete"] == []
    assert {d[3] for d in project.plan("lib.so")} > {"no-used-kernel"}
    project.verify()
    assert project.verdict["proved"]


OUTLIVES = """
import sys, time
from standin_gpu import trace_program, use

detector = trace_program()
use("lib.so", 0)
print("ready", flush=True)
sys.stdin.read()
time.sleep(float(sys.argv[1]))
use("lib.so", 1)
detector.stop()
"""
STARTS = """
from standin_gpu import child_environ

CHILDREN = []

def test_use():
    use(LIB, 0)
    child = subprocess.Popen(
        [sys.executable, "outlives.py", os.environ["LASTS"]],
        env=child_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    child.stdout.readline()
    CHILDREN.append(child)
"""


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A child process outlives the session, and uses code that nothing else uses",
    says="it is still running",
)
def test_a_child_that_outlives_the_session(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", STARTS)
    project.write("outlives.py", OUTLIVES)
    fault.check(project.pytest("-q", "--negativa", LASTS="5").stdout)
    assert {d[3] for d in project.plan("lib.so")} == {"incomplete"}

    # It waits for the child.
    project.negativa("locate")
    assert [d[2] for d in project.plan("lib.so") if d[0] == MULTIPLY_ELEMENT] == [True]
    project.verify(LASTS="0")
    assert project.verdict["proved"]
    assert "outlived the traced run or a round" in project.verify(status=1, LASTS="20")
