"""Sessions whose traced run watches the GPU code of libraries: who reads it uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.compiling import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.paged import needs_page_watch
from tests.support.standin.standin_gpu import USED
from tests.support.verified import VerifiedProject

pytestmark = [needs_compiler, needs_page_watch]

# The payload of an element of a loaded region, on the page of the region's header.
UNWATCHED = 13384

READS = f"""
def test_use():
    use(LIB, 0)

def test_reads():
    need(LIB, {USED[3]})
"""


@pytest.mark.slow
def test_what_is_read_past_the_driver_is_kept(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", READS).trace("--negativa-cpu")
    kept = {d[0]: d[3] for d in project.plan("lib.so") if d[2]}
    assert kept[USED[0]] == "loaded" and kept[USED[3]] == "touched"
    assert USED[1] not in kept and USED[2] not in kept


MEMO = """
def test_use():
    use(LIB, 0)

def test_remembers():
    memo = Path("memo")
    if not memo.exists():
        use(LIB, 1)
        memo.touch()
"""
CACHE = """
def test_use():
    use(LIB, 0)

def test_remembers(request):
    if request.config.cache.get("fastest", None) is None:
        use(LIB, 1)
        request.config.cache.set("fastest", 1)
"""
AUTOTUNER = """
def test_use():
    use(LIB, 0)

def test_tunes():
    use(LIB, 0 if ROUND == "verify" else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suite", [MEMO, CACHE, AUTOTUNER], ids=["memo", "cache", "autotuner"])
@pytest.mark.parametrize("granularity", ["element", "kernel"])
def test_work_that_is_not_repeated_needs_no_rerun(
    tmp_path: Path, suite: str, granularity: str
) -> None:
    project = VerifiedProject(tmp_path / "project", suite)
    project.write("negativa.yaml", f"granularity: {granularity}\n")
    addopts = project.environ["PYTEST_ADDOPTS"]
    project.environ["PYTEST_ADDOPTS"] = addopts.replace("-p no:cacheprovider", "")
    project.trace("--negativa-cpu")
    before, trimmed = unused(project)
    shown = project.verify()
    assert "\nPROVED" in shown and "not repeated on the copies: its images stay whole" in shown
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    after, trimmed_after = unused(project)
    # What shares a page with code that was read, or with the end of its section.
    assert before - after == {13384, 14992, 16640, 20120, 30624, 35448, 81400}
    assert len(trimmed) == len(trimmed_after) + (granularity == "kernel")
    [row] = project.verdict["libraries"]
    assert row["unused_elements"] == len(after) and [*row["trimmed"]] == trimmed_after
    project.negativa("lock")
    # What stays stays: the plan is proved as it is.
    assert project.negativa("locate").stdout and unused(project) == (after, trimmed_after)


def unused(project: VerifiedProject) -> tuple[set[int], list[str]]:
    """By the plan of the library: where removed elements begin, and cubins that are trimmed."""
    [path] = project.run_folder.glob("plan/*.json")
    plan = json.loads(path.read_text())
    removed = {d[0] for d in plan["decisions"] if not d[2]}
    return removed, [str(cubin["start"]) for cubin in plan["trimmed"]]


@pytest.mark.slow
def test_trace_and_proof_in_one_command_watch_without_cpu_code(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", MEMO)
    shown = project.verify("--negativa")
    assert "\nPROVED" in shown and "not repeated on the copies: its images stay whole" in shown
    assert "Watched: no process read " in shown
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    assert not (project.run_folder / "cpu").exists() and "CPU code" not in shown


FALLS_BACK = f"""
def test_use():
    use(LIB, 0)

def test_falls_back():
    try:
        need(LIB, {UNWATCHED})
        use(LIB, 1)
    except RuntimeError:
        pass
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test needs removed code that lies on a page that nothing watched, and goes on without the "
    "GPU on the copies. The traced run watched all other pages.",
    says="not repeated on the copies: its images stay whole",
)
def test_what_nothing_watched_stays(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", FALLS_BACK).trace("--negativa-cpu")
    assert UNWATCHED in unused(project)[0]
    fault.check(project.verify())
    assert UNWATCHED not in unused(project)[0]
    assert project.verdict["proved"] and project.needs(kept=True)
    assert "not repeated" not in project.verify()


UNWATCHED_CHILD = """
CODE = '''
from standin_gpu import trace_program, use
detector = trace_program()
use("lib.so", 2)
detector.stop()
'''

def test_use():
    use(LIB, 0)

def test_child():
    if ROUND != "verify":
        environ = {k: v for k, v in os.environ.items() if k != "LD_AUDIT"}
        subprocess.run([sys.executable, "-c", CODE], env=environ, check=True)
"""


@pytest.mark.slow
def test_a_process_that_watched_nothing_is_no_witness(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", UNWATCHED_CHILD).trace("--negativa-cpu")
    usage = json.loads((project.run_folder / "usage.json").read_text())
    [library] = [u for u in usage["libraries"] if u["library"]["path"].endswith("/lib.so")]
    assert library["touched"] and "untouched" not in library
    assert "the traced run did not watch GPU code" in project.verify(status=1)
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]


DROPS_PRIVILEGES = """
import ctypes

def test_use():
    use(LIB, 0)
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
"""


@pytest.mark.slow
def test_removed_code_is_not_watched_behind_a_filter_of_system_calls(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", DROPS_PRIVILEGES).trace()
    assert "\nPROVED" in project.verify()
    [row] = project.verdict["libraries"]
    assert row["watched_bytes"] == 0
