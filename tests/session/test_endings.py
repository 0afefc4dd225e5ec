"""How a session ends: failed, interrupted, killed, over a limit; and what is planned then."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.sessions import FIRST_USES, HEADLINE, NO_GPU_LINE, Project
from tests.support.verified import VerifiedProject

NOT_PLANNED = "nothing is planned from this run: "
RED = "\x1b[31m"

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert 0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [(), pytest.param(("-n2",), marks=pytest.mark.nightly)],
)
def test_a_stopped_session_plans_nothing(project: Project, stop: tuple[str, ...]) -> None:
    project.write("test_a.py", PASSES + FAILS)

    done = project.pytest("-q", "--negativa", "--maxfail=1", *stop, status=2 if stop else 1)

    reason = "it was interrupted" if stop else "it was stopped: stopping after 1 failures"
    assert NOT_PLANNED + reason in done.stdout
    assert HEADLINE in done.stdout
    assert not project.planned()
    assert project.latest("report.json")["files"] == [
        "trace/", "trace.json", "usage.json", "map/", "report.json",
    ]  # fmt: skip

    failed = project.pytest("-q", "--negativa", *stop, status=1)
    assert NOT_PLANNED not in failed.stdout
    assert len([d for d in project.plan() if not d[2]]) == 25


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.slow)])
def test_a_stopped_session_with_a_suppressed_exit_code(
    project: Project, workers: tuple[str, ...]
) -> None:
    """Some plugins turn exit code 1 into 0."""
    project.write("test_a.py", PASSES + FAILS)
    project.write(
        "conftest.py",
        "import pytest\n\n\n@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n",
    )
    done = project.pytest("-q", "--negativa", "-x", *workers)
    assert NOT_PLANNED in done.stdout
    assert not project.planned()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("raise KeyboardInterrupt", 2),
        ("pytest.exit('enough', returncode=0)", 0),
        ("pytest.exit('enough', returncode=7)", 7),
    ],
)
def test_an_interrupted_session_plans_nothing(
    project: Project, statement: str, status: int
) -> None:
    project.write("test_a.py", f"import pytest\n\n\ndef test_a():\n    {statement}\n{PASSES}")
    done = project.pytest("-q", "--negativa", status=status)
    assert f"{NOT_PLANNED}it was interrupted" in done.stdout
    assert not project.planned()


@pytest.mark.slow
def test_a_session_without_tests_plans_nothing(project: Project) -> None:
    project.write("test_a.py", PASSES)
    done = project.pytest("-q", "--negativa", "-k", "nothing_like_it", status=5)
    assert f"{NOT_PLANNED}it ran no test" in done.stdout
    assert not project.planned()


@pytest.mark.slow
def test_a_collection_error_plans_nothing(project: Project) -> None:
    project.write("test_a.py", PASSES)
    project.write("test_b.py", "import no_such_module\n")
    assert NOT_PLANNED in project.pytest("-q", "--negativa", status=2).stdout
    assert not project.planned()


@pytest.mark.slow
def test_a_killed_worker_is_named_and_nothing_is_planned(project: Project) -> None:
    project.write(
        "test_a.py",
        "import os, signal\n\n\ndef test_killed():\n    os.kill(os.getpid(), signal.SIGKILL)\n\n\n"
        + PASSES,
    )

    done = project.pytest("-q", "--negativa", "-n2", status=1)

    assert "1 failed, 1 passed" in done.stdout
    report = project.latest("report.json")
    [lost] = [text for text in report["not_covered"] if "was lost" in text]
    assert lost.startswith(("worker gw0 was lost (", "worker gw1 was lost ("))
    worker = lost.split()[1]
    assert any(f"({worker}): it did not end by itself" in text for text in report["not_covered"])
    assert lost in done.stdout and NOT_PLANNED in done.stdout
    assert not project.planned()


@pytest.mark.slow
def test_a_crossed_threshold_fails_the_session(project: Project) -> None:
    project.write("test_a.py", PASSES)
    text = "trace: {replay: recorded}\nthresholds: {min_used_kernels: 5}\n"
    project.write("negativa.yaml", text)

    done = project.pytest("-q", "--negativa", status=1)

    assert "negativa: min_used_kernels: 4 kernels are used, the limit is 5" in done.stdout
    assert "1 passed" in done.stdout
    # The tests passed: what they needed is known.
    assert project.planned()


@pytest.mark.slow
def test_kernel_coverage_below_its_limit_is_the_last_line_of_the_report(project: Project) -> None:
    project.write("test_a.py", PASSES)

    passed = project.pytest("-q", "--negativa", "--negativa-fail-under=30.7")
    failed = project.pytest("-q", "--negativa", "--negativa-fail-under=30.8%", status=1)

    assert "fail_under" not in passed.stdout
    assert failed.stdout.splitlines()[-3] == (
        "negativa: fail_under: 30.77% (4 of 13) of the project's kernels looked up, the limit is "
        "30.8%"
    )
    [table] = [p for p in failed.stdout.split("\n\n") if p.startswith("kernel coverage")]
    cells = [line.split() for line in table.splitlines()[2:]]
    assert cells[0] == ["libquickstart.so", "13", "4", "30.8%", "12", "4"]
    assert ["-", "matrices", "3", "1", "33.3%", "2", "1"] in cells
    [library] = project.latest("report.json")["coverage"]
    assert {
        kernel["name"]: kernel["runs"][0][0] for kernel in library["kernels"] if kernel["runs"]
    } == FIRST_USES


@pytest.mark.slow
def test_kept_thresholds_and_stronger_exit_codes(project: Project) -> None:
    project.write("test_a.py", PASSES)
    limits = "max_unused_percent: 89.61, min_used_kernels: 4, max_gpu_code: 67200"
    project.write("negativa.yaml", f"trace: {{replay: recorded}}\nthresholds: {{{limits}}}\n")
    assert "the limit is" not in project.pytest("-q", "--negativa").stdout
    done = project.pytest("-q", "--negativa", "--negativa-min-used-kernels=9", "-k", "no", status=5)
    assert "the limit is 9" in done.stdout


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(project: Project) -> None:
    project.write("test_a.py", PASSES)
    project.write("taken", "a file")

    for workers in ((), ("-n2",)):
        done = project.pytest(
            "--negativa", "--negativa-dir=taken/results", "--color=yes", *workers, status=1
        )
        assert "1 passed" in done.stdout
        [line] = [s for s in done.stdout.splitlines() if "negativa: nothing was traced" in s]
        assert "taken/results" in line and "cannot be" in line
        assert RED in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("shutil.rmtree('.negativa')", "the traces were removed while tests ran"),
        ("shutil.rmtree('.negativa'); Path('.negativa').touch()", "the traces were removed"),
        ("next(Path('.negativa').glob('2*')).joinpath('plan').touch()", "cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written(project: Project, damage: str, line: str) -> None:
    project.write(
        "test_a.py",
        f"import shutil\nfrom pathlib import Path\n\n\ndef test_damage():\n    {damage}\n",
    )

    done = project.pytest("--negativa", "--color=yes", status=1)

    assert "1 passed" in done.stdout and "Traceback" not in done.stdout + done.stderr
    [shown] = [s for s in done.stdout.splitlines() if "negativa: no report" in s]
    assert line in shown and RED in shown


@pytest.mark.slow
def test_without_terminal_a_fault_is_said_all_the_same(project: Project) -> None:
    project.write("test_a.py", PASSES)
    project.write("taken", "a file")
    done = project.pytest(
        "--negativa", "--negativa-dir=taken/results", "-p", "no:terminal", status=1
    )
    assert done.stdout == "" and "negativa: nothing was traced" in done.stderr


@pytest.mark.slow
def test_a_lost_trace_of_a_worker_keeps_everything(project: Project) -> None:
    project.write(
        "test_a.py",
        "import os\nfrom pathlib import Path\n\n\ndef test_remove():\n"
        "    [own] = Path('.negativa').glob(f'*/trace/*.{os.getpid()}.*')\n    own.unlink()\n",
    )
    done = project.pytest("-q", "--negativa", "-n1")
    assert "the trace of worker gw0 is gone" in done.stdout
    assert {d[3] for d in project.plan()} == {"incomplete"}


@pytest.mark.slow
def test_no_gpu_and_no_recording(project: Project) -> None:
    (project.folder / "negativa.yaml").unlink()
    project.write("test_a.py", PASSES + FAILS)
    for workers in ((), ("-n2",)):
        for name, status in (("passes", 0), ("fails", 1)):
            done = project.pytest("-q", "--negativa", "-k", name, *workers, status=status)
            assert [s for s in done.stdout.splitlines() if "negativa" in s.lower()] == [
                "negativa: nothing was traced: no GPU here, and no recorded trace to replay "
                "(trace.replay)",
                "Next: negativa inspect",
            ]
    assert not project.results.exists()


@pytest.mark.slow
def test_a_session_to_verify_that_traces_nothing_leaves_no_run(project: Project) -> None:
    project.write("test_a.py", PASSES)
    for option, status in (("-kpasses", 1), ("-knone", 5), ("--unknown-option", 4)):
        done = project.pytest("--negativa", "--negativa-verify", option, status=status)
        assert "nothing to verify: the traced run has no plan" in done.stdout
        assert [path.name for path in project.results.iterdir()] == [".gitignore"]


@pytest.mark.slow
@pytest.mark.planted_fault(
    "the CI machine lost its GPU, and nothing is traced",
    says="nothing was traced: no GPU here, and no recorded trace to replay (trace.replay); "
    "a GPU is required (require_gpu)",
)
def test_a_required_gpu_that_is_gone(project: Project, fault: PlantedFault) -> None:
    project.write("negativa.yaml", "require_gpu: true\n")
    project.write("test_a.py", PASSES)
    done = project.pytest("-q", "--negativa", status=1)
    fault.check(done.stdout)
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.planted_fault(
    "the CI machine lost its GPU, and a recorded trace hides it",
    says="require_gpu: no GPU code was loaded on a GPU here",
)
def test_a_replay_is_no_gpu(project: Project, fault: PlantedFault) -> None:
    project.write("test_a.py", PASSES)
    done = project.pytest("-q", "--negativa", "--negativa-require-gpu", status=1)
    fault.check(done.stdout)
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_a_nested_session_is_no_worker_of_the_outer_one(project: Project) -> None:
    """What pytester does: a test of a worker starts pytest, which inherits all variables."""
    inner = project.folder / "inner"
    project.write("inner/test_inner.py", PASSES)
    project.write("inner/pytest.ini", "[pytest]\n")
    project.write("inner/negativa.yaml", "trace: {replay: ../recorded}\n")
    project.write(
        "test_a.py",
        "import subprocess, sys\nimport pytest\n\n\n"
        "@pytest.mark.parametrize('workers', ['-n0', '-n1'])\n"
        "def test_nested(workers):\n"
        "    command = [sys.executable, '-m', 'pytest', '-q', '--negativa', workers]\n"
        f"    done = subprocess.run(command, cwd={str(inner)!r}, capture_output=True, text=True)\n"
        "    assert done.returncode == 0, done.stdout + done.stderr\n"
        "    assert 'replaying' in done.stdout\n",
    )

    done = project.pytest("-q", "--negativa", "-n2", "test_a.py")

    assert "2 passed" in done.stdout and NO_GPU_LINE in done.stdout
    usage = project.latest("usage.json")
    workers = sorted(p["header"].get("worker", "") for p in usage["processes"])
    assert workers == ["", "gw0", "gw1"]
    assert usage["incomplete"] == []
    assert len(project.runs()) == 1
    assert len(list(Path(inner, ".negativa").glob("2*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_session_whose_output_is_closed_plans_nothing(tmp_path: Path, unbuffered: str) -> None:
    suite = """
def test_first():
    use(LIB, 0)

def test_second():
    while not Path("closed").exists():
        time.sleep(0.01)
"""
    project = VerifiedProject(tmp_path / "project", suite)

    command = (sys.executable, "-m", "pytest", "-v", "--negativa")
    with project.start(*command, PYTHONUNBUFFERED=unbuffered) as session:
        assert session.stdout is not None and session.stderr is not None
        while "test_first PASSED" not in session.stdout.readline():
            pass
        session.stdout.close()
        project.write("closed", "")
        session.stderr.read()

    assert session.returncode != 0
    [run] = project.runs()
    assert not project.planned()
    failed = project.negativa("locate", "--run", run, status=1)
    assert NOT_PLANNED in failed.stderr


@pytest.mark.slow
def test_a_session_that_a_hook_broke_off_plans_nothing(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_use():\n    use(LIB, 0)\n")
    hook = "def pytest_sessionfinish():\n    raise RuntimeError('no room')\n"
    project.write("conftest.py", hook)

    told = project.pytest("-q", "--negativa", status=1).stderr

    assert "which raised RuntimeError: no room\n" in told
    [run] = project.runs()
    # By its id, as "negativa runs" prints it.
    failed = project.negativa("locate", "--run", run.name, status=1)
    assert f"{NOT_PLANNED}an error ended the session in" in failed.stderr
