"""Files that are GPU code themselves, from the trace of what was opened to the slimmed site."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.storage.lockfile import load_lock
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import Run
from tests.support.builders import CubinSpec, build_cubin
from tests.support.faults import PlantedFault
from tests.support.sites import make_wheel, pip_install
from tests.support.verified import VerifiedProject

# Each file is opened in a way of its own.
OPENED = ("python", "child", "program", "symlink", "hardlink", "forked")
NAMES = (*OPENED, "late", "unused", "other")

SUITE = """
SITE = Path(os.environ["SITE"])
KERNELS = SITE / "kernels"

def test_use(tmp_path):
    use(LIB)
    (KERNELS / "python.cubin").read_bytes()
    open_it = "import sys; open(sys.argv[1], 'rb').read()"
    child = [sys.executable, "-I", "-S", "-c", open_it, str(KERNELS / "child.cubin")]
    subprocess.run(child, env={}, check=True)
    subprocess.run(["cat", str(KERNELS / "program.cubin")], check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "symlink").symlink_to(KERNELS / "symlink.cubin")
    (tmp_path / "symlink").read_bytes()
    (SITE.parent / "another.name").read_bytes()
    if (pid := os.fork()) == 0:
        os.close(os.open(KERNELS / "forked.cubin", os.O_RDONLY))
        os._exit(0)
    os.waitpid(pid, 0)

def test_faults():
    use(LIB)
    if FAULT == "late":
        (KERNELS / "late.cubin").read_bytes()
    if os.environ.get("HARM") == "closes":
        for link in list(Path("/proc/self/fd").iterdir()):
            if link.is_symlink() and "inotify" in os.readlink(link):
                os.close(int(link.name))
    if os.environ.get("HARM") == "replaces":
        (KERNELS / "new").write_bytes(b"")
        (KERNELS / "new").replace(KERNELS / "other.cubin")
        (KERNELS / "other.cubin").read_bytes()
"""


def make_project(folder: Path) -> VerifiedProject:
    files = {}
    for name in NAMES:
        files[f"kernels/{name}.cubin"] = folder / f"{name}.source"
        spec = CubinSpec(arch=90, kernels={name: b"\1" * 64})
        files[f"kernels/{name}.cubin"].write_bytes(build_cubin(spec).data)
    site = folder / "site"
    pip_install(site, make_wheel(folder, "some-kernels", "1.0", files))
    os.link(site / "kernels/hardlink.cubin", folder / "another.name")
    project = VerifiedProject(folder / "project", SUITE)
    project.environ["PYTHONPATH"] += f":{site}"
    project.environ["SITE"] = str(site)
    return project


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return make_project(tmp_path_factory.mktemp("files")).trace()


def lock_of(project: VerifiedProject, *arguments: str) -> set[str]:
    """The names of the files that the lock of the last run keeps."""
    project.negativa("lock", *arguments)
    [files] = load_lock(project.folder / "negativa.lock").files
    assert (files.elements, files.kept_elements) == (len(NAMES), len(files.kept))
    return {Path(str(code.detail)).stem for code in files.kept}


def plan_of(project: VerifiedProject) -> LibraryPlan:
    """The plan of the files of the last run."""
    [plan] = (plan for plan in load_plans(Run(project.run_folder)) if plan.is_files)
    return plan


@pytest.mark.slow
def test_what_any_process_opens_is_used(traced: VerifiedProject) -> None:
    plan = plan_of(traced)
    assert {Path(str(d.detail)).stem for d in plan.decisions if d.kept} == set(OPENED)
    assert len(plan.decisions) == len(NAMES)
    # Negativa-ML's format has spans of one file.
    assert len([*(traced.run_folder / "spans").iterdir()]) == 1


@pytest.mark.slow
def test_all_totals_count_them(traced: VerifiedProject) -> None:
    report = json.loads((traced.run_folder / "report.json").read_text())
    files, library = sorted(report["libraries"], key=lambda row: not row["is_files"])
    assert not library["is_files"]
    code = library["code_bytes"] + files["size"]
    unused = sum(part["bytes"] for row in (library, files) for part in row["unused"])
    text = traced.negativa("report").stdout
    assert "in 1 library and 9 files that are GPU code is unused" in text
    assert traced.negativa("report", f"--max-gpu-code={code}").returncode == 0
    for limit in (f"--max-gpu-code={code - 1}", "--max-gpu-code=dist:some-kernels=1 kB"):
        crossed = traced.negativa("report", limit, status=1)
        assert "max_gpu_code: there are" in crossed.stderr
    assert f"{format_bytes(unused)} of " in text
    traced.negativa("report", "baseline:base.json")
    rows = json.loads((traced.folder / "base.json").read_text())["libraries"]
    assert [row["code_bytes"] for row in rows if row["is_files"]] == [files["size"]]
    same = traced.negativa("diff", "base.json", traced.run_folder.name).stdout
    assert "No code differs in 2 libraries" in same


@pytest.mark.slow
def test_unused_files_are_proved_locked_and_removed(
    traced: VerifiedProject, tmp_path: Path
) -> None:
    assert "\nPROVED" in traced.verify()
    [row] = (row for row in traced.verdict["libraries"] if row["path"].endswith("(files)"))
    assert (row["status"], row["unused_elements"], row["notes"]) == ("proved", 3, [])
    proved = sum(one["unused_bytes"] for one in traced.verdict["libraries"])
    assert f"without {format_bytes(proved)} of GPU code" in traced.negativa("report").stdout
    assert lock_of(traced) == set(OPENED)
    site = tmp_path / "site"
    shutil.copytree(traced.environ["SITE"], site)
    done = traced.negativa("slim", "--no-way-back", "--lock", "negativa.lock", str(site))
    assert "kernels/: slimmed, 3 files removed" in done.stdout
    assert {path.stem for path in (site / "kernels").iterdir()} == set(OPENED)


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test opens a file of GPU code on the copies alone, not when it was traced.",
    says="opened while the tests ran on the copies, so kept: kernels/late.cubin",
)
def test_a_file_that_is_opened_in_a_round_alone(
    traced: VerifiedProject, fault: PlantedFault
) -> None:
    fault.check(traced.verify(FAULT="late"))
    assert lock_of(traced) == {*OPENED, "late"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closes", "replaces"])
@pytest.mark.planted_fault(
    "A test closes the descriptor of the watch, or replaces a file and opens the new one.",
    says="some-kernels (files): all files are kept: nothing tells what else was opened",
)
def test_a_watch_that_is_lost(tmp_path: Path, fault: PlantedFault, how: str) -> None:
    project = make_project(tmp_path)
    fault.check(project.pytest("-q", "--negativa", HARM=how).stdout)
    assert not plan_of(project).unused_bytes
    left_out = "left out: some-kernels (files): all files are kept: nothing tells what else was"
    assert left_out in project.negativa("lock", "--unproved").stdout


@pytest.mark.slow
def test_no_list_of_kernels_has_them(traced: VerifiedProject) -> None:
    listing = json.loads(traced.negativa("kernels", "--json").stdout)
    assert [Path(one["path"]).suffix for one in listing["rows"]] == [".so"]
