"""Sessions on a disk that is full, and in folders that no process may write to.

The fault comes at any of the bytes that are written, from the file system itself. Whatever
happens, the session says so in one line, nothing is lost, and the next try succeeds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.kills import MOST, points
from tests.support.libraries import MULTIARCH, NEGATIVA, make_large
from tests.support.mounts import free_pages, in_namespace, leave, read_only, small_disk
from tests.support.sessions import Done
from tests.support.sites import digests
from tests.support.standin.standin_gpu import USED
from tests.support.verified import VerifiedProject

# The payload for sm_90 of the region that no test uses: the plan calls it unused.
HIDDEN = USED[3]
SUITE = f"""
def test_use():
    use(LIB)

def test_need():
    if "NEED" in os.environ:
        need(LIB, {HIDDEN})
"""
SIZE = 16 << 20
PAGE = 4096
FULL = "No space left on device"


class OnSmallDisk:
    """A project on a small disk, with all that its sessions and commands write."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.project = VerifiedProject(disk / "project", SUITE)
        # What Python itself writes is not of interest here.
        self.project.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        self.before = digests(self.project.folder)

    def session(self, *flags: str) -> Done:
        return self.run(sys.executable, "-m", "pytest", "-q", *flags)

    def run(self, *command: str | Path) -> Done:
        done = subprocess.run(
            command,
            cwd=self.project.folder,
            env=self.project.environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        found = digests(self.project.folder)
        assert {name: found.get(name) for name in self.before} == self.before
        return done

    def try_with_ever_less_space(
        self, command: Sequence[str | Path], *, reset: Callable[[], None], most: int = MOST
    ) -> int:
        """Run a command with some of the pages that it needs, and again with all of them.

        Args:
            reset: restores the state before the command.
            most: how many tries.

        Returns:
            How many tries failed.
        """
        reset()
        free = free_pages(self.disk)
        assert self.run(*command).returncode == 0
        needed = free - free_pages(self.disk)
        failed = 0
        for pages in points(needed, seed=1, most=most):
            reset()
            with leave(self.disk, pages - 1):
                done = self.run(*command)
                said = done.stdout + done.stderr
                failed += done.returncode != 0
                # A cache that can't be written is no failure.
                assert done.returncode == 0 or FULL in said, said
                if "\nPROVED" in done.stdout:
                    assert self.project.verdict["proved"]
            assert self.run(*command).returncode == 0
        return failed

    def forget_runs(self) -> None:
        shutil.rmtree(self.project.results, ignore_errors=True)
        shutil.rmtree(self.disk / "cache", ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "the disk is full while a session is traced, verified or healed", says="No space left on device"
)
@pytest.mark.parametrize("flag", [None, "--negativa-verify", "--negativa-heal"])
@in_namespace
def test_session_on_a_full_disk(tmp_path: Path, flag: str | None, fault: PlantedFault) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        place = OnSmallDisk(disk)
        if flag == "--negativa-heal":
            place.project.environ["NEED"] = "1"
        report = "--negativa-report=json:report.json"
        command = [sys.executable, "-m", "pytest", "-q", "--negativa", report]
        command += [] if flag is None else [flag]
        assert place.try_with_ever_less_space(command, reset=place.forget_runs, most=MOST // 5)
        place.forget_runs()
        with leave(disk, 3):
            done = place.run(*command)
            assert done.returncode
            fault.check(done.stdout + done.stderr)


@pytest.mark.slow
@in_namespace
def test_lock_on_a_full_disk(tmp_path: Path) -> None:
    """The lock that is there stays, or is the new one."""
    with small_disk(tmp_path / "disk", SIZE) as disk:
        place = OnSmallDisk(disk)
        place.session("--negativa", "--negativa-verify")
        lock_file = place.project.folder / "negativa.lock"
        command: list[str | Path] = [NEGATIVA, "lock"]
        assert place.run(*command).returncode == 0
        lock = lock_file.read_bytes()
        with leave(disk, 0):
            done = place.run(*command)
        assert done.returncode == 1
        assert f"negativa.lock: cannot be written: {FULL}" in done.stderr
        assert lock_file.read_bytes() == lock
        assert place.try_with_ever_less_space(command, reset=lock_file.unlink)
        assert lock_file.read_bytes() == lock


@in_namespace
def test_inspection_on_a_full_disk(tmp_path: Path) -> None:
    """The cache saves time, and its lack is no failure."""
    with small_disk(tmp_path / "disk", SIZE) as disk:
        place = OnSmallDisk(disk)
        library = make_large(MULTIARCH, place.project.folder / "large.so")
        command: list[str | Path] = [NEGATIVA, "inspect", library]
        whole = place.run(*command)
        [entry] = (disk / "cache").iterdir()
        size = entry.stat().st_size
        for pages in (0, size // PAGE // 2):
            place.forget_runs()
            with leave(disk, pages):
                assert place.run(*command).stdout == whole.stdout
                assert not (disk / "cache").exists() or not [*(disk / "cache").iterdir()]


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "no process may write to the folder of runs", says="Read-only file system"
)
@in_namespace
def test_read_only_folders(tmp_path: Path, fault: PlantedFault) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        place = OnSmallDisk(disk)
        project = place.project
        with read_only(project.folder):
            done = place.session("--negativa")
            assert done.returncode == 1
            fault.check(done.stdout + done.stderr)
        project.trace()
        before = digests(project.results)
        for folder in (project.folder, project.results):
            with read_only(folder):
                for flag in ("--negativa", "--negativa-verify", "--negativa-heal"):
                    done = place.session(flag)
                    assert done.returncode == 1
                    fault.check(done.stdout + done.stderr)
        assert digests(project.results) == before
        project.verify()
        proved = project.verdict
        with read_only(project.folder):
            fault.check(place.session("--negativa-verify").stderr)
            fault.check(place.run(NEGATIVA, "lock").stderr)
            fault.check(place.run(NEGATIVA, "locate").stderr)
            fault.check(place.run(NEGATIVA, "reconstruct").stderr)
            fault.check(place.run(NEGATIVA, "runs", "--delete", "latest").stderr)
            fault.check(place.run(NEGATIVA, "trace", "--", "true").stderr)
            written = place.run(NEGATIVA, "lock", "-o", "-")
            assert written.returncode == 0
        assert project.verdict == proved
        with read_only(project.results / "reconstructed"):
            fault.check(place.session("--negativa-verify").stderr)
        # Without the cache it only takes longer.
        (disk / "cache").mkdir(exist_ok=True)
        with read_only(disk / "cache"):
            assert place.session("--negativa", "--negativa-verify").returncode == 0
