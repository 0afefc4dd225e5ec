"""Originals that were kept come back bit for bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest, save_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import MANIFEST_NAME, STAGED_SUFFIX, scan
from tests.support.compacting import needs_compiler
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import digest_field, digests, snapshot, wrong_files

pytestmark = needs_compiler


@pytest.fixture
def slimmed(site: Made, tmp_path: Path) -> tuple[Made, dict[str, str]]:
    """A site that was slimmed with its originals kept, and its digests before."""
    os.link(site.two, site.folder / "gpu/linked.so")
    site.one.chmod(0o751)
    before = digests(site.folder)
    options = SlimOptions(keep_originals=tmp_path / "originals")
    slim_trees(
        SlimRequest(paths=(site.folder,), lock=site.lock, strip_others=True, options=options)
    )
    assert digests(site.folder) != before
    return site, before


def undo_all(site: Made, *, dry_run: bool = False) -> dict[str, SlimRow]:
    return {row.path: row for row in undo_trees((site.folder,), dry_run=dry_run)}


def test_bytes_are_told_from_the_beginning(site: Made, tmp_path: Path) -> None:
    """A single large library is done only at the end."""
    told: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        told.append((done, total))

    request = SlimRequest(
        paths=(site.folder,),
        lock=site.lock,
        options=SlimOptions(keep_originals=tmp_path / "originals"),
    )
    slim_trees(request, note)
    check_tree(scan((site.folder,))[0], note)
    undo_trees((site.folder,), on_done=note)
    starts = [total for done, total in told if not done]
    ends = [total for done, total in told if done == total]
    assert starts == ends and len(starts) == 3 and all(starts)


def test_all_is_as_before(slimmed: tuple[Made, dict[str, str]]) -> None:
    site, before = slimmed
    rows = undo_all(site)
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(
        (ONE, TWO, HOST), SlimStatus.UNDONE
    )
    assert digests(site.folder) == before
    assert stat.S_IMODE(site.one.stat().st_mode) == 0o751
    assert site.two.samefile(site.folder / "gpu/linked.so")
    assert wrong_files(site.folder) == []
    assert not (site.folder / MANIFEST_NAME).exists()


def test_what_is_kept_stays_a_file_of_its_own(
    slimmed: tuple[Made, dict[str, str]], tmp_path: Path
) -> None:
    site, _ = slimmed
    undo_all(site)
    assert site.two.stat().st_nlink == 2
    assert site.one.stat().st_nlink == 1
    kept = {path.stat().st_ino for path in (tmp_path / "originals").iterdir()}
    assert not kept & {path.stat().st_ino for path in (site.one, site.two, site.host)}


def test_damaged_libraries_get_their_originals(slimmed: tuple[Made, dict[str, str]]) -> None:
    site, before = slimmed
    os.truncate(site.one, site.one.stat().st_size // 2)
    with site.two.open("r+b") as file:
        file.seek(site.two.stat().st_size // 2)
        file.write(bytes(8192))
    site.host.unlink()
    dry = undo_all(site, dry_run=True)
    assert {row.status for row in dry.values()} == {SlimStatus.WOULD_UNDO}
    assert {row.status for row in undo_all(site).values()} == {SlimStatus.UNDONE}
    assert digests(site.folder) == before
    assert site.two.samefile(site.folder / "gpu/linked.so")


@pytest.mark.parametrize("has_libraries", [True, False])
def test_a_folder_that_became_a_link(
    slimmed: tuple[Made, dict[str, str]], tmp_path: Path, has_libraries: bool
) -> None:
    """What the manifest names is not followed out of its folder, nor put back there."""
    site, _ = slimmed
    outside = tmp_path / "outside"
    (site.folder / "gpu").rename(outside)
    if not has_libraries:
        shutil.rmtree(outside)
        (outside / Path(ONE).relative_to("gpu").parent).mkdir(parents=True)
    (site.folder / "gpu").symlink_to(outside)
    before = snapshot(outside)
    assert undo_all(site)[ONE].status is SlimStatus.LEFT
    assert snapshot(outside) == before


def test_dry_run_writes_nothing(slimmed: tuple[Made, dict[str, str]]) -> None:
    site, _ = slimmed
    before = snapshot(site.folder)
    rows = undo_all(site, dry_run=True)
    assert rows[ONE].status is SlimStatus.WOULD_UNDO
    assert snapshot(site.folder) == before


def test_slim_and_undo_again(slimmed: tuple[Made, dict[str, str]], tmp_path: Path) -> None:
    site, before = slimmed
    undo_all(site)
    options = SlimOptions(keep_originals=tmp_path / "originals")
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=options)
    assert not slim_trees(request).failed
    undo_all(site)
    assert digests(site.folder) == before


def test_original_that_is_damaged_is_refused(
    slimmed: tuple[Made, dict[str, str]], tmp_path: Path
) -> None:
    site, _ = slimmed
    [library] = [row for row in site.lock.libraries if row.path == ONE]
    aside = tmp_path / "originals" / library.sha256
    aside.write_bytes(aside.read_bytes()[:-1])
    before = digests(site.folder)[ONE]
    rows = undo_all(site)
    assert rows[ONE].status is SlimStatus.FAILED
    assert "is gone, or no longer" in (rows[ONE].detail or "")
    assert rows[HOST].status is SlimStatus.UNDONE
    assert digests(site.folder)[ONE] == before
    assert wrong_files(site.folder) == []
    # It is still known, should the original turn up.
    assert set(undo_all(site)) == {ONE}


def test_other_version_is_left_alone(slimmed: tuple[Made, dict[str, str]]) -> None:
    site, _ = slimmed
    site.one.unlink()
    site.one.write_bytes(b"a newer version")
    rows = undo_all(site)
    assert rows[ONE].status is SlimStatus.LEFT
    assert site.one.read_bytes() == b"a newer version"


def test_without_originals(site: Made) -> None:
    options = SlimOptions()
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    before = digests(site.folder)
    rows = undo_all(site)
    assert {row.status for row in rows.values()} == {SlimStatus.FAILED}
    assert "was not kept" in (rows[ONE].detail or "")
    assert digests(site.folder) == before


def test_killed_half_way(slimmed: tuple[Made, dict[str, str]]) -> None:
    """The library is back, and the manifest doesn't say so yet."""
    site, before = slimmed
    manifest = (site.folder / MANIFEST_NAME).read_bytes()
    record = (site.info / "RECORD").read_bytes()
    undo_all(site)
    (site.folder / MANIFEST_NAME).write_bytes(manifest)
    (site.info / "RECORD").write_bytes(record)
    rows = undo_all(site)
    assert {row.status for row in rows.values()} == {SlimStatus.UNDONE}
    assert digests(site.folder) == before


def test_a_name_that_leads_to_the_original_gives_it(site: Made) -> None:
    """A run was killed between the names of one file, and none was kept."""
    linked = site.folder / "gpu/linked.so"
    os.link(site.two, linked)
    before = digests(site.folder)
    original = site.two.read_bytes()
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=SlimOptions()))
    linked.unlink()
    linked.write_bytes(original)
    row = undo_all(site)[TWO]
    assert (row.status, row.others) == (SlimStatus.UNDONE, 1)
    assert site.two.samefile(linked)
    assert digests(site.folder)[TWO] == before[TWO]


def test_a_killed_run_left_the_result_of_an_earlier_one(site: Made, tmp_path: Path) -> None:
    before = digests(site.folder)
    options = SlimOptions(keep_originals=tmp_path / "originals")
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    manifest = load_manifest(site.folder)
    entry = manifest.slimmed[ONE]
    # It notes the new result before that takes the place.
    manifest.slimmed[ONE] = msgspec.structs.replace(entry, sha256="0" * 64, replaced=entry.sha256)
    save_manifest(site.folder, manifest, "0" * 16)
    [found] = [row for row in check_tree(scan((site.folder,))[0]) if row.path == ONE]
    assert found.status is SlimStatus.DIFFERENT
    assert found.detail == "the result of an earlier run: a killed one did not replace it"
    assert undo_all(site)[ONE].status is SlimStatus.UNDONE
    assert digests(site.folder)[ONE] == before[ONE]


def test_killed_while_an_original_is_written(slimmed: tuple[Made, dict[str, str]]) -> None:
    """A part of a copy has a hidden name: the next run removes it."""
    site, before = slimmed
    code = f"""
import os, signal
from pathlib import Path
from pytest_negativa.slimming import atomic_replacement, slim
atomic_replacement.write_layout = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
slim.undo_trees((Path({str(site.folder)!r}),))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(site.folder.rglob(".*"))  # one, or one of each worker
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=SlimOptions()))
    assert list(site.folder.rglob(".*")) == []
    undo_all(site)
    assert digests(site.folder) == before


@pytest.mark.parametrize("interrupted_at", [1, 2, 3, 4])
def test_interrupted_before_the_hidden_name_goes(
    slimmed: tuple[Made, dict[str, str]], monkeypatch: pytest.MonkeyPatch, interrupted_at: int
) -> None:
    """The next run still knows the name for ours, also if it is one of a file that has others."""
    site, before = slimmed
    real = Path.unlink
    calls: list[Path] = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(STAGED_SUFFIX):
            calls.append(path)
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            undo_all(site)
    assert load_manifest(site.folder).run is not None
    assert {row.status for row in undo_all(site).values()} == {SlimStatus.UNDONE}
    assert digests(site.folder) == before
    assert list(site.folder.rglob(".*")) == []


def test_target_that_was_not_slimmed(site: Made) -> None:
    before = snapshot(site.folder)
    assert undo_all(site) == {}
    assert snapshot(site.folder) == before


def test_kept_by_a_second_run_only(site: Made, tmp_path: Path) -> None:
    """What was slimmed without, has no original to keep."""
    plain = SlimOptions()
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=plain)
    slim_trees(request)
    slim_trees(replace(request, options=replace(plain, keep_originals=tmp_path / "originals")))
    assert undo_all(site)[ONE].status is SlimStatus.FAILED


def test_libraries_that_an_earlier_release_slimmed(slimmed: tuple[Made, dict[str, str]]) -> None:
    """Their marker has another format. Nothing else of them is asked."""
    site, before = slimmed
    new = site.one.read_bytes()
    old = new.replace(b'"format":1', b'"format":2')
    assert old != new
    site.one.write_bytes(old)
    manifest = site.folder / MANIFEST_NAME
    digest, earlier = (hashlib.sha256(data).hexdigest() for data in (new, old))
    manifest.write_text(manifest.read_text().replace(digest, earlier))
    record = site.info / "RECORD"
    lines = record.read_bytes().replace(digest_field(new).encode(), digest_field(old).encode())
    record.write_bytes(lines)
    [tree] = scan((site.folder,))
    [found] = [row for row in check_tree(tree) if row.path == ONE]
    assert found.status is SlimStatus.SOUND
    assert undo_all(site)[ONE].status is SlimStatus.UNDONE
    assert digests(site.folder) == before


@pytest.mark.parametrize("way", ["originals", "spare"])
def test_a_damaged_manifest_beside_another_folder(site: Made, tmp_path: Path, way: str) -> None:
    """The other folder is put back; and so are libraries with a spare, once it is moved away."""
    other = tmp_path / "other"
    shutil.copytree(site.folder, other, symlinks=True)
    before = [digests(folder) for folder in (site.folder, other)]
    aside = tmp_path / "aside"
    options = SlimOptions(
        keep_originals=aside if way == "originals" else None,
        spare=SpareTarget(aside) if way == "spare" else None,
    )
    slim_trees(SlimRequest((site.folder, other), site.lock, options=options))
    manifest = site.folder / MANIFEST_NAME
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    slimmed = snapshot(site.folder)
    words = ["slim", "undo", "--yes", str(site.folder), str(other)]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 1 and "2 libraries " in result.stdout
    assert f"{manifest}: not a manifest" in result.stderr
    assert "Input data was truncated" in result.stderr
    assert "if it is damaged, copy it from a backup" in result.stderr
    assert digests(other) == before[1] and snapshot(site.folder) == slimmed
    if way == "spare":
        manifest.unlink()
    else:
        manifest.write_bytes(whole)
    assert {row.status for row in undo_trees((site.folder,))} == {SlimStatus.UNDONE}
    assert digests(site.folder) == before[0]
