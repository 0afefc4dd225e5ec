"""Files that are GPU code themselves: those that no GPU can load are removed whole."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.installed.owners import Owners
from pytest_negativa.installed.record import record_digest
from pytest_negativa.installed.sites import find_code_distributions
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.reporting.slimming import render_rows
from pytest_negativa.slimming.atomic_replacement import take_out
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.explain import explain_error
from pytest_negativa.slimming.package import NOTICE, slim_wheel
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from pytest_negativa.verifying.used_originals import judge_files
from tests.support.builders import (
    CubinSpec,
    ElementSpec,
    build_cubin,
    build_ptx,
    build_region,
)
from tests.support.code_files import planned_files
from tests.support.faults import PlantedFault
from tests.support.kills import FULL_DISK, points, run
from tests.support.libraries import NEGATIVA
from tests.support.sites import digests, make_wheel, pip_install, verdict_of

H200, B200 = ComputeCapability(9, 0), ComputeCapability(10, 0)
LONG = "x" * 249 + ".cubin"


def cubin(arch: int, name: str = "k") -> bytes:
    return build_cubin(CubinSpec(arch=arch, kernels={name: b"\1" * 64})).data


FILES = {
    "cubins/a/one.cubin": cubin(90, "one"),
    "cubins/a/two.cubin": cubin(80, "two"),
    f"cubins/b/{LONG}": cubin(100, "long"),
    "cubins/new.ptx": build_ptx(target="sm_100"),
    "cubins/old.ptx": build_ptx(target="sm_80"),
    "cubins/none.cubin": b"a text that is no cubin",
    "cubins/linked.cubin": build_cubin(
        CubinSpec(arch=80, relocatable=True, kernels={"r": b"\1" * 64})
    ).data,
}
# What stays for an H200: a text and relocatable code are not what a driver loads.
STAYS = {"one.cubin", "old.ptx", "none.cubin", "linked.cubin"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = {}
    for number, (name, data) in enumerate(FILES.items()):
        sources[f"kernels/{name}"] = folder / f"source{number}"
        sources[f"kernels/{name}"].write_bytes(data)
    return make_wheel(folder, "kernels", "1.0", sources)


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "site-packages"
    pip_install(folder, wheel)
    return folder


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(installed, tmp_path / "site-packages")


def slim(*paths: Path, **options: object) -> SlimReport:
    aside = options.pop("keep_originals", None)
    assert aside is None or isinstance(aside, Path)
    done = SlimOptions(keep_originals=aside, dry_run=bool(options.pop("dry_run", False)))
    return slim_trees(SlimRequest(paths=paths, devices=(H200,), options=done, **options))  # type: ignore[arg-type]


def left(folder: Path) -> set[str]:
    return {p.name for p in (folder / "kernels").rglob("*") if p.is_file()}


def check(folder: Path) -> list[SlimRow]:
    [tree] = scan([folder])
    return check_tree(tree)


def test_files_that_no_gpu_can_load_go_and_come_back(site: Path, tmp_path: Path) -> None:
    before = digests(site)
    times = {p: p.stat().st_mtime_ns for p in site.rglob("*") if p.is_file()}
    forecast = slim(site, dry_run=True)
    assert digests(site) == before
    report = slim(site, keep_originals=tmp_path / "originals")
    [row] = report.rows
    assert (row.path, row.status, row.detail) == (
        "kernels/",
        SlimStatus.SLIMMED,
        "3 files removed",
    )
    assert (row.before, row.after) == (forecast.rows[0].before, forecast.rows[0].after)
    gone = ("cubins/a/two.cubin", f"cubins/b/{LONG}", "cubins/new.ptx")
    assert (row.before, row.after) == (sum(len(FILES[name]) for name in gone), 0)
    assert left(site) == STAYS
    rows = check(site)
    assert [row.status for row in rows] == [SlimStatus.SOUND]
    assert "kernels/: sound, 3 files removed" in render_rows(rows, "")
    assert [row.status for row in slim(site).rows] == [SlimStatus.ALREADY]
    [back] = undo_trees([site])
    assert (back.status, back.detail) == (SlimStatus.UNDONE, "3 files")
    assert digests(site) == before
    assert {p: p.stat().st_mtime_ns for p in site.rglob("*") if p.is_file()} == times
    assert not (site / MANIFEST_NAME).exists()


def test_a_fatbin_goes_only_if_all_of_it_is_for_other_gpus(tmp_path: Path) -> None:
    def fatbin(*archs: int) -> bytes:
        return build_region([ElementSpec(content=cubin(arch), arch=arch) for arch in archs])

    (tmp_path / "both.fatbin").write_bytes(fatbin(80, 90))
    (tmp_path / "other.fatbin").write_bytes(fatbin(80, 100))
    (tmp_path / "one.fatbin").write_bytes(fatbin(80))
    [row] = slim(tmp_path).rows
    assert (row.path, row.detail) == ("./", "2 files removed")
    assert (tmp_path / "both.fatbin").exists()
    assert not (tmp_path / "other.fatbin").exists()


def test_all_ptx_stays_if_asked_for(site: Path) -> None:
    slim(site, keep_ptx=True)
    assert left(site) == {*STAYS, "new.ptx"}


def test_all_names_of_a_file_go_and_come_back(site: Path, tmp_path: Path) -> None:
    link = site / "kernels/link.cubin"
    os.link(site / "kernels/cubins/a/two.cubin", link)
    slim(site, keep_originals=tmp_path / "originals")
    assert left(site) == STAYS
    undo_trees([site])
    assert link.read_bytes() == FILES["cubins/a/two.cubin"]


@pytest.mark.planted_fault(
    "files are slimmed for another arch, and the first slimming removed what that needs",
    says="removed before, by another lock or for other archs",
)
def test_files_that_are_gone_may_be_needed(site: Path, fault: PlantedFault) -> None:
    slim(site)
    report = slim_trees(SlimRequest(paths=(site,), devices=(B200,)))
    assert report.failed
    fault.check(report.rows[0].detail or "")


@pytest.mark.planted_fault(
    "removed files of GPU code were not kept, and undo is asked for them",
    says="was slimmed, and its original was not kept; install it again",
)
def test_files_that_were_not_kept(site: Path, fault: PlantedFault) -> None:
    slim_trees(SlimRequest(paths=(site,), devices=(H200,)))
    [row] = undo_trees([site])
    assert (row.path, row.status) == ("kernels/", SlimStatus.FAILED)
    fault.check(row.detail or "")
    assert "(and 2 more files)" in (row.detail or "")
    # The way to a later installation stays.
    assert json.loads((site / MANIFEST_NAME).read_text())["slimmed"]


@pytest.mark.planted_fault(
    "another program puts a newer file in the place of one that is being removed",
    says="another file took its place while negativa worked, so it was left as it is",
)
def test_a_newer_file_stays(
    site: Path, fault: PlantedFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = site / "kernels/cubins/new.ptx"
    from pytest_negativa.slimming import slim as module

    def take_out_late(place: Path, state: FileState) -> None:
        if place == path:
            path.unlink()
            path.write_bytes(b"newer")
        take_out(place, state)

    monkeypatch.setattr(module, "take_out", take_out_late)
    report = slim(site)
    assert path.read_bytes() == b"newer"
    # What went is told, too.
    rows = {row.status: row for row in report.rows}
    assert rows.keys() == {SlimStatus.SLIMMED, SlimStatus.FAILED}
    fault.check(rows[SlimStatus.FAILED].detail or "")
    monkeypatch.undo()
    assert [row.status for row in slim(site).rows] == [SlimStatus.ALREADY]
    manifest = json.loads((site / MANIFEST_NAME).read_text())
    assert "kernels/cubins/new.ptx" not in manifest["slimmed"]
    assert path.read_bytes() == b"newer"


def test_undo_leaves_files_of_a_distribution_that_is_gone(site: Path, tmp_path: Path) -> None:
    slim(site, keep_originals=tmp_path / "originals")
    [metadata] = site.glob("*.dist-info")
    # All of a site's metadata may be away for a while.
    metadata.rename(metadata.with_name("other-1.0.dist-info"))
    assert [row.status for row in undo_trees([site])] == [SlimStatus.LEFT]
    assert left(site) == STAYS and not (site / MANIFEST_NAME).exists()


@pytest.mark.parametrize("damage", [b"\xff", b"", None], ids=["not text", "empty", "gone"])
def test_a_damaged_record_takes_no_file_from_undo(
    site: Path, tmp_path: Path, damage: bytes | None
) -> None:
    before = digests(site)
    slim(site, keep_originals=tmp_path / "originals")
    [metadata] = site.glob("*.dist-info")
    record = metadata / "RECORD"
    intact = record.read_bytes()
    record.unlink()
    if damage is not None:
        record.write_bytes(damage)
    slim(site)
    assert [row.status for row in check(site)] == [SlimStatus.SOUND]
    [row] = undo_trees([site])
    assert (row.status, row.detail) == (SlimStatus.UNDONE, "3 files")
    record.write_bytes(intact)
    assert digests(site) == before


def upgrade(site: Path, *without: str) -> None:
    """Install a version of which one file is another one, and that lacks some files."""
    [record] = site.glob("*.dist-info/RECORD")
    two = site / "kernels/cubins/a/two.cubin"
    rows = [row for row in record.read_text().splitlines() if not row.startswith(without)]
    two.write_bytes(cubin(80, "another"))
    digest = record_digest(hashlib.sha256(two.read_bytes()).hexdigest())
    [old] = [row for row in rows if "/two.cubin" in row]
    rows[rows.index(old)] = f"{old.split(',')[0]},{digest},{two.stat().st_size}"
    record.write_text("\n".join(rows) + "\n")
    record.parent.rename(site / "kernels-2.0.dist-info")


def test_what_an_older_version_lost_is_forgotten(site: Path, tmp_path: Path) -> None:
    slim(site, keep_originals=tmp_path / "originals")
    upgrade(site, "kernels/cubins/b/", "kernels/cubins/new.ptx")
    assert [row.status for row in check(site)] == [SlimStatus.DIFFERENT]
    done = slim_trees(SlimRequest(paths=(site,), devices=(B200,)))
    assert not done.failed
    assert {"one.cubin", "two.cubin"}.isdisjoint(left(site))
    assert set(json.loads((site / MANIFEST_NAME).read_text())["slimmed"]) == {
        "kernels/cubins/a/one.cubin",
        "kernels/cubins/a/two.cubin",
    }


def test_undo_mixes_no_versions(site: Path, tmp_path: Path) -> None:
    slim(site, keep_originals=tmp_path / "originals")
    upgrade(site)
    (site / "kernels/cubins/a/two.cubin").unlink()
    undo_trees([site])
    assert not (site / "kernels/cubins/a/two.cubin").exists()


def test_files_that_were_installed_again_are_forgotten(site: Path, installed: Path) -> None:
    by_lock(site, "one.cubin")
    shutil.copytree(installed, site, dirs_exist_ok=True)
    assert [row.status for row in check(site)] == [SlimStatus.DIFFERENT]
    by_lock(site, "one.cubin", "two.cubin")
    assert [row.status for row in check(site)] == [SlimStatus.SOUND]


@pytest.mark.planted_fault(
    "slim --require is given a lock with files of another version than the one that is installed",
    says="not the files that were proved (of kernels 1.0)",
)
def test_another_version_is_not_what_the_lock_requires(site: Path, fault: PlantedFault) -> None:
    lock = locked(site, "one.cubin")
    upgrade(site)
    before = digests(site)
    report = slim_trees(SlimRequest(paths=(site,), lock=lock, require=True))
    assert report.stopped and digests(site) == before
    fault.check(report.rows[0].detail or "")


def test_an_error_that_names_a_removed_file_is_explained(site: Path, tmp_path: Path) -> None:
    slim(site, keep_originals=tmp_path / "originals")
    error = f"FileNotFoundError: No such file or directory: '{site}/kernels/cubins/a/two.cubin'"
    text = explain_error(error, (), (site,))
    assert "kernels/cubins/a/two.cubin was removed by negativa slim" in text
    assert "what devices of 9.0 can load" in text and "negativa slim undo" in text
    assert "removed by" not in explain_error(error.replace("two", "one"), (), (site,))


def test_a_mistyped_subcommand(site: Path) -> None:
    command = [str(NEGATIVA), "slim", "chek"]
    run = {"capture_output": True, "text": True, "cwd": site}
    done = subprocess.run(command, **run)  # type: ignore[call-overload]
    assert done.returncode == 2
    assert "chek: neither a path nor a subcommand; did you mean check?" in done.stderr
    assert "(see negativa slim --help)" in done.stderr
    (site / "chek").mkdir()
    done = subprocess.run([*command, "--arch=sm_90", "--no-way-back"], **run)  # type: ignore[call-overload]
    assert done.returncode == 1 and "nothing to slim in chek" in done.stderr


@pytest.mark.parametrize("by", ["arch", "lock"])
def test_a_spare_leaves_the_files_and_says_so(site: Path, tmp_path: Path, by: str) -> None:
    before = digests(site)
    options = SlimOptions(spare=SpareTarget(tmp_path / "spares"))
    request = SlimRequest(paths=(site,), devices=(H200,), options=options)
    if by == "lock":
        lock = locked(site, "one.cubin")
        request = SlimRequest(paths=(site,), lock=lock, require=True, options=options)
    [row] = slim_trees(request).rows
    assert before.items() <= digests(site).items()
    assert row.status is SlimStatus.LEFT
    more = 2 if by == "arch" else 3
    assert (row.detail or "").endswith(f"(and {more} more files)")
    assert "slim their folder without --spare to remove them" in (row.detail or "")


def test_a_spare_leaves_only_files_that_are_here(site: Path, tmp_path: Path) -> None:
    options = SlimOptions(spare=SpareTarget(tmp_path / "spares"))
    lock = locked(site, "one.cubin")
    (site / "kernels/cubins/a/two.cubin").unlink()
    [row] = slim_trees(SlimRequest(paths=(site,), lock=lock, options=options)).rows
    assert (row.detail or "").endswith("(and 2 more files)")
    widened = locked(site, *(Path(name).name for name in FILES))
    assert slim_trees(SlimRequest(paths=(site,), lock=widened, options=options)).rows == ()


def locked(site: Path, *kept: str) -> Lock:
    """A lock that keeps these of the files."""
    [one] = find_code_distributions([str(site)])
    digest = one.code_digest
    sizes = {name: int(row.size) for name, row in one.code_files.items()}
    opened = {name: sizes.pop(name) for name in one.code_files if Path(name).name in kept}
    plan = planned_files(sizes, opened, site=str(site), distribution=one.name, digest=digest)
    library = plan.plan.library
    files = tuple(judge_files([plan.plan], [], {(library.path, digest)}))
    return make_lock("run", [plan], replace(verdict_of(), libraries=files), Owners().of)


def by_lock(site: Path, *kept: str, lock: Lock | None = None) -> list[SlimRow]:
    request = SlimRequest(paths=(site,), lock=lock or locked(site, *kept))
    return [row for row in slim_trees(request).rows if row.path.startswith("kernels")]


@pytest.mark.planted_fault(
    "A file of GPU code was changed after its installation, and a lock has it as unused.",
    says="another content than in RECORD, so not what was proved",
)
def test_a_file_that_was_changed_stays(site: Path, fault: PlantedFault) -> None:
    changed = site / "kernels/cubins/a/two.cubin"
    changed.write_bytes(cubin(80, "own"))
    rows = {row.status: row.detail or "" for row in by_lock(site, "one.cubin")}
    assert rows[SlimStatus.SLIMMED] == "3 files removed"
    fault.check(rows[SlimStatus.LEFT])
    assert changed.read_bytes() == cubin(80, "own")
    again = {row.status: row.detail for row in by_lock(site, "one.cubin")}
    assert again.keys() == {SlimStatus.ALREADY, SlimStatus.LEFT}


def test_a_file_that_is_needed_under_one_of_its_names_stays(site: Path, tmp_path: Path) -> None:
    """A tool may make files with the same content one file."""
    one, same = site / "kernels/cubins/a/one.cubin", site / "kernels/cubins/same.cubin"
    os.link(one, same)
    record = next(site.glob("*.dist-info/RECORD"))
    row = next(r for r in record.read_text().splitlines() if "/one.cubin" in r)
    record.write_text(record.read_text() + row.replace("a/one.cubin", "same.cubin") + "\n")
    by_lock(site, "same.cubin")
    assert left(site) == {"one.cubin", "same.cubin", "none.cubin", "linked.cubin"}
    by_lock(site, "none.cubin")
    assert left(site) == {"none.cubin", "linked.cubin"}


def test_two_folders_with_the_same_files_are_slimmed_alike(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "b/site-packages"
    shutil.copytree(site, other)
    lock = locked(site, "one.cubin")
    rows = slim_trees(SlimRequest(paths=(site, other), lock=lock)).rows
    assert [row.status for row in rows] == [SlimStatus.SLIMMED] * 2
    assert left(site) == left(other) == {"one.cubin", "none.cubin", "linked.cubin"}


def test_a_file_with_a_name_of_another_kind_stays(site: Path) -> None:
    os.link(site / "kernels/cubins/a/two.cubin", site / "kernels/zzz.backup")
    slim(site)
    assert left(site) == {*STAYS, "two.cubin", "zzz.backup"}


@pytest.mark.planted_fault(
    "A package that lost files is a link to a developer's folder since, and undo is asked for it.",
    says="its folder is no longer there, or a link leads to another one (and 2 more files)",
)
def test_undo_writes_to_no_other_folder(site: Path, tmp_path: Path, fault: PlantedFault) -> None:
    slim(site, keep_originals=tmp_path / "originals")
    (site / "kernels").rename(tmp_path / "own")
    (site / "kernels").symlink_to(tmp_path / "own")
    before = digests(tmp_path / "own")
    rows = undo_trees([site])
    assert {row.status for row in rows} == {SlimStatus.LEFT}
    fault.check(rows[0].detail or "")
    assert digests(tmp_path / "own") == before


def test_undo_without_hard_links(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def no_links(*paths: Path, **options: Any) -> None:
        if not options:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        link(*paths, **options)  # of a file without a name

    before = digests(site)
    monkeypatch.setattr(os, "link", no_links)
    slim(site, keep_originals=tmp_path / "originals")
    [back] = undo_trees([site])
    assert back.status is SlimStatus.UNDONE
    assert digests(site) == before


@pytest.mark.parametrize("by", ["arch", "lock"])
def test_a_wheel_without_them(wheel: Path, site: Path, tmp_path: Path, by: str) -> None:
    """RECORD of a wheel names the files that the wheel has."""
    request = SlimRequest(paths=(wheel,), devices=(H200,), target=tmp_path / "out")
    if by == "lock":
        request = dataclasses.replace(request, devices=(), lock=locked(site, "one.cubin"))
    assert not slim_wheel(request).failed
    with zipfile.ZipFile(tmp_path / "out" / wheel.name) as made:
        names = set(made.namelist())
        record = made.read("kernels-1.0.dist-info/RECORD").decode().splitlines()
        notice = made.read(f"kernels-1.0.dist-info/{NOTICE}").decode()
    stays = STAYS if by == "arch" else {"one.cubin", "none.cubin", "linked.cubin"}
    assert {Path(name).name for name in names if name.startswith("kernels/")} == stays
    assert {row.split(",")[0] for row in record} == names
    assert f"kernels/: {7 - len(stays)} files removed" in notice
    with zipfile.ZipFile(wheel) as before:
        assert len(before.namelist()) == len(FILES) + 3


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, FULL_DISK], ids=str)
@pytest.mark.parametrize("what", ["slim", "undo"])
def test_a_run_that_is_killed_loses_no_file(site: Path, tmp_path: Path, by: int, what: str) -> None:
    originals = tmp_path / "work/originals"
    below = tmp_path / "work/site-packages"
    commands: dict[str, Sequence[str | Path]] = {
        "slim": [NEGATIVA, "slim", "--arch=sm_90", "--keep-originals", originals, below],
        "undo": [NEGATIVA, "slim", "undo", below],
    }

    def make() -> None:
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        shutil.copytree(site, below)
        if what == "undo":
            assert run(commands["slim"], tmp_path / "work").status == 0

    before = digests(site)
    make()
    changes = run(commands[what], tmp_path / "work").changes
    for at in points(changes, seed=by, most=6):
        make()
        run(commands[what], tmp_path / "work", at=at, by=by)
        kept = set(digests(originals).values()) if originals.exists() else set()
        assert set(before.values()) <= {*digests(below).values(), *kept}, at
        again = run(commands[what], tmp_path / "work")
        assert again.status == 0, (at, again)
        if what == "slim":
            assert left(below) == STAYS, at
            assert run(commands["undo"], tmp_path / "work").status == 0
        assert digests(below) == before, at
