"""Tests that take away what tracing in their own process needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.tracing.children import Children
from tests.support.faults import PlantedFault
from tests.support.sessions import used_kernels
from tests.support.verified import VerifiedProject

# Without its GPU code the last test goes on without the GPU, and passes.
SUITE = """
import atexit, contextlib

def test_gpu():
    use(LIB, 0)

def test_hostile():
    {}

def test_later():
    with contextlib.suppress(RuntimeError):
        use(LIB, 1)
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test closes all descriptors of its process, and its next files get the numbers of ours.",
    says="lib.so: all of it is kept (incomplete)",
)
def test_all_descriptors_closed(tmp_path: Path, fault: PlantedFault) -> None:
    hostile = (
        "os.closerange(3, 256)\n"
        "    global files\n"
        "    files = [open(Path(__file__).parent / f'own{n}', 'w') for n in range(30)]"
    )
    project = VerifiedProject(tmp_path / "project", SUITE.format(hostile))

    # pytest's own capture would not survive it.
    done = project.pytest("-q", "-s", "--negativa")

    fault.check(done.stdout)
    assert [f.read_text() for f in project.folder.glob("own*")] == [""] * 30
    assert "PROVED" in project.verify("-s", status=1)
    assert not project.verdict["proved"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test runs the handlers of the process's end (atexit._run_exitfuncs), and tests follow.",
    says="tracing ended too early, in test_a.py::test_hostile (call)",
)
@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_handlers_of_the_end_run_early(
    tmp_path: Path, fault: PlantedFault, workers: tuple[str, ...]
) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE.format("atexit._run_exitfuncs()"))

    done = project.pytest("-q", "--negativa", *workers)

    fault.check(done.stdout)
    # What the message says to do keeps all code, too.
    located = project.negativa("locate", "--run", project.run_folder).stdout
    assert "lib.so: all of it is kept (incomplete)" in located


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test opens files until the process may open no more, and leaves them open.",
    says="/trace: cannot be listed: Too many open files",
)
def test_no_descriptor_left(tmp_path: Path, fault: PlantedFault) -> None:
    hostile = (
        "global files\n    files = []\n    import resource\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    with contextlib.suppress(OSError):\n"
        "        while True:\n            files.append(open(os.devnull))"
    )
    project = VerifiedProject(
        tmp_path / "project", SUITE.format(hostile).partition("def test_l")[0]
    )

    done = project.pytest("-q", "--negativa", status=1)

    fault.check(done.stdout)
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_a_forked_child_that_runs_on_does_not_report(tmp_path: Path) -> None:
    suite = """
def test_use():
    use(LIB, 0)

def test_fork():
    child = os.fork()
    assert child
    os.waitpid(child, 0)
"""
    project = VerifiedProject(tmp_path / "project", suite)
    shown = project.pytest("-q", "--negativa").stdout
    assert shown.count("GPU code (pytest-negativa)") == 1
    assert project.planned()
    assert "\nPROVED" in project.verify()


SANDBOX = """
import ctypes

class Broken:
    def pytest_sessionfinish(self):
        raise ValueError("in a child")

def test_use():
    use(LIB, 0)

def test_sandbox(pytestconfig):
    if os.fork():
        os.wait()
        return
    assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID
    if os.fork():
        os.wait()
        os._exit(0)
    assert os.getpid() == 1
"""
BREAK = "    pytestconfig.pluginmanager.register(Broken())\n"


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_a_forked_child_with_its_parents_id_does_not_report(tmp_path: Path, breaks: bool) -> None:
    """As of a sandbox, in a container whose first process is pytest."""
    project = VerifiedProject(tmp_path / "project", SANDBOX + BREAK * breaks)
    start = ("unshare", "-Urpf", sys.executable)
    if subprocess.run([*start, "-c", ""], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces")
    done = project.run(*start, "-m", "pytest", "-q", "--negativa")
    assert ("ValueError: in a child" in done.stderr) is breaks
    assert "no report of" not in done.stderr
    assert done.stdout.count("2 passed") == 2 - breaks
    assert done.stdout.count("GPU code (pytest-negativa)") == 1
    assert [(run / "failed").exists() for run in project.runs()] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "workers"])
@pytest.mark.planted_fault(
    "A test starts a pytest session with --negativa, whose tests or workers use the GPU.",
    says="is traced into another run",
)
def test_a_session_that_a_test_starts(
    tmp_path: Path, fault: PlantedFault, workers: tuple[str, ...]
) -> None:
    inner = VerifiedProject(tmp_path / "project", "\ndef test_use():\n    use(LIB, 0)\n")
    outer = Children()
    inner.environ["NEGATIVA_LACKS"] = outer.name
    inner.trace(*workers)
    [lack] = outer.untraced()
    outer.close()
    fault.check(lack)
    # It is a session of its own all the same.
    assert used_kernels(inner.latest("usage.json")) == {"vector_add"}
