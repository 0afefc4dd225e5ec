"""A spare goes when the manifest that needed it names it no more, and no other one does."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget, find_spare, owners_of
from pytest_negativa.slimming.tree import MANIFEST_NAME, ORIGINALS_MARK
from tests.support.compacting import build, gpu_code, needs_compiler
from tests.support.cutting import needs_stub
from tests.support.libraries import NEGATIVA
from tests.support.made_site import Made
from tests.support.sites import digests
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
        options=SlimOptions(spare=SpareTarget(spares)),
    )
    assert not slim_trees(request).failed


def spares_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.spare")}


def names_of(folder: Path) -> set[str]:
    found = (
        path for path in folder.rglob("lib*.so*") if path.name.startswith(("libone", "libtwo"))
    )
    return {find_spare(path).name for path in found}


def test_spares_of_the_slim_before_go(site: Made, spares: Path, tmp_path: Path) -> None:
    before = digests(site.folder)
    slim(site.folder, spares, site)
    earlier = names_of(site.folder)
    # Neither are these spares, nor ours.
    others = [spares / "notes.txt", spares / "libx.so.0123456789abcdef.spare", spares / "deep/a"]
    others[2].parent.mkdir()
    for path in others:
        path.write_text("text")
    slim(site.folder, spares)
    kept = names_of(site.folder)
    assert not earlier & kept and spares_in(spares) == {*kept, others[1].name}
    # Into another folder: the first one is free again.
    slim(site.folder, tmp_path / "others", site)
    assert spares_in(spares) == {others[1].name} and owners_of(spares) == []
    assert set(statuses(undo_trees((site.folder,))).values()) == {SlimStatus.UNDONE}
    assert digests(site.folder) == before
    assert spares_in(tmp_path / "others") == set() and all(path.exists() for path in others)


def test_a_link_in_the_place_of_a_spare_stays(site: Made, spares: Path, tmp_path: Path) -> None:
    slim(site.folder, spares, site)
    moved = []
    for spare in spares.glob("*.spare"):
        moved.append(spare.rename(tmp_path / spare.name))
        spare.symlink_to(moved[-1])
    undo_trees((site.folder,))
    assert all(path.exists() for path in moved)


def test_a_copy_that_was_not_slimmed_there_takes_none_away(
    site: Made, spares: Path, tmp_path: Path
) -> None:
    """Its manifest has them, too, but the folder of spares is not noted as its own."""
    copy = tmp_path / "copy"
    slim(site.folder, spares, site)
    shutil.copytree(site.folder, copy, symlinks=True)
    before = spares_in(spares)
    assert SlimStatus.UNDONE in statuses(undo_trees((copy,))).values()
    assert spares_in(spares) == before == names_of(site.folder)


def test_two_folders_may_share_spares(site: Made, spares: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    slim(site.folder, spares, site)
    shutil.copytree(site.folder, copy, symlinks=True)
    first = spares_in(spares)
    slim(copy, spares)
    assert {*owners_of(spares)} == {site.folder, copy}
    # Those that the copy had are still the others'.
    assert spares_in(spares) == first | names_of(copy)
    undo_trees((site.folder,))
    assert spares_in(spares) == names_of(copy) and owners_of(spares) == [copy]
    undo_trees((copy,))
    assert spares_in(spares) == set() and digests(copy) == digests(site.folder)


@pytest.mark.parametrize("how", ["away", "damaged"])
def test_an_owner_of_which_nothing_is_known_may_need_all(
    site: Made, spares: Path, tmp_path: Path, how: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(site.folder, other, symlinks=True)
    slim(other, spares, site)
    slim(site.folder, spares, site)
    before = spares_in(spares)
    if how == "away":
        other.rename(tmp_path / "elsewhere")
    else:
        (other / MANIFEST_NAME).write_text("{")
    undo_trees((site.folder,))
    assert spares_in(spares) == before


@pytest.mark.parametrize("first", ["undo", "slim"])
@pytest.mark.parametrize("then", ["uninstalled", "upgraded", "away with its site"])
def test_a_library_that_was_uninstalled_needs_no_spare(
    site: Made, spares: Path, tmp_path: Path, first: str, then: str
) -> None:
    """If its whole site is away, nothing is known."""
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
    if first == "undo":
        assert set(statuses(undo_trees((around,))).values()) == {SlimStatus.LEFT}
    else:
        slim_trees(SlimRequest(paths=(around,), lock=site.lock, options=SlimOptions()))
    assert spares_in(spares) == (set() if then in ("uninstalled", "upgraded") else before)


def test_a_note_that_is_no_file(site: Made, spares: Path) -> None:
    slim(site.folder, spares)
    before = spares_in(spares)
    (spares / ORIGINALS_MARK).unlink()
    os.mkfifo(spares / ORIGINALS_MARK)
    with pytest.raises(ReconstructError, match="cannot be read"):
        owners_of(spares)
    undo_trees((site.folder,))
    assert spares_in(spares) == before


def test_a_library_that_cannot_be_slimmed_anew_keeps_its_spare(site: Made, spares: Path) -> None:
    """No manifest names it, and its new file can't be written."""
    before = digests(site.folder)
    slim(site.folder, spares, site)
    (site.folder / MANIFEST_NAME).unlink()
    words: list[str | Path] = [
        NEGATIVA,
        "slim",
        "--arch=sm_80",
        "--force-arch",
        f"--spare={spares}",
        site.folder,
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # noqa: E731
    # A compiled module that Python can't write in full would stay cut off in __pycache__.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        words, preexec_fn=limit, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert spares_in(spares) == names_of(site.folder)
    undo_trees((site.folder,))
    assert digests(site.folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "then"),
    [
        (signal.SIGINT, "nothing"),
        (signal.SIGTERM, "nothing"),
        (signal.SIGKILL, "undo"),
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
        while not [*spares.glob(".unchecked/**/*spare*")]:
            assert process.poll() is None
        process.send_signal(number)
    left = [*spares.glob(".unchecked*")] if spares.exists() else []
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and not left
        return
    assert left
    if then == "slim":
        # Into another folder.
        slim(folder, tmp_path / "others")
    else:
        assert CliRunner().invoke(main, ["slim", "undo", str(folder)]).exit_code == 0
        assert digests(folder) == before
    assert not [*spares.glob(".unchecked*")]


def test_a_spare_that_is_named_around_its_tree_is_left_alone(site: Made, spares: Path) -> None:
    """undo holds the tree: it would wait for itself to hold a folder around it."""
    slim(site.folder, spares, site)
    manifest, named = site.folder / MANIFEST_NAME, site.folder.parent / "libone.so.spare"
    named.write_bytes(b"not ours")
    spare = str(find_spare(site.one))
    assert spare in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(spare, str(named)))
    words = (NEGATIVA, "slim", "undo", "--yes", site.folder)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, 1) and named.read_bytes() == b"not ours"
