"""The command: trace, locate, debloat and combine, on recorded traces."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_negativa.rundir import mark_failed, point_latest
from tests.plugin.sessions import HEADLINE, KERNELS, LOADED, ROOT, Project, used_kernels

TRACES = ROOT / "tests" / "data" / "traces"
Lines = list[str]

NOTHING = "negativa: no GPU code was loaded from any library that is looked at\n"


@pytest.fixture
def recorded(project: Project) -> Project:
    """The recording, with the library's path as it is here: as if it had been traced here."""
    rewrite(project, "recorded/h200.jsonl")
    return project


def rewrite(project: Project, name: str, change: Callable[[Lines], Lines] = list) -> Path:
    """Write the recording, or what ``change`` makes of its lines, to a file of the project."""
    lines = (project.folder / "recorded" / "h200.jsonl").read_text().splitlines(keepends=True)
    path = project.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    here = str(project.folder / "quickstart" / "libquickstart.so")
    text = "".join(change(lines)).replace("/quickstart/quickstart/libquickstart.so", here)
    path.write_text(text)
    return path


@pytest.mark.parametrize("verb", ["trace", "debloat"])
@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_exit_status_is_that_of_the_command(
    project: Project, verb: str, code: str, status: int
) -> None:
    done = project.negativa(verb, "--", sys.executable, "-c", code, status=status)
    # Without a GPU no process can leave a trace: one line says so, and nothing stays behind.
    assert done.stdout == ""
    assert done.stderr.startswith("negativa: nothing was traced: ")
    assert done.stderr.count("\n") == 1
    assert project.runs() == []
    assert not (project.results / "latest").exists()


@pytest.mark.parametrize("verb", ["trace", "debloat"])
def test_limits_do_not_pass_where_nothing_was_traced(project: Project, verb: str) -> None:
    project.write("negativa.yaml", "thresholds: {min_used_kernels: 1}\n")

    done = project.negativa(verb, "--", "true", status=1)

    assert done.stderr.endswith("negativa: so the thresholds can't be checked\n")


def test_the_command_keeps_its_input_and_output(project: Project) -> None:
    code = "import sys; sys.stderr.write('e'); print(sys.argv[1:], sys.stdin.read())"
    done = project.negativa(
        "trace", "--dir", "out", "--", sys.executable, "-c", code, "--dir", "x", "-h"
    )
    assert done.stdout.startswith("['--dir', 'x', '-h']")
    assert done.stderr.startswith("enegativa: nothing was traced")
    assert list((project.folder / "out").iterdir()) == []


@pytest.mark.parametrize("verb", ["trace", "debloat"])
@pytest.mark.parametrize("command", ["no-such-program", "./negativa.yaml", "./recorded"])
def test_a_command_that_is_not_there(project: Project, verb: str, command: str) -> None:
    done = project.negativa(verb, "--", command, status=127)
    assert done.stderr == f"negativa: error: {command}: not found, or not an executable file\n"
    assert done.stdout == "" and not project.results.exists()


def test_no_command_is_wrong_usage(project: Project) -> None:
    assert "COMMAND" in project.negativa("trace", status=2).stderr


def test_results_that_cannot_be_written(project: Project) -> None:
    project.write("taken", "a file")
    done = project.negativa("trace", "--dir=taken/x", "--", "true", status=1)
    assert done.stderr.startswith("negativa: error: ") and "cannot be created" in done.stderr


def test_locate_without_a_run(project: Project) -> None:
    done = project.negativa("locate", status=1)
    latest = project.results / "latest"
    assert done.stderr == (
        f"negativa: error: {latest}: no trace files (*.jsonl) here or in its folder trace\n"
    )
    assert "does not exist" in project.negativa("locate", "nowhere", status=2).stderr


def test_locate_a_recording(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")

    done = recorded.negativa("locate", ".negativa/run")

    assert done.stdout.startswith(f"{HEADLINE}\n\nlibrary ")
    assert done.stdout.endswith(
        "Files in .negativa/run: trace/, trace.json, usage.json, map/, plan/, spans/, report.json\n"
    )
    # Every other library of that machine isn't here, and is named.
    assert "libcuda.so.580.159.04: not found" in done.stdout
    assert [tuple(d[:2]) for d in recorded.plan() if d[2]] == list(LOADED)
    assert used_kernels(recorded.latest("usage.json")) == set(KERNELS)

    # The same again with another policy, now by its link; nothing of before is left.
    again = recorded.negativa("locate", "--keep-library", "libquick*", "--keep-arch", "sm_80")
    assert "all of it is kept (library-policy): keep.libraries: libquick*" in again.stdout
    assert {d[3] for d in recorded.plan()} == {"library-policy"}
    recorded.negativa("locate", "--exclude-library", "libquickstart.so")
    assert list((recorded.results / "run" / "spans").iterdir()) == []


def test_locate_a_folder_of_traces_leaves_no_link(project: Project) -> None:
    folder = project.folder / "h200-ops"
    shutil.copytree(TRACES / "h200-ops", folder)

    done = project.negativa("locate", "h200-ops")

    assert "torch/lib/libtorch_cuda.so: not found" in done.stdout
    assert "0 B of 0 B GPU code (-) in 0 libraries is unused on NVIDIA H200 (9.0)." in done.stdout
    kernels = json.loads((folder / "trace.json").read_text())["detected_kernels"]
    assert len(kernels) > 50
    assert not (project.folder / "latest").exists()


def test_a_failed_run_is_not_planned_later(recorded: Project) -> None:
    trace = rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    mark_failed(recorded.results / "run")
    point_latest(recorded.results / "run")

    done = recorded.negativa("locate")
    assert "nothing is planned from this run" in done.stdout
    assert not recorded.planned()
    done = recorded.negativa("combine", ".negativa/latest")
    assert "nothing is planned from this run" in done.stdout

    recorded.negativa("locate", str(trace.parents[1].resolve()), "--accept-failed")
    assert recorded.planned()


def test_a_session_without_an_end_is_not_planned_later(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl", lambda lines: lines[:-1])
    done = recorded.negativa("locate", ".negativa/run")
    assert "did not end by itself" in done.stdout
    assert "nothing is planned from this run" in done.stdout
    assert not recorded.planned()


def test_thresholds_and_reports(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    recorded.write("negativa.yaml", "thresholds: {max_unused_percent: 50}\n")

    done = recorded.negativa("locate", ".negativa/run", "--report=json:a.json", status=1)

    assert done.stdout == ""
    crossed = json.loads((recorded.folder / "a.json").read_text())["crossed"]
    assert crossed == ["max_unused_percent: 89.6071% of the GPU code is unused, the limit is 50%"]


def test_combine(recorded: Project) -> None:
    """Two halves of the recording, in files of one name: what neither of them used."""

    def without(*names: str) -> Callable[[Lines], Lines]:
        return lambda lines: [s for s in lines if not any(f'"name":"{n}"' in s for n in names)]

    first = rewrite(recorded, "first/trace/h200.jsonl", without("vector_add", "vector_scale"))
    second = rewrite(recorded, "second/h200.jsonl", without("statistics_weighted_sum"))
    assert first.read_text() != second.read_text()

    done = recorded.negativa("combine", "first", "second", "first")

    assert done.stdout.startswith(HEADLINE)
    assert used_kernels(recorded.latest("usage.json")) == set(KERNELS)
    assert len(list((recorded.results / "latest" / "trace").iterdir())) == 2
    assert [tuple(d[:2]) for d in recorded.plan() if d[2]] == list(LOADED)


def test_combine_recordings_of_several_processes(project: Project) -> None:
    folders = [str(TRACES / "h200-children"), str(TRACES / "h200-ops")]
    project.negativa("combine", *folders)
    usage = project.latest("usage.json")
    assert len(usage["processes"]) == 8
    assert len(usage["run_ids"]) == 2


def test_combine_nothing(project: Project) -> None:
    (project.folder / "empty").mkdir()
    done = project.negativa("combine", "empty", status=1)
    assert "no trace files" in done.stderr
    assert not project.results.exists()


def test_faults_of_the_file(project: Project) -> None:
    path = project.write("negativa.yaml", "directory: [a]\n")
    done = project.negativa("debloat", "--", "true", status=1)
    assert done.stderr.startswith(f"negativa: error: {path}:1:12: directory: ")


def test_kernels_of_a_run(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    recorded.negativa("locate", ".negativa/run")

    unused = recorded.negativa("kernels", ".negativa/run").stdout.splitlines()
    used = recorded.negativa("kernels", ".negativa/run", "--used", "--no-demangle").stdout
    other = recorded.negativa("kernels", ".negativa/run", "--library", "libother*").stdout

    assert unused[0].endswith("libquickstart.so: 9 of 13 kernels unused")
    assert any("image_blur" in name for name in unused)
    assert len(unused) == 10
    assert {line.strip() for line in used.splitlines()[1:]} == set(KERNELS)
    assert other == ""


def test_kernels_of_a_run_without_plans(project: Project) -> None:
    done = project.negativa("kernels", ".", status=1)
    assert "no plans here" in done.stderr
