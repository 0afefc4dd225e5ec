"""slim, undo and check are killed, or meet a full disk, at each of their changes."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_negativa.slimming.tree import MANIFEST_NAME
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.kills import FULL_DISK, Ended, points, run
from tests.support.libraries import NEGATIVA
from tests.support.made_site import ONE, TWO, Made
from tests.support.mounts import free_pages, in_namespace, leave, read_only, small_disk
from tests.support.sites import digests, wrong_files

pytestmark = [needs_compiler, pytest.mark.slow]

LINKED = "gpu/linked.so"
RECORD = "gpu_code-1.0.dist-info/RECORD"
LIBRARIES = (ONE, TWO, LINKED)
HOW = pytest.mark.parametrize(
    "by",
    [
        signal.SIGKILL,
        *(
            pytest.param(by, marks=pytest.mark.nightly)
            for by in (signal.SIGTERM, signal.SIGINT, FULL_DISK)
        ),
    ],
    ids=str,
)
Digests = dict[str, str]


class Workplace:
    """A site that is made anew for each try, and the commands on it."""

    def __init__(
        self, installed: Made, folder: Path, *, keep: bool = False, spare: bool = False
    ) -> None:
        self.folder = folder
        self.site = folder / "site-packages"
        self.originals = folder / "originals"
        self._installed = installed
        self._keep = ["--no-way-back"]
        if keep:
            self.keep_in(self.originals)
        if spare:
            self._keep = ["--spare", str(folder / "spares")]

    def keep_in(self, originals: Path) -> None:
        self.originals = originals
        self._keep = ["--keep-originals", str(originals)]

    def make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shutil.copytree(self._installed.folder, self.site, symlinks=True)
        os.link(self.site / TWO, self.site / LINKED)

    def slim(self, *, at: int = 0, by: int = signal.SIGKILL, below: Path | None = None) -> Ended:
        lock = ["--lock", str(self._installed.lock_file), "--jobs", "2"]
        command = [str(NEGATIVA), "slim", *lock, *self._keep, str(self.site)]
        return run(command, below or self.folder, at=at, by=by)

    def slim_by_arch(self) -> Ended:
        how = ["--arch", "sm_80", "--force-arch"]
        return run([NEGATIVA, "slim", *how, *self._keep, self.site], self.folder)

    def undo(self, *, at: int = 0, by: int = signal.SIGKILL) -> Ended:
        return run([NEGATIVA, "slim", "undo", self.site], self.folder, at=at, by=by)

    def check(self) -> Ended:
        """Check the libraries. Where none was slimmed, that is no success."""
        ended = run([NEGATIVA, "slim", "check", self.site], self.folder)
        nothing = f"negativa: error: nothing was slimmed in {self.site}: nothing was checked\n"
        if ended.status == 1 and ended.stderr == nothing and not ended.stdout:
            return replace(ended, status=0)
        return ended

    def assert_whole(self, before: Digests, after: Digests) -> None:
        """Each library is the old one or the new one, RECORD is not cut, and check says so."""
        found = digests(self.site)
        checked = self.check()
        assert checked.changes == 0
        said = checked.stdout + checked.stderr
        if checked.status:
            assert "a run was killed here" in said or "run negativa slim again" in said, said
        assert "differs from what was written" not in said
        for name in LIBRARIES:
            assert found[name] in (before[name], after[name]), name
        record = (self.site / RECORD).read_text().splitlines()
        installed = (self._installed.folder / RECORD).read_text().splitlines()
        assert [line.split(",")[0] for line in record] == [x.split(",")[0] for x in installed]
        for path in self.originals.glob("[0-9a-f]*") if self._keep else ():
            assert path.name in (before[ONE], before[TWO])
            assert path.name in set(digests(self.originals).values())

    def spares(self) -> set[str]:
        return {path.name for path in self.folder.glob("spares/*.spare")}

    def assert_clean(self, expected: Digests) -> None:
        """Assert that all is as after an undisturbed run, except for the manifest's notes."""
        found = digests(self.site)
        found.pop(MANIFEST_NAME, None)
        assert found == {name: d for name, d in expected.items() if name != MANIFEST_NAME}
        assert (self.site / LINKED).samefile(self.site / TWO)
        assert [str(p) for p in self.site.rglob(".*")] == []
        assert list(self.folder.glob("spares/.unchecked*")) == []
        assert wrong_files(self.site) == []
        checked = self.check()
        assert (checked.status, checked.changes) == (0, 0), checked


@pytest.fixture(params=["forgotten", "kept", "spare"])
def place(installed: Made, tmp_path: Path, request: pytest.FixtureRequest) -> Workplace:
    keep, spare = request.param == "kept", request.param == "spare"
    return Workplace(installed, tmp_path / "work", keep=keep, spare=spare)


def assert_ended(ended: Ended, by: int) -> None:
    # A signal may come when all is done.
    expected = {0, 1} if by == FULL_DISK else {0, -by, 128 + by}
    assert ended.status in expected, ended
    if ended.status == 1:
        assert "No space left on device" in ended.stderr


@HOW
def test_slim(place: Workplace, by: int) -> None:
    place.make()
    before = digests(place.site)
    undisturbed = place.slim()
    assert undisturbed.status == 0, undisturbed
    after = digests(place.site)
    for at in points(undisturbed.changes, seed=by):
        place.make()
        assert_ended(place.slim(at=at, by=by), by)
        place.assert_whole(before, after)
        again = place.slim()
        assert again.status == 0, (at, again)
        place.assert_clean(after)


@HOW
@pytest.mark.parametrize("spare", [False, True], ids=["kept", "spare"])
def test_slim_in_another_way(installed: Made, tmp_path: Path, by: int, spare: bool) -> None:
    """The result before goes with its spare, and never the original."""
    place = Workplace(installed, tmp_path / "work", keep=not spare, spare=spare)
    place.make()
    before = digests(place.site)
    assert place.slim_by_arch().status == 0
    undisturbed = place.slim()
    assert undisturbed.status == 0, undisturbed
    after = digests(place.site)
    for at in points(undisturbed.changes, seed=by):
        place.make()
        assert place.slim_by_arch().status == 0
        assert_ended(place.slim(at=at, by=by), by)
        again = place.slim()
        assert again.status == 0, (at, again)
        place.assert_clean(after)
        assert place.undo().status == 0
        place.assert_clean(before)


@HOW
@pytest.mark.parametrize("killed", ["slim", "slim in another way", "undo"])
@pytest.mark.parametrize("then", ["undo", "slim"])
def test_no_spare_is_left_that_nobody_knows(
    installed: Made, tmp_path: Path, by: int, killed: str, then: str
) -> None:
    place = Workplace(installed, tmp_path / "work", spare=True)
    work = place.undo if killed == "undo" else place.slim

    def make() -> None:
        place.make()
        if killed != "slim":
            assert place.slim_by_arch().status == 0

    make()
    undisturbed = work()
    assert undisturbed.status == 0
    for at in points(undisturbed.changes, seed=by):
        make()
        assert_ended(work(at=at, by=by), by)
        if then == "slim":
            assert place.slim().status == 0
            assert len(place.spares()) == 2
        assert place.undo().status == 0
        assert place.spares() == set()


@pytest.mark.nightly
@in_namespace
def test_originals_on_another_disk(installed: Made, tmp_path: Path) -> None:
    """They are copied there, and no part of a copy is left."""
    place = Workplace(installed, tmp_path / "work", keep=True)
    disk = tmp_path / "disk"
    place.keep_in(disk / "originals")
    with small_disk(disk, 16 << 20):
        place.make()
        before = digests(place.site)
        undisturbed = place.slim(below=disk)
        after = digests(place.site)
        assert undisturbed.changes
        for at in range(1, undisturbed.changes + 1):
            place.make()
            shutil.rmtree(place.originals)
            assert_ended(place.slim(at=at, below=disk), signal.SIGKILL)
            place.assert_whole(before, after)
            assert place.slim().status == 0
            place.assert_clean(after)
            kept = {path.name for path in place.originals.iterdir()}
            assert kept == {".negativa-originals", before[ONE], before[TWO]}


@HOW
@pytest.mark.parametrize("spare", [False, True], ids=["kept", "spare"])
def test_undo(installed: Made, tmp_path: Path, by: int, spare: bool) -> None:
    place = Workplace(installed, tmp_path / "work", keep=not spare, spare=spare)
    place.make()
    before = digests(place.site)
    assert place.slim().status == 0
    after = digests(place.site)
    undisturbed = place.undo()
    assert undisturbed.status == 0, undisturbed
    for at in points(undisturbed.changes, seed=by):
        place.make()
        assert place.slim().status == 0
        assert_ended(place.undo(at=at, by=by), by)
        place.assert_whole(before, after)
        again = place.undo()
        assert again.status == 0, (at, again)
        place.assert_clean(before)


@in_namespace
def test_real_disk_with_ever_less_space(installed: Made, tmp_path: Path) -> None:
    """The file system itself says no, at any byte that is written."""
    place = Workplace(installed, tmp_path / "disk/work", keep=True)
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        place.make()
        before = digests(place.site)
        free = free_pages(disk)
        assert place.slim().status == 0
        after = digests(place.site)
        needed = free - free_pages(disk)
        for pages in points(needed + 64, seed=1):
            place.make()
            with leave(disk, pages):
                ended = place.slim()
                assert ended.status in (0, 1), ended
                place.assert_whole(before, after)
            assert place.slim().status == 0
            place.assert_clean(after)


@in_namespace
def test_undo_on_a_real_disk_with_ever_less_space(installed: Made, tmp_path: Path) -> None:
    place = Workplace(installed, tmp_path / "disk/work", keep=True)
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        place.make()
        before = digests(place.site)
        assert place.slim().status == 0
        after = digests(place.site)
        needed = sum(path.stat().st_size for path in place.originals.iterdir()) // 4096
        for pages in points(needed + 64, seed=1):
            with leave(disk, pages):
                assert_ended(place.undo(), FULL_DISK)
                place.assert_whole(before, after)
            assert place.undo().status == 0
            place.assert_clean(before)
            assert sorted(p.name for p in place.folder.iterdir()) == ["originals", "site-packages"]
            assert place.slim().status == 0


@pytest.mark.planted_fault(
    "The folder to slim is on a disk that is mounted read-only.", says="Read-only file system"
)
@pytest.mark.parametrize("slimmed", [False, True])
@in_namespace
def test_read_only_folder(
    installed: Made, tmp_path: Path, fault: PlantedFault, slimmed: bool
) -> None:
    place = Workplace(installed, tmp_path / "disk/work", keep=True)
    place.folder.parent.mkdir()
    place.make()
    if slimmed:
        assert place.slim().status == 0
    before = digests(place.site)
    with read_only(place.folder):
        ended = place.undo() if slimmed else place.slim()
        assert ended.status == 1
        fault.check(ended.stderr)
        assert place.check().status == 0
        assert digests(place.site) == before
    # The originals alone: nothing changes that could not be undone.
    place.originals.mkdir(exist_ok=True)
    with read_only(place.originals):
        ended = place.undo() if slimmed else place.slim()
        assert (ended.status == 0) is slimmed
    if not slimmed:
        assert digests(place.site) == before
