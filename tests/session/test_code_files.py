"""Files that are GPU code themselves, from the trace of what was opened to the slimmed site."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pytest_negativa.reporting.units import format_bytes
from pytest_negativa.storage.lockfile import load_lock
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
    assert (files.files, files.kept_files) == (len(NAMES), len(files.kept))
    return {Path(name).stem for name in files.kept}


@pytest.mark.slow
def test_what_any_process_opens_is_used(traced: VerifiedProject) -> None:
    [plan] = json.loads((traced.run_folder / "files.json").read_text())["distributions"]
    assert {Path(name).stem for name in plan["kept"]} == set(OPENED)
    [row] = json.loads((traced.run_folder / "report.json").read_text())["code_files"]
    assert (row["files"], row["unused_files"]) == (len(NAMES), 3)


@pytest.mark.slow
def test_all_totals_count_them(traced: VerifiedProject) -> None:
    report = json.loads((traced.run_folder / "report.json").read_text())
    [library], [files] = report["libraries"], report["code_files"]
    code = library["code_bytes"] + files["size"]
    unused = sum(part["bytes"] for part in library["unused"]) + files["unused_bytes"]
    text = traced.negativa("report").stdout
    assert "in 1 library and 9 files that are GPU code is unused" in text
    assert traced.negativa("report", f"--max-gpu-code={code}").returncode == 0
    for limit in (f"--max-gpu-code={code - 1}", "--max-gpu-code=dist:some-kernels=1 kB"):
        crossed = traced.negativa("report", limit, status=1)
        assert "max_gpu_code: there are" in crossed.stderr
    assert f"  {format_bytes(unused)}\n" in traced.negativa("diff").stdout
    traced.negativa("report", "baseline:base.json")
    [_, row] = json.loads((traced.folder / "base.json").read_text())["libraries"]
    assert sum(part[-1] for part in row["rows"]) == files["size"]
    same = traced.negativa("diff", "base.json", traced.run_folder.name).stdout
    assert "No code differs in 2 libraries" in same


@pytest.mark.slow
def test_unused_files_are_proved_locked_and_removed(
    traced: VerifiedProject, tmp_path: Path
) -> None:
    assert "\nPROVED" in traced.verify()
    [row] = traced.verdict["files"]
    assert (row["files"], row.get("opened"), row.get("unseen")) == (3, [], None)
    proved = sum(one["unused_bytes"] for one in traced.verdict["libraries"]) + row["size"]
    assert f"without {format_bytes(proved)} of GPU code" in traced.negativa("report").stdout
    assert lock_of(traced) == set(OPENED)
    site = tmp_path / "site"
    shutil.copytree(traced.environ["SITE"], site)
    done = traced.negativa("slim", "--lock", "negativa.lock", str(site))
    assert "some-kernels 1.0" in done.stdout and "3 of 9 files removed" in done.stdout
    assert {path.stem for path in (site / "kernels").iterdir()} == set(OPENED)


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test opens a file of GPU code on the copies alone, not when it was traced.",
    says="1 file of some-kernels 1.0 was opened while the tests ran on the copies; it is kept",
)
def test_a_file_that_is_opened_in_a_round_alone(
    traced: VerifiedProject, fault: PlantedFault
) -> None:
    fault.check(traced.verify(FAULT="late"))
    [row] = traced.verdict["files"]
    assert row["opened"] == ["kernels/late.cubin"]
    assert lock_of(traced) == {*OPENED, "late"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closes", "replaces"])
@pytest.mark.planted_fault(
    "A test closes the descriptor of the watch, or replaces a file and opens the new one.",
    says="some-kernels: all files are kept: nothing tells what else was opened",
)
def test_a_watch_that_is_lost(tmp_path: Path, fault: PlantedFault, how: str) -> None:
    project = make_project(tmp_path)
    fault.check(project.pytest("-q", "--negativa", HARM=how).stdout)
    [plan] = json.loads((project.run_folder / "files.json").read_text())["distributions"]
    assert not plan["unused"]
    left_out = "left out: files of some-kernels 1.0: nothing tells what else was opened"
    assert left_out in project.negativa("lock", "--unproved").stdout
