"""An honest suite is proved every time, whatever it starts, forks, kills, skips or runs at its end.

``TESTS_TIMES`` says how often each way is tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.runs import Run
from tests.support.verified import VerifiedProject

TIMES = int(os.environ.get("TESTS_TIMES", "1"))

SUITE = """
import atexit, multiprocessing, threading

CHILD = '''
from standin_gpu import trace_program, use
detector = trace_program()
use({library!r}, 0)
detector.stop()
'''

@pytest.fixture(scope="module")
def shared():
    use(LIB, 1)
    yield
    use(LIB, 1)

@pytest.mark.parametrize("region", [0, 1, 2])
def test_kernels(region):
    use(LIB, region)

def test_shared(shared):
    use(LIB, 0)

def test_a_program_that_uses_the_gpu():
    code = CHILD.format(library=str(LIB))
    subprocess.run([sys.executable, "-c", code], check=True)

def test_a_program_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.kill()
    assert child.returncode == -signal.SIGKILL

def work(queue):
    queue.put(7)

@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_as_a_data_loader_has_them(method):
    use(LIB, 0)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,), daemon=True)
    worker.start()
    assert queue.get() == 7
    worker.join()

def test_a_thread_that_outlives_the_test():
    use(LIB, 2)
    threading.Thread(target=time.sleep, args=(0.2,)).start()

def test_at_exit():
    atexit.register(use, LIB, 0)

@pytest.mark.xfail(reason="known", strict=True)
def test_fails_as_expected():
    use(LIB, 0)
    assert False

@pytest.mark.skipif(sys.platform == "linux", reason="not on Linux")
def test_skipped():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize(
    "eager", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["lazy", "eager"]
)
@pytest.mark.parametrize("traced", [(), ("-n4",)], ids=["traced-solo", "traced-n4"])
@pytest.mark.parametrize(
    "verified", [(), pytest.param(("-n4",), marks=pytest.mark.nightly)], ids=["solo", "n4"]
)
def test_an_honest_suite_is_proved(
    tmp_path: Path,
    number: int,
    eager: bool,
    traced: tuple[str, ...],
    verified: tuple[str, ...],
) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.trace(*traced)
    if eager:
        project.environ["CUDA_MODULE_LOADING"] = "EAGER"
    shown = project.verify(*verified)
    assert "\nPROVED" in shown
    assert "laky" not in shown and "can't" not in shown


CHOOSES = """
import random
from hypothesis import given, settings, strategies

@settings(deadline=None)
@given(strategies.integers())
def test_examples(number):
    use(LIB, number % 3)

@pytest.mark.flaky(reruns=2)
def test_is_rerun(request):
    use(LIB, random.randrange(3))
    assert request.node.execution_count > 1

@pytest.mark.parametrize("region", range(3))
def test_kernels(region):
    use(LIB, region)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("dist", ["load", "loadscope", "worksteal", "each"])
@pytest.mark.parametrize("at_once", [False, True], ids=["two commands", "one command"])
def test_plugins_in_all_ways_of_xdist(tmp_path: Path, dist: str, at_once: bool) -> None:
    project = VerifiedProject(tmp_path / "project", CHOOSES)
    # pytest-rerunfailures and flaky have one marker.
    project.environ["PYTEST_ADDOPTS"] = "-p standin_gpu -p no:flaky"
    words = ("-n2", f"--dist={dist}")
    if not at_once:
        project.trace(*words)
    assert "\nPROVED" in project.verify(*(["--negativa"] if at_once else []), *words)


# Restarts itself, as suites do that need another environment from the start.
RESTARTS = """
import os, sys
from standin_gpu import use

if "RESTARTED" not in os.environ:
    use("lib.so", 2)
    os.environ["RESTARTED"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""


@pytest.mark.nightly
def test_a_conftest_that_restarts_pytest(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "\ndef test_use():\n    use(LIB, 0)\n")
    project.write("conftest.py", RESTARTS)
    # pytest captures what a conftest writes, and so what the second program writes.
    project.trace("-s")
    assert [len(list(run.glob("trace/*.jsonl"))) for run in project.runs()] == [2]
    assert "\nPROVED" in project.verify("-s")
    assert "\nPROVED" in project.verify("-s", "--negativa")
    names = {kernel[0] for kernel in project.latest("plan/lib.so.json")["used_kernels"]}
    assert names == {"vector_add", "statistics_weighted_sum"}, "what it used before counts"


NAMESPACE = ["unshare", "-Urpf", "--kill-child"]
INNER = """
INNER = Path(__file__).parent / "inner"

if not INNER.exists():
    INNER.mkdir()
    (INNER / "test_inner.py").write_text("def test_inner(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "--negativa", "test_inner.py"]
    subprocess.run([*NAMESPACE, *command], cwd=INNER, check=True)

def test_outer():
    use(LIB, 0)
"""


@pytest.mark.slow
def test_a_session_in_a_pid_namespace_is_not_the_outer_one(tmp_path: Path) -> None:
    """Both are process 1, as pytest is in a container."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    suite = f"NAMESPACE = {NAMESPACE}\n{INNER}"
    project = VerifiedProject(tmp_path / "project", suite)
    project.run(*NAMESPACE, sys.executable, "-m", "pytest", "-q", "--negativa")
    files = [Run(run).outcomes_file for run in project.runs()]
    # Ids of one second have no order.
    assert sorted([t.nodeid for t in read_outcomes(file).tests] for file in files) == [
        ["inner/test_inner.py::test_inner"],
        ["test_a.py::test_outer"],
    ]


@pytest.mark.slow
def test_two_hard_links_of_one_library(tmp_path: Path) -> None:
    suite = """
HARD = LIB.with_name("hard.so")

def test_use():
    use(LIB, 0)

def test_the_other_name():
    use(HARD, 1)
"""
    project = VerifiedProject(tmp_path / "project", suite)
    (project.folder / "hard.so").hardlink_to(project.folder / "lib.so")
    # Two processes, each with a name of its own; then one, which maps the file once.
    project.trace("-n2")
    assert "\nPROVED" in project.verify()
    assert {name: status for name, (status, _) in project.statuses().items()} == {
        "lib.so": "proved",
        "hard.so": "proved",
    }
    assert project.verdict["needs"] == [] and len(project.verdict["rounds"]) == 1


@pytest.mark.nightly
def test_a_session_that_a_test_starts_leaves_latest_alone(tmp_path: Path) -> None:
    suite = """
def inner():
    return [sys.executable, "-m", "pytest", "-q", "--negativa", "inner.py"]

def test_use():
    use(LIB, 0)

def test_subprocess():
    subprocess.run(inner(), check=True, stdout=subprocess.PIPE)

def test_in_process():
    assert pytest.main(inner()[3:]) == 0
"""
    project = VerifiedProject(tmp_path / "project", suite)
    project.write("inner.py", "def test_nothing():\n    pass\n")
    project.trace()
    assert len(project.runs()) == 3
    [run] = (r for r in project.runs() if "test_use" in (r / "tests.jsonl").read_text())
    assert project.run_folder == run
    # A round of the verification starts one more, in a process of its own.
    assert "\nPROVED" in project.verify()
    assert project.run_folder == run
