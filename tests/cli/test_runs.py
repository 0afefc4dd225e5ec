"""runs: what it prints, deletes and refuses; push and fetch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.storage.runs import RunsFolder
from tests.support.faults import PlantedFault
from tests.support.sessions import KERNELS, Project, used_kernels

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    assert False\n"


@pytest.fixture
def three(project: Project) -> list[str]:
    """Three runs, the oldest first: good, failed, good."""
    made: list[str] = []
    for text, status in ((PASSES, 0), (FAILS, 1), (PASSES, 0)):
        project.write("test_a.py", text)
        project.pytest("-q", "--negativa", "-x", status=status)
        run = (project.results / "latest").resolve()
        # Ids sort by time, which has seconds.
        made.append(run.rename(run.with_name(f"20260101T00000{len(made)}Z-0123ab")).name)
        (project.results / "latest").unlink()
        (project.results / "latest").symlink_to(made[-1])
    return made


@pytest.mark.slow
def test_runs_are_listed_and_deleted(project: Project, three: list[str]) -> None:
    done = project.negativa("runs")
    assert done.stderr == "Next: negativa report\n"
    listed = done.stdout.splitlines()
    assert [line.split()[0] for line in listed[2:]] == three[::-1]
    assert "latest" in listed[2] and "planned" in listed[2]
    assert "failed: it was stopped: stopping after 1 failures" in listed[3]

    assert "no such run" in project.negativa("runs", "--delete", "elsewhere", status=2).stderr
    both = project.negativa("runs", "--json", "--keep", "0", status=2).stderr
    assert "--json lists the runs" in both and len(project.runs()) == 3

    project.negativa("runs", "--delete", three[2], "--keep", "2")
    assert [folder.name for folder in project.runs()] == three[:2]
    assert (project.results / "latest").resolve().name == three[1]
    project.negativa("runs", "--keep", "0")
    assert project.runs() == []
    assert not (project.results / "latest").is_symlink()
    done = project.negativa("runs")
    assert "no traced run" in done.stdout and done.stderr == "Next: pytest --negativa\n"


@pytest.mark.planted_fault(
    "a run is deleted while a session uses it",
    says="not deleted: a running session uses it",
)
def test_a_run_in_use_stays(project: Project, fault: PlantedFault) -> None:
    run = project.results / "20260101T000000Z-0123ab"
    (run / "trace").mkdir(parents=True)
    script = (
        "import sys; from pathlib import Path; from pytest_negativa.storage.runs import Run\n"
        "Run(Path(sys.argv[1])).hold(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(run)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        fault.check(project.negativa("runs", "--delete", run.name, status=1).stderr)
        holder.kill()
    assert run.is_dir()
    project.negativa("runs", "--delete", run.name)
    assert not run.exists()


@pytest.mark.planted_fault(
    "a folder that is no run is named to be deleted",
    says="not deleted: not the folder of a run",
)
def test_what_is_no_run_stays(project: Project, tmp_path: Path, fault: PlantedFault) -> None:
    precious = tmp_path / "20260101T000000Z-0123ab"
    (precious / "trace").mkdir(parents=True)
    link = project.results / "20260102T000000Z-0123ab"
    link.parent.mkdir()
    link.symlink_to(tmp_path)
    other = project.folder / "quickstart"
    refused = project.negativa("runs", "--delete", link.name, status=2).stderr
    assert "a link; name the run itself" in refused
    for named in (other, "reconstructed"):
        (project.results / "reconstructed").mkdir(exist_ok=True)
        fault.check(project.negativa("runs", "--delete", named, status=1).stderr)
    assert precious.is_dir() and other.is_dir() and (project.results / "reconstructed").is_dir()
    assert link.is_symlink() and os.listdir(tmp_path)


def test_links_and_urls_are_not_deleted(project: Project, tmp_path: Path) -> None:
    other = RunsFolder(tmp_path / "other").new_run()
    other.make()
    link = project.results / other.run_id
    link.parent.mkdir()
    link.symlink_to(other.folder)
    refused = project.negativa("runs", "--delete", other.run_id, status=2).stderr
    assert "a link; name the run itself" in refused and other.folder.is_dir()
    refused = project.negativa("runs", "--delete", f"file://{other.folder}", status=2).stderr
    assert "a URL; --delete deletes runs in" in refused and other.folder.is_dir()
    link.unlink()
    project.negativa("runs", "--delete", other.folder, "--delete", f"{other.folder}/")
    assert not other.folder.exists()


@pytest.mark.slow
def test_a_folder_without_a_run(project: Project) -> None:
    run = project.results / "20260101T000000Z-0123ab"
    (run / "trace").mkdir(parents=True)
    assert "empty" in project.negativa("runs").stdout
    assert "'': no such run" in project.negativa("runs", "--delete", "", status=2).stderr


def test_names_of_folders_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    runs = RunsFolder(tmp_path / "e\x1b[2Jvil\n::error::")
    run = runs.new_run()
    run.make()
    run.new_trace_file().touch()
    for words in (["--delete", run.run_id], []):
        shown = CliRunner().invoke(main, ["--dir", str(runs.folder), "runs", *words])
        assert shown.exit_code == 0
        assert "e\\x1b[2Jvil\\n::error::" in shown.output and "\x1b" not in shown.output


@pytest.mark.slow
def test_runs_go_to_a_url_and_come_back(quickstart: Project, tmp_path: Path) -> None:
    """Two shards are pushed; another machine combines, reports and fetches them."""
    store = f"file://{tmp_path}/store/build-7"
    for number, tests in enumerate(("test_vectors.py", "test_matrices.py")):
        quickstart.pytest("-q", "--negativa", f"tests/{tests}")
        pushed = quickstart.negativa("push", f"{store}/shard-{number}").stdout
        assert pushed.startswith(f"{store}/shard-{number}: 2")
    first, second = (folder.name for folder in quickstart.runs()[-2:])
    again = quickstart.negativa("push", "--run", first, f"{store}/shard-0").stdout
    assert ", 0 B sent, " in again

    shutil.rmtree(quickstart.results)
    quickstart.negativa("combine", f"{store}/shard-0", f"{store}/shard-1")
    assert used_kernels(quickstart.latest("usage.json")) == {*KERNELS}
    # What was fetched to be combined is gone; what a command is to work on stays.
    assert len(list(quickstart.results.glob(".fetched-*"))) == 0 and len(quickstart.runs()) == 1
    quickstart.negativa("report", "--run", f"{store}/shard-0", "json:report.json")
    assert json.loads((quickstart.folder / "report.json").read_text())["run_id"] == first
    assert "1 library" in quickstart.negativa("report", "--run", f"{store}/shard-1").stdout
    assert {first, second} < {folder.name for folder in quickstart.runs()}
    shown = quickstart.negativa(
        "inspect", "--packages", "quickstart", "--run", f"{store}/shard-1"
    ).stdout
    assert "libquickstart.so" in shown

    # The first run that is fetched is the last one, if there is no other.
    elsewhere = "--dir=elsewhere"
    for number in range(2):
        quickstart.negativa(elsewhere, "fetch", f"{store}/shard-{number}")
        assert f"{first}  latest" in quickstart.negativa(elsewhere, "runs").stdout

    # A run that is here is not replaced.
    (quickstart.results / first / "trace.json").write_text("mine")
    refused = quickstart.negativa("fetch", f"{store}/shard-0", status=1).stderr
    assert f"{quickstart.results / first} has another trace.json; use that run" in refused


@pytest.mark.slow
def test_a_url_without_a_run_is_a_bad_run(quickstart: Project, tmp_path: Path) -> None:
    quickstart.pytest("-q", "--negativa")
    url = f"file://{tmp_path}/store/a"
    quickstart.negativa("push", url)
    gone = f"file://{tmp_path}/store/gone"

    done = quickstart.negativa("combine", url, gone, status=1)
    assert f"{gone}: there is no manifest.json; check the URL" in done.stderr
    assert (
        "a URL with a password"
        in quickstart.negativa("push", "s3://me:secret@bucket/a", status=2).stderr
    )
