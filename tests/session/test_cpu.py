"""Sessions that trace CPU code."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.spans import Span, covers, size, spans_of_pages
from pytest_negativa.models.verdict import Witness
from pytest_negativa.pages.gather import require_usage
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.storage.runs import Run
from tests.support.compiling import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.paged import compile_constants, compile_paged, functions_in, needs_page_watch
from tests.support.pages import read_page
from tests.support.sessions import Project, import_path
from tests.support.verified import VerifiedProject

pytestmark = [needs_compiler, needs_page_watch]

SUITE = """
import atexit, ctypes, os, subprocess, sys

LIBRARY = os.environ["LIBRARY"]
CHILD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).in_child()"


def test_calls():
    library = ctypes.CDLL(LIBRARY)
    library.in_main()
    atexit.register(library.at_exit)


def test_starts_a_child():
    subprocess.run([sys.executable, "-c", CHILD, LIBRARY], check=True)
"""


@pytest.fixture
def library(project: Project, tmp_path: Path) -> Path:
    library = compile_paged(tmp_path)
    project.environ["LIBRARY"] = str(library)
    project.write("negativa.yaml", "cpu: true\n")
    project.write("test_cpu.py", SUITE)
    return library


def usage_of(project: Project) -> HostUsage:
    return msgspec.json.decode((project.results / "latest/cpu.json").read_bytes(), type=HostUsage)


def find(usage: HostUsage, library: Path) -> HostLibrary:
    (found,) = (one for one in usage.libraries if one.paths == (str(library),))
    return found


@pytest.mark.slow
def test_pages_that_tests_children_and_the_exit_touch(project: Project, library: Path) -> None:
    done = project.pytest("-q", "--negativa", "--negativa-top=0")
    assert "2 passed" in done.stdout
    assert "Programs themselves and libc are not traced." in done.stdout
    assert "libpaged.so" in done.stdout
    assert len(project.runs()) == 1

    before = functions_in(library, find(usage_of(project), library).touched)
    assert before == {"in_constructor", "in_main", "in_child"}
    # Code ran after the report, too.
    shown = project.negativa("pages", "--top=0")
    assert "libpaged.so" in shown.stdout
    after = functions_in(library, find(usage_of(project), library).touched)
    assert after == {"in_constructor", "in_main", "in_child", "at_exit"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flag", "addopts", "file"])
def test_the_process_starts_again_once(
    project: Project, library: Path, how: str, tmp_path: Path
) -> None:
    project.environ["NEGATIVA_DIRECTORI"] = "x"
    if how != "file":
        project.write("negativa.yaml", f"directory: {tmp_path / 'runs'}\n")
    if how == "addopts":
        project.write("pytest.ini", "[pytest]\naddopts = --negativa-cpu\n")
    flags = ["--negativa-cpu"] if how == "flag" else []
    done = project.pytest("-q", "-p", "negativa", "--negativa", *flags)
    assert "2 passed" in done.stdout
    assert "Programs themselves and libc are not traced." in done.stdout
    # Told once, and only the folder that the file names has a run.
    assert done.stderr.count("NEGATIVA_DIRECTORI") == 1
    runs = project.results if how == "file" else tmp_path / "runs"
    assert project.results.exists() == (how == "file")
    assert len([run for run in runs.iterdir() if run.is_dir() and not run.is_symlink()]) == 1


REFUSED = {
    "plugin": (["-p", "nope"], 'Error importing plugin "nope"'),
    "required": (["-o", "required_plugins=nope"], "Missing required plugins: nope"),
    "interpreter": (["-p", "moved"], "/nope/python: cannot be started: No such file or directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_session_leaves_no_run(project: Project, library: Path, why: str) -> None:
    project.write("moved.py", "import sys\nsys.executable = '/nope/python'\n")
    project.environ["PYTHONPATH"] = import_path(project.folder)
    words, error = REFUSED[why]
    plugins = [*words, "-p", "negativa"] if why == "interpreter" else ["-p", "negativa", *words]
    done = project.pytest("-q", *plugins, "--negativa", "--negativa-cpu", status=4)
    assert done.stderr.count(error) == 1
    assert project.runs() == []


@pytest.mark.slow
def test_a_plugin_that_is_switched_off_again(project: Project, library: Path) -> None:
    words = ["-p", "negativa", "--negativa", "--negativa-cpu", "-p", "no:negativa"]
    assert "2 passed" in project.pytest("-q", *words).stdout
    assert project.runs() == []


LISTS_AT_THE_END = """
import atexit, os, sys


@atexit.register
def list_tests():
    if "LISTED" not in os.environ:
        os.environ["LISTED"] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "pytest", "--collect-only", "-q"])
"""


@pytest.mark.slow
def test_a_session_whose_process_becomes_another_keeps_its_run(
    project: Project, library: Path
) -> None:
    project.write("conftest.py", LISTS_AT_THE_END)
    done = project.pytest("-q", "--negativa")
    assert "2 passed" in done.stdout and "test_cpu.py::test_calls" in done.stdout
    assert len(project.runs()) == 1


@pytest.mark.slow
def test_a_plugin_that_a_conftest_names_comes_too_late(project: Project, library: Path) -> None:
    project.write("conftest.py", "pytest_plugins = ['pytest_negativa.plugin']\n")
    project.write("test_fails.py", "def test_fails():\n    assert False\n")
    words = ["-q", "--negativa", "--negativa-cpu"]
    done = project.pytest(*words, status=1, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    assert "1 failed, 2 passed" in done.stdout
    assert project.runs() == []


@pytest.mark.slow
def test_reports_of_gpu_code_are_refused(project: Project, library: Path) -> None:
    done = project.pytest("--negativa", "--negativa-report=html,json", "-k", "calls")
    assert "negativa: GPU code not traced: " in done.stdout
    assert "negativa: no GPU code was traced: " in done.stdout
    assert "html, json not written: these reports need a trace of GPU code" in done.stdout
    image_report = (
        "inspect",
        "--packages",
        str(library.parent),
        "--run",
        str(project.results / "latest"),
    )
    for command in (("report", "html"), ("locate",), ("reconstruct",), image_report):
        refused = project.negativa(*command, status=1)
        assert "only CPU code was traced; to prove it, add --cpu" in refused.stderr


@pytest.mark.slow
def test_a_library_at_a_path_that_is_not_utf_8(project: Project, library: Path) -> None:
    odd = os.fsdecode(os.fsencode(library.parent) + b"/caf\xe9.so")
    shutil.copy(library, odd)
    project.environ["LIBRARY"] = odd
    done = project.pytest("-q", "--negativa", "-k", "calls")
    assert "1 passed" in done.stdout
    assert r"caf\xe9.so: its path is not UTF-8" in project.negativa("pages").stdout


@pytest.mark.slow
def test_a_choice_of_tests_is_told(project: Project, library: Path) -> None:
    """In the report, in cpu.json and by slim, also of a united trace."""
    chosen = "the tests of -k calls -m 'not slow' alone"
    done = project.pytest("-q", "--negativa", "-k", "calls", "-m", "not slow")
    run = project.runs()[-1].name
    told = f"Tests that were not chosen may need more CPU code:\n  {run}: {chosen}"
    assert told in done.stdout and told in project.negativa("pages").stdout
    assert usage_of(project).chosen == (f"{run}: {chosen}",)
    spares = library.parents[1] / "spares"
    told = f"{chosen}; CPU code that only other tests need comes from the spare"
    assert told in project.negativa("lock").stderr
    words = (f"--spare={spares}", "--dry-run", str(library.parent))
    slimming = project.negativa("slim", *words)
    assert told in slimming.stderr
    assert "not chosen" not in project.pytest("-q", "--negativa").stdout
    assert usage_of(project).chosen == ()


@pytest.mark.slow
def test_workers_of_xdist(project: Project, library: Path) -> None:
    project.pytest("-q", "--negativa", "-n", "2")
    project.negativa("pages")
    usage = usage_of(project)
    assert sum(usage.processes.values()) >= 3
    assert functions_in(library, find(usage, library).touched) >= {"in_main", "in_child", "at_exit"}


FAILS = "def test_fails():\n    assert False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "options", "status", "reason"),
    [
        pytest.param(FAILS, ["-x"], 1, "stopping after 1 failures", id="stopped"),
        pytest.param(
            "def test_stops():\n    raise KeyboardInterrupt\n", [], 2, "it was interrupted",
            id="interrupted",
        ),
        pytest.param(
            "import nothing_of_that_name\n", ["--continue-on-collection-errors"], 1,
            "files with tests could not be collected", id="not-collected",
        ),
        pytest.param(
            "import os\ndef test_dies():\n    os._exit(1)\n", ["-n2"], 1, "was lost",
            id="crashed",
        ),
    ],
)  # fmt: skip
@pytest.mark.planted_fault(
    "a session that stopped early had not touched all the pages that its tests need",
    says="All CPU code counts as used, because more may have been touched",
)
def test_a_session_that_stopped_early_is_incomplete(
    project: Project,
    library: Path,
    fault: PlantedFault,
    suite: str,
    options: list[str],
    status: int,
    reason: str,
) -> None:
    project.write("test_a.py", suite)
    done = project.pytest("-q", "--negativa", *options, status=status)
    fault.check(done.stdout)
    (found,) = usage_of(project).incomplete
    assert reason in found
    refused = project.negativa("lock", status=1).stderr
    assert f": not locked: {found}; trace again\n" in refused


@pytest.mark.slow
def test_tests_that_failed_leave_a_trace_for_a_slim_with_a_spare(
    project: Project, library: Path
) -> None:
    project.write("test_a.py", FAILS)
    done = project.pytest("-q", "--negativa", status=1)
    assert "Tests that failed may need CPU code that they did not reach:\n  2" in done.stdout

    deployed = project.folder / "deployed"
    deployed.mkdir()
    shutil.copy(library, deployed)
    project.negativa("lock")
    done = project.negativa("slim", "--spare", "spares", "--dry-run", str(deployed))
    run = (project.results / "latest").resolve().name
    told = f"{run}: 1 test failed; CPU code that only such tests need comes from the spare\n"
    assert done.stderr.count(told) == 1
    usage = usage_of(project)
    assert usage.incomplete == () and "1 test failed" in usage.failed[0]
    # A failed test is compared like any other.
    verified = project.pytest("-q", "--negativa-verify", "--negativa-cpu", status=1)
    assert "Proved on " in verified.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--negativa-cpu"]])
def test_a_program_that_calls_pytest_cannot_be_traced(
    project: Project, library: Path, options: list[str]
) -> None:
    words = ["-q", "--negativa", *options]
    project.write("main.py", f"import pytest, sys\nsys.exit(pytest.main({words}))\n")
    done = project.run(sys.executable, "main.py", NEGATIVA_DIRECTORI="x")
    assert "CPU code was not traced: a program called pytest" in done.stdout
    assert "2 passed" in done.stdout
    assert done.stderr.count("NEGATIVA_DIRECTORI") == 1


INNER = """
import pytest


def test_calls_pytest(tmp_path):
    (tmp_path / "test_inner.py").write_text("def test_fails(): assert False")
    assert pytest.main(["-q", "--negativa", "--negativa-cpu", str(tmp_path)]) == 1
"""


@pytest.mark.slow
def test_a_session_inside_a_test_leaves_the_outer_run_alone(
    project: Project, library: Path
) -> None:
    project.write("test_cpu.py", INNER)
    project.pytest("-q", "--negativa", "--negativa-cpu")
    assert usage_of(project).incomplete == ()
    assert "nothing is planned" not in project.negativa("pages").stdout
    outcomes = Run(project.results / "latest").outcomes_file
    assert [t.nodeid for t in read_outcomes(outcomes).tests] == ["test_cpu.py::test_calls_pytest"]


ANOTHER = """
import ctypes, os
from pathlib import Path


def test_calls_another_function_each_time():
    runs = len(Path("runs").read_text()) if Path("runs").exists() else 0
    Path("runs").write_text("x" * (runs + 1))
    names = ("in_main", "in_thread", "in_child", "in_handler", "when_blocked", "at_exit")
    getattr(ctypes.CDLL(os.environ["LIBRARY"]), names[min(runs, 5)])()
"""


TOUCHED_AGAIN = f"{Witness.TOUCHED_AGAIN.value}:\n".capitalize()


def line_of_need(shown: str, library: Path) -> str:
    """What a session shows of pages that the proof alone touched."""
    lines = shown.partition(TOUCHED_AGAIN)[2].splitlines()
    (line,) = (line for line in lines if f" of {library.name}, in the second watched run" in line)
    return line


def missed_in(verdict: Any, library: Path) -> list[Span]:
    """The pages of a library that a verdict says the proof alone touched."""
    (need,) = (one for one in verdict["needs"] if one["library"] == str(library))
    assert need["witness"] == Witness.TOUCHED_AGAIN.value and need["kept"]
    return [Span(*span) for span in need["spans"]]


def pages_in(verdict: Any, library: Path) -> int:
    """Bytes of a library's pages that a verdict says are not needed."""
    (row,) = (one for one in verdict["libraries"] if one["path"] == str(library))
    return size(spans_of_pages(row["pages"]))


@pytest.mark.slow
def test_untouched_pages_are_proved_unneeded(project: Project, library: Path) -> None:
    done = project.pytest("-q", "--negativa", "--negativa-verify", "-k", "calls")
    assert "Proved on" in done.stdout
    verdict = project.latest("verdict.json")
    assert verdict["proved"] and verdict["cpu_reasons"] == []
    assert pages_in(verdict, library) >= 7 * 4096


@pytest.mark.slow
@pytest.mark.planted_fault(
    "a test needs a page of CPU code that it did not touch when it was traced",
    says="1 page (file offsets 0x",
)
def test_a_page_that_is_needed_after_all(
    project: Project, library: Path, fault: PlantedFault
) -> None:
    project.write("test_more.py", ANOTHER)
    done = project.pytest("--negativa", "-q", "--negativa-verify", "test_more.py")
    fault.check(line_of_need(done.stdout, library))
    verdict = project.latest("verdict.json")
    assert verdict["proved"] and len(verdict["rounds"]) == 1
    missed = missed_in(verdict, library)
    assert functions_in(library, missed) == {"in_thread"}
    # The page joined the run, and no plan by this run takes it.
    usage = require_usage(Run((project.results / "latest").resolve()))
    (kept,) = (one for one in usage.libraries if one.paths[0] == str(library))
    assert covers(kept.touched, *missed[0])
    assert size(kept.watched) - size(kept.touched) == pages_in(verdict, library)


LATER = """
import ctypes, os
from pathlib import Path


def test_loads_it_in_the_second_run():
    ctypes.CDLL(os.environ["LIBRARY"]).in_main()
    if Path("ran").exists():
        ctypes.CDLL(os.environ["LATER"])
    Path("ran").touch()
"""


@pytest.mark.slow
def test_a_library_that_the_proof_alone_loads_joins_the_run(
    project: Project, library: Path, tmp_path: Path
) -> None:
    later = compile_constants(tmp_path)
    project.write("test_later.py", LATER)
    project.pytest("--negativa", "-q", "--negativa-verify", "test_later.py", LATER=str(later))
    usage = require_usage(Run((project.results / "latest").resolve()))
    assert str(later) in [path for one in usage.libraries for path in one.paths]


BY_CHANCE = """
import ctypes, os
from pathlib import Path


def test_fails_twice():
    runs = len(Path("runs").read_text()) if Path("runs").exists() else 0
    Path("runs").write_text("x" * (runs + 1))
    ctypes.CDLL(os.environ["LIBRARY"]).in_main()
    assert runs >= 2
    ctypes.CDLL(os.environ["LIBRARY"]).in_thread()
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test fails by chance when traced and in the proof, before it comes to a page that it needs.",
    says="1 page (file offsets 0x",
)
def test_a_page_that_a_failed_test_needs(
    project: Project, library: Path, fault: PlantedFault
) -> None:
    project.write("test_chance.py", BY_CHANCE)
    done = project.pytest("--negativa", "-q", "--negativa-verify", "test_chance.py", status=1)
    fault.check(line_of_need(done.stdout, library))
    missed = missed_in(project.latest("verdict.json"), library)
    assert functions_in(library, missed) == {"in_thread"}


EMPTIED = """
import ctypes, os, subprocess, sys

def test_child():
    ctypes.CDLL(os.environ["LIBRARY"]).in_main()
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).in_thread()"
    subprocess.run([sys.executable, "-c", code, os.environ["LIBRARY"]], env={}, check=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.planted_fault(
    "A child with an emptied environment needs a page of CPU code.",
    says="was started without NEGATIVA_PAGES_LOGS and LD_AUDIT",
)
def test_a_child_that_nothing_watches(project: Project, fault: PlantedFault) -> None:
    project.write("test_child.py", EMPTIED)
    words = ("--negativa", "-q", "--negativa-verify", "test_child.py")
    done = project.pytest(*words, status=1)
    fault.check(done.stdout)
    accepted = project.pytest(*words, "--negativa-opened-originals=command:* -c import ctypes*")
    assert "was started without" not in accepted.stdout


FAILS_BUT_AGAIN = """
import ctypes

def test_use():
    use(LIB)

def test_fails():
    ctypes.CDLL(os.environ["LIBRARY"]).in_main()
    assert ROUND == "original"
    ctypes.CDLL(os.environ["LIBRARY"]).in_thread()
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "Code that a failed test needs is seen when it runs again, and the copies have it elsewhere.",
    says="1 page (file offsets 0x",
)
def test_a_page_that_a_failed_test_needs_with_compacted_copies(
    tmp_path: Path, fault: PlantedFault
) -> None:
    project = VerifiedProject(tmp_path / "project", FAILS_BUT_AGAIN)
    library = compile_paged(tmp_path)
    options = ("--negativa", "--negativa-verify", "--negativa-cpu", "--negativa-copies=compacted")
    done = project.pytest("-q", *options, status=1, LIBRARY=str(library))
    fault.check(line_of_need(done.stdout, library))
    missed = missed_in(project.latest("verdict.json"), library)
    assert functions_in(library, missed) == {"in_thread"}


BOTH = f"""
{ANOTHER}

def test_uses_code():
    ctypes.CDLL(LIB)
    use(LIB)
"""


@pytest.mark.slow
def test_gpu_code_and_cpu_code_are_proved_in_one_round(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", BOTH)
    project.environ["LIBRARY"] = str(compile_paged(tmp_path))
    flags = ("--negativa-cpu", "--negativa-level=launch", "--negativa-report=html:page.html")
    options = ("-q", "--negativa", "--negativa-verify", *flags)
    done = project.pytest(*options, "-k", "uses")
    assert "PROVED: " in done.stdout and "Proved on " in done.stdout
    page = read_page(project.folder / "page.html")
    assert page["hostProof"].startswith("Proved on ")
    assert done.stdout.rstrip().endswith("\nNext: negativa lock")
    verdict = project.latest("verdict.json")
    assert verdict["proved"] and verdict["cpu_reasons"] == []
    assert [r["kind"] for r in verdict["rounds"]] == ["verify"]
    copied = project.folder / "lib.so"
    pages_in(verdict, copied)
    # The library is the same, though its file is newer than the trace.
    os.utime(copied)
    project.pytest("-q", "--negativa-verify", "--negativa-cpu", "-k", "uses")
    verdict = project.latest("verdict.json")
    pages_in(verdict, copied)
    assert verdict["cpu_reasons"] == []

    # What the tests need on the copies alone is seen there.
    done = project.pytest(*options)
    assert "PROVED: " in done.stdout and TOUCHED_AGAIN in done.stdout
    rows = [one["path"] for one in project.latest("verdict.json")["libraries"]]
    assert len(set(rows)) == len(rows) and not any("reconstructed" in path for path in rows)


HEALS = """
def test_use():
    use(LIB, 0)

def test_needs():
    if ROUND == "verify":
        need(LIB, USED[2])
"""


@pytest.mark.slow
def test_a_healed_session_ends_as_its_last_round(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", HEALS)
    project.pytest("-q", "--negativa", "--negativa-heal", "--negativa-cpu")
    verdict = project.latest("verdict.json")
    assert verdict["proved"] and verdict["needs"] and verdict["cpu_reasons"] == []
    assert [r["status"] for r in verdict["rounds"]] == [1, 0]


@pytest.mark.slow
def test_cpu_code_is_proved_on_the_originals_if_gpu_code_is_not(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", HEALS)
    done = project.pytest("-q", "--negativa", "--negativa-verify", "--negativa-cpu", status=1)
    assert "\nNOT PROVED:" in done.stdout and "\nProved on " in done.stdout
    verdict = project.latest("verdict.json")
    assert not verdict["proved"] and verdict["reasons"] and verdict["libraries"]
    assert verdict["cpu_reasons"] == [] and len(verdict["rounds"]) == 2
    assert done.stdout.rstrip().endswith("\nNext: pytest --negativa-heal")


@pytest.mark.slow
@pytest.mark.planted_fault(
    "a requested proof of CPU code is skipped", says="no trace of CPU code; make one with"
)
def test_a_run_without_a_trace_of_cpu_code(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", HEALS)
    project.pytest("-q", "--negativa", "-k", "use")
    words = ("-q", "--negativa-verify", "--negativa-cpu", "-k", "use")
    done = project.pytest(*words, status=1)
    fault.check(done.stdout + done.stderr)
    verdict = project.latest("verdict.json")
    assert verdict["proved"] and verdict["cpu_reasons"] is None


SHARDS = """
import ctypes, os

LIBRARY = ctypes.CDLL(os.environ["LIBRARY"])


def test_main():
    LIBRARY.in_main()


def test_both():
    LIBRARY.in_thread()


def test_exit():
    LIBRARY.at_exit()
"""


@pytest.mark.slow
def test_shards_are_united(project: Project, library: Path) -> None:
    """A run that is given again changes nothing."""
    project.write("test_cpu.py", SHARDS)
    for selected in ("main or both", "both or exit"):
        project.pytest("-q", "--negativa", "--negativa-verify", "-k", selected)
    parts = project.runs()
    assert all((Path(part) / "verdict.json").exists() for part in parts)
    project.negativa("combine", *parts)
    touched = functions_in(library, find(usage_of(project), library).touched)
    assert touched == {"in_constructor", "in_main", "in_thread", "at_exit"}
    whole = (project.results / "latest").resolve()
    # Nothing says of a union what was proved of its parts.
    assert not (whole / "verdict.json").exists()
    project.negativa("combine", whole, *parts)
    again = (project.results / "latest" / "cpu.json").read_bytes()
    assert again == (whole / "cpu.json").read_bytes()
    assert usage_of(project).processes.keys() == {Path(part).name for part in parts}
    project.negativa("combine", whole, f"--path={library.parent}=/elsewhere")
    paths = {path for one in usage_of(project).libraries for path in one.paths}
    assert "/elsewhere/libpaged.so" in paths and str(library) not in paths


@pytest.mark.slow
def test_what_a_proof_touched_is_kept_before_its_verdict(project: Project, library: Path) -> None:
    # A folder is in the way when the verdict is written.
    project.write(
        "test_block.py",
        """
from pathlib import Path

def test_blocks():
    if Path("block").exists():
        Path(".negativa/latest/verdict.json").mkdir()
""",
    )
    project.pytest("-q", "--negativa")
    project.write("block", "")
    done = project.pytest("-q", "--negativa-verify", status=1)
    assert "verdict.json: cannot be written" in done.stdout + done.stderr
    assert list(project.results.glob("latest/cpu/added-*.json"))


@pytest.mark.slow
def test_a_damaged_log_of_a_round_is_judged(project: Project, library: Path) -> None:
    project.write(
        "test_damage.py",
        """
import os
from pathlib import Path

def test_damages():
    if Path("damage").exists():
        Path(os.environ["NEGATIVA_PAGES_LOGS"], "1.1.1.pages").write_bytes(b"no log")
""",
    )
    project.pytest("-q", "--negativa")
    project.write("damage", "")
    done = project.pytest("-q", "--negativa-verify", status=1)
    assert "CPU code is not proved:" in done.stdout and "1.1.1.pages" in done.stdout
    (project.folder / "damage").unlink()
    project.pytest("-q", "--negativa-verify")
