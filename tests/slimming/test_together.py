"""Runs in the same folder, and in one in another, at the same time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_negativa.errors import ReconstructError
from pytest_negativa.slimming.journal import hold, hold_metadata
from pytest_negativa.slimming.request import SlimOptions
from tests.support.compacting import needs_compiler
from tests.support.made_site import ONE, TWO, Made
from tests.support.sites import digests, wrong_files

pytestmark = needs_compiler

FAST = SlimOptions()
HOLDING = """
import sys
from pathlib import Path
from pytest_negativa.slimming.journal import hold

with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator[None]:
    """A process holds a folder until the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        yield
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def start_holding(*roots: Path) -> threading.Event:
    """Set once this process has the folders."""
    held = threading.Event()

    def take() -> None:
        with hold(*roots):
            held.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return held


def waits(*roots: Path) -> bool:
    """Whether this process does not get the folders while another one has some."""
    return not start_holding(*roots).wait(0.5)


def gets(*roots: Path) -> bool:
    """Whether this process gets the folders."""
    return start_holding(*roots).wait(60)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """One in another, and one beside it."""
    inner, beside = tmp_path / "a/b/c", tmp_path / "a/d"
    inner.mkdir(parents=True)
    beside.mkdir()
    return tmp_path / "a", inner, beside


@pytest.mark.slow
def test_folders_in_each_other_wait(folders: tuple[Path, Path, Path]) -> None:
    outer, inner, beside = folders
    with held_by_another(outer):
        assert waits(outer) and waits(inner)
    with held_by_another(inner):
        assert waits(outer) and waits(inner)
        assert gets(beside)
        assert waits(beside, inner)
    assert gets(outer)
    assert gets(inner, beside)


def test_who_waits_says_so(folders: tuple[Path, Path, Path]) -> None:
    outer, inner, _ = folders
    with held_by_another(outer):
        command = [sys.executable, "-c", HOLDING, str(inner)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
            assert waiting.stderr is not None
            line = waiting.stderr.readline().decode()
            waiting.kill()
    assert line.startswith(f"negativa: waiting for a process that has locked {outer} (lslocks ")


def test_several_at_once(folders: tuple[Path, Path, Path]) -> None:
    outer, inner, beside = folders
    with hold(inner, beside):
        for folder, free in ((inner, False), (beside, False), (outer, True)):
            handle = os.open(folder, os.O_RDONLY)
            kind = fcntl.LOCK_SH if free else fcntl.LOCK_EX
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                assert free
            except BlockingIOError:
                assert not free
            finally:
                os.close(handle)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ReconstructError, match="cannot be opened"), hold(tmp_path / "gone"):
        pass


def test_metadata_beside_the_folder_that_is_held(tmp_path: Path) -> None:
    info, inside = tmp_path / "a.dist-info", tmp_path / "in"
    info.mkdir()
    inside.mkdir()
    # Who holds the folder around it has it already.
    with hold(tmp_path), hold_metadata(info, tmp_path):
        pass
    with hold(inside), hold_metadata(info, inside):
        assert waits(info)


def test_metadata_that_are_given_as_well(site: Made) -> None:
    """As ``site-packages/*`` does: nobody waits for himself."""
    code = (
        "import sys; from pathlib import Path\n"
        "from pytest_negativa.storage.lockfile import load_lock\n"
        "from pytest_negativa.slimming.request import SlimOptions\n"
        "from pytest_negativa.slimming.request import SlimRequest\n"
        "from pytest_negativa.slimming.tree import scan\n"
        "from pytest_negativa.slimming.slim import slim_trees\n"
        "lock, *paths = map(Path, sys.argv[1:])\n"
        "options = SlimOptions()\n"
        "slim_trees(SlimRequest(paths=tuple(paths), lock=load_lock(lock), options=options))"
    )
    folders = (path for path in site.folder.iterdir() if path.is_dir())
    subprocess.run([sys.executable, "-c", code, site.lock_file, *folders], check=True, timeout=60)
    assert site.one.stat().st_size < (site.lock_file.parent / "one" / site.one.name).stat().st_size
    assert wrong_files(site.folder) == []


def test_a_folder_and_one_in_it_at_once(site: Made, installed: Made, tmp_path: Path) -> None:
    """Neither takes the other's unfinished files for remains, nor loses lines of RECORD."""
    code = (
        "import sys; from pathlib import Path\n"
        "from pytest_negativa.storage.lockfile import load_lock\n"
        "from pytest_negativa.slimming.request import SlimOptions\n"
        "from pytest_negativa.slimming.request import SlimRequest\n"
        "from pytest_negativa.slimming.tree import scan\n"
        "from pytest_negativa.slimming.slim import slim_trees\n"
        "lock = load_lock(Path(sys.argv[1]))\n"
        "slim_trees(SlimRequest((Path(sys.argv[2]),), lock, options=SlimOptions()))"
    )
    folders = (site.folder, site.folder / "gpu", site.one.parent, site.folder / "gpu")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, site.lock_file, folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    results = [(process.communicate()[1], process.returncode) for process in processes]
    assert not any("Traceback" in errors for errors, _ in results), results
    assert wrong_files(site.folder) == []
    original = digests(installed.folder)
    now = digests(site.folder)
    assert now[ONE] != original[ONE] and now[TWO] != original[TWO]
