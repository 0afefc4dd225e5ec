"""Processes that end otherwise on the copies, behind the last test: nothing is proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
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
                says="did not come to its end; it was last seen in pytest_sessionfinish, which "
                "raised RuntimeError: boom",
            ),
        ),
        pytest.param(
            "sessionfinish: die of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_sessionfinish calls os._exit(3)",
                says="did not come to its end; it was last seen in pytest_sessionfinish",
            ),
        ),
        pytest.param(
            "unconfigure: raise of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_unconfigure raises an error",
                says="did not come to its end; it was last seen in pytest_unconfigure, which "
                "raised RuntimeError: boom",
            ),
        ),
        pytest.param(
            "unconfigure: segfault of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, a worker's pytest_unconfigure crashes",
                says="did not come to its end; it was last seen in pytest_unconfigure",
            ),
        ),
        pytest.param(
            "atexit: die well of a worker",
            marks=pytest.mark.planted_fault(
                "On the copies, an atexit handler of a worker calls os._exit(0)",
                says="did not come to its end; it was last seen in after the session",
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


def test_without_a_fault_it_is_proved(solo: VerifiedProject, distributed: VerifiedProject) -> None:
    for project in (solo, distributed):
        for workers in ((), ("-n2",)):
            project.verify(*workers)
            assert project.verdict["proved"]
