"""Processes that end otherwise on the copies, behind the last test: nothing is proved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.sessions import used_kernels
from tests.support.verified import HEAD, VerifiedProject

pytestmark = pytest.mark.slow

SUITE = """
def test_use():
    use(LIB, 0)

def test_use_more():
    use(LIB, 1)
"""
CONFTEST = (
    HEAD
    + """
import atexit, ctypes, faulthandler

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if FAULT.endswith(" of a worker"):
    FAULT = FAULT.removesuffix(" of a worker") if IN_WORKER else ""

def act(fault):
    faulthandler.disable()
    if fault == "raise":
        raise RuntimeError("boom")
    if fault == "exit":
        pytest.exit("enough", returncode=4)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "die":
        os._exit(3)
    if fault == "die well":
        os._exit(0)
    if fault == "hang":
        time.sleep(1000)

def act_in(hook):
    if FAULT.startswith(f"{hook}: "):
        act(FAULT.removeprefix(f"{hook}: "))

def pytest_sessionfinish():
    act_in("sessionfinish")

def pytest_terminal_summary():
    act_in("terminal_summary")

def pytest_unconfigure():
    act_in("unconfigure")

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main():
    status = yield
    act_in("cmdline_main")
    return status

atexit.register(act_in, "atexit")

if FAULT == "destructor: crash":
    # The C library calls it after Python's own end.
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None).abort, None)
"""
)


def traced_project(folder: Path, *arguments: str) -> VerifiedProject:
    project = VerifiedProject(folder / "project", SUITE)
    project.write("conftest.py", CONFTEST)
    return project.trace(*arguments)


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return traced_project(tmp_path_factory.mktemp("solo"))


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return traced_project(tmp_path_factory.mktemp("distributed"), "-n2")


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            "sessionfinish: raise",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_sessionfinish raises an error",
                says="the pytest process ended with exit status 1 in pytest_sessionfinish, which "
                "raised RuntimeError: boom, before its session's end",
            ),
        ),
        pytest.param(
            "sessionfinish: segfault",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_sessionfinish crashes",
                says="the pytest process ended with signal SIGSEGV in pytest_sessionfinish, before "
                "its session's end",
            ),
        ),
        pytest.param(
            "sessionfinish: die",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_sessionfinish calls os._exit(3)",
                says="the pytest process ended with exit status 3 in pytest_sessionfinish, before "
                "its session's end",
            ),
        ),
        pytest.param(
            "sessionfinish: die well",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_sessionfinish calls os._exit(0)",
                says="the pytest process ended with exit status 0 in pytest_sessionfinish, before "
                "its session's end",
            ),
        ),
        pytest.param(
            "sessionfinish: exit",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_sessionfinish calls pytest.exit",
                says="exit status 4, with 0 when it was traced",
            ),
        ),
        pytest.param(
            "terminal_summary: raise",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_terminal_summary raises an error",
                says="ended with exit status 1 in pytest_terminal_summary, which raised "
                "RuntimeError: boom, before its session's end",
            ),
        ),
        pytest.param(
            "terminal_summary: die",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_terminal_summary calls os._exit(3)",
                says="ended with exit status 3 in pytest_terminal_summary, before its session's "
                "end",
            ),
        ),
        pytest.param(
            "unconfigure: raise",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_unconfigure raises an error",
                says="ended with exit status 1 in pytest_unconfigure, which raised RuntimeError: "
                "boom, before its session's end",
            ),
        ),
        pytest.param(
            "unconfigure: segfault",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_unconfigure crashes",
                says="ended with signal SIGSEGV in pytest_unconfigure, before its session's end",
            ),
        ),
        pytest.param(
            "unconfigure: die well",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_unconfigure calls os._exit(0)",
                says="ended with exit status 0 in pytest_unconfigure, before its session's end",
            ),
        ),
        pytest.param(
            "cmdline_main: raise",
            marks=pytest.mark.planted_fault(
                "On the copies, a plugin raises an error after pytest's last hook",
                says="ended with exit status 1 after its session, expected was exit status 0",
            ),
        ),
        pytest.param(
            "atexit: die",
            marks=pytest.mark.planted_fault(
                "On the copies, an atexit handler calls os._exit(3)",
                says="ended with exit status 3 after its session, expected was exit status 0",
            ),
        ),
        pytest.param(
            "atexit: die well",
            marks=pytest.mark.planted_fault(
                "On the copies, an atexit handler calls os._exit(0)",
                says="ended with exit status 0 after its session, but its trace has no end",
            ),
        ),
        pytest.param(
            "atexit: segfault",
            marks=pytest.mark.planted_fault(
                "On the copies, an atexit handler crashes",
                says="ended with signal SIGSEGV after its session, expected was exit status 0",
            ),
        ),
        pytest.param(
            "destructor: crash",
            marks=pytest.mark.planted_fault(
                "On the copies, the process crashes when its interpreter is gone",
                says="ended with signal SIGABRT after its session, expected was exit status 0",
            ),
        ),
        pytest.param(
            "atexit: hang",
            marks=pytest.mark.planted_fault(
                "On the copies, the process hangs at its exit",
                says="the pytest process hung after its session and was ended",
            ),
        ),
    ],
)
def test_a_process_that_ends_otherwise(
    solo: VerifiedProject, plant: str, fault: PlantedFault
) -> None:
    limit = (
        "--negativa-verify-timeout=3" if plant.endswith("hang") else "--negativa-verify-timeout=60"
    )
    fault.check(solo.pytest("-q", "--negativa-verify", limit, status=1, FAULT=plant).stdout)
    assert not solo.verdict["proved"]
    assert solo.statuses()["lib.so"][0] == "not proved"


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            "sessionfinish: raise of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_sessionfinish raises an error",
                says="did not end well: it ended with exit status 0 in pytest_sessionfinish, which "
                "raised RuntimeError: boom",
            ),
        ),
        pytest.param(
            "sessionfinish: die of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_sessionfinish calls os._exit(3)",
                says="did not end well: it ended with exit status 3 in pytest_sessionfinish",
            ),
        ),
        pytest.param(
            "unconfigure: raise of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_unconfigure raises an error",
                says="did not end well: it ended with exit status 0 in pytest_unconfigure, which "
                "raised RuntimeError: boom",
            ),
        ),
        pytest.param(
            "unconfigure: segfault of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_unconfigure crashes",
                says="did not end well: it ended with signal SIGSEGV in pytest_unconfigure",
            ),
        ),
        pytest.param(
            "atexit: die well of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, an atexit handler of a worker calls os._exit(0)",
                says="did not end well: it ended with exit status 0 after its session",
            ),
        ),
        pytest.param(
            "destructor: crash of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker crashes when its interpreter is gone",
                says="did not end well: it ended with signal SIGABRT after its session",
            ),
        ),
        pytest.param(
            "unconfigure: die",
            marks=pytest.mark.planted_fault(
                "On the copies, pytest_unconfigure of controller and workers calls os._exit(3)",
                says="the pytest process ended with exit status 3 in pytest_unconfigure, before "
                "its session's end",
            ),
        ),
    ],
)
def test_a_worker_that_ends_otherwise(
    distributed: VerifiedProject, plant: str, fault: PlantedFault
) -> None:
    done = distributed.pytest("-q", "--negativa-verify", "-n2", status=1, FAULT=plant)
    fault.check(done.stdout)
    assert not distributed.verdict["proved"]


@pytest.mark.nightly
def test_a_crash_at_exit_that_happens_when_traced_too_is_proved(tmp_path: Path) -> None:
    """Some libraries crash in their destructors, in every session."""
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write("conftest.py", CONFTEST.replace("if FAULT ==", "if 'destructor: crash' =="))
    for workers in ((), ("-n2",)):
        done = project.pytest("-q", "--negativa", "--negativa-verify", *workers, status=134)
        assert "\nPROVED" in done.stdout
    # Without a supervisor, nothing saw it when it was traced.
    project.pytest("-q", "--negativa", status=-6)
    assert "expected was exit status 0" in project.verify(status=1)


@pytest.mark.nightly
def test_without_a_fault_it_is_proved(solo: VerifiedProject, distributed: VerifiedProject) -> None:
    for project in (solo, distributed):
        for workers in ((), ("-n2",)):
            project.verify(*workers)
            assert project.verdict["proved"]


CHILD = """
import atexit, os, signal, sys, time
from standin_gpu import trace_program, use

detector = trace_program()
atexit.register(detector.stop)
use("lib.so", 1)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGSEGV)
print("ready", flush=True)
if sys.argv[1] == "waits":
    time.sleep(1000)
"""
CHILDREN = """
from multiprocessing import get_context
from standin_gpu import child_environ, trace_program

def start(how):
    command = [sys.executable, "child.py", how]
    return subprocess.Popen(
        command, env=child_environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )

def in_fork():
    trace_program()
    use(LIB, 0)

def test_child_that_is_killed(tmp_path):
    child = start("waits")
    child.stdout.readline()
    child.kill()
    child.wait()

def test_child_that_ends():
    start("dies" if FAULT == "child" else "ends").wait()

def test_forked_child(monkeypatch):
    monkeypatch.setenv("NEGATIVA_TRACE_DIR", child_environ()["NEGATIVA_TRACE_DIR"])
    child = get_context("fork").Process(target=in_fork)
    child.start()
    child.join()
    assert child.exitcode == 0

def test_use():
    use(LIB, 0)
"""


@pytest.mark.planted_fault(
    "On the copies, a child process that used the GPU crashes, and its test does not look",
    says="did not come to its end; when traced, 0 such processes did not",
)
def test_a_child_that_ends_otherwise(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", CHILDREN)
    project.write("child.py", CHILD)
    # Children that their tests kill, and those that end by os._exit, don't speak against a proof.
    for workers in ((), ("-n2",)):
        project.pytest("-q", "--negativa", "--negativa-verify", *workers)
        assert project.verdict["proved"]
    fault.check(project.verify("-n2", status=1, FAULT="child"))


PROGRAM = """
import atexit, os, sys
from standin_gpu import ROUND, trace_program, use

detector = trace_program()
atexit.register(detector.stop)
use("lib.so", 0)
atexit.register(use, "lib.so", 1)
if ROUND == "verify" and "FAULT" in os.environ:
    os._exit(0)
"""


@pytest.mark.planted_fault(
    "On the copies, a program ends by os._exit before its work is done, with the traced status",
    says="did not come to its end; when traced, 0 such processes did not",
)
def test_a_program_that_ends_otherwise(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", "")
    project.write("program.py", PROGRAM)
    project.negativa("debloat", "--", sys.executable, "program.py")
    # What it uses at its exit is traced.
    assert len(used_kernels(project.latest("usage.json"))) == 2
    project.write("negativa.yaml", "thresholds: {max_gpu_code: ['*=67200']}\n")
    assert "\nPROVED" in project.negativa("verify").stdout
    fault.check(project.negativa("verify", status=1, FAULT="exit").stdout)


def test_a_program_whose_gpu_code_is_not_located(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "")
    project.write("program.py", PROGRAM)
    project.negativa("trace", "--cpu", "--", sys.executable, "program.py")
    done = project.negativa("verify", "--cpu", status=1)
    assert "no plans here; make them with negativa locate" in done.stderr


def test_a_child_with_the_environment_of_a_killed_proof(tmp_path: Path) -> None:
    suite = """
import json, signal

def test_job():
    use(LIB, 0)
    job = Path("job.json")
    if ROUND == "verify" and not job.exists():
        job.write_text(json.dumps(dict(os.environ)))
        os.kill(os.getppid(), signal.SIGKILL)
    if job.exists():
        words = [sys.executable, "-c", "import ctypes; ctypes.CDLL('./lib.so')"]
        subprocess.run(words, env=json.loads(job.read_text()), check=True)
"""
    project = VerifiedProject(tmp_path / "project", suite).trace()
    project.verify(status=-9)
    assert [*project.results.glob("*/verify/*/*/redirect.table")]
    told = project.verify(status=1)
    assert "a process opened the original 1 time while the tests ran on the copies" in told
    assert not [*project.results.glob("*/verify/*/*/redirect.table")]
