"""Spares of earlier slims go, and none that a library may need."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.errors import OptionError, ReconstructError
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.prune import prune_spares
from pytest_negativa.slimming.slim import SlimRequest, slim_trees
from pytest_negativa.slimming.slimmer import SlimOptions
from pytest_negativa.slimming.spares import SparePolicy, find_spare, hold_folder, owners_of
from pytest_negativa.slimming.tree import MANIFEST_NAME, ORIGINALS_MARK
from pytest_negativa.slimming.undo import undo_trees
from tests.support.compacting import build, gpu_code, needs_compiler
from tests.support.cutting import needs_stub
from tests.support.faults import PlantedFault
from tests.support.libraries import NEGATIVA
from tests.support.made_site import Made
from tests.support.sites import digests, snapshot
from tests.support.slim_rows import statuses

pytestmark = [needs_compiler, needs_stub]

SM_80 = ComputeCapability(8, 0)


@pytest.fixture
def spares(tmp_path: Path) -> Path:
    return tmp_path / "spares"


def slim(folder: Path, spares: Path, site: Made | None = None) -> None:
    """Slim by the lock of a site, else by an arch."""
    request = SlimRequest(
        paths=(folder,),
        lock=None if site is None else site.lock,
        devices=() if site is not None else (SM_80,),
        force_archs=True,
        options=SlimOptions(spare=SparePolicy(spares)),
    )
    assert not slim_trees(request).failed


def spares_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.spare")}


def names_of(site: Made) -> set[str]:
    return {find_spare(path).name for path in (site.one, site.two)}


def prune(*words: str | Path, status: int = 0) -> Result:
    done = CliRunner().invoke(main, ["slim", "prune", *map(str, words)])
    assert done.exit_code == status, done.output
    return done


def test_spares_of_earlier_slims_go(site: Made, spares: Path) -> None:
    before = digests(site.folder)
    slim(site.folder, spares, site)
    earlier = names_of(site)
    command = ["slim", "--arch=sm_80", "--force-arch", f"--spare={spares}"]
    done = CliRunner().invoke(main, [*command, str(site.folder)])
    assert done.exit_code == 0, done.output
    assert f"of earlier slims: negativa slim prune {spares} removes those" in done.stderr
    # Neither are these spares, nor ours.
    others = [spares / "notes.txt", spares / "libx.so.0123456789abcdef.spare", spares / "deep/a"]
    others[2].parent.mkdir()
    for path in others:
        path.write_text("text")
    (spares / "libl.so.0123456789abcdef.spare").symlink_to(site.one)
    kept = names_of(site)
    assert spares_in(spares) > earlier | kept and not earlier & kept
    stay = {f"{find_spare(path).name} stays: {path} needs it" for path in (site.one, site.two)}
    dry = prune(spares, "--dry-run")
    assert "2 spares (" in dry.stdout and "would be removed; 2 others needed" in dry.stdout
    assert spares_in(spares) > earlier
    done = prune(spares)
    assert {*done.stdout.splitlines()[:-1]} == earlier | stay
    assert "removed; 2 others needed" in done.stdout
    left = {*kept, others[1].name, "libl.so.0123456789abcdef.spare"}
    assert spares_in(spares) == left and all(path.exists() for path in others)
    assert set(statuses(undo_trees((site.folder,))).values())
    assert digests(site.folder) == before
    prune(spares)
    assert spares_in(spares) == left - kept
    assert {path.name for path in spares.glob(".*")} == {ORIGINALS_MARK}


def test_undo_tells_of_spares_that_no_library_needs(site: Made, spares: Path) -> None:
    def undo(folder: Path) -> str:
        done = CliRunner().invoke(main, ["slim", "undo", str(folder)])
        assert done.exit_code == 0, done.output
        return done.stderr

    slim(site.folder, spares, site)
    told = undo(site.folder)
    assert f"negativa: {spares} still has 2 spares (" in told
    assert f"negativa slim prune {spares} removes those that no library needs" in told
    prune(spares)
    assert spares_in(spares) == set()


def test_copies_that_are_named_keep_theirs(site: Made, spares: Path, tmp_path: Path) -> None:
    """Those that were slimmed into the folder are known; copies have to be named."""
    copy = tmp_path / "copy"
    slim(site.folder, spares, site)
    shutil.copytree(site.folder, copy, symlinks=True)
    copied = spares_in(spares)
    undo_trees((site.folder,))
    slim(site.folder, spares)
    assert names_of(site) == spares_in(spares) - copied
    assert "0 spares (0 B on disk) removed; 4 others needed" in prune(spares, copy).stdout
    undo_trees((site.folder,))
    prune(spares, copy)
    assert spares_in(spares) == copied
    # A library alone may need a spare, too.
    shutil.copy(copy / site.one.relative_to(site.folder), tmp_path / "libone.so.1")
    prune(spares, tmp_path / "libone.so.1")
    assert spares_in(spares) == {find_spare(tmp_path / "libone.so.1").name}


def test_a_folder_of_spares_is_of_the_libraries_of_one_folder(
    site: Made, spares: Path, tmp_path: Path
) -> None:
    """Or of those that were slimmed together."""
    other = tmp_path / "other"
    (site.folder / "gpu").rename(other)
    shutil.copytree(other, site.folder / "gpu")
    command = ["slim", "--arch=sm_80", "--force-arch", f"--spare={spares}"]
    done = CliRunner().invoke(main, [*command, str(site.folder), str(other)])
    assert done.exit_code == 0, done.output
    assert {*owners_of(spares)} == {other, site.folder}
    before = snapshot(site.folder), spares_in(spares)
    shutil.copytree(site.folder, tmp_path / "copy", symlinks=True)
    done = CliRunner().invoke(main, ["slim", "--arch=sm_90", *command[2:], str(tmp_path / "copy")])
    assert done.exit_code == 1
    assert f"{spares}: has the spares of the libraries in {other}" in done.stderr
    assert (snapshot(site.folder), spares_in(spares)) == before
    undo_trees((site.folder,))
    assert owners_of(spares) == [other]


def test_a_folder_that_was_moved(site: Made, spares: Path, tmp_path: Path) -> None:
    slim(site.folder, spares, site)
    moved = site.folder.rename(tmp_path / "moved")
    kept = spares_in(spares)
    command = ["slim", "--arch=sm_90", "--force-arch", f"--spare={spares}"]
    done = CliRunner().invoke(main, [*command, str(moved)])
    advice = f"negativa slim prune --force {spares} PATH"
    assert done.exit_code == 1 and advice in done.stderr
    done = CliRunner().invoke(main, ["slim", "prune", "--force", str(spares), str(moved)])
    assert done.exit_code == 0 and spares_in(spares) == kept, done.output
    done = CliRunner().invoke(main, [*command, str(moved)])
    assert done.exit_code == 0 and "another folder" not in done.output, done.output


def test_notes_of_an_earlier_version_count(site: Made, spares: Path, tmp_path: Path) -> None:
    """It had an empty mark, and a note for each folder of libraries."""
    slim(site.folder, spares, site)
    (spares / ORIGINALS_MARK).write_bytes(b"")
    (spares / ".tree-0123456789abcdef").write_bytes(os.fsencode(site.folder))
    kept = spares_in(spares)
    assert f"0 spares (0 B on disk) removed; {len(kept)} others needed" in prune(spares).stdout
    assert spares_in(spares) == kept
    shutil.copytree(site.folder, tmp_path / "copy", symlinks=True)
    command = ["slim", "--arch=sm_90", "--force-arch", f"--spare={spares}"]
    done = CliRunner().invoke(main, [*command, str(tmp_path / "copy")])
    assert f"{spares}: has the spares of the libraries in {site.folder}" in done.stderr
    undo_trees((site.folder,))
    assert owners_of(spares) == []
    prune(spares)
    assert spares_in(spares) == set()


@pytest.mark.parametrize("first", ["undo", "prune"])
@pytest.mark.parametrize("then", ["uninstalled", "upgraded", "away with its site", "no RECORD"])
def test_a_library_that_was_uninstalled_needs_no_spare(
    site: Made, spares: Path, tmp_path: Path, first: str, then: str
) -> None:
    """If its whole site is away, or a RECORD can't be read, nothing is known."""
    around, original = tmp_path / "around", site.one.read_bytes()
    (around / "lib").mkdir(parents=True)
    site = Made(site.folder.rename(around / "lib/site-packages"), site.lock, site.lock_file)
    slim(around, spares, site)
    before = spares_in(spares)
    if then == "away with its site":
        site.folder.rename(tmp_path / "away")
        site.folder.mkdir()
    else:
        # As pip leaves it.
        shutil.rmtree(site.info)
        site.one.unlink()
        site.two.unlink()
    if then == "upgraded":
        site.one.write_bytes(original + b"newer")
        site.two.write_bytes(original + b"newer")
    elif then == "no RECORD":
        (site.folder / "host_code-2.0.dist-info/RECORD").unlink()
    if first == "undo":
        assert set(statuses(undo_trees((around,))).values()) == {SlimStatus.LEFT}
    is_known = then in ("uninstalled", "upgraded")
    assert f"{0 if is_known else 2} others needed" in prune(spares).stdout
    assert spares_in(spares) == (set() if is_known else before)


@pytest.mark.planted_fault(
    "a folder that was slimmed into the folder of spares is not here, and prune is asked for",
    says="was slimmed with spares here, and has no slimmed library now",
)
def test_a_folder_that_is_away(
    site: Made, spares: Path, tmp_path: Path, fault: PlantedFault
) -> None:
    slim(site.folder, spares)
    site.folder.rename(tmp_path / "away")
    before = spares_in(spares)
    # As the place of a mount is, before it is mounted.
    for _ in range(2):
        done = prune(spares, status=1)
        fault.check(done.stderr)
        assert spares_in(spares) == before
        site.folder.mkdir(exist_ok=True)
    site.folder.rmdir()
    (tmp_path / "away").rename(site.folder)
    prune(spares)
    assert spares_in(spares) == before
    shutil.rmtree(site.folder)
    prune(spares, "--force")
    assert spares_in(spares) == set()
    assert "0 spares" in prune(spares).stdout


def test_a_library_that_is_away_keeps_its_spare(site: Made, spares: Path, tmp_path: Path) -> None:
    slim(site.folder, spares)
    before = spares_in(spares)
    site.one.rename(tmp_path / "away.so")
    prune(spares)
    (tmp_path / "away.so").rename(site.one)
    with site.one.open("r+b") as file:
        file.truncate(1000)
    prune(spares, status=1)
    assert spares_in(spares) == before


@pytest.mark.slow
def test_nothing_goes_while_slim_is_at_work(site: Made, spares: Path, tmp_path: Path) -> None:
    slim(site.folder, spares)
    undo_trees((site.folder,))
    command: list[str | Path] = [NEGATIVA, "slim", "prune", spares]
    with hold_folder(spares):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None and "waiting for a process" in process.stderr.readline()
        assert len(spares_in(spares)) == 2
        (spares / "library.spare").touch()
        process.stderr.close()
    assert process.wait() == 0
    assert spares_in(spares) == {"library.spare"}
    with pytest.raises(OptionError, match="not written by slim --spare"):
        prune_spares(tmp_path, ())
    with pytest.raises(OptionError, match="no such folder; name one that slim --spare wrote"):
        prune_spares(tmp_path / "gone", ())
    mark = spares / ORIGINALS_MARK
    mark.unlink()
    os.mkfifo(mark)
    with pytest.raises(ReconstructError, match="cannot be read"):
        owners_of(spares)


def test_without_a_manifest_the_folder_of_spares_stays_known(site: Made, spares: Path) -> None:
    slim(site.folder, spares)
    (site.folder / MANIFEST_NAME).unlink()
    assert set(statuses(undo_trees((site.one,))).values()) == {SlimStatus.UNDONE}
    before = spares_in(spares)
    prune(spares, status=1)
    assert spares_in(spares) == before
    prune(spares, site.folder)
    assert spares_in(spares) == {find_spare(site.two).name}


def test_a_damaged_manifest_is_unknown(site: Made, spares: Path) -> None:
    slim(site.folder, spares, site)
    slim(site.folder, spares)
    before, needed = spares_in(spares), names_of(site)
    (site.folder / MANIFEST_NAME).write_text("{")
    for paths in ((), (site.folder,)):
        done = prune(spares, *paths, status=1)
        assert "not a manifest of negativa slim" in done.stderr
        assert spares_in(spares) == before
    prune(spares, "--force")
    assert spares_in(spares) == needed < before
    assert owners_of(spares) == [site.folder]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "then"),
    [
        (signal.SIGINT, "nothing"),
        (signal.SIGTERM, "nothing"),
        (signal.SIGKILL, "undo"),
        (signal.SIGKILL, "prune"),
        (signal.SIGKILL, "slim"),
    ],
)
def test_what_an_interrupted_slim_leaves(
    spares: Path, tmp_path: Path, number: signal.Signals, then: str
) -> None:
    """A killed run may leave hundreds of megabytes, which the next command removes."""
    folder = tmp_path / "libraries"
    one = build(tmp_path / "build", fatbin=gpu_code(5, ((1 << 24,) * 3,)))
    folder.mkdir()
    for copy in range(3):
        shutil.copy(one, folder / f"lib{copy}.so")
    before = digests(folder)
    command = ["slim", "--arch=sm_80", "--force-arch", f"--spare={spares}"]
    with subprocess.Popen([NEGATIVA, *command, "--jobs=2", folder]) as process:
        # A spare that is being written, or checked.
        while not [*spares.glob(".unchecked-*/**/*spare*")]:
            assert process.poll() is None
        process.send_signal(number)
    left = [*spares.glob(".unchecked-*")] if spares.exists() else []
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and not left
        return
    assert left
    if then == "prune":
        dry = prune(spares, "--dry-run", status=1)
        assert re.search(r"what a killed slim left \([\d.]+ MB on disk\) would be", dry.stdout)
        assert [*spares.glob(".unchecked-*")] == left
        assert ") removed\n" in prune(spares, "--force").stdout
    elif then == "slim":
        # Into another folder.
        slim(folder, tmp_path / "others")
    else:
        assert CliRunner().invoke(main, ["slim", "undo", str(folder)]).exit_code == 0
        assert digests(folder) == before
    assert not [*spares.glob(".unchecked-*")]
