"""``negativa lock`` and ``negativa slim`` as commands."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from pytest_negativa.cli.main import main
from pytest_negativa.models.lock import Place, seal
from pytest_negativa.models.verdict import LibraryStatus
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run
from tests.support.code_files import planned_files
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import NEGATIVA
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.reports import report
from tests.support.sites import digests, planned_of, snapshot, verdict_of

pytestmark = needs_compiler


def negativa(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def write_run(folder: Path, *libraries: Path, status: LibraryStatus | None) -> Path:
    """A run's folder as far as lock reads it."""
    planned = [planned_of(path) for path in libraries]
    for number, one in enumerate(planned):
        write_record(folder / "map" / f"{number}.json", one.library_map)
        write_record(folder / "plan" / f"{number}.json", one.plan)
    if status is not None:
        write_record(folder / "verdict.json", verdict_of(*planned, status=status))
    return folder


class TestLock:
    def test_written(self, site: Made, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", site.one, site.two, status=LibraryStatus.PROVED)
        result = negativa("lock", "--run", run, "-o", tmp_path / "made.lock")
        assert "2 libraries" in result.stdout
        made = load_lock(tmp_path / "made.lock")
        assert made.libraries == site.lock.libraries
        assert made.libraries[0].distribution == "gpu-code"

    def test_last_run_by_default(
        self, site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_run(tmp_path / ".negativa/run", site.one, status=LibraryStatus.PROVED)
        (tmp_path / ".negativa/latest").symlink_to("run")
        negativa("lock")
        assert load_lock(tmp_path / "negativa.lock").libraries[0].path == ONE

    @pytest.mark.parametrize("status", [LibraryStatus.NOT_PROVED, None])
    def test_not_proved(self, site: Made, tmp_path: Path, status: LibraryStatus | None) -> None:
        run = write_run(tmp_path / "run", site.one, status=status)
        write_record(Run(run).report_file, report())
        result = negativa("lock", "--run", run, "-o", tmp_path / "made.lock", code=1)
        assert "is not proved" in result.stderr
        assert not (tmp_path / "made.lock").exists()
        result = negativa("lock", "--run", run, "-o", tmp_path / "made.lock", "--unproved")
        assert "NOT PROVED" in result.stderr
        made = load_lock(tmp_path / "made.lock")
        assert not made.proof.proved
        result = negativa("slim", "--lock", tmp_path / "made.lock", "--dry-run", site.folder)
        assert "NOT PROVED" in result.stderr

    def test_verdict_that_is_none(self, site: Made, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", site.one, status=None)
        (run / "verdict.json").write_text('{"format": 1}')
        assert "not a verdict" in negativa("lock", "--run", run, code=1).stderr


class TestSlim:
    def test_slim_check_undo(self, site: Made, tmp_path: Path) -> None:
        before = digests(site.folder)
        lock, originals = ("--lock", site.lock_file), ("--keep-originals", tmp_path / "aside")
        result = negativa("slim", *lock, *originals, site.folder)
        assert "2 libraries" in result.stdout
        assert ONE in result.stdout
        assert digests(site.folder) != before
        again = negativa("slim", "--no-way-back", *lock, site.folder)
        assert "slimmed before" in again.stdout
        checked = negativa("slim", "check", site.folder).stdout
        assert "sound" in checked and "before" not in checked
        planned = negativa("slim", "undo", "--dry-run", site.folder).stdout
        assert "would be put back" in planned and "original is back" not in planned
        assert "original is back" in negativa("slim", "undo", site.folder).stdout
        assert digests(site.folder) == before

    @pytest.mark.planted_fault(
        "slim applies a lock that lost a kept line in a merge.",
        says="its lines don't match their digest: one was lost, added or changed",
    )
    def test_lock_that_lost_a_line(self, site: Made, tmp_path: Path, fault: PlantedFault) -> None:
        lines = site.lock_file.read_text().splitlines(keepends=True)
        lines.remove(next(line for line in lines if "{offset:" in line))
        (tmp_path / "merged.lock").write_text("".join(lines))
        before = snapshot(site.folder)
        result = negativa(
            "slim", "--no-way-back", "--lock", tmp_path / "merged.lock", site.folder, code=1
        )
        fault.check(result.stderr)
        assert snapshot(site.folder) == before

    @pytest.mark.planted_fault(
        "A lock that says proved: true holds a library that was not proved.",
        says="NOT PROVED in this lock: gpu/lib/libone.so.1: it was not loaded",
    )
    def test_lock_with_a_library_that_is_not_proved(
        self, site: Made, tmp_path: Path, fault: PlantedFault
    ) -> None:
        first, *others = site.lock.libraries
        libraries = (replace(first, not_proved="it was not loaded"), *others)
        save_lock(seal(replace(site.lock, libraries=libraries)), tmp_path / "partly.lock")
        arguments = ("slim", "--dry-run", "--lock", tmp_path / "partly.lock", site.folder)
        fault.check(negativa(*arguments).stderr)

    @pytest.mark.planted_fault(
        "A lock of another environment is applied, which changes nothing.",
        says="nothing of the lock is in",
    )
    def test_foreign_lock(self, site: Made, tmp_path: Path, fault: PlantedFault) -> None:
        (tmp_path / "empty").mkdir()
        lock_file = tmp_path / "foreign.lock"
        plan = planned_files({"k/a.cubin": 1, "k/b.cubin": 1}, {}, distribution="kernels")
        place = Place("kernels (files)", "kernels", "1.0")
        [files] = make_lock("run", [plan], None, lambda path: place, unproved=True).files
        save_lock(seal(replace(site.lock, files=(files,))), lock_file)
        result = negativa("slim", "--no-way-back", "--lock", lock_file, tmp_path / "empty", code=1)
        fault.check(result.stderr)
        assert "it is not here (of gpu-code 1.0); install it" in result.stdout
        # Two folders with another version each give two rows for one distribution of the lock.
        for name in "ab":
            info = tmp_path / name / "kernels-2.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 2.0\n")
            (info / "RECORD").write_text("kernels/k.cubin,sha256=new,2\n")
        first = site.lock.libraries[:1]
        save_lock(seal(replace(site.lock, libraries=first, files=(files,))), lock_file)
        places = (site.folder, tmp_path / "a", tmp_path / "b")
        result = negativa("slim", "--no-way-back", "--lock", lock_file, *places)
        assert "not the files that were proved" in result.stdout
        assert "nothing of" not in result.stderr

    @pytest.mark.planted_fault(
        "a folder without GPU code is slimmed, such as a misspelled one", says="nothing to slim in"
    )
    def test_nothing_to_work_on(self, site: Made, tmp_path: Path, fault: PlantedFault) -> None:
        empty = site.folder / "host"
        spare, last = ("--spare", tmp_path / "spares"), "--no-way-back"
        for flags in ((last,), ("--dry-run",), (last, "--json"), spare):
            result = negativa("slim", "--arch", "sm_90", *flags, empty, code=1)
            fault.check(result.stderr)
            assert f"nothing to slim in {empty}: no library has GPU code" in result.stderr
        assert json.loads(
            negativa("slim", "--no-way-back", "--arch", "sm_90", "--json", empty, code=1).stdout
        )
        lock = seal(replace(site.lock, libraries=()))
        save_lock(lock, tmp_path / "empty.lock")
        result = negativa(
            "slim", "--no-way-back", "--lock", tmp_path / "empty.lock", site.folder, code=1
        )
        fault.check(result.stderr)
        # What was slimmed before is something, and so is what saves too little.
        negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        assert (
            "slimmed before"
            in negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder).stdout
        )

    def test_only_other_libraries_change_beside_a_spare(self, site: Made, tmp_path: Path) -> None:
        """Nothing is cut, so the folder of spares stays empty, and no line names it."""
        spares = tmp_path / "spares"
        host = (site.folder / HOST).parent
        words = ["slim", "--arch", "sm_90", "--spare", spares, "--strip-others", host]
        words.append("--no-way-back")
        result = negativa(*words)
        assert "libhost.so " in result.stdout and "nothing to remove" in result.stdout
        assert list(spares.iterdir()) == [] and str(spares) not in result.stderr

    @pytest.mark.parametrize("command", ["--arch=sm_90", "--lock"])
    def test_files_that_slim_does_not_take(self, site: Made, tmp_path: Path, command: str) -> None:
        words = [command] if "=" in command else [command, site.lock_file]
        for name, content in (("image.tar", b"\0" * 512), ("notes.txt", b"text"), ("x.so", b"")):
            path = tmp_path / name
            path.write_bytes(content)
            problem = negativa("slim", "--no-way-back", *words, path, code=2).stderr
            assert f"{path}: not a shared library (ELF, *.so*); slim takes folders" in problem
            assert "of an image or a conda package, slim the folder of its files while" in problem

    def test_lock_of_this_folder(self, site: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(site.folder)
        assert "no negativa.lock here" in negativa("slim", "--no-way-back", ".", code=2).stderr
        save_lock(site.lock, Path("negativa.lock"))
        assert "2 libraries" in negativa("slim", "--dry-run", site.folder).stdout

    def test_default_is_the_active_environment(
        self, site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("VIRTUAL_ENV", raising=False)
        monkeypatch.setenv("CONDA_PREFIX", str(site.folder))
        result = negativa("slim", "--lock", site.lock_file, "--dry-run", "--require")
        assert "2 libraries" in result.stdout
        assert result.stderr.startswith(f"negativa: {site.folder} (CONDA_PREFIX)\n")
        monkeypatch.delenv("CONDA_PREFIX")
        monkeypatch.chdir(tmp_path)
        assert (
            "no active environment"
            in negativa("slim", "--no-way-back", "--arch=sm_90", code=2).stderr
        )
        assert "no active environment" in negativa("slim", "undo", code=2).stderr

    def test_require(self, site: Made) -> None:
        site.two.unlink()
        before = snapshot(site.folder)
        result = negativa(
            "slim", "--no-way-back", "--lock", site.lock_file, "--require", site.folder, code=1
        )
        assert "nothing was done: not all libraries of the lock are here" in result.stderr
        assert "libtwo.so: not found" in result.stdout
        assert "gpu-code 1.0" in result.stdout
        assert snapshot(site.folder) == before
        assert (
            "not found"
            in negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder).stdout
        )

    def test_archs(self, site: Made) -> None:
        lists = ("--arch", "sm_90, 9.1", "--arch", "compute_80", "--arch", "75")
        result = negativa(
            "slim", "--no-way-back", *lists, "--force-arch", "--strip-others", site.folder
        )
        assert HOST in result.stdout and ONE in result.stdout
        source = load_manifest(site.folder).slimmed[ONE].source
        assert source == "what devices of 7.5, 8.0, 9.0, 9.1 can load"

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--arch", "sm_9x"), "no GPU architecture"),
            (("--arch", ""), "no GPU architecture"),
            (("--arch", "sm_90,sm_901"), "did you mean sm_90? (--force-arch takes it as it is)"),
            (("--lock", "LOCK", "--force-arch"), "goes with --arch"),
            (("--lock", "LOCK", "--keep-ptx"), "goes with --arch"),
            (("--arch", "sm_90", "--require"), "goes with a lock"),
            (("--lock", "LOCK", "--no-strip", "--strip-others"), "contradict"),
            (
                ("--lock", "LOCK", "--target", "x", "--keep-originals", "y"),
                "does not change the wheel",
            ),
            (("undo", "--lock", "LOCK"), "No such option"),
            (("undo", "--check"), "No such option"),
            (("check", "--dry-run"), "No such option"),
            (("--undo", "--lock", "LOCK"), "No such option"),
            (("--dry-run", "--check"), "No such option"),
            (("--undo", "--check"), "No such option"),
            (("--lock", "LOCK", "--jobs", "0"), "jobs"),
            (("--lock", "gone.lock"), "gone.lock: no such file or folder"),
            (("--lock", "LOCK", "--no-way-back", "--spare", "x"), "leave one out"),
            (("--lock", "LOCK", "--no-way-back", "--keep-originals", "x"), "leave one out"),
            (
                ("--arch", "sm_90", "--no-way-back", "gone"),
                "; slim takes paths, not names of distributions",
            ),
            (
                ("--arch", "sm_90", "--no-way-back", "--", "--undo"),
                "--undo: no such file or folder",
            ),
            (("--arch", "sm_90", "--no-way-back", "SITE/gpu"), "give one of them"),
            (("--arch", "sm_90", "--target", "copy"), "--target takes a wheel"),
            (("--arch", "sm_90", "--keep-originals", "SITE/kept"), "in the folder to slim"),
        ],
    )
    def test_wrong_usage(self, site: Made, arguments: tuple[str, ...], problem: str) -> None:
        names = {"LOCK": str(site.lock_file), "SITE": str(site.folder)}
        words = ["/".join(names.get(part, part) for part in word.split("/")) for word in arguments]
        before = snapshot(site.folder)
        assert problem in negativa("slim", *words, site.folder, code=2).stderr
        assert snapshot(site.folder) == before

    def test_a_folder_of_wheels(self, tmp_path: Path) -> None:
        (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"PK")
        result = negativa("slim", "--no-way-back", "--arch", "sm_90", tmp_path, code=1)
        told = "no library has GPU code; the wheels there were not opened: pass each by its"
        assert told in result.stderr

    def test_originals_that_can_no_longer_be_kept(self, site: Made, tmp_path: Path) -> None:
        lock, keep = ("--lock", site.lock_file), ("--keep-originals", tmp_path / "kept")
        negativa("slim", "--no-way-back", *lock, site.folder)
        result = negativa("slim", *lock, *keep, site.folder)
        for name in (ONE, TWO):
            assert f"{name}: no original is kept" in result.stdout
        assert "no original" not in negativa("slim", "--no-way-back", *lock, site.folder).stdout

    def test_undo_where_nothing_was_slimmed(self, site: Made) -> None:
        text = f"nothing was slimmed in {site.folder}\n"
        assert negativa("slim", "undo", site.folder).stdout == text

    @pytest.mark.planted_fault(
        "a container checks a folder that holds no slimmed library", says=": nothing was checked"
    )
    def test_check_of_nothing(self, site: Made, fault: PlantedFault) -> None:
        for option in ((), ("--require",)):
            result = negativa("slim", "check", *option, site.folder, code=1)
            fault.check(result.stderr)
            assert f"nothing was slimmed in {site.folder}" in result.stderr
        negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        assert "sound" in negativa("slim", "check", "--require", site.folder).stdout

    def test_undo_without_originals(self, site: Made) -> None:
        negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        result = negativa("slim", "undo", site.folder, code=1)
        detail = "failed: was slimmed, and its original was not kept; install it again"
        lines = result.stderr.splitlines()
        for line, name in zip(lines, (ONE, TWO), strict=True):
            assert line.startswith(f"negativa: error: {name}: {detail}")

    def test_damage_in_kernel_code_is_an_error_of_check(self, site: Made) -> None:
        negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        with site.one.open("r+b") as file:
            file.seek(site.one.stat().st_size // 2)
            file.write(bytes(8192))
        site.two.unlink()
        result = negativa("slim", "check", site.folder, code=1)
        assert "differs from what was written; install it again" in result.stderr
        assert "libtwo.so: gone" in result.stderr

    @pytest.mark.slow
    def test_check_and_explain_name_the_folder_to_undo(self, site: Made, tmp_path: Path) -> None:
        words = ("--lock", site.lock_file, site.folder, "--keep-originals", tmp_path / "aside")
        negativa("slim", *words)
        undo = f"negativa slim undo {site.folder}"
        error = "CUDA error: no kernel image is available for execution on the device"
        told = negativa("explain", error, site.folder).stdout
        assert f"{undo} if they were kept" in " ".join(told.split())
        site.two.unlink()
        assert (
            f"{undo}, or install it again" in negativa("slim", "check", site.folder, code=1).stderr
        )

    def test_inspect_tells_of_it(self, site: Made) -> None:
        negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        assert "Slimmed by negativa slim" in negativa("inspect", site.one).stdout
        report = json.loads(negativa("inspect", "--packages", "--json", site.folder).stdout)
        assert {row["path"] for row in report["libraries"]} == {ONE, TWO}
        assert {*report["slimmed"]} == {ONE, TWO}

    def test_names_are_made_fit_for_a_terminal(self, site: Made) -> None:
        site.one.rename(site.one.with_name("lib\x1b[2J.so"))
        result = negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
        assert "\x1b" not in result.output
        assert r"\x1b[2J" in result.output

    def test_without_pytest_and_gpu(self, site: Made) -> None:
        """In an image build there is neither; and the command says so if it can't run."""
        code = (
            "import sys; sys.modules['cupti'] = None\n"
            "from pytest_negativa.cli.main import main\n"
            "try: main()\n"
            "finally: print('pytest' in sys.modules or '_pytest' in sys.modules)"
        )
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                "slim",
                "--no-way-back",
                "--lock",
                site.lock_file,
                site.folder,
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "False"

    @pytest.mark.parametrize("name", ["undo", "check"])
    def test_folder_called_like_a_command(
        self, site: Made, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(site.folder.parent)
        site.folder.rename(name)
        lock = ("--lock", site.lock_file)
        assert "2 libraries" in negativa("slim", f"./{name}", *lock, "--dry-run").stdout
        assert "2 libraries" in negativa("slim", *lock, "--dry-run", name).stdout
        code = 1 if name == "check" else 0
        assert f"nothing was slimmed in {name}" in negativa("slim", name, name, code=code).output
        assert "2 libraries" in negativa("slim", "--no-way-back", *lock, name).stdout
        assert "sound" in negativa("slim", "check", name).stdout


def test_what_negativa_needs_stays_where_it_runs(
    site: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = site.folder / "pytest_negativa-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: pytest-negativa\nVersion: 1.0\nRequires-Dist: gpu-code\n")
    (info / "RECORD").write_text("pytest_negativa-1.0.dist-info/METADATA,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site.folder)])
    before = digests(site.folder)

    for what in (("--lock", site.lock_file), ("--arch", "sm_90")):
        result = negativa("slim", *what, "--no-way-back", site.folder)
        assert result.stdout.count("negativa runs in this environment, and needs it itself") == 2
    assert digests(site.folder) == before


def test_a_way_back_is_asked_for(site: Made) -> None:
    result = negativa("slim", "--arch", "sm_90", site.folder, code=2)
    assert "give --spare DIR or --keep-originals DIR" in result.stderr
    negativa("slim", "--arch", "sm_90", "--dry-run", site.folder)


def test_a_terminal_is_asked(site: Made, tmp_path: Path) -> None:
    kept = ["--arch=sm_90", "--keep-originals", str(tmp_path / "kept")]
    slim, undo = [str(NEGATIVA), "slim", *kept], [str(NEGATIVA), "slim", "undo"]
    for command, answer in ((slim, "n\n"), (slim, "y\n"), (undo, "n\n"), (undo, "y\n")):
        before = digests(site.folder)
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [*command, str(site.folder)], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
        ) as done:
            os.write(ours, answer.encode())
            assert done.wait() == (answer == "n\n")
        os.close(ours)
        os.close(theirs)
        assert (digests(site.folder) == before) == (answer == "n\n")
