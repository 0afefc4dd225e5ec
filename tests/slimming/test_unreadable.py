"""What can't be read is named, and is an error; the other libraries are done."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.common import encode_json
from pytest_negativa.cli.main import main
from pytest_negativa.models.base import Listing
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from pytest_negativa.storage.shared_folders import ALONE
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import IS_ROOT, MULTIARCH, NEGATIVA
from tests.support.made_site import ONE, TWO, Made
from tests.support.sites import digests
from tests.support.slim_rows import statuses

NOBODY = 65534
SM_80 = ComputeCapability(8, 0)
FAST = SlimOptions()


@pytest.fixture
def foreign(site: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """The site in a folder that any user may reach."""
    monkeypatch.setenv(ALONE, "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "site-packages")
        shutil.move(site.folder, folder)
        if IS_ROOT:
            for path in (Path(name), folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield replace(site, folder=folder)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Work as a user whose rights count."""
    if not IS_ROOT:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@needs_compiler
@pytest.mark.parametrize(
    "by",
    [
        pytest.param(
            "lock",
            marks=pytest.mark.planted_fault(
                "slim --lock may not read a library", says="it cannot be read"
            ),
        ),
        pytest.param(
            "archs",
            marks=pytest.mark.planted_fault(
                "slim --arch may not read a library", says=": Permission denied"
            ),
        ),
    ],
)
def test_a_library_that_the_user_may_not_read(foreign: Made, by: str, fault: PlantedFault) -> None:
    request = SlimRequest(paths=(foreign.folder,))
    if by == "lock":
        request = replace(request, lock=foreign.lock)
    else:
        request = replace(request, devices=(SM_80,))
    # Root's Python may be closed to others, so this imports what they need.
    assert not slim_trees(replace(request, options=replace(FAST, dry_run=True))).failed
    foreign.one.chmod(0)
    with not_root():
        for dry_run in (True, False):
            options = replace(FAST, dry_run=dry_run)
            report = slim_trees(replace(request, options=options))
            done = SlimStatus.WOULD_SLIM if dry_run else SlimStatus.SLIMMED
            assert statuses(report.rows) == {ONE: SlimStatus.FAILED, TWO: done}
            assert report.failed
        [row] = [row for row in report.rows if row.path == ONE]
        fault.check(row.detail or "")
        checked = statuses(row for tree in scan((foreign.folder,)) for row in check_tree(tree))
        assert checked[ONE] is SlimStatus.FAILED


@needs_compiler
@pytest.mark.parametrize("command", ["undo", "slim"])
def test_a_library_that_cannot_be_read_keeps_its_way_back(foreign: Made, command: str) -> None:
    spares = foreign.folder.with_name("spares")
    options = replace(FAST, spare=SpareTarget(spares))
    request = SlimRequest(paths=(foreign.folder,), lock=foreign.lock, options=options)
    before = digests(foreign.folder)
    # Root's Python may be closed to others, so this imports what they need.
    slim_trees(request)
    undo_trees((foreign.folder,))
    shutil.rmtree(spares)
    with not_root():
        slim_trees(request)
        # A copy of a tree may have other times, so only the digest tells what it is.
        os.utime(foreign.one)
        mode = foreign.one.stat().st_mode
        foreign.one.chmod(0)
        if command == "undo":
            rows = undo_trees((foreign.folder,))
            [row] = [row for row in rows if row.path == ONE]
            assert (row.status, row.detail) == (SlimStatus.FAILED, "it cannot be read")
        else:
            assert statuses(slim_trees(request).rows)[ONE] is SlimStatus.FAILED
        assert ONE in load_manifest(foreign.folder).slimmed
        foreign.one.chmod(mode)
        assert statuses(undo_trees((foreign.folder,)))[ONE] is SlimStatus.UNDONE
    assert digests(foreign.folder) == before


@needs_compiler
def test_a_second_name_that_cannot_be_read_is_not_replaced(foreign: Made) -> None:
    """The first leads to the result."""
    second = foreign.one.with_name("second.so")
    os.link(foreign.one, second)
    options = replace(FAST, spare=SpareTarget(foreign.folder.with_name("spares")))
    request = SlimRequest(paths=(foreign.folder,), lock=foreign.lock, options=options)
    # Root's Python may be closed to others, so this imports what they need.
    slim_trees(request)
    undo_trees((foreign.folder,))
    shutil.rmtree(foreign.folder.with_name("spares"))
    with not_root():
        slim_trees(request)
        content = second.read_bytes()
        second.unlink()
        second.write_bytes(content)
        second.chmod(0)
        [row] = [row for row in undo_trees((foreign.folder,)) if row.path == ONE]
        assert (row.status, row.detail) == (SlimStatus.FAILED, "it cannot be read")
        second.chmod(0o644)
        assert second.read_bytes() == content
        assert statuses(undo_trees((foreign.folder,)))[ONE] is SlimStatus.UNDONE


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def negativa(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("make", [fifo, folder, device])
@pytest.mark.parametrize("command", ["--arch=sm_90 --no-way-back", "check", "undo"])
def test_a_manifest_that_is_no_file(
    tmp_path: Path, make: Callable[[Path], None], command: str
) -> None:
    manifest = tmp_path / MANIFEST_NAME
    make(manifest)
    done = negativa("slim", *command.split(), tmp_path)
    assert done.exit_code == 1
    if f"{manifest}: other users may write to /dev/zero" in done.stderr:
        return  # Root refuses what others may write to before it reads it.
    assert f"{manifest}: cannot be read: " in done.stderr
    assert done.stderr.endswith("; move it away\n")
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


@pytest.mark.parametrize("make", [fifo, folder, device])
def test_a_wheel_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    wheel = tmp_path / "x-1.0-py3-none-any.whl"
    make(wheel)
    done = negativa("slim", wheel, "--arch=sm_90", "--target", tmp_path / "target")
    assert done.exit_code == 1
    assert ", expected a regular file" in done.stderr


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name)
        commands = ("--arch=sm_90 --no-way-back", "check", "undo")
        assert [negativa("slim", *c.split(), closed).exit_code for c in commands] == [1, 1, 0]
        closed.chmod(0)
        with not_root():
            for command in commands:
                done = negativa("slim", *command.split(), closed)
                assert done.exit_code == 1
                assert f"{closed}: cannot be " in done.stderr and "Permission denied" in done.stderr
                done = negativa("slim", *command.split(), closed / "inner")
                assert done.exit_code == 2
                assert f"{closed}/inner: cannot be read: Permission denied" in done.stderr
        closed.chmod(0o700)


@pytest.mark.parametrize("option", ["--spare", "--keep-originals", "--target", "--arch=sm_90"])
@pytest.mark.parametrize("path", ["loop", "loop/x", "loop/../y", "n" * 300])
def test_a_path_that_leads_nowhere(tmp_path: Path, option: str, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lib").mkdir()
    shutil.copy(MULTIARCH, tmp_path / "lib")
    words = ("--arch=sm_90", "--dry-run", option, tmp_path / path)
    done = negativa("slim", *words, tmp_path / "lib")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 0 or done.stderr.count("\n") == 1


class TestPathsThatAreNotUtf8:
    def test_a_library_stays_and_the_others_are_done(self, tmp_path: Path) -> None:
        shutil.copy(MULTIARCH, tmp_path / "libone.so")
        shutil.copy(MULTIARCH, tmp_path / "lib\udcff.so")
        (tmp_path / "link\udcff.so").symlink_to("libone.so")
        words = ("--no-way-back", "--arch=sm_20", "--force-arch", "--strip-others", "--json")
        done = negativa("slim", *words, tmp_path)
        assert done.exit_code == 0, done.output
        [told] = json.loads(done.stdout)["rows"]
        assert told["path"] == "libone.so"
        assert (tmp_path / "lib\udcff.so").read_bytes() == MULTIARCH.read_bytes()

    def test_json_has_escapes(self) -> None:
        row = SlimRow.unchanged("w\udcff.so", SlimStatus.FAILED, 0, None)
        listing = Listing(rows=(row,))
        assert json.loads(encode_json(listing))["rows"][0]["path"] == r"w\udcff.so"

    @pytest.mark.parametrize("option", ["--spare", "--keep-originals"])
    def test_a_folder_for_what_is_kept_is_refused(self, tmp_path: Path, option: str) -> None:
        site = tmp_path / "site"
        site.mkdir()
        shutil.copy(MULTIARCH, site)
        kept = tmp_path / "kept\udcff"
        done = negativa("slim", "--arch=sm_90", option, kept, site)
        assert done.exit_code == 2 and "its path is not UTF-8" in done.stderr
        assert os.listdir(tmp_path) == ["site"] and os.listdir(site) == [MULTIARCH.name]


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("plant", [fifo, endless])
@pytest.mark.parametrize("name", ["RECORD", "METADATA", "INSTALLER", "direct_url.json"])
def test_metadata_that_are_no_files(site: Made, plant: Callable[[Path], None], name: str) -> None:
    """As root of an image build, slim neither waits for a pipe nor reads it all."""
    (site.info / name).unlink(missing_ok=True)
    plant(site.info / name)
    done = run("slim", "--no-way-back", str(site.folder), "--arch=sm_80", cwd=None)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    assert ONE in done.stdout


@pytest.mark.parametrize(
    ("name", "command", "code", "says"),
    [
        ("pyproject.toml", "inspect", 0, ONE),
        ("negativa.lock", "slim", 2, "no negativa.lock here"),
    ],
)
def test_a_pipe_in_the_working_folder(
    site: Made, tmp_path: Path, name: str, command: str, code: int, says: str
) -> None:
    fifo(tmp_path / name)
    done = run(command, str(site.folder), cwd=tmp_path)
    assert done.returncode == code and says in done.stdout + done.stderr


LISTED = """
import os, sys
from pathlib import Path
from pytest_negativa.slimming.tree import scan
[tree] = scan([Path(sys.argv[1])])
for group in tree.groups:
    os.unlink(tree.root / group.name)
    os.mkfifo(tree.root / group.name)
print(any(map(tree.is_library, tree.groups)))
"""


def test_a_pipe_that_takes_the_place_of_a_file_that_was_listed(site: Made) -> None:
    """As the owner of one folder in the tree may do while root works."""
    command: list[str | Path] = [sys.executable, "-c", LISTED, site.folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def run(*arguments: str, cwd: Path | None) -> subprocess.CompletedProcess[str]:
    """In a process of its own: one that waits could not be ended."""
    command = [str(NEGATIVA), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
